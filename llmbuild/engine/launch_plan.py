"""`plan/plan.json`: what the cuda target runs in a step, in order. Strict, versioned; written and read without torch.

    arena    one allocation; each buffer has a fixed place in it, shared with buffers that live at other times
    counters another; zero when a kernel starts, and again when it ends
    inputs   the arrays that the host writes before a step
    ops      kernels of the pack (`kernel_pack.py`) and GEMMs, in order
    logits   the buffer in which they end

Sizes are expressions (`expressions.py`) over T tokens, B sequences and L rows of logits of the step. A step is "decode"
when every sequence has one new token (T = B), otherwise "mixed"; ops may belong to one kind of step only.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator

from llmbuild.engine.expressions import evaluate, parse
from llmbuild.engine.manifest import Bytes, Count, Section
from llmbuild.errors import EngineError

PLAN_VERSION = 2
ALIGNMENT = 256  # bytes: of buffers, weights, pools and counters
COUNTER_BYTES = 4  # of a number: int32
DAMAGED = "convert the model again with --force, or restore the file from a good copy"
ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "uint64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

When = Literal["always", "decode", "mixed"]


def _legal(text: str) -> str:
    try:
        parse(text)
    except EngineError as error:
        raise ValueError(str(error)) from None
    return text


def _known(name: str) -> str:
    if name not in ITEM_BYTES:
        raise ValueError(f"{name!r} is no dtype of buffers")
    return name


SizeText = Annotated[str, Field(max_length=400)]
DtypeName = Annotated[str, Field(max_length=16)]


class Place(Section):
    """Where an argument lies.

    kind: "buffer" (in the arena), "counter", "input", "weight", "pool" (a layer's keys or values) or "state" (of
    sampling). name: of it. offset: bytes from its start.
    """

    kind: Literal["buffer", "counter", "input", "weight", "pool", "state"]
    name: str
    offset: Bytes = 0


class Number(Section):
    """An integer passed by value: an expression."""

    kind: Literal["number"] = "number"
    value: SizeText

    _check = field_validator("value")(_legal)


Argument = Annotated[Place | Number, Field(discriminator="kind")]


class KernelOp(Section):
    """A launch of a kernel of the pack. arguments: in the order of its parameters, scratch pointers left out.

    when: the kind of steps it is part of. label: the graph's nodes that it computes, for people. A kernel whose grid is
    empty is not launched.
    """

    op: Literal["kernel"] = "kernel"
    kernel: str
    arguments: tuple[Argument, ...]
    when: When = "always"
    label: str = ""


class SmallGemm(Section):
    """A kernel that takes the place of the library for at most `most_rows` rows; None: for any number."""

    most_rows: Count | None
    launches: tuple[KernelOp, ...]


class GemmOp(Section):
    """out[i, m, n] = Σ_k x[i, m, k] · weight[i, n, k] + bias[n], accumulated in float32.

    rows: M. n, k: sizes. batch: i. dtype: of x, weight, bias and out. Strides in elements: x_stride, out_stride from
    row to row; *_batch from one i to the next. weight_layout: "nk", rows of k numbers, or "kn"; weight_stride from row
    to row of what is stored.

    number_dtype: of x and weight where it is not `dtype`: 8-bit numbers. With scales, float32, x[m, k] counts
    x_scale[m] times and weight[n, k] weight_scale[n] times.

    kernels: those used instead of the GEMM library, the first that takes so many rows; most_rows rise. Where one of
    them takes any number, the weight, and the scales, may be in a form that only they read.
    """

    op: Literal["gemm"] = "gemm"
    x: Place
    weight: Place
    bias: Place | None
    out: Place
    rows: SizeText
    n: Count
    k: Count
    batch: Count
    dtype: DtypeName
    x_stride: Count
    x_batch: Bytes
    weight_layout: Literal["nk", "kn"]
    weight_stride: Count
    weight_batch: Bytes
    out_stride: Count
    out_batch: Bytes
    number_dtype: DtypeName | None = None
    x_scale: Place | None = None
    weight_scale: Place | None = None
    kernels: tuple[SmallGemm, ...] = ()
    when: When = "always"
    label: str = ""

    _check = field_validator("rows")(_legal)
    _dtype = field_validator("dtype")(_known)

    @field_validator("number_dtype")
    @classmethod
    def _known_numbers(cls, name: str | None) -> str | None:
        return None if name is None else _known(name)

    def kernels_for(self, rows: int) -> tuple[KernelOp, ...] | None:
        """Return the launches that compute so many rows, None for the library."""
        for small in self.kernels:
            if small.most_rows is None or rows <= small.most_rows:
                return small.launches
        return None


Op = Annotated[KernelOp | GemmOp, Field(discriminator="op")]


class Buffer(Section):
    """A tensor of a step. size: bytes, an expression. offset: in the arena. first, last: ops between which it lives."""

    name: str
    dtype: DtypeName
    size: SizeText
    offset: Bytes
    first: Bytes
    last: Bytes

    _check = field_validator("size")(_legal)
    _dtype = field_validator("dtype")(_known)


class Counter(Section):
    """int32 numbers by which the programs of a kernel find out which of them is the last. num_bytes: of all.

    They are zero when the engine is loaded, and each kernel leaves them zero, so launches of several kernels may use
    the same: they come one after the other, since a kernel touches its counters only after it has seen what the kernel
    before it wrote.
    """

    name: str
    num_bytes: Count


class Input(Section):
    """An array that the host writes. size: elements, an expression."""

    name: str
    dtype: DtypeName
    size: SizeText

    _check = field_validator("size")(_legal)
    _dtype = field_validator("dtype")(_known)


class Weight(Section):
    """A tensor of the weight file, as it lies there."""

    name: str
    dtype: DtypeName
    shape: tuple[Count, ...]

    _dtype = field_validator("dtype")(_known)

    @property
    def num_bytes(self) -> int:
        total = ITEM_BYTES[self.dtype]
        for dim in self.shape:
            total *= dim
        return total


class Pool(Section):
    """Keys or values of a layer: [slots, width] of dtype."""

    name: str
    dtype: DtypeName
    width: Count

    _dtype = field_validator("dtype")(_known)

    @property
    def token_bytes(self) -> int:
        return self.width * ITEM_BYTES[self.dtype]


class Sampling(Section):
    """Kernels that turn logits into tokens on the device. Their buffers live at the end of the plan.

    After the ops run greedy (every row takes the likeliest token), full, or adjusted (full, with penalties, bias and
    lists); then logprobs and count, where a row asks for logprobs or has penalties. Before the ops of a step run enter,
    for a sequence with penalties that enters, and feed, for tokens that the host has not seen.

    inputs: arrays of these kernels alone, which the host writes where they are read. state: arrays that stay on the
    device from step to step, all zeros at first; sizes are those at the plan's limits. num_tokens: columns of logits
    from there on are never sampled. token_ids, status (0: a token,
    1: logits that are not finite) int32 [L], logprob_ids int32, logprobs float32 [L, 1 + n] and ranks int32 [L] are the
    results.
    """

    greedy: tuple[KernelOp, ...]
    full: tuple[KernelOp, ...]
    adjusted: tuple[KernelOp, ...]
    logprobs: tuple[KernelOp, ...]
    count: tuple[KernelOp, ...]
    enter: tuple[KernelOp, ...]
    feed: tuple[KernelOp, ...]
    inputs: tuple[Input, ...]
    state: tuple[Input, ...]
    num_tokens: Count
    token_ids: Place
    status: Place
    logprob_ids: Place
    logprob_values: Place
    ranks: Place

    def ops(self) -> tuple[KernelOp, ...]:
        """Return all kernels; some of them are in several lists."""
        lists = (self.greedy, self.full, self.adjusted, self.logprobs, self.count, self.enter, self.feed)
        return tuple(op for ops in lists for op in ops)


class Limits(Section):
    """Upper bounds of a step: T, B and L, for which the arena is laid out. table_stride: entries of a block table."""

    max_num_tokens: Count
    max_batch_size: Count
    table_stride: Count
    block_size: Count

    def sizes(self) -> dict[str, int]:
        return {"T": self.max_num_tokens, "B": self.max_batch_size, "L": self.max_batch_size}


class LaunchPlan(Section):
    """See the module. arena_bytes: size of the arena. logits: [L, columns] of logits_dtype.

    sampling: None where the host samples.
    """

    version: int
    limits: Limits
    inputs: tuple[Input, ...]
    weights: tuple[Weight, ...]
    pools: tuple[Pool, ...]
    buffers: tuple[Buffer, ...]
    arena_bytes: Bytes
    counters: tuple[Counter, ...]
    ops: tuple[Op, ...]
    logits: Place
    logits_dtype: DtypeName
    logits_columns: Count
    sampling: Sampling | None = None

    @property
    def counter_offsets(self) -> dict[str, int]:
        """Bytes from the start of the allocation of all counters, by name."""
        found, end = {}, 0
        for counter in self.counters:
            found[counter.name] = end
            end += -(-counter.num_bytes // ALIGNMENT) * ALIGNMENT
        return found

    @property
    def counter_bytes(self) -> int:
        return sum(-(-counter.num_bytes // ALIGNMENT) * ALIGNMENT for counter in self.counters)

    def to_json(self) -> bytes:
        """Return the deterministic text of the file."""
        return self.compact_json() + b"\n"

    @staticmethod
    def read(path: Path) -> LaunchPlan:
        """Read and check a plan: version, shape, and that every name and place that it mentions exists.

        Raises:
            EngineError: Not a plan, of another version, or damaged.
        """
        import json

        try:
            text = path.read_bytes()
        except OSError as error:
            raise EngineError(f"cannot read the launch plan: {error.strerror}", where=str(path), hint=DAMAGED) from None
        try:
            version = json.loads(text)["version"]
        except (ValueError, TypeError, KeyError):
            raise EngineError("not a launch plan", where=str(path), hint=DAMAGED) from None
        if version != PLAN_VERSION:
            raise EngineError(
                f"a launch plan of version {version}; this llmbuild reads version {PLAN_VERSION}",
                where=str(path),
                hint="convert the model again with this version of llmbuild",
            )
        try:
            plan = LaunchPlan.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "plan"
            raise EngineError(f"damaged launch plan: {place}: {first['msg']}", where=str(path), hint=DAMAGED) from None
        problem = plan.problem()
        if problem is not None:
            raise EngineError(f"damaged launch plan: {problem}", where=str(path), hint=DAMAGED)
        return plan

    def problem(self) -> str | None:
        """Return what is wrong with the plan, None if nothing is. What `first` and `last` say is part of it."""
        sizes = self.limits.sizes()
        known: dict[str, dict[str, int]] = {
            "buffer": {b.name: most_bytes(b.size, self.limits) for b in self.buffers},
            "counter": {c.name: c.num_bytes for c in self.counters},
            "input": {i.name: evaluate(i.size, sizes) * ITEM_BYTES[i.dtype] for i in self.inputs},
            "weight": {w.name: w.num_bytes for w in self.weights},
            "pool": {p.name: p.token_bytes for p in self.pools},
        }
        ops: list[tuple[int, KernelOp | GemmOp]] = list(enumerate(self.ops))
        if self.sampling is not None:
            for kind, arrays in (("input", self.sampling.inputs), ("state", self.sampling.state)):
                held = {array.name: evaluate(array.size, sizes) * ITEM_BYTES[array.dtype] for array in arrays}
                known[kind] = known.get(kind, {}) | held
            ops += [(len(self.ops), op) for op in self.sampling.ops()]
        for buffer in self.buffers:
            if buffer.offset % ALIGNMENT or buffer.offset + known["buffer"][buffer.name] > self.arena_bytes:
                return f"buffer {buffer.name} does not lie in the arena"
        names = [counter.name for counter in self.counters]
        for counter in self.counters:
            if names.count(counter.name) > 1:
                return f"there are several counters {counter.name}"
            if counter.num_bytes % COUNTER_BYTES:
                return f"counter {counter.name} of {counter.num_bytes} bytes is no array of int32"
        lives = {b.name: (b.first, b.last) for b in self.buffers}
        for number, op in ops:
            for place in places_of(op):
                if place.name not in known.get(place.kind, {}):
                    return f"op {number} reads the {place.kind} {place.name!r}, which is not there"
                if place.offset >= max(known[place.kind][place.name], 1):
                    return f"op {number} reads past the end of {place.name}"
                if place.kind == "counter" and place.offset % COUNTER_BYTES:
                    return f"op {number} reads {place.name} at {place.offset} bytes, between two numbers"
                if place.kind == "buffer" and not lives[place.name][0] <= number <= lives[place.name][1]:
                    return f"op {number} uses the buffer {place.name} outside its lifetime"
        if self.logits.kind != "buffer" or self.logits.name not in lives:
            return "the logits are in no buffer"
        if lives[self.logits.name][1] != len(self.ops):
            return "the logits do not live to the end"
        return self._overlap(known["buffer"])

    def _overlap(self, sizes: dict[str, int]) -> str | None:
        """Return which two buffers share memory while both live: sweeping over the ops, by places in the arena."""
        alive: list[Buffer] = []
        for buffer in sorted(self.buffers, key=lambda each: (each.first, each.name)):
            alive = [other for other in alive if other.last >= buffer.first]
            end = buffer.offset + sizes[buffer.name]
            for other in alive:
                if buffer.offset < other.offset + sizes[other.name] and other.offset < end:
                    return f"buffers {other.name} and {buffer.name} share memory"
            alive.append(buffer)
        return None


def launches_of(op: KernelOp | GemmOp) -> tuple[KernelOp, ...]:
    """Return the kernels that an op may launch."""
    if isinstance(op, KernelOp):
        return (op,)
    return tuple(launch for small in op.kernels for launch in small.launches)


def places_of(op: KernelOp | GemmOp) -> list[Place]:
    """Return every place that an op may touch."""
    found = [a for launch in launches_of(op) for a in launch.arguments if isinstance(a, Place)]
    if isinstance(op, GemmOp):
        places = (op.x, op.weight, op.bias, op.out, op.x_scale, op.weight_scale)
        found += [place for place in places if place is not None]
    return found


@lru_cache(maxsize=4096)
def most_bytes(size: str, limits: Limits) -> int:
    """Return the most that a size can be within the limits.

    A size in one name that need not grow with it is tried at all its values: what splits of attention need does not
    grow with the batch. Of several names, the size must grow with each.
    """
    expression = parse(size)
    most = limits.sizes()
    if len(expression.names) == 1 and any(sign in size for sign in ("-", "/", "%", "cdiv")):
        (name,) = expression.names
        return max(expression.evaluate({name: value}) for value in range(1, most[name] + 1))
    return expression.evaluate(most)
