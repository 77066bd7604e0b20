"""Canonical ops and kernels shared by the builder and the runtime."""
