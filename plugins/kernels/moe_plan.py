"""A layer's experts: sort, two products and a sum, in tiles that suit the number of tokens of a step.

A step's rows per expert decide how many rows a tile has: with few, tiles of 16 waste little; with many, wide tiles
read each weight less often. For each height there is a set of kernels; by their grids, which are expressions in T,
only one of them is launched.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmbuild.plugins.kernels.block_layout import BlockShape
from llmbuild.plugins.kernels.gemm_shape import FLOATS, power_of_2, stages_for, step_of
from llmbuild.plugins.kernels.moe_block_gemm import expert_block_gemm
from llmbuild.plugins.kernels.moe_gemm import ExpertTiling, expert_gemm
from llmbuild.plugins.kernels.moe_shape import ExpertsPlan, ExpertsShape
from llmbuild.plugins.kernels.moe_sort import blocks_text, sort_spec
from llmbuild.plugins.kernels.moe_sum import sum_experts
from llmbuild.plugins.kernels.spec import Constant, KernelSpec, arguments_of

HEIGHTS = (16, 64, 128)  # rows of a block
SUM_COLUMNS = 1024


@dataclass(frozen=True)
class Regime:
    """The tiles for steps of at most `most_tokens` tokens, None for any number. up, down: of either product."""

    most_tokens: int | None
    up: ExpertTiling
    down: ExpertTiling


def regimes(shape: ExpertsShape, sm: int) -> tuple[Regime, ...]:
    """Return the tiles for a shape: blocks of a height serve steps that fill each expert's with no more rows."""
    found = []
    for height in HEIGHTS:
        most = None if height == HEIGHTS[-1] else max(height * shape.experts // shape.top_k, 1)
        up = tiling(height, shape.hidden, shape.halves, shape.dtype, sm)
        found.append(Regime(most, up, tiling(height, shape.intermediate, 1, shape.dtype, sm)))
    return tuple(found)


def tiling(height: int, k: int, halves: int, dtype: str, sm: int) -> ExpertTiling:
    """Return the tile for blocks of a height."""
    item = FLOATS[dtype]
    if height == 16:  # as many steps of weights on their way as fit
        block_n, block_k, warps, programs = 64 // halves, step_of(k, 256 // item), 4, 2
    else:
        block_n, block_k, warps, programs = 128 // halves, step_of(k, 128 // item), 4 if height == 64 else 8, 1
    stages = stages_for((height + halves * block_n) * block_k * item, sm, programs)
    return ExpertTiling(height, block_n, block_k, warps, min(stages, 6 if height == 16 else 4))


def experts_plan(
    shape: ExpertsShape,
    sm: int,
    *,
    name: str,
    blocks: tuple[BlockShape, BlockShape] | None = None,
    tilings: tuple[Regime, ...] | None = None,
    pdl: bool = False,
) -> ExpertsPlan:
    """Plan a layer's experts.

    blocks: how up and down are held where they are block-quantized (`llmbuild::moe_experts_blockwise`): the kernels
    take the packed rows of all experts as `up` and `down`, and up_scale, up_offset, down_scale, down_offset beside.
    sm: compute capability as 90. name: of the kernels is this and something after it. pdl: each kernel may start
    before the one before it ends, and waits where it needs its results (SM 90 and up).
    """
    tilings = tilings or regimes(shape, sm)
    specs: list[KernelSpec] = []
    arguments: dict[str, dict[str, str]] = {}

    def add(spec: KernelSpec, **other: str) -> None:
        specs.append(spec)
        arguments[spec.name] = {argument: other.get(argument, argument) for argument in spec.signature}

    least = 1
    for regime in tilings:
        height, most = regime.up.block_m, regime.most_tokens
        present = f"max(0, min(1, T - {least - 1}))"
        if most is not None:
            present = f"min({present}, max(0, {most + 1} - T))"
            least = most + 1
        sort = f"{name}_sort_{height}"
        chunk = 256 if height == HEIGHTS[0] else 2048
        add(sort_spec(shape, name=sort, block_m=height, chunk=chunk, present=present, pdl=pdl))
        of_up, of_down = blocks or (None, None)
        up = product(shape, regime.up, f"{name}_up_{height}", present, first=True, block=of_up, pdl=pdl)
        add(up, a="x", out="hidden", **weight_names("up"))
        down = product(shape, regime.down, f"{name}_down_{height}", present, first=False, block=of_down, pdl=pdl)
        add(down, a="hidden", out="results", **weight_names("down"))
    add(sum_spec(shape, f"{name}_sum", pdl=pdl))
    return ExpertsPlan(tuple(specs), workspaces(shape, tilings), arguments)


def weight_names(linear: str) -> dict[str, str]:
    """What the arguments of a product are called for one of the two linears."""
    return {"w": linear, "bias": f"{linear}_bias", "w_scale": f"{linear}_scale", "w_offset": f"{linear}_offset"}


def product(
    shape: ExpertsShape,
    tiling: ExpertTiling,
    name: str,
    present: str,
    *,
    first: bool,
    block: BlockShape | None,
    pdl: bool,
) -> KernelSpec:
    """Return one of the two linears of the experts."""
    n, k = (shape.intermediate, shape.hidden) if first else (shape.hidden, shape.intermediate)
    constants: dict[str, Constant] = {
        "N": n,
        "K": k,
        "HALVES": shape.halves if first else 1,
        "PAIRS_OF_ROW": shape.top_k if first else 1,
        "ACTIVATION": shape.activation if first else None,
        "SLOPE": shape.slope if first and shape.activation == "silu" else 1.0,
        "LIMIT": shape.limit if first and shape.gated else None,
        "SHIFT": shape.shift if first and shape.gated else 0.0,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "PDL": pdl,
    }
    given = shape.types()
    types = dict.fromkeys(("a", "w", "out"), given["x"]) | {key: given[key] for key in ("order", "block_experts")}
    if shape.up_bias if first else shape.down_bias:
        types["bias"] = given["x"]
    function = expert_gemm if block is None else expert_block_gemm
    if block is None:
        constants["BLOCK_K"] = tiling.block_k
    else:
        constants |= block.constants(k) | {"UNITS": max(1, tiling.block_k // block.values)}
        types |= block.types()
    return KernelSpec(
        name,
        function,
        **arguments_of(function, types, constants),
        grid=(f"{blocks_text(shape, tiling.block_m)} * {-(-n // tiling.block_n)}", "1", present),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        options={"launch_pdl": True} if pdl else {},
    )


def sum_spec(shape: ExpertsShape, name: str, *, pdl: bool) -> KernelSpec:
    block = min(SUM_COLUMNS, power_of_2(shape.hidden))
    constants: dict[str, Constant] = {"HIDDEN": shape.hidden, "TOP_K": shape.top_k, "BLOCK": block, "PDL": pdl}
    return KernelSpec(
        name,
        sum_experts,
        **arguments_of(sum_experts, shape.types(), constants),
        grid=("T", str(-(-shape.hidden // block)), "1"),
        num_warps=max(1, min(4, block // 256)),
        num_stages=1,
        options={"launch_pdl": True} if pdl else {},
    )


def workspaces(shape: ExpertsShape, tilings: tuple[Regime, ...]) -> dict[str, tuple[str, str]]:
    """Return dtype and bytes of what lies between the kernels: the most that any of the tilings needs."""
    item = FLOATS[shape.dtype]
    blocks = {regime.up.block_m: blocks_text(shape, regime.up.block_m) for regime in tilings}
    pairs = f"T * {shape.top_k}"
    return {
        "order": ("int32", f"4 * ({pairs} + {max(blocks)} * min({shape.experts}, {pairs}))"),
        "block_experts": ("int32", f"4 * {blocks[min(blocks)]}"),
        "hidden": (shape.dtype, f"{pairs} * {shape.intermediate * item}"),
        "results": (shape.dtype, f"{pairs} * {shape.hidden * item}"),
    }
