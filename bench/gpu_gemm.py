"""Times of the GEMM kernels for few rows on a GPU, beside torch (cuBLAS) in the same run; and of a layer of experts.

    python bench/gpu_gemm.py [--weights bf16,fp8,w8a8,int8,int4] [--layers qkv,o] [--rows 1,16,256] [--tune]

fp8 is weights alone, w8a8 rows too, with a scale for each row of both; beside the latter stands cuBLAS with one scale
for all (torch_tensor), which is what engines call where a row program can apply the scales. More than 64 rows are
cuBLAS's alone. The layers are those of Llama-3-8B. Each kernel is checked against a product in float32, then timed:
microseconds of a call inside of a CUDA graph that goes round over so many copies of the weights that none is found in
the L2 cache.
--tune tries a sweep of tilings, in a shuffled order until --seconds are over; without it, the built-in ones alone.
Needs torch with CUDA and Triton; llmbuild need not be installed. JSON lines first, tables last.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
import uninstalled  # noqa: F401
from gpu_timing import COLD_BYTES, capability, compile_specs, in_processes, launch, time_us
from records import emit, environment, table, write_results
from torch import Tensor

from llmbuild.engine.expressions import evaluate
from llmbuild.plugins.kernels.block_few_gemm import BlockFewTiling, block_few_kernel, block_few_tiling, reads_few
from llmbuild.plugins.kernels.block_layout import BlockShape
from llmbuild.plugins.kernels.block_row_gemm import BlockRowTiling, block_row_kernel, block_row_tiling
from llmbuild.plugins.kernels.block_tile_gemm import BlockTileTiling, block_tile_kernel, block_tile_tiling
from llmbuild.plugins.kernels.gemm_shape import FLOAT8, GemmShape, SmallKernel, stages_for
from llmbuild.plugins.kernels.moe_plan import experts_plan
from llmbuild.plugins.kernels.moe_shape import ExpertsShape
from llmbuild.plugins.kernels.row_gemm import RowTiling, row_kernel, row_tiling
from llmbuild.plugins.kernels.tile_gemm import TileTiling, tile_kernel, tile_tiling

DEVICE = "cuda"
LAYERS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
BLOCKS = {"int8": BlockShape(8, 128, 128), "int4": BlockShape(4, 128, 8)}
WEIGHTS = ("bf16", "fp8", "w8a8", *BLOCKS)
FLOAT8_WEIGHTS = ("fp8", "w8a8")
ROWS = (1, 8, 16, 64)
EXPERTS = ExpertsShape(2048, 768, 128, 8)  # of Qwen3-30B-A3B
TOKENS = (1, 16, 64, 2048)
Tiling: TypeAlias = RowTiling | TileTiling | BlockRowTiling | BlockTileTiling | BlockFewTiling


@dataclass(frozen=True)
class Case:
    """One kernel of one layer: for one row, or for at most 8 (int4), 16 or 64. More rows have no kernel of ours."""

    weights: str
    layer: str
    most_rows: int

    @property
    def shape(self) -> GemmShape:
        n, k = LAYERS[self.layer]
        w_dtype = FLOAT8 if self.weights in FLOAT8_WEIGHTS else None
        return GemmShape(n, k, w_dtype=w_dtype, x_dtype=FLOAT8 if self.weights == "w8a8" else None)

    @property
    def item_bytes(self) -> float:
        return {"bf16": 2, "fp8": 1, "w8a8": 1, "int8": 1, "int4": 0.5}[self.weights]

    @property
    def few(self) -> bool:
        """Whether `block_few_gemm` computes it."""
        block = BLOCKS.get(self.weights)
        return block is not None and self.most_rows <= 16 and reads_few(self.shape, block)

    def default(self, sm: int) -> Tiling:
        block = BLOCKS.get(self.weights)
        if self.few:
            return block_few_tiling(self.shape, max(8, self.most_rows))
        if self.most_rows == 1:
            return row_tiling(self.shape) if block is None else block_row_tiling(self.shape, block)
        if block is None:
            return tile_tiling(self.shape, sm, self.most_rows)
        return block_tile_tiling(self.shape, block, sm, self.most_rows)

    def kernel(self, tiling: Tiling, sm: int) -> SmallKernel:
        block, pdl = BLOCKS.get(self.weights), sm >= 90
        match tiling:
            case RowTiling():
                return row_kernel(self.shape, sm, name="gemm", tiling=tiling, pdl=pdl)
            case TileTiling():
                return tile_kernel(self.shape, sm, name="gemm", most_rows=self.most_rows, tiling=tiling, pdl=pdl)
            case BlockFewTiling():
                assert block is not None
                most = max(8, self.most_rows)
                return block_few_kernel(self.shape, block, sm, name="gemm", most_rows=most, tiling=tiling, pdl=pdl)
            case BlockRowTiling():
                assert block is not None
                return block_row_kernel(self.shape, block, name="gemm", tiling=tiling, pdl=pdl)
        assert block is not None
        return block_tile_kernel(self.shape, block, sm, name="gemm", most_rows=self.most_rows, tiling=tiling, pdl=pdl)

    def tilings(self, sm: int) -> list[Tiling]:
        """The sweep: the default, then others in a shuffled order."""
        found: list[Tiling]
        block = BLOCKS.get(self.weights)
        if self.few:
            grid = itertools.product((16, 32, 64), (4, 8, 16), (4, 8))
            found = [BlockFewTiling(*sizes) for sizes in grid if sizes[1] >= sizes[2]]
        elif self.most_rows == 1:
            found = list(self.row_tilings(block))
        elif block is None:
            found = list(self.tile_tilings(sm))
        else:
            found = list(self.block_tilings(block, sm))
        default = self.default(sm)
        random.Random(0).shuffle(found)
        return [default, *(tiling for tiling in found if tiling != default)]

    def row_tilings(self, block: BlockShape | None) -> Any:
        for block_n, step, warps in itertools.product((1, 2, 4, 8), (2048, 4096, 8192, 16384), (2, 4, 8)):
            loaded = block_n * step * self.item_bytes / (warps * 32)  # bytes a thread has on their way
            if 16 <= loaded <= 128 and step < 2 * self.shape.k:
                yield (
                    RowTiling(block_n, step, warps)
                    if block is None
                    else BlockRowTiling(block_n, step // block.values, warps)
                )

    def tile_tilings(self, sm: int) -> Any:
        grid = itertools.product((16, 32, 64, 128), (128, 256, 512), (1, 2, 4), (1, 2, 3), (4, 8), (False, True))
        for block_n, step_bytes, splits, programs, warps, swap in grid:
            block_k = step_bytes // self.shape.w_bytes
            stages = stages_for(block_k * (block_n * self.shape.w_bytes + self.most_rows * 2), sm, programs)
            wide = block_n >= 64
            if (warps == 8) <= wide and swap <= wide and stages >= 3 and block_n * block_k <= 16384:
                yield TileTiling(self.most_rows, block_n, block_k, splits, warps, stages, swap)

    def block_tilings(self, block: BlockShape, sm: int) -> Any:
        grid = itertools.product((32, 64, 128), (64, 128, 256), (1, 2, 4), (1, 2, 3), (4, 8), (False, True))
        for block_n, columns, splits, programs, warps, swap in grid:
            units = columns // block.values
            stages = stages_for(units * 16 * block_n + columns * self.most_rows * 2, sm, programs)
            wide = block_n >= 64
            if (warps == 8) <= wide and swap <= wide and stages >= 3:
                yield BlockTileTiling(self.most_rows, block_n, units, splits, warps, stages, swap)


def make_weights(case: Case) -> list[dict[str, Tensor]]:
    """So many copies of what the kernels take of a weight that they do not fit into L2."""
    n, k = LAYERS[case.layer]
    copies = max(1, math.ceil(COLD_BYTES / (n * k * case.item_bytes)))
    block = BLOCKS.get(case.weights)

    def copy() -> dict[str, Tensor]:
        if block is not None:
            w = torch.randint(0, 256, (n, k * block.bits // 8), device=DEVICE, dtype=torch.uint8)
            return {"w": w, "w_scale": torch.rand(n, k // block.block_size, device=DEVICE) * 0.01}
        dense = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16)
        if case.weights == "bf16":
            return {"w": dense}
        return {"w": dense.to(torch.float8_e4m3fn), "w_scale": torch.rand(n, device=DEVICE) + 0.5}

    return [copy() for _ in range(copies)]


def dense_weight(case: Case, weight: dict[str, Tensor]) -> Tensor:
    """The float32 weight that a copy stands for."""
    w, block = weight["w"], BLOCKS.get(case.weights)
    if block is None:
        return w.float() * weight["w_scale"][:, None] if "w_scale" in weight else w.float()
    if block.bits == 4:
        units = w.unflatten(1, (-1, 16))
        w = torch.stack((units & 15, units >> 4), dim=2).flatten(1)
    return (w.float() - block.zero) * weight["w_scale"].repeat_interleave(block.block_size, dim=1)


def our_call(
    case: Case, tiling: Tiling, x: Tensor, weights: list[dict[str, Tensor]]
) -> tuple[Callable[[int], None], Tensor]:
    """A function that multiplies by copy number i, and the tensor that it writes."""
    kernel = case.kernel(tiling, capability())
    rows, n = x.shape[0], case.shape.n
    out = torch.full((rows, n), float("nan"), device=DEVICE, dtype=x.dtype)
    given: dict[str, Any] = {"out": out, "x": x}
    if case.weights == "w8a8":
        given["x"], given["x_scale"] = float8_rows(x)
    given |= {"rows": rows, "x_stride": x.shape[1], "out_stride": n}
    for name, (_, size) in kernel.workspaces.items():
        given[name] = torch.empty(size // 4, device=DEVICE)

    def call(copy: int) -> None:
        for spec in kernel.specs:
            launch(spec, given | weights[copy], {})

    return call, out


def float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as float8, and the scale of each."""
    scale = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def torch_call(
    case: Case, x: Tensor, weights: list[dict[str, Tensor]], *, one_scale: bool = False
) -> Callable[[int], None] | None:
    """The same by cuBLAS, where it has such a product; float8 takes x as float8 too. one_scale: for all rows."""
    if case.weights == "bf16":
        out = torch.empty(x.shape[0], case.shape.n, device=DEVICE, dtype=x.dtype)

        def plain(copy: int) -> None:
            torch.mm(x, weights[copy]["w"].T, out=out)

        return plain
    if case.weights in FLOAT8_WEIGHTS:
        x8, scale = float8_rows(x)
        one = torch.ones((), device=DEVICE)

        def scaled(copy: int) -> None:
            w, w_scale = weights[copy]["w"].T, weights[copy]["w_scale"][None]
            scales = (one, one) if one_scale else (scale, w_scale)
            torch._scaled_mm(x8, w, *scales, out_dtype=x.dtype, use_fast_accum=True)

        return scaled
    return None


def measure(case: Case, rows: tuple[int, ...], tilings: list[Tiling], until: float) -> list[dict[str, Any]]:
    """Records of one kernel at each number of rows: every tiling, and the peer."""
    torch.manual_seed(0)
    weights = make_weights(case)
    n, k = LAYERS[case.layer]
    dense = dense_weight(case, weights[0])
    records = []
    for count in rows:
        x = torch.randn(count, k, device=DEVICE, dtype=torch.bfloat16)
        values = x.float()
        if case.weights == "w8a8":
            x8, scale = float8_rows(x)
            values = x8.float() * scale
        expected = values @ dense.T
        about = {"kind": "gemm", "weights": case.weights, "layer": case.layer, "rows": count}
        ours = []
        for tiling in tilings:
            if ours and time.monotonic() > until:
                break
            record = about | {"kernel": "ours", "default": tiling == tilings[0], "tiling": asdict(tiling)}
            try:
                call, out = our_call(case, tiling, x, weights)
                call(0)
                error = ((out.float() - expected).abs().max() / expected.abs().max()).item()
                if not error < 1e-2:
                    raise ValueError(f"wrong result: relative error {error}")
                us = time_us(call, len(weights), graph_ms=2.0, replays=3 if len(tilings) > 1 else 7)
            except Exception as error:  # a tiling that does not fit, whatever says so, is left out of the sweep
                emit(**record, refused=repr(error)[:200])
                continue
            ours.append(record | {"error": round(error, 5)} | speed(us, n * k * case.item_bytes))
        for record in ours:
            record["best"] = record["us"] == min(other["us"] for other in ours)
        records += ours
        for peer_name in ("torch", *(("torch_tensor",) if case.weights == "w8a8" else ())):
            peer = torch_call(case, x, weights, one_scale=peer_name == "torch_tensor")
            if peer is None:
                continue
            try:
                us = time_us(peer, len(weights), graph_ms=2.0)
            except RuntimeError as error:  # torch refuses some shapes
                emit(**about, kernel=peer_name, refused=str(error).splitlines()[0])
                continue
            records.append(about | {"kernel": peer_name} | speed(us, n * k * case.item_bytes))
    return [emit(**record) for record in records]


def speed(us: float, num_bytes: float) -> dict[str, float]:
    return {"us": round(us, 2), "tb_s": round(num_bytes / us / 1e6, 3)}


def measure_experts(tokens: int) -> dict[str, Any]:
    """Our kernels for a layer of experts, over routers that choose at random."""
    torch.manual_seed(0)
    shape, copies = EXPERTS, 16
    plan = experts_plan(shape, capability(), name="experts", pdl=capability() >= 90)
    up = torch.randn(shape.experts, 2 * shape.intermediate, shape.hidden, device=DEVICE, dtype=torch.bfloat16)
    down = torch.randn(shape.experts, shape.hidden, shape.intermediate, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(tokens, shape.hidden, device=DEVICE, dtype=torch.bfloat16)
    order = torch.rand(copies, tokens, shape.experts, device=DEVICE).argsort(-1)
    ids = order[..., : shape.top_k].contiguous()
    given: dict[str, Any] = {"x": x, "up": up, "down": down, "out": torch.empty_like(x), "tokens": tokens}
    given["scores"] = torch.rand(tokens, shape.top_k, device=DEVICE, dtype=torch.bfloat16)
    for name, (_, size) in plan.workspaces.items():
        given[name] = torch.empty(evaluate(size, {"T": tokens}) // 4 + 1, device=DEVICE, dtype=torch.int32)
    for name in ("hidden", "results"):
        given[name] = given[name].view(torch.bfloat16)

    def call(copy: int) -> None:
        for spec in plan.specs:
            names = plan.arguments[spec.name]
            launch(spec, {key: (given | {"ids": ids[copy]})[name] for key, name in names.items()}, {"T": tokens})

    us = time_us(call, copies, graph_ms=2.0)
    hit = sum(len(ids[copy].unique()) for copy in range(copies)) / copies
    weight = 3 * shape.hidden * shape.intermediate
    flops = 2 * tokens * shape.top_k * weight
    return emit(
        kind="experts", tokens=tokens, kernel="ours", **speed(us, hit * weight * 2), tflop_s=round(flops / us / 1e6, 1)
    )


def compile_case(case: Case, tiling: Tiling) -> None:
    compile_specs(case.kernel(tiling, capability()).specs)


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a product: our default and best tiling beside cuBLAS."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        key = tuple(record[name] for name in ("weights", "layer", "rows"))
        row = rows.setdefault(key, dict(zip(("weights", "layer", "rows"), key, strict=True)))
        if record["kernel"] != "ours":
            row[record["kernel"]] = record["us"]
            continue
        if record["default"]:
            row["default"] = record["us"]
        if record["best"]:
            row |= {"best": record["us"], "tb_s": record["tb_s"]}
            row["tiling"] = ",".join(str(value) for value in record["tiling"].values())
    return list(rows.values())


def groups(weights: str, wanted: list[int]) -> list[tuple[int, tuple[int, ...]]]:
    """(most rows of a kernel, those of the wanted numbers that it is for); 0: more than any is for."""
    edges = [0, 1, *((8,) if weights == "int4" else ()), 16, 64]
    found = [(high, tuple(r for r in wanted if low < r <= high)) for low, high in itertools.pairwise(edges)]
    found.append((0, tuple(r for r in wanted if r > edges[-1])))
    return [(most, rows) for most, rows in found if rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--weights", default=",".join(WEIGHTS), help="formats, of " + ",".join(WEIGHTS))
    parser.add_argument("--layers", default=",".join(LAYERS), help="of " + ",".join(LAYERS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows")
    parser.add_argument("--tune", action="store_true", help="try other tilings too")
    parser.add_argument("--seconds", type=float, default=40.0, help="for all measurements of --tune")
    parser.add_argument("--most-tilings", type=int, default=20, help="of each kernel, with --tune")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--no-experts", action="store_true", help="leave the layer of experts out")
    parser.add_argument("--save", action="store_true", help="write bench/results/<date>-gpu-gemm.jsonl")
    options = parser.parse_args()
    card = torch.cuda.get_device_properties(0)
    about = emit(**environment(["torch", "triton"]), gpu=card.name, multiprocessors=card.multi_processor_count)
    cases = [
        (Case(weights, layer, most), rows)
        for weights, layer in itertools.product(options.weights.split(","), options.layers.split(","))
        for most, rows in groups(weights, sorted({int(text) for text in options.rows.split(",")}))
    ]
    sm = capability()
    most = options.most_tilings if options.tune else 1
    work = [(case, case.tilings(sm)[:most] if case.most_rows else []) for case, _ in cases]
    in_processes(compile_case, [(case, tiling) for case, tilings in work for tiling in tilings], options.workers)
    records = []
    begin = time.monotonic()
    for index, ((case, rows), (_, tilings)) in enumerate(zip(cases, work, strict=True)):
        until = begin + options.seconds * (index + 1) / len(cases)
        records += measure(case, rows, tilings, until)
    experts = [] if options.no_experts else [measure_experts(tokens) for tokens in TOKENS]
    if options.save:
        write_results("gpu-gemm", [about, *records, *experts])
    table(
        "Products, microseconds a call (TB/s of the weights, of the best tiling)",
        summary(records),
        ["weights", "layer", "rows", "default", "best", "torch", "torch_tensor", "tb_s", "tiling"],
    )
    table("Experts", experts, ["tokens", "us", "tb_s", "tflop_s"])


if __name__ == "__main__":
    main()
