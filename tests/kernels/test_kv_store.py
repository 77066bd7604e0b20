"""kv_store against indexing, over random shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.builder.targets.cuda.aot import compile_spec
from llmbuild.plugins.cache_rounding import round_int8
from llmbuild.plugins.kernels.kv_store import BYTES, FLOATS, kv_store, kv_store_spec, parts, store_constants
from llmbuild.plugins.kernels.kv_store_scaled import kv_store_scaled, kv_store_scaled_spec, scaled_constants
from support.kernels import run

DTYPES = {name: getattr(torch, name) for name in FLOATS}
POOLS = {"float8_e4m3fn": torch.uint8, "int8": torch.int8}
GEOMETRY: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "k_stride": 6144, "v_stride": 6144}


def slices(projection: torch.Tensor, k_width: int, v_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v as they lie in a merged projection [T, ... k, v]."""
    stride = projection.shape[1]
    return projection[:, stride - k_width - v_width : stride - v_width], projection[:, stride - v_width :]


def quantized(x: torch.Tensor, scale: torch.Tensor, pool_dtype: str) -> torch.Tensor:
    """What a pool of bytes should hold of float32 rows."""
    if pool_dtype == "int8":
        return (x / scale).clamp(-127, 127).round().to(torch.int8)
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


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
    k, v = slices(projection, *widths)
    constants = store_constants(*widths, *[projection.shape[1]] * 2)
    run(kv_store, (tokens, parts(constants)), k, v, *pools, slots, None, None, **constants)
    for pool, rows, width in zip(pools, (k, v), widths, strict=True):
        expected = torch.full((16, width), 7.0, dtype=pool.dtype)
        expected[slots[slots >= 0].long()] = rows[slots >= 0].to(pool.dtype)
        assert torch.equal(pool.reshape(16, width), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pool_dtype", BYTES)
def test_bytes_with_one_scale(pool_dtype: str, dtype: str) -> None:
    projection = (torch.randn(3, 72, generator=torch.Generator().manual_seed(3)) * 100).to(DTYPES[dtype])
    pools = [torch.zeros(2, 4, 2, size, dtype=POOLS[pool_dtype]) for size in (16, 12)]
    slots = torch.tensor([6, -1, 1], dtype=torch.int32)
    scales = [torch.tensor([2.3]), torch.tensor([0.01])]
    k, v = slices(projection, 32, 24)
    constants = store_constants(32, 24, 72, 72)
    run(kv_store, (3, parts(constants)), k, v, *pools, slots, *scales, **constants)
    for pool, rows, scale in zip(pools, (k, v), scales, strict=True):
        expected = torch.zeros(8, rows.shape[1], dtype=pool.dtype)
        expected[[6, 1]] = quantized(rows.float(), scale, pool_dtype)[[0, 2]]
        assert torch.equal(pool.reshape(8, -1), expected)
    assert (pools[1] & 0x7F).max() == (0x7F if pool_dtype == "int8" else 0x7E)  # too large: the largest there is


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(1, 4),
    heads=st.integers(1, 3),
    sizes=st.tuples(st.sampled_from([4, 16, 24]), st.sampled_from([4, 16, 24])),
    dtype=st.sampled_from(FLOATS),
    pool_dtype=st.sampled_from(sorted(BYTES)),
    seed=st.integers(0, 2**31),
)
def test_bytes_with_a_scale_for_each_token_and_head(tokens, heads, sizes, dtype, pool_dtype, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    widths = [heads * size for size in sizes]
    projection = torch.randn(tokens, 8 + sum(widths), generator=generator).to(DTYPES[dtype])
    projection[0] = 0.0
    pools = [torch.full((16, heads, size), 7, dtype=POOLS[pool_dtype]) for size in sizes]
    scales = [torch.full((16, heads), 7.0) for _ in sizes]
    slots = torch.randperm(16, generator=generator)[:tokens].int()
    slots[torch.rand(tokens, generator=generator) < 0.2] = -1
    k, v = slices(projection, *widths)
    constants = scaled_constants(pool_dtype, heads, *sizes, *[projection.shape[1]] * 2)
    run(kv_store_scaled, (tokens, 2), k, v, *pools, slots, *scales, **constants)
    written = slots[slots >= 0].long()
    for pool, scale, rows, size in zip(pools, scales, (k, v), sizes, strict=True):
        x = rows[slots >= 0].float().reshape(-1, heads, size)
        expected_scale, expected = torch.full((16, heads), 7.0), torch.full((16, heads, size), 7, dtype=pool.dtype)
        expected_scale[written] = x.abs().amax(-1) / (127.0 if pool_dtype == "int8" else 448.0)
        divisor = torch.where(expected_scale > 0, expected_scale, 1.0)[written]
        expected[written] = quantized(x, divisor[..., None], pool_dtype)
        assert torch.equal(scale, expected_scale)
        assert torch.equal(pool, expected)


def test_int8_rows_are_those_of_the_reference_whatever_they_hold() -> None:
    """Zeros, one value, an outlier, NaN and infinity: what row programs store, and the oracle."""
    nan, inf = float("nan"), float("inf")
    rows = [[0.0] * 4, [-2.5] * 4, [1e4, 1e-3, -39.4, 0.0], [nan, 1.0, 2.0, 3.0], [1.0, -inf, 2.0, 3.0]]
    x = torch.tensor(rows).reshape(5, 1, 4)
    pools, scales = (
        [torch.full((5, 1, 4), 7, dtype=torch.int8) for _ in range(2)],
        [torch.zeros(5, 1), torch.zeros(5, 1)],
    )
    constants = scaled_constants("int8", 1, 4, 4, 4, 4)
    run(kv_store_scaled, (5, 2), x, x, *pools, torch.arange(5, dtype=torch.int32), *scales, **constants)
    numbers, scale = round_int8(x)
    for pool, found in zip(pools, scales, strict=True):
        assert torch.equal(pool, numbers) and torch.equal(found, scale[..., 0])


SMS = [80, 90, *(pytest.param(sm, marks=pytest.mark.slow) for sm in (86, 89, 100, 120))]


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("pool_dtype", ["bfloat16", *BYTES])
def test_it_compiles(pool_dtype: str, sm: int) -> None:
    spec = kv_store_spec("kv_store", dtype="bfloat16", pool_dtype=pool_dtype, **GEOMETRY)
    assert spec.grid == ("T", "2", "1")
    names = [parameter.name for parameter in compile_spec(spec, sm).launch.parameters]
    scales = ["k_scales", "v_scales"] if pool_dtype in BYTES else []
    assert names == ["k", "v", "k_pool", "v_pool", "slots", *scales, "global_scratch", "profile_scratch"]


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("pool_dtype", BYTES)
def test_it_compiles_with_scales_for_each_token(pool_dtype: str, sm: int) -> None:
    spec = kv_store_scaled_spec("kv_store", dtype="bfloat16", pool_dtype=pool_dtype, **GEOMETRY)
    assert len(compile_spec(spec, sm).launch.parameters) == 9


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="no kernel stores int8 keys and values in pools of bfloat16"):
        kv_store_spec("kv_store", dtype="int8", pool_dtype="bfloat16", **GEOMETRY)
    with pytest.raises(ValueError, match="no kernel stores float16 keys and values in pools of int32"):
        kv_store_spec("kv_store", dtype="float16", pool_dtype="int32", **GEOMETRY)
    with pytest.raises(ValueError, match="pools of float16 take no scales; float8_e4m3fn, int8 do"):
        kv_store_scaled_spec("kv_store", dtype="float16", pool_dtype="float16", **GEOMETRY)
