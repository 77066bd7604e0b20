"""The file of weights: what is cut from one origin is computed once, and the bytes are the same either way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmbuild.builder.ir import BlockPart, Constant, Map
from llmbuild.builder.targets import weight_file
from llmbuild.builder.targets.weight_file import WeightFile, blocks_behind, plain_entry
from llmbuild.quantization.blocks import BlockTensor
from llmbuild.quantization.expressions import Quantized
from llmbuild.quantization.recipes import PerGroup, WeightOnly
from support.small_programs import random


@dataclass(frozen=True)
class Counted(Quantized):
    """Counts the rows that are rounded."""

    rounded: list[int] = field(default_factory=list, compare=False)

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        for piece in super().block_pieces(elements):
            self.rounded.append(piece.shape[0])
            yield piece


def halved(q: torch.Tensor) -> torch.Tensor:
    return q[:, 0::2] | (q[:, 1::2] << 4)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    monkeypatch.setattr(weight_file, "PIECE", 64 * 5)  # five rows
    return Counted(Constant(random(23, 64)), WeightOnly(4, PerGroup(16)))


def entries(source: Counted) -> WeightFile:
    file = WeightFile()
    q = BlockPart(source, "q")
    file.add("packed", plain_entry(Map(q, halved, (23, 32), torch.uint8, "packed", rowwise=True)))
    file.add("other", plain_entry(Constant(random(3, 3, seed=1))))
    file.add("scale", plain_entry(BlockPart(source, "scale")))
    return file


def test_parts_of_one_weight_are_computed_once(counted: Counted, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    entries(counted).write(tmp_path / "once", lambda done, total, name: told.append((done, total)))
    assert counted.rounded == [5, 5, 5, 5, 3] and told[-1] == (3, 3)
    file = entries(counted)
    file.entries = {name: replace(entry, origin=None) for name, entry in file.entries.items()}
    file.write(tmp_path / "apart")
    assert counted.rounded == [5, 5, 5, 5, 3] * 3
    assert (tmp_path / "once").read_bytes() == (tmp_path / "apart").read_bytes()
    found, blocks = load_file(tmp_path / "once"), counted.load_blocks()
    assert found["packed"].equal(halved(blocks.q)) and found["scale"].equal(blocks.scale)


def test_only_rows_that_stand_alone_are_cut_from_pieces(counted: Counted) -> None:
    q = BlockPart(counted, "q")
    assert blocks_behind(Map(q, halved, (23, 32), torch.uint8, "packed", rowwise=False)) is None
    assert blocks_behind(Constant(random(3, 3))) is None
    assert blocks_behind(q) is not None


def test_an_entry_of_the_wrong_size_is_found(tmp_path: Path) -> None:
    file = WeightFile()
    file.add("w", replace(plain_entry(Constant(random(3, 3))), shape=(4, 3)))
    with pytest.raises(AssertionError, match="weight 'w': 36 bytes came"):
        file.write(tmp_path / "w")
