"""Executors of TensorRT engines."""
