"""What both the runtime and the TensorRT plugin ask of the CUDA driver: checked calls, and launches of kernels."""
