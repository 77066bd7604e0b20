"""The targets `tensorrt` and `tensorrt-rtx`: FX graph → ONNX → TensorRT engine. One lowering, two capabilities."""
