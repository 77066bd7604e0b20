"""FX node → standard ONNX operators that TensorRT's parser takes; `table.py` lists the rules."""
