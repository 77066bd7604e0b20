"""What the compressed-tensors package writes is read as it reads it. Needs that package."""

from __future__ import annotations

import pytest
import torch

from llmbuild.builder.frontend.quantized_config import find_format
from llmbuild.builder.frontend.quantized_weight import QuantizedWeight
from llmbuild.builder.weights import Constant

pytestmark = pytest.mark.slow

INT4 = dict(num_bits=4, type="int", strategy="group", group_size=32)
INT8 = dict(num_bits=8, type="int", strategy="channel")
FLOAT8 = dict(num_bits=8, type="float", symmetric=True)
CASES = {
    "int4": ("pack-quantized", INT4 | dict(symmetric=True)),
    "int4-zeros": ("pack-quantized", INT4 | dict(symmetric=False)),
    "int8-packed": ("pack-quantized", INT8 | dict(symmetric=True)),
    "int8-packed-zeros": ("pack-quantized", INT8 | dict(symmetric=False)),
    "int8": ("int-quantized", INT8 | dict(symmetric=True)),
    "float8-channel": ("float-quantized", FLOAT8 | dict(strategy="channel")),
    "float8-tensor": ("float-quantized", FLOAT8 | dict(strategy="tensor")),
    "float8-blocks": ("float-quantized", FLOAT8 | dict(strategy="block", block_structure=[16, 32])),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_those_of_the_library(name: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    layout_name, args = CASES[name]
    weights = QuantizationArgs(**args)
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(8)).to(torch.bfloat16)
    if args["strategy"] == "block":
        tiles = weight.reshape(3, 16, 2, 32).transpose(1, 2).flatten(2)
    elif args["strategy"] == "tensor":
        tiles = weight.reshape(1, -1)
    else:
        tiles = weight.reshape(48, -1, args.get("group_size", 64))
    scale, zero = calculate_qparams(tiles.amin(-1), tiles.amax(-1), weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(layout_name)
    stored = compressor.compress(dict(state), scheme)
    wanted = compressor.decompress(dict(stored), scheme)["weight"]

    config = {"quant_method": "compressed-tensors", "format": layout_name, "config_groups": {"g": {"weights": args}}}
    config["config_groups"]["g"]["targets"] = ["Linear"]
    form = find_format(config)
    parts = {suffix: Constant(value) for suffix, value in stored.items() if suffix in form.suffixes}
    layout = form.layout("layer", parts)
    assert layout is not None
    read = QuantizedWeight("layer.weight", layout, dict(parts))
    # The library multiplies in the type of the scale: our exact values, rounded to it once, are its values.
    assert torch.equal(read.load().to(wanted.dtype), wanted)
    if args["type"] == "int":
        assert torch.equal(read.load_blocks().dequantize(), read.load())
