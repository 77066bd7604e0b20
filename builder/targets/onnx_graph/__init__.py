"""FX node → ONNX operators: the graph under construction, and the rules that every target by way of ONNX shares."""
