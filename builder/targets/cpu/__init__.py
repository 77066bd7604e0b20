"""The cpu target: FX graph -> ONNX -> onnxruntime."""
