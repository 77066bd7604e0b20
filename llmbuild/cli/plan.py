"""`llmbuild inspect --plan`: what an engine of the cuda target runs in a step, to be read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from llmbuild.cli.console import print_json, print_table
from llmbuild.errors import ConfigError
from llmbuild.units import human_size

if TYPE_CHECKING:
    from llmbuild.engine.launch_plan import GemmOp, KernelOp, LaunchPlan, Number, Place
    from llmbuild.engine.reader import Engine


def print_plan(engine: Engine, sm: int | None, *, as_json: bool) -> None:
    """Print the plan for one kind of GPU, the first of the engine if `sm` is None.

    Raises:
        ConfigError: The engine has no plan, or none for this SM.
    """
    from llmbuild.engine.kernel_pack import KernelPack
    from llmbuild.engine.launch_plan import LaunchPlan

    target = engine.manifest.target
    if "plans" not in target.section:
        raise ConfigError(
            f"an engine of the {target.name} target has no launch plan", where=str(engine.path), hint="leave --plan out"
        )
    sms = target.section["sms"]
    sm = sms[0] if sm is None else sm
    if sm not in sms:
        raise ConfigError(
            f"the engine has no plan for SM {sm}", where="--sm", hint=f"it has {', '.join(map(str, sms))}"
        )
    plan = LaunchPlan.read(engine.file(target.section["plans"][str(sm)]))
    if as_json:
        print_json({"sm": sm, "plan": plan.model_dump(mode="json")})
        return
    pack = KernelPack.open(engine.file(target.section["kernels"][str(sm)]))
    grids = {name: pack.grid(name) for name in pack.names}
    _show(plan, sm, grids)


def _show(plan: LaunchPlan, sm: int, grids: dict[str, tuple[str, str, str]]) -> None:
    from llmbuild.engine.launch_plan import most_bytes

    limits = plan.limits
    pool_bytes = sum(pool.token_bytes for pool in plan.pools)
    facts = [
        (
            "step",
            f"at most {limits.max_num_tokens} tokens T, {limits.max_batch_size} sequences B, as many logits rows L",
        ),
        ("kernels", f"{len(grids)} for SM {sm}"),
        (
            "ops",
            f"{len(plan.ops)}, of which a decode step runs {_count(plan, 'decode')}, others {_count(plan, 'mixed')}",
        ),
        ("arena", f"{human_size(plan.arena_bytes)} for {len(plan.buffers)} buffers at these limits"),
        ("counters", f"{human_size(plan.counter_bytes)} in {len(plan.counters)} arrays, zero between kernels"),
        ("weights", f"{human_size(sum(weight.num_bytes for weight in plan.weights))} in {len(plan.weights)} tensors"),
        ("KV pools", f"{human_size(pool_bytes)} a token in {len(plan.pools)} pools"),
        ("logits", f"{plan.logits.name}: [L, {plan.logits_columns}] {plan.logits_dtype}"),
        ("sampling", "on the host" if plan.sampling is None else "on the device"),
    ]
    print_table(f"Launch plan, SM {sm}", ("", ""), facts)
    rows = [row for number, op in enumerate(plan.ops) for row in _op_rows(number, op, grids)]
    print_table("Ops", ("#", "steps", "what", "grid", "arguments", "computes"), rows)
    buffers = [
        (b.name, b.dtype, b.size, human_size(most_bytes(b.size, limits)), b.offset, f"{b.first}..{b.last}")
        for b in plan.buffers
    ]
    print_table("Buffers of the arena", ("name", "dtype", "bytes", "at most", "offset", "lives in ops"), buffers)


def _count(plan: LaunchPlan, kind: str) -> int:
    return sum(op.when in ("always", kind) for op in plan.ops)


def _op_rows(number: int, op: KernelOp | GemmOp, grids: dict[str, tuple[str, str, str]]) -> list[tuple[Any, ...]]:
    if op.op == "kernel":
        return [(number, op.when, op.kernel, _grid(grids[op.kernel]), _arguments(op.arguments), op.label)]
    batch = f"{op.batch} x " if op.batch > 1 else ""
    what = f"GEMM {batch}[{op.rows}, {op.k}] x [{op.k}, {op.n}] {op.dtype}"
    places = [place for place in (op.x, op.weight, op.bias, op.out) if place is not None]
    rows: list[tuple[Any, ...]] = [(number, op.when, what, "", _arguments(places), op.label)]
    for small in op.kernels:
        bound = "any rows" if small.most_rows is None else f"rows <= {small.most_rows}"
        rows += [("", "", f"  {bound}: {one.kernel}", _grid(grids[one.kernel]), "", "") for one in small.launches]
    if not any(small.most_rows is None for small in op.kernels):
        rows.append(("", "", "  more: GEMM library" if op.kernels else "  GEMM library", "", "", ""))
    return rows


def _grid(grid: tuple[str, str, str]) -> str:
    text = ", ".join(grid)
    return re.sub(r"(, 1)+$", "", text)


def _arguments(arguments: Any) -> str:
    return ", ".join(_argument(argument) for argument in arguments)


def _argument(argument: Place | Number) -> str:
    if argument.kind == "number":
        return argument.value
    offset = f"+{argument.offset}" if argument.offset else ""
    return f"{argument.name}{offset}"
