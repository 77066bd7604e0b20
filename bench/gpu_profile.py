"""Where a step of the cuda target spends its time: every op of the plan against the least that the card allows.

    python bench/gpu_profile.py ENGINE [--decode 1,64,256] [--context 192] [--prefill 2048,8192] [--save NAME]

Needs torch, for its profiler: it sees the kernels of this process, those inside of CUDA graphs too. Kernels of a step
follow the ops of its plan in order, which is how a library's kernels get the names of the products that they compute.
Limits: bytes at BYTES_S, or a product's operations at FLOP_S where that is longer; both were measured on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gpu_timing import capability
from h200 import Server, gpu, random_prompts
from records import emit, environment, package_version, table, write_results

from llmbuild.engine.expressions import evaluate
from llmbuild.engine.kernel_pack import KernelPack
from llmbuild.engine.launch_plan import ITEM_BYTES, GemmOp, KernelOp, LaunchPlan, Place

STEPS = 8  # that are traced
BYTES_S = 4.4e12
FLOP_S = {"bfloat16": 794e12, "float16": 794e12, "float8_e4m3fn": 1.56e15, "int8": 1.58e15}


class Kernel(NamedTuple):
    """A kernel that ran, in microseconds. us: from the end of the kernel before it to its own.

    Kernels that start early wait inside for those before them, so that their own durations count time twice; these
    add up to the step.
    """

    name: str
    start: float
    end: float
    us: float


class Pack(NamedTuple):
    """Of the engine's kernels: grids by name, and names as the GPU knows them."""

    grids: dict[str, tuple[str, str, str]]
    symbols: frozenset[str]


class Sizes(NamedTuple):
    """Of a step. context: tokens that its sequences read, summed."""

    T: int
    B: int
    L: int
    context: int


def traced(server: Server, prompts: list[list[int]], max_tokens: int, skip: int, first: str) -> list[list[Kernel]]:
    """Serve prompts; return the kernels of some steps after the first `skip`. first: the kernel that begins a step."""
    from torch.profiler import ProfilerActivity, profile

    server.add(prompts, max_tokens)
    for _ in range(skip):
        server.core.step()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            if server.core.has_work:
                server.core.step()
    while server.core.has_work:
        server.core.step()
    events = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events()
        if str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset", "Activity"))
    ]
    steps: list[list[Kernel]] = []
    latest = None
    for start, end, name in sorted(events):
        if name == first:
            steps.append([])
            latest = start
        if latest is None:
            continue
        steps[-1].append(Kernel(name, start, end, max(0.0, end - latest)))
        latest = max(latest, end)
    return steps


def assign(plan: LaunchPlan, kernels: list[Kernel], pack: Pack, sizes: Sizes) -> list[tuple[str, float, float]]:
    """Return (group, microseconds, least microseconds) of the ops of a step; what no op claims is "sampling, other".

    An op whose grid is empty has launched nothing.
    """
    found, at = [], 0
    decode = sizes.T == sizes.B
    values = sizes._asdict()
    for op in plan.ops:
        if op.when == ("mixed" if decode else "decode"):
            continue
        launches = [op.kernel] if isinstance(op, KernelOp) else None
        if isinstance(op, GemmOp):
            chosen = op.kernels_for(evaluate(op.rows, values))
            launches = None if chosen is None else [launch.kernel for launch in chosen]
        us = 0.0
        if launches is None:
            while at < len(kernels) and kernels[at].name not in pack.symbols:
                us += kernels[at].us
                at += 1
        else:
            for kernel in launches:
                if 0 in [evaluate(text, values) for text in pack.grids[kernel]]:
                    continue
                us += kernels[at].us if at < len(kernels) else 0.0
                at += 1
        found.append((group(op), us, least(plan, op, sizes)))
    rest = sum(kernel.us for kernel in kernels[at:])
    return [*found, ("sampling, other", rest, 0.0)]


def group(op: KernelOp | GemmOp) -> str:
    return op.kernel if isinstance(op, KernelOp) else f"product {op.n} x {op.k}"


def least(plan: LaunchPlan, op: KernelOp | GemmOp, sizes: Sizes) -> float:
    """Return the microseconds that its bytes, or a product's operations, need at the card's measured rates."""
    values = sizes._asdict()
    if isinstance(op, GemmOp):
        rows, item = evaluate(op.rows, values) * op.batch, ITEM_BYTES[op.dtype]
        weight = next(w for w in plan.weights if w.name == op.weight.name)
        moved = weight.num_bytes + rows * (op.n + op.k) * item
        return max(moved / BYTES_S, 2 * rows * op.n * op.k / FLOP_S.get(op.number_dtype or op.dtype, 60e12)) * 1e6
    places = {(a.kind, a.name) for a in op.arguments if isinstance(a, Place)}
    buffers = {b.name: b for b in plan.buffers}
    total = 0.0
    for kind, name in places:
        if kind == "buffer":
            total += evaluate(buffers[name].size, values)
        elif kind == "pool" and "attention" in op.kernel:
            total += sizes.context * next(p for p in plan.pools if p.name == name).token_bytes
    return total / BYTES_S * 1e6


def profile_step(plan: LaunchPlan, pack: Pack, steps: list[list[Kernel]], sizes: Sizes, kind: str):
    """Return records: one a group of ops, over the median of steps, and one of the whole."""
    full = [step for step in steps if len(step) == max(map(len, steps))] or steps
    span = [sum(kernel.us for kernel in step) for step in full]
    pitch = [later[0].start - step[0].start for step, later in itertools.pairwise(steps)]
    chosen = sorted(zip(span, range(len(full)), full, strict=True))[len(full) // 2][2]
    groups: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for name, us, floor in assign(plan, chosen, pack, sizes):
        entry = groups[name]
        entry[0] += 1
        entry[1] += us
        entry[2] += floor
    common = {"kind": "profile", "step": kind, "B": sizes.B, "tokens": sizes.T, "context": sizes.context}
    rows = [
        {**common, "op": name, "count": int(count), "us": round(us, 1), "limit_us": round(floor, 1)}
        for name, (count, us, floor) in sorted(groups.items(), key=lambda item: -item[1][1])
    ]
    whole = {
        **common,
        "op": "whole step",
        "count": len(chosen),
        "us": round(statistics.median(span), 1),
        "limit_us": round(sum(row["limit_us"] for row in rows), 1),
        "pitch_us": round(statistics.median(pitch), 1) if pitch else None,
    }
    return [*rows, whole]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--decode", default="1,64,256", help="batch sizes")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--prefill", default="2048,8192", help="prompt lengths")
    parser.add_argument("--tag", default="bf16")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/DATE-NAME.jsonl")
    arguments = parser.parse_args()
    records: list[dict[str, Any]] = [emit(**environment(("llmbuild", "cuda-bindings", "torch")), gpu=gpu())]
    server = Server(arguments.engine)
    files = arguments.engine / "plan" / f"sm{capability()}"
    plan, packed = LaunchPlan.read(files / "plan.json"), KernelPack.open(files / "kernels.bin")
    symbols = {name: packed.kernel(name, capability()).launch.symbol for name in packed.names}
    pack = Pack({name: packed.grid(name) for name in packed.names}, frozenset(symbols.values()))
    first = symbols[plan.ops[0].kernel]
    who = {"peer": f"llmbuild-{package_version('llmbuild')}", "tag": arguments.tag}
    vocab = server.limits.vocab_size
    for text in filter(None, arguments.decode.split(",")):
        batch = int(text)
        prompts = random_prompts(batch, arguments.context - 8, vocab, 5)
        chunks = int(np.ceil(batch * (arguments.context - 8) / server.limits.max_num_tokens)) + 2
        steps = traced(server, prompts, STEPS + 2 * chunks, chunks, first)
        sizes = Sizes(batch, batch, batch, batch * arguments.context)
        records += [who | row for row in profile_step(plan, pack, steps, sizes, "decode")]
    for text in filter(None, arguments.prefill.split(",")):
        length = int(text)
        server.run(random_prompts(1, length, vocab, 3), 1)
        steps = traced(server, random_prompts(1, length, vocab, 4), 1, 0, first)
        sizes = Sizes(length, 1, 1, length)
        records += [who | row for row in profile_step(plan, pack, steps, sizes, "prefill")]
    for step, size in {(r["step"], r["tokens"]): 0 for r in records if r.get("kind") == "profile"}:
        rows = [r for r in records if r.get("kind") == "profile" and (r["step"], r["tokens"]) == (step, size)]
        table(f"{step}, {size} tokens", rows, ["op", "count", "us", "limit_us", "pitch_us"])
    if arguments.save:
        print(f"\nwritten to {write_results(arguments.save, records).name}")


if __name__ == "__main__":
    main()
