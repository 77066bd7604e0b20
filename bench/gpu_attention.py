"""Times of the paged attention kernels on a GPU, beside torch's SDPA over contiguous keys in the same run.

    python bench/gpu_attention.py [--kind decode|prefill] [--cache fp8|int8] [--quick] [--save]

Each shape is checked against the plain reference first, then timed for every tiling of a small sweep. Times are those
of a CUDA graph that holds many launches, divided by their number: what a launch costs inside of a model. The launches
go round over so many copies of the cache that they find nothing of their own in the L2 cache ("cold"); --warm uses one
copy. --cache: pools in 8 bits, checked against the numbers that they stand for; SDPA has none. Needs torch with CUDA
and Triton; llmbuild need not be installed. JSON lines first, tables last.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import torch
import uninstalled  # noqa: F401
from gpu_timing import COLD_BYTES, capability, compile_specs, in_processes, launch, time_us
from records import emit, environment, table, write_results
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.errors import OutOfResources

from llmbuild.plugins.attention_reference import attend_one
from llmbuild.plugins.cache_rounding import round_fp8, round_int8, widened
from llmbuild.plugins.kernels.attention_hopper import chunk_spec
from llmbuild.plugins.kernels.attention_shape import AttentionShape
from llmbuild.plugins.kernels.paged_attention_decode import DecodeTiling, decode_plan, decode_tiling
from llmbuild.plugins.kernels.paged_attention_prefill import PrefillTiling, prefill_spec
from llmbuild.plugins.kernels.spec import KernelSpec

DEVICE = "cuda"
HEADS, KV_HEADS, HEAD, PAGE = 32, 8, 128, 16
SHAPE = AttentionShape(HEADS, KV_HEADS, HEAD, HEAD, scale=HEAD**-0.5, page=PAGE)
SHAPES = {
    "bf16": SHAPE,
    "fp8": replace(SHAPE, kv_dtype="float8_e4m3fn", kv_scales="layer"),
    "int8": replace(SHAPE, kv_dtype="int8", kv_scales="token"),
}
DECODE = [(1, 1024), (1, 8192), (8, 2048), (64, 1024), (64, 8192), (256, 1024), (256, 2048)]
PREFILL = [(1, 2048), (1, 8192), (8, 2048)]
Tiling: TypeAlias = DecodeTiling | PrefillTiling


@dataclass
class Pool:
    """numbers [pages, PAGE, KV_HEADS, HEAD] and their scales: None, [1] or [pages, PAGE, KV_HEADS, 1]."""

    numbers: Tensor
    scales: Tensor | None = None

    @staticmethod
    def random(pages: int, cache: str) -> Pool:
        x = torch.randn(pages, PAGE, KV_HEADS, HEAD, device=DEVICE, dtype=torch.bfloat16)
        if cache == "bf16":
            return Pool(x)
        if cache == "int8":
            return Pool(*round_int8(x))
        scale = torch.tensor([0.02], device=DEVICE)
        return Pool(round_fp8(x, scale).view(torch.float8_e4m3fn), scale)

    def wide(self, pages: Tensor) -> Tensor:
        """Return what some pages stand for."""
        if self.scales is None:
            return self.numbers[pages]
        if self.scales.ndim > 1:
            return widened(self.numbers[pages], self.scales[pages])
        return widened(self.numbers.view(torch.uint8)[pages], self.scales)


@dataclass
class Batch:
    """`batch` sequences of `length` tokens of which `queries` are new, and as many copies of the pools as it takes."""

    batch: int
    length: int
    queries: int
    q: Tensor
    pools: list[tuple[Pool, Pool]]
    tables: Tensor

    @property
    def sizes(self) -> dict[str, int]:
        return {"B": self.batch, "T": self.batch * self.queries}

    def contiguous(self, copy: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one copy as [batch, kv_heads, length, head]."""
        pages = self.tables[:, : self.length // PAGE].long()
        keys, values = (pool.wide(pages).flatten(1, 2).transpose(1, 2) for pool in self.pools[copy])
        return keys.contiguous(), values.contiguous()


def make_batch(batch: int, length: int, queries: int, cache: str, *, warm: bool) -> Batch:
    """Pages lie in a random order. Lengths are multiples of the page size."""
    pages = length // PAGE
    bytes_each = cache_bytes(batch, length, cache)
    copies = 1 if warm else max(1, min(64, math.ceil(COLD_BYTES / bytes_each)))
    pools = [(Pool.random(batch * pages, cache), Pool.random(batch * pages, cache)) for _ in range(copies)]
    order = torch.randperm(batch * pages, device=DEVICE, dtype=torch.int32).view(batch, pages)
    q = torch.randn(batch * queries, HEADS, HEAD, device=DEVICE, dtype=torch.bfloat16)
    return Batch(batch, length, queries, q, pools, order)


def cache_bytes(batch: int, length: int, cache: str) -> int:
    """Bytes of keys and values that a step reads, scales included."""
    heads = 2 * batch * length * KV_HEADS
    return heads * (HEAD * SHAPES[cache].kv_bytes + (4 if cache == "int8" else 0))


def specs_of(kind: str, cache: str, batch: int, tiling: Tiling | None) -> tuple[list[KernelSpec], dict[str, Any]]:
    """The kernels of one call, those of an engine without a tiling, and the arguments that depend on the plan."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    pdl = capability() >= 90
    if kind == "prefill":
        if tiling is None:
            return [chunk_spec(SHAPES[cache], capability(), processors=processors, pdl=pdl)], {}
        return [prefill_spec(SHAPES[cache], capability(), tiling=tiling, pdl=pdl)], {}
    plan = decode_plan(SHAPES[cache], capability(), tiling=tiling, processors=processors, pdl=pdl)
    splits, partial, sums = plan.sizes(batch)
    between = {name: torch.empty(size // 4, device=DEVICE) for name, size in (("partial", partial), ("sums", sums))}
    return [plan.attend, plan.merge] if splits > 1 else [plan.attend], between | {"splits": splits}


def our_call(kind: str, cache: str, batch: Batch, tiling: Tiling | None) -> tuple[Callable[[int], None], Tensor]:
    """A function that attends over copy number i, and the tensor that it writes."""
    specs, arguments = specs_of(kind, cache, batch.batch, tiling)
    out = torch.full_like(batch.q, float("nan"))
    new = torch.arange(batch.batch + 1, device=DEVICE, dtype=torch.int32) * batch.queries
    arguments |= {
        "q": batch.q,
        "out": out,
        "block_tables": batch.tables,
        "table_stride": batch.tables.shape[1],
        "seq_lens": torch.full((batch.batch,), batch.length, device=DEVICE, dtype=torch.int32),
        "cu_q_lens": new,
        "sequences": batch.batch,
    }

    def call(copy: int) -> None:
        keys, values = batch.pools[copy]
        given = arguments | {"keys": keys.numbers, "values": values.numbers}
        given |= {"k_scales": keys.scales, "v_scales": values.scales}
        for spec in specs:
            launch(spec, given, batch.sizes)

    return call, out


def sdpa_call(batch: Batch, backend: SDPBackend) -> Callable[[int], None]:
    copies = [batch.contiguous(copy) for copy in range(len(batch.pools))]
    q = batch.q.view(batch.batch, batch.queries, HEADS, HEAD).transpose(1, 2)

    def call(copy: int) -> None:
        keys, values = copies[copy]
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(
                q, keys, values, is_causal=batch.queries > 1, enable_gqa=True
            )

    return call


def check(batch: Batch, out: Tensor) -> float:
    """Return the largest error against the float32 reference, over the newest 128 queries of some sequences."""
    keys, values = batch.contiguous(0)
    queries = min(batch.queries, 128)
    worst = 0.0
    for row in sorted({0, batch.batch // 2, batch.batch - 1}):
        end = (row + 1) * batch.queries
        expected = attend_one(
            batch.q[end - queries : end].float(),
            keys[row].transpose(0, 1).float(),
            values[row].transpose(0, 1).float(),
            SHAPE.scale,
        )
        worst = max(worst, (out[end - queries : end].float() - expected).abs().max().item())
    if not worst < 2e-2 or out.isnan().any():
        raise SystemExit(f"wrong result: error {worst} at {batch.batch} x {batch.length}")
    return worst


def decode_tilings() -> list[Tiling]:
    grid = itertools.product((32, 64, 128), (1, 2, 4, 8), (3, 5, 7, 9), (1, 2, 3, 4, 6, 8, 16))
    # at most 128 KiB of keys and values in flight; wider steps than 32 keys a warp need more registers than there are
    return [DecodeTiling(*entry) for entry in grid if entry[0] * (entry[2] // 2) <= 256 and entry[0] <= 32 * entry[1]]


def prefill_tilings() -> list[Tiling]:
    grid = itertools.product((64, 128), (32, 64, 128), (4, 8), (3, 5, 7))
    # one group of 4 warps for 64 rows: with twice as many rows, results do not fit into registers
    return [
        PrefillTiling(*entry) for entry in grid if entry[0] == 16 * entry[2] and entry[1] * (entry[3] // 2 + 1) <= 256
    ]


def compile_tiling(kind: str, cache: str, tiling: Tiling) -> None:
    compile_specs(specs_of(kind, cache, 1, tiling)[0])


def measure(kind: str, cache: str, batch: int, length: int, tilings: list[Tiling], warm: bool) -> list[dict[str, Any]]:
    """Records of one shape: each tiling, the default one and the peers."""
    torch.manual_seed(0)
    data = make_batch(batch, length, 1 if kind == "decode" else length, cache, warm=warm)
    copies = len(data.pools)
    work: dict[str, Any] = {
        "kind": kind,
        "batch": batch,
        "length": length,
        "cache": cache,
        "l2": "warm" if copies == 1 and warm else "cold",
    }
    default = decode_tiling(SHAPES[cache], capability()) if kind == "decode" else None
    records = []
    for tiling in [default, *(tiling for tiling in tilings if tiling != default)]:
        try:
            call, out = our_call(kind, cache, data, tiling)
            call(0)
        except OutOfResources:
            continue
        error = check(data, out)
        us = time_us(call, copies)
        about: dict[str, Any] = {
            "kernel": "ours",
            "default": tiling == default,
            "tiling": asdict(tiling) if tiling else {},
            "error": round(error, 5),
        }
        records.append(work | about | speed(kind, cache, batch, length, us))
    ours = min(records, key=lambda record: record["us"])
    for record in records:
        record["best"] = record is ours
    peers = (("sdpa-flash", SDPBackend.FLASH_ATTENTION), ("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION))
    for name, backend in peers if cache == "bf16" else ():
        try:
            us = time_us(sdpa_call(data, backend), copies)
        except RuntimeError as error:  # torch says so when a backend refuses the shape
            emit(**work, kernel=name, refused=str(error).splitlines()[0])
            continue
        records.append(work | {"kernel": name} | speed(kind, cache, batch, length, us))
    return [emit(**record) for record in records]


def speed(kind: str, cache: str, batch: int, length: int, us: float) -> dict[str, float]:
    if kind == "decode":
        return {"us": round(us, 2), "tb_s": round(cache_bytes(batch, length, cache) / us / 1e6, 3)}
    return {"us": round(us, 1), "tflop_s": round(2 * batch * length**2 * HEADS * HEAD / us / 1e6, 1)}


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a shape: our default and best tiling beside the peers."""
    rows: dict[tuple[str, int, int], dict[str, Any]] = {}
    for record in records:
        row = rows.setdefault((record["kind"], record["batch"], record["length"]), {})
        row |= {"kind": record["kind"], "shape": f"{record['batch']} x {record['length']}"}
        if record["kernel"] != "ours":
            row[record["kernel"]] = record["us"]
            continue
        if record["default"]:
            row["default"] = record["us"]
        if record["best"]:
            row |= {"best": record["us"], "tiling": ",".join(str(value) for value in record["tiling"].values())}
            row["speed"] = record.get("tb_s") or record.get("tflop_s")
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kind", choices=("decode", "prefill"), help="one of the kernels; both if not given")
    parser.add_argument("--cache", choices=tuple(SHAPES), default="bf16", help="what the pools hold")
    parser.add_argument("--quick", action="store_true", help="the default tilings alone")
    parser.add_argument("--warm", action="store_true", help="let the cache of a small batch stay in L2")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--save", action="store_true", help="write bench/results/<date>-gpu-attention.jsonl")
    options = parser.parse_args()
    card = torch.cuda.get_device_properties(0)
    about = emit(**environment(["torch", "triton", "numpy"]), gpu=card.name, multiprocessors=card.multi_processor_count)
    records = []
    for kind, shapes, tilings in (
        ("decode", DECODE, [] if options.quick else decode_tilings()),
        ("prefill", PREFILL, [] if options.quick else prefill_tilings()),
    ):
        if options.kind not in (None, kind):
            continue
        if tilings:
            in_processes(compile_tiling, [(kind, options.cache, tiling) for tiling in tilings], options.workers)
        for batch, length in shapes:
            records += measure(kind, options.cache, batch, length, tilings, options.warm)
            torch.cuda.empty_cache()
    if options.save:
        write_results(
            "gpu-attention" if options.cache == "bf16" else f"gpu-attention-{options.cache}", [about, *records]
        )
    table(
        "Attention, microseconds a call (speed: TB/s of the cache, or TFLOP/s, of the best tiling)",
        summary(records),
        ["kind", "shape", "default", "best", "speed", "sdpa-flash", "sdpa-cudnn", "tiling"],
    )


if __name__ == "__main__":
    main()
