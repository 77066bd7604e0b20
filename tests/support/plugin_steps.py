"""Steps of one attention layer, as TensorRT would hand them to the plugin, and what the reference makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmbuild.plugins import ops  # noqa: F401  # registers llmbuild::rope
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.plugins.cache_rounding import round_fp8, round_int8
from llmbuild.plugins.kernels.attention_shape import AttentionShape
from llmbuild.plugins.tensorrt.form import PluginForm
from support.packed_driver import Request, next_step

PAGE, BLOCKS, STRIDE = 4, 12, 4
PLAIN = AttentionShape(2, 1, 16, 16, scale=0.25, dtype="float32", kv_dtype="float32", page=PAGE)
EXACT_SCALE = 0.25  # of caches with one scale a layer


def form(
    layout: str = "separate",
    rotary_dim: int = 0,
    interleaved: bool = False,
    table_stride: int = STRIDE,
    **changes: Any,
) -> PluginForm:
    """Return PLAIN's form with other features; `changes` are those of AttentionShape."""
    shape = replace(PLAIN, **changes)
    return PluginForm(shape, 3, table_stride, layout, rotary_dim, interleaved)  # type: ignore[arg-type]


# What each feature of the plugin is, as arguments of `form`.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"heads": 6, "kv_heads": 2},
    "window": {"window": 5},
    "softcap_sinks": {"softcap": 2.0, "sinks": True},
    "alibi": {"alibi": True, "kv_heads": 2},
    "head_24_16": {"head_dim": 24, "value_dim": 16},
    "float16": {"dtype": "float16", "kv_dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    "fused": {"layout": "fused"},
    "fused_rope": {"layout": "fused", "rotary_dim": 16},
    "fused_partial_rope": {"layout": "fused", "rotary_dim": 8, "head_dim": 24, "value_dim": 24},
    "fused_interleaved_rope_bfloat16": {
        "layout": "fused",
        "rotary_dim": 16,
        "interleaved": True,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
    },
    "float8_layer": {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "kv_scales": "layer"},
    "int8_token_fused_rope": {"kv_dtype": "int8", "kv_scales": "token", "layout": "fused", "rotary_dim": 16},
}


@dataclass
class Step:
    """arrays: the node's inputs by name, pools and scales left out. expected: float32 [T, Hq, Dv]. kind: of step."""

    arrays: dict[str, Tensor]
    expected: Tensor
    kind: str


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]


def requests() -> list[Request]:
    """Three sequences: their prompts cross pages, come in chunks, and one joins while others decode."""
    return [
        Request(range(9), prompt=6, chunks=(2,)),
        Request(range(4), prompt=1),
        Request(range(11), prompt=9, chunks=(5,), arrives=1),
    ]


def steps(
    form: PluginForm, seed: int = 0, waiting: Sequence[Request] | None = None, blocks: int = BLOCKS
) -> Iterator[Step]:
    """Yield random steps of sequences, to their end: mixed ones at first, then decode steps.

    waiting: the sequences, three short ones if None. blocks: of the cache.
    """
    shape, random = form.shape, torch.Generator().manual_seed(seed)
    dtype = torch_dtype(shape.dtype)

    def draw(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=random).to(dtype)

    state = PagedState(blocks, shape.page)
    fixed = {"sinks": torch.randn(shape.heads, generator=random)} if shape.sinks else {}
    if shape.alibi:
        fixed["slopes"] = torch.rand(shape.heads, generator=random)
    free = torch.randperm(blocks, generator=random).tolist()
    waiting = [Request(r.tokens, r.prompt, r.chunks, r.arrives) for r in waiting or requests()]
    clock = 0
    while any(request.done < len(request.tokens) for request in waiting):
        active = [r for r in waiting if r.arrives <= clock and r.done < len(r.tokens)]
        clock += 1
        batch, _ = next_step(active, free, shape.page, True)
        tables = np.zeros((len(active), form.table_stride), np.int32)
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        tokens = len(batch.input_ids)
        paging = {
            "slot_mapping": torch.from_numpy(batch.slot_mapping),
            "block_tables": torch.from_numpy(tables),
            "seq_lens": torch.from_numpy(batch.seq_lens),
            "cu_q_lens": torch.from_numpy(batch.cu_q_lens),
        }
        q, k = draw(tokens, shape.heads, shape.head_dim), draw(tokens, shape.kv_heads, shape.head_dim)
        v = draw(tokens, shape.kv_heads, shape.value_dim)
        if form.layout == "separate":
            given = {"q": q, "k": k, "v": v}
        else:
            given = {"qkv": torch.cat([x.flatten(1) for x in (q, k, v)], 1)}
            if form.rotary_dim:
                angles = torch.rand(tokens, form.rotary_dim // 2, generator=random) * 6
                given |= {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
                turn = (given["cos"].float(), given["sin"].float(), form.interleaved)
                q, k = (torch.ops.llmbuild.rope(x.float(), *turn).to(dtype) for x in (q, k))
        state.set_step(*paging.values())
        expected = state.attend(q.float(), *cached(shape, k, v), **rules(shape, fixed), **scales(shape, k, v))
        yield Step(given | paging | fixed, expected.float(), "decode" if tokens == len(active) else "mixed")


def rules(shape: AttentionShape, fixed: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "layer": 0,
        "scale": shape.scale,
        "window": shape.window,
        "softcap": shape.softcap,
        "sinks": fixed.get("sinks"),
        "alibi_slopes": fixed.get("slopes"),
    }


def cached(shape: AttentionShape, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What the reference appends to its pools."""
    if shape.kv_scales == "layer":
        scale = torch.tensor([EXACT_SCALE])
        return round_fp8(k, scale), round_fp8(v, scale)
    if shape.kv_scales == "token":
        return round_int8(k)[0], round_int8(v)[0]
    return k.float(), v.float()


def scales(shape: AttentionShape, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    if shape.kv_scales == "layer":
        return dict.fromkeys(("k_scale", "v_scale"), torch.tensor([EXACT_SCALE]))
    if shape.kv_scales == "token":
        return {"k_scale": round_int8(k)[1], "v_scale": round_int8(v)[1]}
    return {}


def pools(form: PluginForm, blocks: int = BLOCKS) -> dict[str, Tensor]:
    """Caches full of NaN (127 in int8), and their scales: what nothing was written to must not be read."""
    shape, slots = form.shape, blocks * form.shape.page
    dtype = torch_dtype(shape.kv_dtype)
    poison = float("nan") if dtype.is_floating_point else 127
    made = {
        name: torch.full((slots, shape.kv_heads, width), poison, dtype=torch.float32).to(dtype)
        for name, width in (("key_pool", shape.head_dim), ("value_pool", shape.value_dim))
    }
    if shape.kv_scales == "layer":
        made |= {name: torch.tensor([EXACT_SCALE]) for name in ("k_scales", "v_scales")}
    if shape.kv_scales == "token":
        made |= {name: torch.full((slots, shape.kv_heads), float("nan")) for name in ("k_scales", "v_scales")}
    return made


def check(form: PluginForm, step: Step, out: Tensor) -> None:
    """Compare within the rounding of the node's dtype: once for what is rotated, once for weights, once for results."""
    bits = {"float32": 15, "float16": 9, "bfloat16": 6}[form.shape.dtype]
    torch.testing.assert_close(out.float(), step.expected, rtol=2.0**-bits, atol=2.0**-bits)
