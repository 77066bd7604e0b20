"""Random batches for the attention kernels: pools in pages, what must not be read poisoned, and the right answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmbuild.engine.expressions import evaluate
from llmbuild.plugins.attention_reference import attend_one
from llmbuild.plugins.kernels.attention_shape import AttentionShape
from llmbuild.plugins.kernels.paged_attention_decode import DecodePlan
from llmbuild.plugins.kernels.spec import KernelSpec
from support.kernels import run

POISON = 0  # the block that stands in the table where nothing may be read
NAN = float("nan")
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
SM = 10 * CAPABILITY[0] + CAPABILITY[1]

PLAIN = AttentionShape(2, 1, 32, 32, scale=0.2, dtype="float32", kv_dtype="float32")
FLOAT8 = {"kv_dtype": "float8_e4m3fn", "kv_scales": "layer"}
# What to replace in PLAIN for each feature that both kernels have.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi_head": {"kv_heads": 2},
    "groups": {"heads": 4, "kv_heads": 2},
    "group_of_3": {"heads": 3},
    "window": {"window": 19},
    "window_1": {"window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "alibi_softcap_window_sinks": {"alibi": True, "softcap": 2.0, "window": 37, "sinks": True},
    "head_8": {"head_dim": 8, "value_dim": 8},
    "head_80": {"head_dim": 80, "value_dim": 80},
    "head_192_128": {"head_dim": 192, "value_dim": 128},
    "head_576_512": {"head_dim": 576, "value_dim": 512},
    "page_8": {"page": 8},
    "page_64": {"page": 64},
    "float16": {"dtype": "float16", "kv_dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    "float8_layer": {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "kv_scales": "layer"},
    "float8_bits": {"dtype": "bfloat16", "kv_dtype": "uint8", "kv_scales": "layer"},
    "float8_192_128": {"head_dim": 192, "value_dim": 128, "dtype": "bfloat16"} | FLOAT8,
    "float8_softcap": {"dtype": "float16", "kv_dtype": "float8_e4m3fn", "kv_scales": "layer", "softcap": 1.5},
    "int8_token": {"dtype": "bfloat16", "kv_dtype": "int8", "kv_scales": "token"},
    "int8_layer": {"dtype": "float32", "kv_dtype": "int8", "kv_scales": "layer"},
}


@dataclass
class Case:
    """buffers: the kernels' arguments by name, `out` full of NaN. expected: float32 [T, heads, value_dim]."""

    buffers: dict[str, Any]
    expected: Tensor
    sizes: dict[str, int]

    @property
    def out(self) -> Tensor:
        return self.buffers["out"]


def make_case(
    shape: AttentionShape, lengths: list[tuple[int, int]], *, seed: int = 0, sinks: Tensor | None = None
) -> Case:
    """Return a step over sequences of (new tokens, tokens in all).

    NaN (127 in int8) lies in all slots but those of positions that a new token may see: in the rest of a last block,
    below the window, in free blocks. Blocks come in a random order.
    """
    random = torch.Generator().manual_seed(seed)
    page = shape.page
    tables = torch.zeros(len(lengths), max(-(-total // page) for _, total in lengths) + 1, dtype=torch.int32)
    order = torch.randperm(sum(-(-total // page) for _, total in lengths) + 2, generator=random) + 1
    slots = (len(order) + 1) * page
    keys, values = new_pool(shape, slots, shape.head_dim, 0.25), new_pool(shape, slots, shape.value_dim, 0.5)
    tokens = sum(queries for queries, _ in lengths)
    q = torch.randn(tokens, shape.heads, shape.head_dim, generator=random).to(getattr(torch, shape.dtype))
    if shape.sinks and sinks is None:
        sinks = torch.randn(shape.heads, generator=random)
    slopes = torch.rand(shape.heads, generator=random) if shape.alibi else None
    expected, begin, blocks = [], 0, 0
    for row, (queries, total) in enumerate(lengths):
        lowest = 0 if shape.window is None else max(total - queries - shape.window + 1, 0)
        for block in range(lowest // page, -(-total // page)):
            tables[row, block] = order[blocks]
            blocks += 1
        positions = torch.arange(lowest, total)
        seen_slots = tables[row, positions // page].long() * page + positions % page
        answer = attend_one(
            q[begin : begin + queries].float(),
            keys.fill(seen_slots, random),
            values.fill(seen_slots, random),
            shape.scale,
            window=shape.window,
            softcap=shape.softcap,
            sinks=sinks,
            alibi_slopes=slopes,
        )
        expected.append(answer)
        begin += queries
    new = torch.tensor([0] + [queries for queries, _ in lengths])
    buffers = {
        "q": q,
        "keys": keys.numbers,
        "values": values.numbers,
        "k_scales": keys.scales,
        "v_scales": values.scales,
        "sinks": sinks,
        "slopes": slopes,
        "block_tables": tables,
        "table_stride": tables.shape[1],
        "seq_lens": torch.tensor([total for _, total in lengths], dtype=torch.int32),
        "cu_q_lens": new.cumsum(0).int(),
        "out": torch.full((tokens, shape.heads, shape.value_dim), NAN, dtype=q.dtype),
        "sequences": len(lengths),
    }
    return Case(buffers, torch.cat(expected), {"T": tokens, "B": len(lengths)})


@dataclass
class Pool:
    """numbers [slots, kv_heads, width] in the pool's dtype; scales float32 [1], [slots, kv_heads] or None."""

    numbers: Tensor
    scales: Tensor | None
    per_token: bool

    @property
    def bits(self) -> bool:
        """Whether the numbers are those of float8_e4m3fn."""
        return self.numbers.dtype == torch.uint8

    def fill(self, slots: Tensor, random: torch.Generator) -> Tensor:
        """Store random rows at `slots`; return them in float32, as the pool holds them."""
        wanted = torch.randn(len(slots), *self.numbers.shape[1:], generator=random)
        if self.scales is None:
            scale = torch.ones(())
        elif self.per_token:
            scale = wanted.abs().amax(-1, keepdim=True) / 100
            self.scales[slots] = scale[..., 0]
        else:
            scale = self.scales
        stored = wanted / scale
        if self.numbers.dtype == torch.int8:
            stored = stored.round().clamp(-128, 127)
        stored = stored.to(torch.float8_e4m3fn if self.bits else self.numbers.dtype)
        bits = torch.uint8 if stored.element_size() == 1 else stored.dtype  # torch cannot index float8
        self.numbers.view(bits)[slots] = stored.view(bits)
        return stored.float() * scale


def new_pool(shape: AttentionShape, slots: int, width: int, layer_scale: float) -> Pool:
    """A pool of `slots` slots that holds nothing but poison."""
    dtype = getattr(torch, shape.kv_dtype)
    floats = dtype.is_floating_point or shape.kv_dtype == "uint8"
    poison = NAN if dtype.is_floating_point else 127  # as bits of float8_e4m3fn, NaN as well
    numbers = torch.full((slots, shape.kv_heads, width), poison, dtype=torch.float32).to(dtype)
    scales = None
    if shape.kv_scales == "token":
        scales = torch.full((slots, shape.kv_heads), NAN)
    if shape.kv_scales == "layer":
        scales = torch.tensor([layer_scale if floats else layer_scale / 16])
    return Pool(numbers, scales, shape.kv_scales == "token")


def launch(spec: KernelSpec, case: Case, **buffers: Any) -> None:
    """Run one kernel of a spec on a case."""
    grid = [evaluate(text, case.sizes) for text in spec.grid]
    if 0 in grid:
        return
    given = case.buffers | buffers
    arguments = {name: given[name] for name in spec.signature}
    run(
        spec.function,
        grid,
        **arguments,
        **spec.constants,
        num_warps=spec.num_warps,
        num_stages=spec.num_stages,
        **spec.options,
    )


def decode(plan: DecodePlan, case: Case) -> None:
    """Run both kernels of a plan; what lies between them is NaN before."""
    splits, partial_bytes, sums_bytes = plan.sizes(case.sizes["B"])
    between = {
        "partial": torch.full((partial_bytes // 4,), NAN),
        "sums": torch.full((sums_bytes // 4,), NAN),
        "splits": splits,
    }
    launch(plan.attend, case, **between)
    launch(plan.merge, case, **between)


def check(case: Case, tolerance: float | None = None) -> None:
    """Compare `out` with what is expected, by default within the rounding of its dtype."""
    # Weights and results are rounded: each by 2^-(bits + 1) of values whose sizes are about 1.
    bits = {torch.float32: 16, torch.float16: 10, torch.bfloat16: 7}[case.out.dtype]
    tolerance = tolerance or 2.0**-bits
    torch.testing.assert_close(case.out.float(), case.expected, rtol=tolerance, atol=tolerance)
