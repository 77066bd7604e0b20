"""Triton kernels of the cuda target, one idea a file. `spec.py`: what is compiled; `interpreter.py`: runs it here."""
