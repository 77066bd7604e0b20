"""kv_store against indexing, over random shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.builder.targets.cuda.aot import compile_spec
from llmbuild.plugins.kernels.kv_store import FLOAT8, FLOATS, constants_for, kv_store, kv_store_spec, parts
from support.kernels import run

DTYPES = {name: getattr(torch, name) for name in FLOATS}
GEOMETRY: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "k_stride": 6144, "v_stride": 6144}


def store(
    projection: torch.Tensor, k_width: int, v_width: int, pools: list[torch.Tensor], slots: torch.Tensor, **named
):
    """Runs the kernel on k and v as they lie in a merged projection [T, ... k, v]."""
    stride = projection.shape[1]
    k = projection[:, stride - k_width - v_width : stride - v_width]
    v = projection[:, stride - v_width :]
    scaled = named["k_scale"] is not None
    constants = constants_for(k_width, v_width, stride, stride, scaled)
    run(kv_store, (len(slots), parts(constants), 1), k, v, *pools, slots, **named, **constants)
    return k, v


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 5),
    heads=st.integers(1, 3),
    sizes=st.tuples(st.sampled_from([4, 16, 24, 80]), st.sampled_from([4, 16, 24, 80])),
    before=st.sampled_from([0, 3, 32]),
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    seed=st.integers(0, 2**31),
)
def test_rows_go_to_their_slots(tokens, heads, sizes, before, dtypes, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    widths = [heads * size for size in sizes]
    projection = torch.randn(tokens, before + sum(widths), generator=generator).to(DTYPES[dtypes[0]])
    pools = [torch.full((4, 4, heads, size), 7.0, dtype=DTYPES[dtypes[1]]) for size in sizes]
    slots = torch.randperm(16, generator=generator)[:tokens].int()
    slots[torch.rand(tokens, generator=generator) < 0.2] = -1
    k, v = store(projection, *widths, pools, slots, k_scale=None, v_scale=None)
    for pool, rows, width in zip(pools, (k, v), widths, strict=True):
        expected = torch.full((16, width), 7.0, dtype=pool.dtype)
        expected[slots[slots >= 0].long()] = rows[slots >= 0].to(pool.dtype)
        assert torch.equal(pool.reshape(16, width), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_e4m3_bytes_of_scaled_values(dtype: str) -> None:
    projection = (torch.randn(3, 72, generator=torch.Generator().manual_seed(3)) * 100).to(DTYPES[dtype])
    pools = [torch.zeros(2, 4, 2, size, dtype=torch.uint8) for size in (16, 12)]
    slots = torch.tensor([6, -1, 1], dtype=torch.int32)
    k, v = store(projection, 32, 24, pools, slots, k_scale=0.7, v_scale=0.01)
    for pool, rows, scale in ((pools[0], k, 0.7), (pools[1], v, 0.01)):
        expected = torch.zeros(8, rows.shape[1], dtype=torch.uint8)
        quantized = (rows.float() / torch.tensor(scale)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        expected[[6, 1]] = quantized[[0, 2]]
        assert torch.equal(pool.reshape(8, -1), expected)
    assert (pools[1] & 0x7F).max() == 0x7E  # some were too large, and became the largest


@pytest.mark.parametrize("sm", [80, 90, *(pytest.param(sm, marks=pytest.mark.slow) for sm in (86, 89, 100, 120))])
@pytest.mark.parametrize("pool_dtype", ["bfloat16", FLOAT8])
def test_it_compiles(pool_dtype: str, sm: int) -> None:
    spec = kv_store_spec("kv_store", dtype="bfloat16", pool_dtype=pool_dtype, **GEOMETRY)
    assert spec.grid == ("T", "2", "1")
    names = [parameter.name for parameter in compile_spec(spec, sm).launch.parameters]
    scales = ["k_scale", "v_scale"] if pool_dtype == FLOAT8 else []
    assert names == ["k", "v", "k_pool", "v_pool", "slots", *scales, "global_scratch", "profile_scratch"]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_store from int8 to bfloat16"):
        kv_store_spec("kv_store", dtype="int8", pool_dtype="bfloat16", **GEOMETRY)
    with pytest.raises(ValueError, match="kv_store from float16 to int8"):
        kv_store_spec("kv_store", dtype="float16", pool_dtype="int8", **GEOMETRY)
