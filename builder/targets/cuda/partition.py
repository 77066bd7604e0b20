"""The graph as an ordered list of parts: GEMMs, attention, experts, and row programs for everything else.

    level 1   linear(q|k|v)               barriers of a level, in the graph's order,
              rows: rope(q), rope(k), v   then what is computed from them row by row
    level 2   paged_attention
    level 3   linear(o)
              rows: add_rms_norm
    ...

A value lies in memory when a barrier reads it (or is what it is a view of), when it is the result, or when it is read
at a later level than its own; all others exist only inside a row program. Keys and values are written where they stay,
into the slots of a layer's pools `keys_0`, `values_0`: attention appends nothing. Where a cache has a scale for each
token and head, `key_scales_0` and `value_scales_0` are pools likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from llmbuild.builder.ir import Program, raise_unsupported
from llmbuild.builder.passes.edit import is_call, is_tensor, size
from llmbuild.builder.targets.cuda.buffers import SLOTS, Buffer, Output, View, whole
from llmbuild.builder.targets.cuda.levels import (
    Rows,
    barrier,
    computed_operands,
    levels,
    reads_in_place,
    strided,
    tensors,
)
from llmbuild.builder.targets.cuda.row_program import RowProgram, anonymous, header, row_program
from llmbuild.builder.targets.cuda.rules.table import has_rule
from llmbuild.builder.targets.cuda.views import NoRule, base


@dataclass(frozen=True)
class Barrier:
    """A GEMM, attention, experts or a lookup in blocks. kind: which. inputs: what it reads besides weights, in order.

    The node holds the op, its weights and its numbers. Its result is the dense buffer of the node's name. The inputs of
    attention are queries and the two pools, and two pools of scales where each token and head has its own.
    """

    kind: str
    node: fx.Node
    inputs: tuple[View, ...]


@dataclass(frozen=True)
class Launch:
    """A row program's kernel with the buffers of this launch, in the order of the parameters.

    grid: of this launch: a kernel does the same to rows of tokens and to rows of logits.
    """

    kernel: RowProgram
    arguments: tuple[str, ...]
    grid: tuple[str, str, str]


@dataclass
class Partition:
    """parts: in order of execution. buffers: every tensor in memory, by name, weights and inputs included.

    kernels: the distinct row programs; layers that do the same share one. output: the logits [L, V].
    """

    parts: list[Barrier | Launch]
    buffers: dict[str, Buffer]
    kernels: list[RowProgram]
    output: View

    @property
    def source(self) -> str:
        """All kernels as one module."""
        return "\n\n".join([header(self.kernels), *(kernel.source for kernel in self.kernels)])


def partition(program: Program) -> Partition:
    """Cut an optimised program into parts and write its row programs.

    Raises:
        UnsupportedError: naming every node that has no rule, with its source line.
    """
    calls = [node for node in program.graph.nodes if node.op == "call_function" and is_value(node)]
    unknown = [node for node in calls if barrier(program, node) is None and not has_rule(node)]
    raise_unsupported("cuda", [(node, "no rule for this op") for node in unknown])
    try:
        plan = Plan(program)
    except NoRule as problem:
        raise_unsupported("cuda", [(problem.node, problem.reason)])
        raise
    parts: list[Barrier | Launch] = []
    kernels: dict[tuple[str, tuple[str, ...]], RowProgram] = {}
    problems: dict[fx.Node, str] = {}
    for level in range(max(plan.level.values()) + 1):
        parts += [plan.barrier(node) for node in calls if plan.level[node] == level and node in plan.barriers]
        for name, rows, outputs in plan.outputs(level):
            try:
                kernel = row_program(name, rows, outputs, partial(plan.stored, level=level))
            except NoRule as problem:
                problems.setdefault(problem.node, problem.reason)
                continue
            types = tuple(str(plan.named[argument].dtype) for argument in kernel.arguments)
            shared = kernels.setdefault((anonymous(kernel.source), types), kernel)
            parts.append(Launch(shared, kernel.arguments, kernel.grid))
    raise_unsupported("cuda", list(problems.items()))
    return Partition(parts, plan.used_buffers(parts), list(kernels.values()), plan.output)


class Plan:
    """What lies in memory, and from which level on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rows = Rows(program)
        self.level = levels(program)
        nodes = list(program.graph.nodes)
        self.barriers = {node for node in nodes if barrier(program, node) is not None}
        self.buffers: dict[fx.Node, Buffer] = {
            node: self.rows.buffer(node) for node in nodes if node.op == "placeholder" or node in self.barriers
        }
        self.made: dict[fx.Node, None] = {}  # by row programs
        self.slots = Buffer("slot_mapping", torch.int32, size(program.placeholder("input_ids")), "T", 0)
        self.pools: dict[tuple[fx.Node, str], Buffer] = {}  # (what is appended, to which pool)
        result = narrow_logits(next(node for node in nodes if node.op == "output").args[0])
        for node in nodes:
            if node in self.barriers:
                self.only_weights(node)
                self.inputs(node)
            elif node.op == "call_function" and is_value(node):
                for operand in tensors(node):
                    if self.level[operand] < self.level[node]:
                        self.keep(base(operand))
        self.output = self.read(result, "gemm")
        everything = [*self.buffers.values(), *self.pools.values(), self.slots]
        self.named = {buffer.name: buffer for buffer in everything}

    def only_weights(self, node: fx.Node) -> None:
        """Check that what a barrier reads besides its computed operands is weights."""
        for operand in node.all_input_nodes:
            if operand not in computed_operands(node) and self.program.weight_of(operand) is None:
                raise NoRule(node, f"its operand {operand.name} is computed")

    def keep(self, node: fx.Node) -> None:
        """Let a row program leave `node` in memory, unless it is there anyway or does not depend on the step."""
        if node not in self.buffers and is_tensor(node) and self.rows.buffer(node).rows is not None:
            self.buffers[node] = self.rows.buffer(node)
            self.made.setdefault(node)

    def read(self, node: fx.Node, kind: str) -> View:
        """Return `node` as a barrier reads it: what it is a view of, if it can be read in place, else itself."""
        origin = base(node)
        view = strided(node, self.rows.buffer(origin))
        if node not in self.buffers and view is not None and reads_in_place(kind, view):
            self.keep(origin)
            return view
        self.keep(node)
        return whole(self.buffers[node])

    def append(self, node: fx.Node, name: str) -> View:
        """Let a row program write keys or values where they stay: into the slots of a layer's pool."""
        like = self.rows.buffer(node)
        if like.rows != "T" or like.row_axis != 0 or like.rows_each != 1:
            raise NoRule(node, f"keys or values of shape {list(like.shape)}")
        pool = self.pools.setdefault((node, name), replace(like, name=name, rows=SLOTS))
        return whole(pool)

    def inputs(self, node: fx.Node) -> tuple[View, ...]:
        kind = barrier(self.program, node)
        operands = computed_operands(node)
        if kind != "attention":
            return tuple(self.read(operand, str(kind)) for operand in operands)
        query, *stored = operands
        pools = zip(stored, ("keys", "values", "key_scales", "value_scales"), strict=False)
        return (self.read(query, kind), *(self.append(each, f"{name}_{node.args[3]}") for each, name in pools))

    def barrier(self, node: fx.Node) -> Barrier:
        return Barrier(str(barrier(self.program, node)), node, self.inputs(node))

    def stored(self, node: fx.Node, level: int) -> Buffer | None:
        """Return the buffer that holds `node` when the row programs of a level start."""
        if node in self.made and self.level[node] >= level:
            return None
        return self.buffers.get(node)

    def outputs(self, level: int) -> Iterator[tuple[str, str, list[Output]]]:
        """Yield the kernels of a level: name, rows, and what each leaves in memory."""
        for rows in ("T", "L"):
            here = [
                Output(node, self.buffers[node])
                for node in self.program.graph.nodes
                if node in self.made and self.level[node] == level and self.buffers[node].rows == rows
            ]
            if rows == "T":
                here += [
                    Output(node, pool, self.slots)
                    for (node, _), pool in self.pools.items()
                    if self.level[node] == level
                ]
            if here:
                yield f"rows_{level}_{rows.lower()}", rows, here

    def used_buffers(self, parts: list[Barrier | Launch]) -> dict[str, Buffer]:
        """Return the buffers of all parts, and the weights that barriers read, by name."""
        used = {self.output.buffer}
        for part in parts:
            if isinstance(part, Launch):
                used |= set(part.arguments)
            else:
                used |= {part.node.name, *(view.buffer for view in part.inputs)}
                used |= {each.name for each in part.node.all_input_nodes if self.program.weight_of(each) is not None}
        return {name: buffer for name, buffer in self.named.items() if name in used}


def narrow_logits(result: fx.Node) -> fx.Node:
    """Return the logits before they are widened to float32, which changes no value: who reads them does it as well."""
    source = result.args[0] if is_call(result, torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default) else None
    if isinstance(source, fx.Node) and source.meta["val"].dtype in (torch.bfloat16, torch.float16):
        return source
    return result


def is_value(node: fx.Node) -> bool:
    """Whether a node is a tensor or several; sizes are known without it."""
    return is_tensor(node) or isinstance(node.meta.get("val"), (tuple, list))
