"""The cuda target: GEMMs, attention and generated row programs; kernels compiled ahead of time, on any machine."""
