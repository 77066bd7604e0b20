"""A section of a kernel being written: values of graph nodes at indices, as lines of Triton.

Everything is lazy. The value of a node at an index is computed from the values of its operands at the indices where
they are needed, down to loads. A value is a block [heads, channels] or broadcasts to one: axis 0 are several heads,
axis 1 runs along a tensor's last axis. Arithmetic is float32 (integers stay integers); only stores round.

The same value at the same index is written once: all lines of a section see each other.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import Size, dtype, is_tensor, size
from llmbuild.builder.targets.cuda import views
from llmbuild.builder.targets.cuda.buffers import Buffer
from llmbuild.builder.targets.cuda.index import NO_AXES, Index, Var, index_of
from llmbuild.builder.targets.cuda.views import Indices, NoRule

MAX_BLOCK = 16384  # channels that one program holds: 8 warps with 64 registers for each value
MAX_UNROLLED = 32  # terms that are written out one by one, where a block would need a third axis
RESERVED = {*keyword.kwlist, *dir(builtins), "tl", "triton", "row", "part", "float32"}


@dataclass(frozen=True)
class Value:
    """A variable of the kernel (or a literal). kind: "float", "int" or "bool". axes: those along which it varies."""

    text: str
    kind: str
    axes: frozenset[int] = NO_AXES


@dataclass(frozen=True)
class Reduction:
    """block: over the channels of a block {x}; pair: of two terms {a}, {b}; identity: what changes nothing."""

    block: str
    pair: str
    identity: str


SUM = Reduction("tl.sum({x}, axis=1, keep_dims=True)", "{a} + {b}", "0")
MAX = Reduction("tl.max({x}, axis=1, keep_dims=True)", "tl.maximum({a}, {b})", 'float("-inf")')
MIN = Reduction("tl.min({x}, axis=1, keep_dims=True)", "tl.minimum({a}, {b})", 'float("inf")')


class Names:
    """Names that are unique within a kernel: those of graph nodes where they are free."""

    def __init__(self) -> None:
        self.taken = set(RESERVED)

    def unique(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self.taken:
            count += 1
            name = f"{wanted}_{count}"
        self.taken.add(name)
        return name


class Section:
    """See the module.

    Args:
        stored: Returns the buffer that holds a node's value when this kernel starts, or None if it must be computed.
        rule: Returns the rule that writes a node's value (see `rules.table`).
        names: Those of the kernel.
        pointer: Returns the kernel's parameter for a buffer.
    """

    def __init__(
        self,
        stored: Callable[[fx.Node], Buffer | None],
        rule: Callable[[fx.Node], Callable[[Section, fx.Node, Indices], Value]],
        names: Names,
        pointer: Callable[[Buffer], str],
    ) -> None:
        self.stored, self.rule, self.names, self.pointer = stored, rule, names, pointer
        self.lines: list[str] = []
        self.nodes: dict[fx.Node, None] = {}  # those computed here, in order
        self.reduces = False  # whether some value needs all channels of its row
        self.widest = 1
        self._values: dict[Any, Any] = {}
        self._written: dict[str, Value] = {}
        self._lanes: dict[int, Var] = {}

    # ------------------------------------------------------------------------------------------------------ values
    def value(self, node: fx.Node, index: Indices) -> Value:
        """Return a node's value at an index."""
        return self.once((node, index), lambda: self._value(node, index))

    def _value(self, node: fx.Node, index: Indices) -> Value:
        buffer = self.stored(node)
        if buffer is not None:
            return self.load(buffer, index)
        step = views.step(node, index)
        if step is not None:
            return self.value(*step)
        self.nodes.setdefault(node)
        return self.rule(node)(self, node, index)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]

    def load(self, buffer: Buffer, index: Indices) -> Value:
        address = buffer.address(index)
        mask = masked(address)
        text = f"tl.load({self.pointer(buffer)} + {address.text}{f', mask={mask}, other=0' if mask else ''})"
        kind = kind_of(buffer.dtype)
        if kind == "float" and buffer.dtype != torch.float32:
            text += ".to(tl.float32)"
        return self.emit(buffer.name, text, kind, address.axes)

    def emit(self, name: str, text: str, kind: str, *inputs: Value | frozenset[int]) -> Value:
        """Write `name = text` and return the variable. It varies along the axes of its inputs."""
        if text not in self._written:
            variable = self.names.unique(name)
            axes = NO_AXES.union(*(each.axes if isinstance(each, Value) else each for each in inputs))
            self.lines.append(f"{variable} = {text}")
            self._written[text] = Value(variable, kind, axes)
        return self._written[text]

    def operand(self, arg: Any, kind: str, index: Indices) -> Value:
        """Return an operand of an elementwise op at the index of the result: a number, or a node that broadcasts."""
        if not isinstance(arg, fx.Node):
            return Value(literal(arg, kind), kind)
        if not is_tensor(arg):
            raise NoRule(arg, "a size is used as a number")
        return self.converted(self.value(arg, views.broadcast(index, size(arg))), kind)

    def converted(self, value: Value, kind: str) -> Value:
        if value.kind == kind:
            return value
        if kind == "bool":
            return self.emit(f"{value.text}_set", f"{value.text} != 0", kind, value)
        as_type = {"float": "float32", "int": "int64"}[kind]
        return self.emit(f"{value.text}_{as_type}", f"{value.text}.to(tl.{as_type})", kind, value)

    def where(self, name: str, condition: str, axes: frozenset[int], yes: Value, no: Value) -> Value:
        return self.emit(name, f"tl.where({condition}, {yes.text}, {no.text})", no.kind, axes, yes, no)

    def as_index(self, value: Value, extent: Any, *, skips: bool = False) -> Index:
        """Return an integer value as an index of an axis of that size. skips: where it is negative, nothing is done."""
        wide = self.emit(f"{value.text}_wide", f"{value.text}.to(tl.int64)", "int", value)
        masks = (f"{wide.text} >= 0",) if skips else ()
        return index_of(Var(wide.text, extent if isinstance(extent, int) else None, wide.axes, masks))

    # -------------------------------------------------------------------------------------------------- reductions
    def lane(self, extent: int) -> Index:
        """Return the index that runs along all of a row of `extent` channels."""
        if extent == 1:
            return Index()
        if extent not in self._lanes:
            width = power_of_2(extent)
            self.widest = max(self.widest, width)
            name = self.names.unique(f"c{extent}")
            self.lines.append(f"{name} = tl.arange(0, {width})[None, :]")
            self._lanes[extent] = Var(name, extent, frozenset({1}), (f"{name} < {extent}",) if width > extent else ())
        return index_of(self._lanes[extent])

    def reduce(
        self,
        node: fx.Node,
        name: str,
        others: Indices,
        sizes: Size,
        extent: Any,
        term: Callable[[Indices, Index], Value],
        how: Reduction,
    ) -> Value:
        """Return the reduction of term(others, i) over 0 <= i < extent, the same for all channels.

        Args:
            node: For the reason when it cannot be done.
            name: Of the result; together with `node` and `others` it identifies the value.
            others: Index along the axes that stay; `sizes` are theirs.
        """
        if not isinstance(extent, int):
            raise NoRule(node, "it reduces over rows")

        def whole(at: Indices) -> list[Value]:
            self.reduces = True
            if extent > MAX_BLOCK:
                raise NoRule(node, f"it needs {extent} channels at once, more than {MAX_BLOCK}")
            lane = self.lane(extent)
            x = term(at, lane)
            if lane.masks or 1 not in x.axes:
                condition = masked(lane) or f"{lane.text} >= 0"
                x = self.where(f"{name}_terms", condition, lane.axes, x, Value(how.identity, x.kind))
            return [self.emit(name, how.block.format(x=x.text), x.kind, x.axes - {1})]

        def unrolled() -> Value:
            total = term(others, Index())
            for place in range(1, extent):
                other = term(others, Index((), place))
                total = self.emit(name, how.pair.format(a=total.text, b=other.text), total.kind, total, other)
            return total

        def make() -> Value:
            varies = any(1 in each.axes for each in others)
            if extent == 1 or (varies and extent <= MAX_UNROLLED):
                return unrolled()
            return self.each_channel(node, name, others, sizes, whole)[0]

        result: Value = self.once((node, name, others), make)
        return result

    def each_channel(
        self, node: fx.Node, name: str, others: Indices, sizes: Size, whole: Callable[[Indices], list[Value]]
    ) -> list[Value]:
        """Return what `whole`, which needs the channels for itself, gives at an index that may vary along them.

        Then it is written for each value that the index takes, of which there must be few, and picked from.
        """
        varying = [place for place, each in enumerate(others) if 1 in each.axes]
        if not varying:
            return whole(others)
        extents = [sizes[place] for place in varying]
        if any(not isinstance(extent, int) for extent in extents) or count(extents) > MAX_UNROLLED:
            raise NoRule(node, f"it is reduced for each of {extents} places at once, more than {MAX_UNROLLED}")
        picked: list[Value] = []
        for places in itertools.product(*(range(int(extent)) for extent in extents)):
            at = list(others)
            for place, value in zip(varying, places, strict=True):
                at[place] = Index((), value)
            found = whole(tuple(at))
            tests = [f"({others[p].grouped} == {v})" for p, v in zip(varying, places, strict=True)]
            axes = NO_AXES.union(*(others[p].axes for p in varying))
            condition = " & ".join(tests)
            picked = (
                [self.where(name, condition, axes, *pair) for pair in zip(found, picked or found, strict=True)]
                if picked
                else found
            )
        return picked

    def pick(self, name: str, index: Index, values: Sequence[Value]) -> Value:
        """Return values[index]."""
        if index.constant is not None:
            return values[index.constant]
        result = values[0]
        for place, value in enumerate(values[1:], 1):
            result = self.where(name, f"{index.grouped} == {place}", index.axes, value, result)
        return result


def count(extents: Sequence[Any]) -> int:
    total = 1
    for extent in extents:
        total *= int(extent)
    return total


def masked(index: Index) -> str:
    """Return the condition under which an index is meaningful, "" when it always is."""
    if len(index.masks) == 1:
        return index.masks[0]
    return " & ".join(f"({mask})" for mask in index.masks)


def power_of_2(extent: int) -> int:
    return 1 << (extent - 1).bit_length()


def kind_of(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def kind(node: fx.Node) -> str:
    return kind_of(dtype(node))


def literal(number: Any, kind: str) -> str:
    """Return a Python number as source text."""
    if kind == "int":
        return str(int(number))
    if kind == "bool":
        return str(bool(number))
    value = float(number)
    return repr(value) if abs(value) < float("inf") else f'float("{value}")'
