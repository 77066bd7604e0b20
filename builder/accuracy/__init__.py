"""How far a quantized model is from the unquantized one: texts, measures, layers, thresholds."""
