"""Row programs: generated Triton kernels for what lies between GEMMs and attention.

A kernel computes values of one level (of equal distance from the start, see `levels.py`) and one kind of rows. Its grid
is (rows, tiles): a program handles one row, and in it one tile of one section. Outputs that are iterated alike form a
section; sections are the branches of the kernel:

    tile 0 .. 3   heads 0..31 of q, eight at once      block [8 heads, 128 channels]
    tile 4        heads 0..7 of k
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import fx

from llmbuild.builder.passes.edit import is_call
from llmbuild.builder.targets.cuda.buffers import Buffer, Output
from llmbuild.builder.targets.cuda.index import Index, Var, index_of
from llmbuild.builder.targets.cuda.rules.table import rule
from llmbuild.builder.targets.cuda.section import Names, Section, kind, masked, power_of_2
from llmbuild.builder.targets.cuda.views import Indices, replaced

CHUNK = 1024  # channels of a program that needs no others of its row
BLOCK = 1024  # elements of a block of several heads
HEADER = "import triton\nimport triton.language as tl\n"
WAIT = (
    "if PDL:  # the kernel before this one may still run",
    "    tl.extra.cuda.gdc_launch_dependents()",
    "    tl.extra.cuda.gdc_wait()",
)
WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*")  # a name, but no attribute
HELPERS = {"float32_to_e4m3": "float8", "float32_to_int8": "int8"}  # that a kernel may call: module of plugins.kernels

Stored = Callable[[fx.Node], Buffer | None]


@dataclass(frozen=True)
class RowProgram:
    """One kernel and its launch.

    name: of the function. source: its text; `HEADER` goes before it.
    arguments: buffers by name, outputs first, one pointer for each parameter. grid: expressions over T and L.
    widest: channels of the widest block, from which the number of warps follows. nodes: those computed, in order.
    """

    name: str
    source: str
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    grid: tuple[str, str, str]
    widest: int
    nodes: tuple[str, ...] = field(compare=False)

    @property
    def num_warps(self) -> int:
        """Each thread then holds 8 elements of a block of up to 2048 channels, and 16 of a wider one.

        A block of 16384 channels in 8 warps took 390 us for 8,192 rows on an H200, two and a half times as long as its
        memory needs, for want of registers.
        """
        return max(min(8, max(1, self.widest // 256)), min(32, self.widest // 512))


@dataclass(frozen=True)
class Space:
    """How a section iterates: `heads` (all axes but the last, flattened) and `channels`, besides the rows."""

    heads: int
    channels: int

    @staticmethod
    def of(buffer: Buffer) -> Space:
        dims = [*([buffer.rows_each] if buffer.rows_each > 1 else []), *(int(dim) for dim in buffer.inner)] or [1]
        return Space(math.prod(dims[:-1]), dims[-1])


class Kernel:
    """A kernel being written: its parameters and names."""

    def __init__(self, outputs: Sequence[Buffer]) -> None:
        self.names = Names()
        self.parameters: dict[str, str] = {}
        self.weights: set[str] = set()  # parameters whose memory no kernel writes
        for buffer in outputs:
            self.pointer(buffer)

    def pointer(self, buffer: Buffer) -> str:
        if buffer.name not in self.parameters:
            self.parameters[buffer.name] = self.names.unique(f"{buffer.name}_ptr")
            if buffer.rows is None:
                self.weights.add(self.parameters[buffer.name])
        return self.parameters[buffer.name]


def row_program(name: str, rows: str, outputs: Sequence[Output], stored: Stored) -> RowProgram:
    """Write the kernel that computes `outputs`, all of one level, for each of `rows` ("T" or "L").

    Raises:
        NoRule: naming a node that cannot be expressed, and why.
    """
    kernel = Kernel([output.buffer for output in outputs])
    groups: dict[Space, list[Output]] = {}
    for output in outputs:
        groups.setdefault(space_of(output, outputs), []).append(output)
    sections = [Written.of(kernel, space, group, stored) for space, group in groups.items()]
    body, tiles = [], 0
    for section in sections:
        lines = section.lines(f"tl.program_id(1) - {tiles}" if tiles else "tl.program_id(1)", kernel.weights)
        tiles += section.tiles
        if len(sections) == 1:
            body += lines
        else:
            last = section is sections[-1]
            head = "else:" if last else f"{'el' if body else ''}if tl.program_id(1) < {tiles}:"
            body += [head, *(f"    {line}" for line in lines)]
    nodes = list(dict.fromkeys(node.name for section in sections for node in section.section.nodes))
    parameters = [*kernel.parameters.values(), "PDL: tl.constexpr"]
    arguments = ",\n".join(f"    {parameter}" for parameter in parameters)
    source = "\n".join(
        [
            "@triton.jit",
            f"def {name}(\n{arguments},\n):",
            *wrapped(f"    # {len(nodes)} nodes: {', '.join(nodes)}"),
            "    row = tl.program_id(0).to(tl.int64)",
            *(f"    {line}" for line in body),
        ]
    )
    return RowProgram(
        name,
        source + "\n",
        tuple(kernel.parameters),
        tuple(output.buffer.name for output in outputs),
        (rows, str(tiles), "1"),
        max(section.widest for section in sections),
        tuple(nodes),
    )


def space_of(output: Output, outputs: Sequence[Output]) -> Space:
    """Return how an output is iterated: one number a head, made beside a head's channels, is written beside them."""
    own = Space.of(output.buffer)
    if own.channels > 1 or not is_call(output.node, operator.getitem):
        return own
    producer = output.node.args[0]
    siblings = [o for o in outputs if is_call(o.node, operator.getitem) and o.node.args[0] is producer]
    spaces = [space for space in (Space.of(sibling.buffer) for sibling in siblings) if space.heads == own.heads]
    return max(spaces, key=lambda space: space.channels)


@dataclass
class Written:
    """A section with its values and stores written."""

    section: Section
    tiles: int
    prologue: list[str]
    stores: list[str]
    title: str
    widest: int

    @staticmethod
    def of(kernel: Kernel, space: Space, outputs: Sequence[Output], stored: Stored) -> Written:
        """Rows whose channels need not be together are taken apart into chunks, for which one must have looked."""
        names, parameters = set(kernel.names.taken), dict(kernel.parameters)
        written = Written.attempt(kernel, space, outputs, stored, chunked=False)
        if written.section.reduces or space.channels <= CHUNK:
            return written
        kernel.names.taken, kernel.parameters = names, parameters
        return Written.attempt(kernel, space, outputs, stored, chunked=True)

    @staticmethod
    def attempt(kernel: Kernel, space: Space, outputs: Sequence[Output], stored: Stored, *, chunked: bool) -> Written:
        section = Section(stored, rule, kernel.names, kernel.pointer)
        chunks = -(-space.channels // CHUNK) if chunked else 1
        width = CHUNK if chunked else power_of_2(space.channels)
        at_once = min(power_of_2(space.heads), max(1, BLOCK // width))
        tile = kernel.names.unique("tile")
        prologue = [] if space.heads == chunks == 1 else [f"{tile} = {{tile}}"]
        head, lines = head_index(kernel.names, tile, space.heads, chunks, at_once)
        prologue += lines
        if chunked:
            name = kernel.names.unique("c")
            first = f"({tile} % {chunks})" if space.heads > 1 else tile
            prologue.append(f"{name} = {first} * {CHUNK} + tl.arange(0, {CHUNK})[None, :]")
            masks = (f"{name} < {space.channels}",) if space.channels % CHUNK else ()
            channel = index_of(Var(name, space.channels, frozenset({1}), masks))
        else:
            channel = section.lane(space.channels)
        stores = []
        for output in outputs:
            node, buffer = output.node, output.buffer
            index = output_index(buffer, head, channel)
            value = section.converted(section.value(node, index), kind(node))
            if output.through is not None and buffer.row_axis is not None:
                row = section.load(output.through, (index[buffer.row_axis],))
                index = replaced(index, buffer.row_axis, section.as_index(row, None, skips=True))
            address = buffer.address(index)
            mask = masked(address)
            target = f"{kernel.pointer(buffer)} + {address.text}"
            if not address.axes:
                target += " + tl.zeros((1, 1), tl.int32)"  # values are blocks, so places must be
            stores.append(f"tl.store({target}, {value.text}{f', mask={mask}' if mask else ''})")
        title = (
            f"# {', '.join(output.buffer.name for output in outputs)}: [{space.heads}, {space.channels}] for each row"
        )
        tiles = -(-space.heads // at_once) * chunks
        return Written(section, tiles, prologue, stores, title, max(section.widest, width * at_once))

    def lines(self, tile: str, weights: set[str]) -> list[str]:
        """The text, where `tile` is what counts its tiles from 0.

        What reads weights alone comes first: the kernel before this one may still run then, and nothing else of it
        has to wait for memory once.
        """
        lines = [*(line.format(tile=tile) for line in self.prologue), *self.section.lines]
        early, late = taken_apart(lines, weights)
        return [self.title, *early, *WAIT, *late, *self.stores]


def taken_apart(lines: Sequence[str], weights: set[str]) -> tuple[list[str], list[str]]:
    """Return the assignments that need nothing but weights and the place of the program, and the others, in order."""
    known = {"tl", "None", "mask", "other", *weights}
    early, late = [], []
    for line in lines:
        target, _, text = line.partition(" = ")
        if set(WORD.findall(text)) <= known:
            known.add(target)
            early.append(line)
        else:
            late.append(line)
    return early, late


def head_index(names: Names, tile: str, heads: int, chunks: int, at_once: int) -> tuple[Index, list[str]]:
    """Return the index over heads and the lines that define it."""
    if heads == 1:
        return Index(), []
    name = names.unique("h")
    first = f"({tile} // {chunks})" if chunks > 1 else tile
    if at_once == 1:
        return index_of(Var(name, heads)), [f"{name} = {first}"]
    masks = (f"{name} < {heads}",) if heads % at_once else ()
    line = f"{name} = {first} * {at_once} + tl.arange(0, {at_once})[:, None]"
    return index_of(Var(name, heads, frozenset({0}), masks)), [line]


def header(kernels: Sequence[RowProgram]) -> str:
    """Return what goes before the kernels of a module: imports, helpers only where they are called."""
    called = {name for name in HELPERS for kernel in kernels if f"{name}(" in kernel.source}
    imports = [f"from llmbuild.plugins.kernels.{HELPERS[name]} import {name}\n" for name in sorted(called)]
    return HEADER + "\n" * bool(imports) + "".join(imports)


def output_index(buffer: Buffer, head: Index, channel: Index) -> Indices:
    """Return the index in an output of a section's head and channel."""
    dims = [*([buffer.rows_each] if buffer.rows_each > 1 else []), *(int(dim) for dim in buffer.inner)]
    parts: list[Index] = []
    for place in reversed(range(len(dims))):
        if place == len(dims) - 1:
            parts.append(channel if dims[place] > 1 else Index())
        elif place == 0:
            parts.append(head)
        else:
            head, rest = head.divide(dims[place])
            parts.append(rest)
    parts.reverse()
    row = index_of(Var("row"))
    if buffer.rows_each > 1:
        row = row * buffer.rows_each + parts.pop(0)
    assert buffer.row_axis is not None
    return (*parts[: buffer.row_axis], row, *parts[buffer.row_axis :])


def wrapped(comment: str, width: int = 118) -> list[str]:
    """A comment in lines of at most `width` characters."""
    lines = [comment]
    while len(lines[-1]) > width and (cut := lines[-1].rfind(" ", 8, width)) > 0:
        lines[-1:] = [lines[-1][:cut], f"    # {lines[-1][cut + 1 :]}"]
    return lines


def anonymous(source: str) -> str:
    """Return a kernel's text with names numbered in order: equal for kernels that do the same to other buffers."""
    code = re.sub(r"#.*", "", source)
    numbers: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return numbers.setdefault(found[0], f"v{len(numbers)}")

    return WORD.sub(number, code)
