"""The tensors of a GGUF file under their Hugging Face names, in Hugging Face row order, blocks kept as stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llmbuild.builder.frontend.gguf_architectures import ROPE_FACTORS, find_architecture, hf_name
from llmbuild.builder.frontend.gguf_file import GGUFFile
from llmbuild.builder.weights import piece_size, rows_at_once
from llmbuild.errors import ModelError
from llmbuild.quantization.blocks import BlockFormat, BlockTensor
from llmbuild.quantization.gguf_types import block_type, decode

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class GGUFTensor:
    """A `WeightExpr`: `size` bytes at `offset` of `file`, of GGUF type `type_name`.

    Attributes:
        shape: Hugging Face order, [N, K] or [N].
        heads: When not None, rows are stored with rotary pairs as neighbours within this many heads, and are put
            back into half order on reading. Whole rows move, so blocks stay what they are.
        taken: First and last row (exclusive) of a piece, in Hugging Face order; None: all of them.
    """

    name: str
    file: Path
    offset: int
    size: int
    type_name: str
    shape: tuple[int, ...]
    heads: int | None = None
    taken: tuple[int, int] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return _PLAIN.get(self.type_name, torch.float32)

    @property
    def block_format(self) -> BlockFormat | None:
        return None if self.type_name in _PLAIN else block_type(self.type_name).format(self.type_name)

    def load(self) -> Tensor:
        if self.type_name not in _PLAIN:
            return self.load_blocks().dequantize()
        raw = torch.from_numpy(np.ascontiguousarray(self._rows()))
        return raw.view(self.dtype).reshape(-1, *self.shape[1:])

    def load_blocks(self) -> BlockTensor:
        if self.type_name in _PLAIN:
            raise TypeError(f"{self.name} is stored as {self.type_name}, not in blocks")
        rows = self._rows()
        return decode(self.type_name, rows, (len(rows), self.shape[1]))

    def sources(self) -> frozenset[str]:
        return frozenset((self.name,))

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return (piece.load() for piece in self._cut(elements))

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        return (piece.load_blocks() for piece in self._cut(elements))

    def held(self, elements: int) -> int:
        # Stored bytes, and what unpacking makes of them: q, scales, and steps in between.
        return piece_size(self.shape, elements) * (self.dtype.itemsize * 2 if self.block_format is None else 8)

    def _cut(self, elements: int) -> Iterator[GGUFTensor]:
        step = rows_at_once(self.shape, elements)
        for begin in range(0, self.shape[0], step):
            yield replace(self, taken=(begin, min(begin + step, self.shape[0])))

    def _rows(self) -> np.ndarray:
        """Raw bytes of the rows in Hugging Face order, uint8 [N, bytes]; a copy, so that the file is unmapped."""
        begin, end = self.taken or (0, self.shape[0])
        raw = np.memmap(self.file, np.uint8, "r", self.offset, (self.size,)).reshape(self.shape[0], -1)
        return np.array(raw[begin:end]) if self.heads is None else raw[half_order(self.shape[0], self.heads)[begin:end]]


def half_order(rows: int, heads: int) -> np.ndarray:
    """Row indices that turn interleaved rotary pairs into halves.

    Of each head of D rows, stored row 2i + j goes to row j·D/2 + i:

        stored   0 1 2 3 4 5        result takes   0 2 4 | 1 3 5
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


class GGUFCheckpoint:
    """A `Checkpoint` over one GGUF file.

    Args:
        gguf: The opened file.
        heads: Number of query heads and of key heads.

    Raises:
        UnsupportedError: a tensor's type, or the architecture, is not supported.
    """

    kind = "gguf"

    def __init__(self, gguf: GGUFFile, heads: tuple[int, int]) -> None:
        interleaved = find_architecture(gguf.require("general.architecture")).interleaved
        by_projection = {"q_proj": heads[0], "k_proj": heads[1]} if interleaved else {}
        self.files: tuple[Path, ...] = (gguf.path,)
        self.notices: tuple[str, ...] = ()
        self._tensors: dict[str, GGUFTensor] = {}
        self.rope_factors: GGUFTensor | None = None
        for name, entry in gguf.tensors.items():
            target = hf_name(name)
            tensor = GGUFTensor(
                name=name,
                file=gguf.path,
                offset=int(entry.data_offset),
                size=int(entry.n_bytes),
                type_name=entry.tensor_type.name,
                shape=tuple(int(size) for size in reversed(entry.shape)),
                heads=next((count for word, count in by_projection.items() if word in target), None),
            )
            if tensor.type_name not in _PLAIN:
                block_type(tensor.type_name)
                if len(tensor.shape) != 2:
                    raise ModelError(f"tensor {name!r} is {tensor.type_name} but not a matrix", where=str(gguf.path))
            if name == ROPE_FACTORS:
                self.rope_factors = tensor
            else:
                self._tensors[target] = tensor

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tensors))

    def weight(self, name: str) -> GGUFTensor:
        return self._tensors[name]
