"""Weights come from the checkpoint in pieces: the same bytes as whole, and little memory."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from llmbuild.builder.frontend import bind
from llmbuild.builder.frontend.safetensors_checkpoint import SafetensorsCheckpoint
from llmbuild.builder.frontend.safetensors_file import StoredTensor
from llmbuild.builder.ir import BlockPart, Cast, Concat, Constant, Item, Map, Stack, items
from llmbuild.builder.targets import weight_file
from llmbuild.builder.targets.onnx_graph import blocks
from llmbuild.builder.targets.onnx_graph.blocks import whole_tiles
from llmbuild.errors import ModelError
from llmbuild.quantization.expressions import Dequantized, Quantized
from llmbuild.quantization.recipes import PerGroup, WeightOnly
from support.cpu_engines import compiled, needs_compiler
from support.traced import optimized

INT4 = WeightOnly(4, PerGroup(16))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def stored(tmp_path: Path) -> SafetensorsCheckpoint:
    tensors = {
        "matrix": random(37, 48).bfloat16(),
        "other": random(20, 48, seed=1).bfloat16(),
        "stack": random(3, 8, 48, seed=2).bfloat16(),
        "vector": random(48, seed=3),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return SafetensorsCheckpoint(tmp_path)


def plain(stored: SafetensorsCheckpoint) -> dict[str, object]:
    """One of every kind of expression."""
    matrix, other, stack = (stored.weight(name) for name in ("matrix", "other", "stack"))
    wide = Cast(matrix, torch.float32)
    return {
        **{name: stored.weight(name) for name in stored.names()},
        "cast": wide,
        "concat": Concat((wide, Cast(other, torch.float32))),
        "items": Stack(items(Cast(stack, torch.float32))),
        "item": Item(stack, 1),
        "constant": Constant(random(5, 7).t()),
        "rowwise": Map(wide, lambda w: w + 1, (37, 48), torch.float32, "1 + w", rowwise=True),
        "transposed": Map(wide, torch.t, (48, 37), torch.float32, "wᵀ"),
        "dequantized": Dequantized(Quantized(wide, INT4)),
        "scale": BlockPart(Quantized(wide, INT4), "scale"),
    }


@pytest.mark.parametrize("elements", [1, 100, 500, 10**9])
def test_pieces_are_the_weight(stored: SafetensorsCheckpoint, elements: int) -> None:
    for name, expr in plain(stored).items():
        whole = expr.load()
        pieces = list(expr.pieces(elements))
        joined = pieces[0] if whole.ndim == 0 else torch.cat([piece.reshape(-1, *whole.shape[2:]) for piece in pieces])
        assert torch.equal(joined.reshape(whole.shape), whole), name
        row = math.prod(whole.shape[1 + (name == "items") :])  # a stack comes expert by expert, row by row
        assert max(piece.numel() for piece in pieces) <= max(elements, row), name
        assert expr.held(elements) >= max(piece.nbytes for piece in pieces) * (name != "constant"), name


@pytest.mark.parametrize("elements", [1, 100, 10**9])
def test_pieces_of_blocks_are_the_blocks(stored: SafetensorsCheckpoint, elements: int) -> None:
    matrix, other = (Cast(stored.weight(name), torch.float32) for name in ("matrix", "other"))
    for expr in (Quantized(matrix, INT4), Concat((Quantized(matrix, INT4), Quantized(other, INT4)))):
        whole, pieces = expr.load_blocks(), list(expr.block_pieces(elements))
        for part in ("q", "scale"):
            assert torch.equal(torch.cat([getattr(piece, part) for piece in pieces]), getattr(whole, part))


def test_pieces_are_regrouped_into_whole_tiles() -> None:
    q = np.arange(23)[:, None]
    for widths in ([23], [1] * 23, [5, 8, 3, 7], [12, 11]):
        ends = np.cumsum(widths)
        parts = [(q[e - w : e], q[e - w : e], None) for w, e in zip(widths, ends, strict=True)]
        tiles = list(whole_tiles(iter(parts)))
        assert all(len(tile[0]) % 8 == 0 for tile in tiles[:-1])
        assert np.array_equal(np.concatenate([tile[0] for tile in tiles]), q)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize(("family", "recipe"), [("llama", "none"), ("llama", "int4-wo"), ("qwen3_moe", "int8-wo")])
def test_small_pieces_give_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, recipe: str, native: bool
) -> None:
    program = optimized(family, recipe)
    compiled(program, tmp_path / "whole", native=native)
    program = optimized(family, recipe)
    reads = []
    load = StoredTensor.load
    monkeypatch.setattr(StoredTensor, "load", lambda self: (reads.append(math.prod(self.shape)), load(self))[1])
    for module in (weight_file, blocks):
        monkeypatch.setattr(module, "PIECE", 640)
    compiled(program, tmp_path / "pieces", native=native)
    for name in ("plan/model.onnx", "weights/cpu.safetensors"):
        assert (tmp_path / "pieces" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert max(reads) <= 640  # nothing was read in one go


def test_values_that_cannot_be_rounded_are_named_by_their_row(tmp_path: Path) -> None:
    weight = random(37, 48)
    weight[30, 5] = float("nan")
    save_file({"w": weight}, tmp_path / "model.safetensors")
    expr = Quantized(SafetensorsCheckpoint(tmp_path).weight("w"), INT4)
    with pytest.raises(ModelError, match="row 30, column 5") as caught:
        list(expr.block_pieces(100))
    assert "weight 'w' holds nan" in str(caught.value)


def test_ties_are_compared_up_to_the_first_difference(stored: SafetensorsCheckpoint, monkeypatch) -> None:
    monkeypatch.setattr(bind, "PIECE", 48)
    matrix = stored.weight("matrix")
    other = matrix.load().clone()
    assert bind.same_values(matrix, Constant(other))
    other[3, 0] += 1
    reads = []
    load = StoredTensor.load
    monkeypatch.setattr(StoredTensor, "load", lambda self: (reads.append(self.offset), load(self))[1])
    assert not bind.same_values(matrix, Constant(other))
    assert len(reads) == 4
    assert not bind.same_values(matrix, stored.weight("other"))
