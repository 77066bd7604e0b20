"""FX node → ONNX operators, one rule an op. `table.py` lists them all."""
