"""Every layout of quantized checkpoints gives the values that its published formula gives, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmbuild.builder.frontend.quantized_config import find_format
from llmbuild.builder.frontend.quantized_weight import QuantizedWeight
from llmbuild.builder.weights import Constant
from llmbuild.errors import LLMBuildError, ModelError, UnsupportedError
from llmbuild.quantization.blocks import BlockFormat
from support.tiny_quantized import AWQ_CONFIG, BLOCKS, STORED, Stored, compressed, gptq, gptq_config

ROWS, COLUMNS = 48, 64


def described(stored: Stored) -> dict:
    config = stored.config if stored.modelopt is None else {"quant_method": "modelopt", **stored.modelopt}
    assert config is not None
    return config


def source_weight() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4))


def read(stored: Stored, change=None) -> tuple[QuantizedWeight, torch.Tensor]:
    """The weight as it is read, and the values that were stored."""
    tensors, values = stored.store(source_weight())
    form = find_format(described(stored))
    tensors = {name: value for name, value in tensors.items() if name in form.suffixes}
    tensors.update(change or {})
    parts = {name: Constant(value) for name, value in tensors.items() if value is not None}
    layout = form.layout("layer", parts)
    assert layout is not None
    return QuantizedWeight("layer.weight", layout, dict(parts)), values


@pytest.mark.parametrize("name", STORED)
def test_values_and_blocks_are_those_stored(name: str) -> None:
    weight, values = read(STORED[name])
    assert weight.shape == (ROWS, COLUMNS) and weight.layout.label == STORED[name].label
    assert weight.dtype is torch.float32 and torch.equal(weight.load(), values)
    wanted = STORED[name].blocks
    if wanted is None:
        assert weight.block_format is None
        with pytest.raises(TypeError, match="no blocks hold this weight"):
            weight.load_blocks()
        return
    assert weight.block_format == BlockFormat(*wanted, source=STORED[name].label)
    blocks = weight.load_blocks()
    assert blocks.format == weight.block_format and blocks.shape == weight.shape
    assert torch.equal(blocks.dequantize(), values)


@pytest.mark.parametrize("rows", [1, 5, 7, 20])
@pytest.mark.parametrize("name", STORED)
def test_pieces_are_the_rows_of_the_whole(name: str, rows: int) -> None:
    weight, values = read(STORED[name])
    pieces = list(weight.pieces(rows * COLUMNS))
    assert all(len(piece) <= rows for piece in pieces) and torch.equal(torch.cat(pieces), values)
    if weight.block_format is not None:
        blocks = [piece.dequantize() for piece in weight.block_pieces(rows * COLUMNS)]
        assert torch.equal(torch.cat(blocks), values)
    assert weight.held(rows * COLUMNS) >= rows * COLUMNS


def test_sorted_columns_are_dequantized_exactly_and_are_in_no_blocks() -> None:
    stored = Stored("", gptq_config(4, 16, False, desc_act=True), gptq(4, 16, sym=False, order=3), None)
    weight, values = read(stored)
    assert weight.layout.scattered and weight.block_format is None
    assert torch.equal(weight.load(), values)


def test_zero_points_with_float32_scales_are_dequantized_exactly_and_are_in_no_blocks() -> None:
    stored = Stored("", gptq_config(4, 16, False), gptq(4, 16, sym=False, dtype=torch.float32), None)
    weight, values = read(stored)
    assert not weight.layout.scattered and weight.block_format is None
    assert torch.equal(weight.load(), values)


def test_symmetric_and_unknown_symmetry_give_the_same_values() -> None:
    config = gptq_config(4, 32, True)
    del config["sym"]
    weight, values = read(replace(STORED["gptq"], config=config))
    assert weight.block_format is not None and weight.block_format.has_offset
    assert torch.equal(weight.load_blocks().dequantize(), values)


def test_plain_modules_of_a_quantized_checkpoint_stay_plain() -> None:
    for name in ("pack-int4", "int-quantized", "fp8-blocks", "modelopt-int4"):
        form = find_format(described(STORED[name]))
        assert form.layout("norm", {"weight": Constant(torch.ones(4))}) is None


# ---------------------------------------------------------------------------------------------- what is refused
def int4(**weights) -> dict:
    return compressed("pack-quantized", dict(type="int", num_bits=4, strategy="group", group_size=32) | weights)


REFUSED = [
    ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes', which llmbuild cannot read"),
    ({"quant_method": "hqq"}, "quantized by 'hqq'"),
    ({"quant_method": "torchao"}, "quantized by 'torchao'"),
    ({"quant_method": "quanto"}, "quantized by 'quanto'"),
    ({"quant_method": "mxfp4"}, "quantized by 'mxfp4'(.|\n)*4-bit floats are not read yet"),
    ({"quant_method": "gptq_marlin"}, "quantized by 'gptq_marlin'(.|\n)*convert the GPTQ checkpoint"),
    ({"quant_method": None}, "quantized by None"),
    (gptq_config(3, 32, True), "bits = 3 is not supported(.|\n)*known: 4, 8"),
    (gptq_config(4, 32, True, checkpoint_format="marlin"), "checkpoint_format = 'marlin' is not supported"),
    (gptq_config(4, 32, True, is_marlin_format=True), "is_marlin_format = True is not supported"),
    (gptq_config(4, 32, True, pack_dtype="int8"), "pack_dtype = 'int8'"),
    (gptq_config(4, 32, True, dynamic={"+:.*down.*": {"bits": 8}}), "dynamic gives some layers their own"),
    (gptq_config(4, "big", True), "group_size = 'big' is not a number of columns"),
    ({**AWQ_CONFIG, "bits": 8}, "bits = 8 is not supported"),
    ({**AWQ_CONFIG, "zero_point": False}, "zero_point = False is not supported"),
    ({**AWQ_CONFIG, "version": "gemv"}, "version = 'gemv' of AWQ is not supported"),
    (int4(num_bits=2), "num_bits = 2 is not supported(.|\n)*config_groups.group_0"),
    (int4(strategy="tensor_group"), "strategy = 'tensor_group'"),
    (int4(symmetric="yes"), "symmetric = 'yes'"),
    (int4(dynamic=True), "dynamic = True"),
    (compressed("marlin-24", {"num_bits": 4}), "format = 'marlin-24' is not supported"),
    (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "format = 'nvfp4-pack-quantized'"),
    (compressed("float-quantized", {"num_bits": 4, "type": "float"}), "num_bits = 4 is not supported"),
    ({**int4(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format = 'sparse-24-bitmask'"),
    ({**int4(), "transform_config": {"config_groups": {"a": {}}}}, "transform_config rotates activations"),
    ({**int4(), "config_groups": {}}, "config_groups says nothing"),
    (compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block"}), "without a block_structure"),
    ({**BLOCKS, "fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
    ({**BLOCKS, "weight_block_size": [128]}, r"weight_block_size = \[128\] is not a number of rows"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo = 'NVFP4' is not supported(.|\n)*W4A16_AWQ"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "has_zero_point": True}, "has_zero_point = True"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_options_are_refused_by_name(config: dict, message: str) -> None:
    with pytest.raises(LLMBuildError, match=message) as caught:
        find_format(config)
    assert isinstance(caught.value, (UnsupportedError, ModelError)) and caught.value.where is not None


BROKEN = [
    ("gptq", {"scales": None}, ModelError, "tensor 'layer.scales' is missing"),
    ("gptq", {"qweight": None}, ModelError, "tensor 'layer.qweight' is missing"),
    (
        "gptq",
        {"scales": torch.ones(1, ROWS)},
        ModelError,
        r"'layer.scales' has shape \[1, 48\], \[2, 48\] was expected",
    ),
    ("gptq", {"qzeros": torch.zeros(2, 6)}, ModelError, "'layer.qzeros' holds float32, int32 was expected"),
    ("gptq", {"g_idx": torch.full((COLUMNS,), 2, dtype=torch.int32)}, ModelError, "groups beyond the 2 that"),
    ("gptq", {"qweight": torch.zeros(2, 2, 2).int()}, UnsupportedError, "are read as matrices only"),
    ("awq", {"qzeros": None}, ModelError, "tensor 'layer.qzeros' is missing"),
    ("pack-int4", {"weight_scale": None}, ModelError, "tensor 'layer.weight_scale' is missing"),
    ("pack-int4", {"weight_shape": torch.tensor([48, 65])}, ModelError, r"'layer.weight_shape' says \[48, 65\]"),
    ("pack-int4-zeros", {"weight_zero_point": None}, ModelError, "tensor 'layer.weight_zero_point' is missing"),
    ("int-quantized", {"weight_scale": None}, ModelError, "tensor 'layer.weight_scale' is missing"),
    ("int-quantized", {"weight": torch.ones(ROWS, COLUMNS)}, ModelError, "'layer.weight' holds float32, int8 was"),
    ("float-quantized", {"weight_scale": None}, ModelError, "8-bit floats, but 'layer.weight_scale' is missing"),
    ("fp8-tensor", {"weight_scale": None}, ModelError, "8-bit floats, but 'layer.weight_scale' is missing"),
    ("fp8-tensor", {"weight_scale": torch.ones(3)}, ModelError, "neither one scale nor one a row"),
    ("fp8-tensor", {"weight_scale_inv": torch.ones(())}, ModelError, "has both weight_scale and weight_scale_inv"),
    ("fp8-tensor", {"weight": None}, ModelError, "tensor 'layer.weight' is missing"),
    ("fp8-tensor", {"weight": torch.ones(ROWS, COLUMNS)}, ModelError, "holds float32, float8_e4m3fn was expected"),
    ("fp8-blocks", {"weight_scale_inv": torch.ones(1, 1)}, ModelError, r"blocks of 32 x 16 of a weight \[48, 64\]"),
    ("modelopt-int4", {"weight_scale": None}, ModelError, "tensor 'layer.weight_scale' is missing"),
    ("modelopt-int4", {"pre_quant_scale": torch.ones(COLUMNS)}, UnsupportedError, "'layer.pre_quant_scale' scales the"),
]


@pytest.mark.parametrize(("name", "change", "kind", "message"), BROKEN)
def test_tensors_that_are_missing_or_do_not_fit_are_named(name: str, change: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        read(STORED[name], change)


def test_zero_points_that_readers_disagree_about_are_refused() -> None:
    weight, _ = read(STORED["gptq-zeros"], {"qzeros": torch.full((2, 6), -1, dtype=torch.int32)})
    with pytest.raises(UnsupportedError, match=r"'layer.qzeros' stores a zero point as 15(.|\n)*gptq_v2"):
        weight.load()


def test_zero_points_of_a_symmetric_checkpoint_are_checked() -> None:
    weight, _ = read(STORED["gptq"], {"qzeros": torch.zeros(2, 6, dtype=torch.int32)})
    with pytest.raises(ModelError, match=r"holds zero points besides 8(.|\n)*set sym to false"):
        weight.load()


def test_bytes_beyond_the_stated_width_are_refused() -> None:
    config = compressed("int-quantized", dict(type="int", num_bits=4, strategy="channel"))
    stored = replace(STORED["int-quantized"], config=config)
    weight, _ = read(stored)
    with pytest.raises(ModelError, match=r"'layer.weight' holds values that are not of 4 bits"):
        weight.load()


def test_sorted_columns_need_their_index() -> None:
    config = compressed(
        "pack-quantized", dict(type="int", num_bits=4, strategy="group", group_size=32, actorder="group")
    )
    with pytest.raises(ModelError, match=r"'layer.weight_g_idx' is missing: the config says that columns were sorted"):
        read(replace(STORED["pack-int4"], config=config))


def test_groups_of_modules_are_found_by_name_pattern_and_class() -> None:
    from llmbuild.quantization.compressed_schemes import read_scheme, scheme_for

    def scheme(bits: int, *targets: str):
        group = {"targets": list(targets), "weights": {"num_bits": bits, "type": "int", "strategy": "channel"}}
        return read_scheme("g", group, {"format": "pack-quantized"})

    schemes = (scheme(4, "Linear"), scheme(8, "re:.*down_proj$"), scheme(8, "model.layers.0.mlp.up_proj"))
    bits = {name: scheme_for(name, schemes).bits for name in ("a.down_proj", "model.layers.0.mlp.up_proj", "a.up_proj")}
    assert bits == {"a.down_proj": 8, "model.layers.0.mlp.up_proj": 8, "a.up_proj": 4}
    with pytest.raises(ModelError, match="no targets of config_groups match it"):
        scheme_for("a.up_proj", schemes[1:])
