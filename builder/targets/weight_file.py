"""The safetensors file with an engine's weights, streamed one at a time, always the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from llmbuild.builder.weights import PIECE, BlockPart, Map, WeightExpr

PAGE = 4096  # the data begin on a page, so that the runtime can map the file and use it in place
TYPE_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "int8": "I8",
    "bool": "BOOL",
}
CARRIERS: dict[str, np.dtype] = {
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
}  # numpy has no such types


@dataclass(frozen=True)
class Origin:
    """What several tensors are cut from (the blocks of a weight), computed once for all of them, piece by piece.

    key: Equal for tensors of one origin. pieces: computes it. cut: returns this tensor's part of a piece.
    """

    key: Hashable
    pieces: Callable[[], Iterable[Any]]
    cut: Callable[[Any], npt.NDArray]


@dataclass(frozen=True)
class Entry:
    """One tensor to come: `pieces` computes it, some rows at a time, when the file is written.

    dtype: of the pieces. element: its name in TYPE_NAMES, where the pieces carry bits of a type that numpy has not.
    storage: name of its format, for the report. origin: what it shares with other tensors; it gives the same pieces.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Callable[[], Iterable[npt.NDArray]]
    storage: str
    element: str | None = None
    origin: Origin | None = None

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass
class WeightFile:
    """Collects entries by name, then writes them. Peak memory is one piece."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, name: str, entry: Entry) -> None:
        if name in self.entries:
            raise ValueError(f"weight {name!r} is added twice")
        self.entries[name] = entry

    def bytes_by_storage(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for entry in self.entries.values():
            total[entry.storage] = total.get(entry.storage, 0) + entry.num_bytes
        return dict(sorted(total.items()))

    def write(self, path: Path, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Write the safetensors file at `path`.

        Wide element types come first: without padding between tensors (the format allows none) every tensor is then
        aligned to its element size.
        """
        order = sorted(self.entries.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
        header: dict[str, dict[str, object]] = {}
        places: dict[str, int] = {}  # behind the header
        position = 0
        for name, entry in order:
            end = position + entry.num_bytes
            header[name] = {
                "dtype": TYPE_NAMES[entry.element or entry.dtype.name],
                "shape": list(entry.shape),
                "data_offsets": [position, end],
            }
            places[name] = position
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % PAGE)
        path.parent.mkdir(parents=True, exist_ok=True)
        begin, done = 8 + len(text), 0
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            file.truncate(begin + position)
            for group in together(order):
                if progress is not None:
                    progress(done, len(order), group[0][0])
                write_group(file, group, {name: begin + places[name] for name, _ in group})
                done += len(group)
        if progress is not None:
            progress(len(order), len(order), "")


Named = tuple[str, Entry]


def together(order: Sequence[Named]) -> list[list[Named]]:
    """Return the entries in groups of one origin, in the order of their first."""
    groups: dict[Hashable, list[Named]] = {}
    for name, entry in order:
        groups.setdefault(name if entry.origin is None else ("origin", entry.origin.key), []).append((name, entry))
    return list(groups.values())


def write_group(file: BinaryIO, group: Sequence[Named], places: dict[str, int]) -> None:
    """Write entries of one origin, or a single one, each from its place in the file (in bytes) on."""
    ends = dict(places)
    origin = group[0][1].origin
    if len(group) == 1 or origin is None:
        ((name, entry),) = group
        rows: Iterable[Iterable[tuple[str, Entry, npt.NDArray]]] = ([(name, entry, p)] for p in entry.pieces())
    else:
        rows = ([(n, e, e.origin.cut(piece)) for n, e in group if e.origin is not None] for piece in origin.pieces())
    for row in rows:
        for name, entry, piece in row:
            file.seek(ends[name])
            ends[name] += write_piece(file, name, entry, piece)
    for name, entry in group:
        written = ends[name] - places[name]
        if written != entry.num_bytes:
            raise AssertionError(f"weight {name!r}: {written} bytes came for {entry.dtype} {entry.shape}")


def plain_entry(expression: WeightExpr) -> Entry:
    """Return the entry of a weight that is kept as it is."""
    name = str(expression.dtype).removeprefix("torch.")
    carrier = CARRIERS.get(name)
    if carrier is None:
        dtype = torch.zeros((), dtype=expression.dtype).numpy().dtype
        pieces = lambda: (p.numpy() for p in expression.pieces(PIECE))  # noqa: E731
        return Entry(tuple(expression.shape), dtype, pieces, name, origin=blocks_behind(expression))
    bits = getattr(torch, carrier.name)
    bit_pieces = lambda: (piece.view(bits).numpy() for piece in expression.pieces(PIECE))  # noqa: E731
    return Entry(tuple(expression.shape), carrier, bit_pieces, name, element=name)


def blocks_behind(expression: WeightExpr) -> Origin | None:
    """Return the blocks that an expression is a part of, as it is or row by row in another form; None if it is none."""
    steps: list[Callable[[Any], Any]] = []
    while isinstance(expression, Map) and expression.rowwise:
        steps.append(expression.function)
        expression = expression.source
    if not isinstance(expression, BlockPart):
        return None
    source, steps = expression.source, [attrgetter(expression.part), *reversed(steps)]

    def cut(piece: Any) -> npt.NDArray:
        for step in steps:
            piece = step(piece)
        array: npt.NDArray = piece.contiguous().numpy()
        return array

    return Origin(id(source), lambda: source.block_pieces(PIECE), cut)


def write_piece(file: BinaryIO, name: str, entry: Entry, piece: npt.NDArray) -> int:
    """Append a piece; return its size in bytes."""
    if piece.dtype != entry.dtype:
        raise AssertionError(f"weight {name!r}: got {piece.dtype}, said {entry.dtype}")
    if piece.size:
        file.write(np.asarray(piece, order="C").data.cast("B"))
    return piece.nbytes
