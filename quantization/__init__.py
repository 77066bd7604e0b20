"""Quantization: recipe types, block formats, primitives."""
