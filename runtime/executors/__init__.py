"""Executors: one file a target."""
