"""Program → launch plan.

partition.py    the graph as barriers and row programs
lowering.py     each part as ops, with the kernels, weights and workspaces that they need
  attention_ops.py, gemm_ops.py, scaled_ops.py, experts_ops.py, blockwise_ops.py: one kind of barrier each
planner.py      places of the buffers in the arena
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx

from llmbuild.builder.ir import Program, WeightExpr, raise_unsupported
from llmbuild.builder.targets.base import Limits as EngineLimits
from llmbuild.builder.targets.cuda.attention_ops import attention_ops
from llmbuild.builder.targets.cuda.blockwise_ops import block_embedding_op, block_gemm_op
from llmbuild.builder.targets.cuda.buffers import Buffer
from llmbuild.builder.targets.cuda.experts_ops import block_experts_ops, experts_ops
from llmbuild.builder.targets.cuda.gemm_ops import gemm_op
from llmbuild.builder.targets.cuda.kernel_source import specs
from llmbuild.builder.targets.cuda.levels import dense_strides
from llmbuild.builder.targets.cuda.lowered import INPUTS, Hardware, Lowered, dtype_name, label
from llmbuild.builder.targets.cuda.partition import Barrier, Launch, Partition, partition
from llmbuild.builder.targets.cuda.planner import lay_out
from llmbuild.builder.targets.cuda.sampling_ops import sampling_ops
from llmbuild.builder.targets.cuda.scaled_ops import number_gemm_op, scaled_gemm_op
from llmbuild.builder.targets.cuda.views import NoRule
from llmbuild.engine.launch_plan import (
    PLAN_VERSION,
    Counter,
    Input,
    KernelOp,
    LaunchPlan,
    Limits,
    Place,
    Sampling,
    Weight,
    places_of,
)
from llmbuild.plugins.kernels.sampling_order import MOST_TOKENS
from llmbuild.plugins.kernels.sampling_plan import sampling_plan
from llmbuild.plugins.kernels.spec import KernelSpec

BARRIERS: dict[str, Callable[[Lowered, Barrier], None]] = {
    "attention": attention_ops,
    "gemm": gemm_op,
    "batched_gemm": gemm_op,
    "experts": experts_ops,
    "block_gemm": block_gemm_op,
    "scaled_gemm": scaled_gemm_op,
    "number_gemm": number_gemm_op,
    "block_experts": block_experts_ops,
    "block_embedding": block_embedding_op,
}


@dataclass(frozen=True)
class Planned:
    """A plan with what belongs to it: kernels and weights by the names that it uses, and the row programs' source.

    needed: bytes of buffers that live at the worst op; no arena could be smaller.
    """

    plan: LaunchPlan
    specs: dict[str, KernelSpec]
    weights: dict[str, WeightExpr]
    source: str
    needed: int


def plan_program(program: Program, limits: EngineLimits, hardware: Hardware, parts: Partition | None = None) -> Planned:
    """Plan an optimised program for one kind of GPU.

    Args:
        parts: What `partition(program)` returned, to share it among several GPUs.

    Raises:
        UnsupportedError: naming every node that cannot be planned, with its source line.
    """
    parts = partition(program) if parts is None else parts
    stride = -(-limits.max_seq_len // limits.block_size)
    bounds = Limits(
        max_num_tokens=limits.max_num_tokens,
        max_batch_size=limits.max_batch_size,
        table_stride=stride,
        block_size=limits.block_size,
    )
    lowered = Lowered(program, parts, bounds, hardware)
    rows = {spec.name: spec for spec in specs(parts, pdl=hardware.pdl)}
    problems: list[tuple[fx.Node, str]] = []
    for part in parts.parts:
        if isinstance(part, Launch):
            lowered.ops.append(row_op(lowered, part, rows[part.kernel.name]))
        elif part.kind not in BARRIERS:
            problems.append((part.node, f"the cuda target has no kernels for {part.kind} yet"))
        else:
            try:
                BARRIERS[part.kind](lowered, part)
            except NoRule as problem:
                problems.append((problem.node, problem.reason))
    raise_unsupported("cuda", problems)
    return finish(lowered)


def row_op(lowered: Lowered, part: Launch, spec: KernelSpec) -> KernelOp:
    kernel = lowered.kernel(replace(spec, grid=part.grid))
    places = tuple(lowered.place(name) for name in part.arguments)
    return KernelOp(kernel=kernel, arguments=places, label=label(part.arguments[: len(part.kernel.outputs)]))


def finish(lowered: Lowered) -> Planned:
    """Give buffers their places and write everything down."""
    output = lowered.parts.output
    buffer = lowered.parts.buffers[output.buffer]
    logits = lowered.place(output.buffer, output.offset)
    if buffer.row_axis is None or output.offset or output.strides != dense_strides(output.shape):
        raise ValueError(f"the logits are {output}, not the rows of a buffer")
    sampling = device_sampling(lowered, logits, buffer)
    touched = [places_of(op) for op in lowered.ops]
    after = [] if sampling is None else [place for op in sampling.ops() for place in places_of(op)]
    layout = lay_out(list(lowered.needs.values()), [*touched, [logits, *after]], lowered.limits)
    weights = tuple(
        Weight(name=name, dtype=dtype_name(expression.dtype), shape=tuple(expression.shape))
        for name, expression in sorted(lowered.weights.items())
    )
    plan = LaunchPlan(
        version=PLAN_VERSION,
        limits=lowered.limits,
        inputs=tuple(
            Input(name=name, dtype="int32", size=size.format(table_stride=lowered.limits.table_stride))
            for name, size in INPUTS.items()
        ),
        weights=weights,
        pools=tuple(lowered.pools[name] for name in sorted(lowered.pools, key=pool_order)),
        buffers=layout.buffers,
        arena_bytes=layout.arena_bytes,
        counters=tuple(Counter(name=name, num_bytes=size) for name, size in sorted(lowered.counters.items())),
        ops=tuple(lowered.ops),
        logits=logits,
        logits_dtype=dtype_name(buffer.dtype),
        logits_columns=buffer.width,
        sampling=sampling,
    )
    problem = plan.problem()
    if problem is not None:
        raise AssertionError(f"the plan is wrong: {problem}")
    return Planned(plan, lowered.specs, lowered.weights, lowered.parts.source, layout.needed)


def device_sampling(lowered: Lowered, logits: Place, buffer: Buffer) -> Sampling | None:
    """Return the kernels that sample; None where the host must, because the vocabulary is too large for them."""
    num_tokens = min(token_count(lowered.program), buffer.width)
    if not lowered.hardware.sampling or num_tokens > MOST_TOKENS:
        return None
    hardware, rows = lowered.hardware, lowered.limits.max_batch_size
    plan = sampling_plan(buffer.width, num_tokens, dtype_name(buffer.dtype), rows, hardware.sm, pdl=hardware.pdl)
    for spec in plan.specs:
        lowered.specs[spec.name] = spec
    section, buffers = sampling_ops(plan, logits)
    for name, dtype, needed in buffers:
        lowered.workspace(name, dtype, needed)
    return section


def token_count(program: Program) -> int:
    """Return how many tokens can be sampled: ids that no text stands for, at the end of the vocabulary, cannot."""
    text = program.tokenizer_files.get("tokenizer.json")
    if text is None:
        return program.info.vocab_size
    from tokenizers import Tokenizer

    ids = Tokenizer.from_buffer(text).get_vocab(with_added_tokens=True).values()
    return min(1 + max(ids, default=-1), program.info.vocab_size)


def pool_order(name: str) -> tuple[int, str]:
    kind, _, layer = name.rpartition("_")
    return int(layer), kind
