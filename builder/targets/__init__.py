"""Targets: each turns a program into the files of an engine."""
