"""Checkpoint readers and tracing."""
