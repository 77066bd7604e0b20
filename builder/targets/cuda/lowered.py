"""What lowering has found so far: ops in order, and the kernels, weights, pools and workspaces that they name."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch

from llmbuild.builder.ir import Program, WeightExpr
from llmbuild.builder.targets.cuda.buffers import SLOTS, Buffer
from llmbuild.builder.targets.cuda.partition import Partition
from llmbuild.builder.targets.cuda.planner import Need
from llmbuild.engine.launch_plan import ITEM_BYTES, GemmOp, KernelOp, Limits, Place, Pool
from llmbuild.plugins.kernels.spec import KernelSpec

INPUTS = {  # what the host writes: elements
    "input_ids": "T",
    "position_ids": "T",
    "slot_mapping": "T",
    "seq_lens": "B",
    "cu_q_lens": "B + 1",
    "block_tables": "B * {table_stride}",
    "logits_indices": "L",
}


@dataclass(frozen=True)
class Hardware:
    """What kernels are made for. sm: 90 for 9.0. processors: multiprocessors of the card, None for the usual one.

    pdl: launch kernels before those before them have ended (SM 90 and up). small_gemms: compute products of few rows
    with kernels of the engine, not with the GEMM library. sampling: sample on the device.
    """

    sm: int
    processors: int | None = None
    pdl: bool = False
    small_gemms: bool = True
    sampling: bool = True


@dataclass
class Lowered:
    """Collects a plan.

    needs: buffers by name. weights: by the name that the plan gives them. specs: kernels by name. counters: bytes by
    name.
    """

    program: Program
    parts: Partition
    limits: Limits
    hardware: Hardware
    ops: list[KernelOp | GemmOp] = field(default_factory=list)
    needs: dict[str, Need] = field(default_factory=dict)
    weights: dict[str, WeightExpr] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    specs: dict[str, KernelSpec] = field(default_factory=dict)
    names: dict[Hashable, str] = field(default_factory=dict)

    def place(self, name: str, offset: int = 0) -> Place:
        """Return where a tensor of the partition lies; `offset` in elements."""
        if name in INPUTS:
            return Place(kind="input", name=name, offset=offset * 4)
        buffer = self.parts.buffers[name]
        offset *= buffer.dtype.itemsize
        if buffer.rows is None:
            self.weights.setdefault(name, self.program.weights[name])
            return Place(kind="weight", name=name, offset=offset)
        if buffer.rows == SLOTS:
            pool = Pool(name=name, dtype=dtype_name(buffer.dtype), width=buffer.width)
            self.pools.setdefault(name, pool)
            return Place(kind="pool", name=name, offset=offset)
        self.needs.setdefault(name, need(buffer))
        return Place(kind="buffer", name=name, offset=offset)

    def workspace(self, name: str, dtype: str, size: str) -> Place:
        """Return a new buffer of `size` bytes, an expression, that no node of the graph stands for."""
        if name in self.needs or name in self.parts.buffers:
            raise ValueError(f"two buffers are called {name!r}")
        self.needs[name] = Need(name, dtype, size)
        return Place(kind="buffer", name=name)

    def counter(self, name: str, num_bytes: int) -> Place:
        """Return the place of int32 numbers that are zero between kernels; equal names mean the same memory."""
        self.counters[name] = max(num_bytes, self.counters.get(name, 0))
        return Place(kind="counter", name=name)

    def weight(self, name: str, expression: WeightExpr) -> Place:
        """Return the place of a weight in another form than the graph's; equal names mean the same weight."""
        self.weights.setdefault(name, expression)
        return Place(kind="weight", name=name)

    def kernel(self, spec: KernelSpec) -> str:
        """Return the name in the pack of a kernel: equal ones are kept once."""
        key = (spec.key, spec.grid)
        if key not in self.names:
            name, count = spec.name, 1
            while name in self.specs:
                count += 1
                name = f"{spec.name}_{count}"
            self.names[key] = name
            self.specs[name] = replace(spec, name=name)
        return self.names[key]


def need(buffer: Buffer) -> Need:
    return Need(buffer.name, dtype_name(buffer.dtype), f"{buffer.rows} * {buffer.width * buffer.dtype.itemsize}")


def dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ValueError(f"the cuda target has no tensors of {name}")
    return name


def label(nodes: Sequence[str], most: int = 6) -> str:
    """Return nodes as text for people."""
    more = f", {len(nodes) - most} more" if len(nodes) > most else ""
    return ", ".join(nodes[:most]) + more
