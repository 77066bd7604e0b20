"""The experts' kernels against `llmbuild::moe_experts` in float32, and each of them against what it says it does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.builder.targets.cuda.aot import compile_spec
from llmbuild.engine.expressions import evaluate
from llmbuild.plugins import ops
from llmbuild.plugins.kernels.attention_shape import SHARED_BYTES
from llmbuild.plugins.kernels.block_layout import BlockShape
from llmbuild.plugins.kernels.moe_gemm import ExpertTiling
from llmbuild.plugins.kernels.moe_plan import Regime, experts_plan, regimes
from llmbuild.plugins.kernels.moe_shape import ACTIVATIONS, ExpertsPlan, ExpertsShape
from llmbuild.plugins.kernels.moe_sort import sort_pairs
from support.gemm_cases import DTYPES, TOLERANCE, assert_near, block_weight, launch
from support.kernels import run

INTEGERS = {"int32": torch.int32, "int64": torch.int64}
MIXTRAL = ExpertsShape(4096, 14336, 8, 2)
GPT_OSS = ExpertsShape(
    2880, 2880, 32, 4, activation="silu", slope=1.702, limit=7.0, shift=1.0, up_bias=True, down_bias=True
)
QWEN = ExpertsShape(2048, 768, 128, 8)


def small(height: int, most_tokens: int | None) -> Regime:
    tile = ExpertTiling(height, 16, 16, 4, 2)
    return Regime(most_tokens, tile, tile)


SMALL = (small(16, 3), small(32, None))


def operands(shape: ExpertsShape, tokens: int, seed: int) -> dict[str, Any]:
    """Inputs of a layer, those that it takes."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[shape.dtype]
    wide = shape.halves * shape.intermediate
    sizes: dict[str, tuple[int, ...]] = {
        "x": (tokens, shape.hidden),
        "up": (shape.experts, wide, shape.hidden),
        "down": (shape.experts, shape.hidden, shape.intermediate),
    }
    if shape.up_bias:
        sizes["up_bias"] = (shape.experts, wide)
    if shape.down_bias:
        sizes["down_bias"] = (shape.experts, shape.hidden)
    given: dict[str, Any] = {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}
    order = torch.rand(tokens, shape.experts, generator=generator).argsort(1)
    given["ids"] = order[:, : shape.top_k].contiguous().to(INTEGERS[shape.ids_dtype])
    given["scores"] = torch.rand(tokens, shape.top_k, generator=generator).to(DTYPES[shape.scores_dtype])
    return given


def compute(shape: ExpertsShape, plan: ExpertsPlan, given: dict[str, Any]) -> torch.Tensor:
    tokens = given["x"].shape[0]
    buffers: dict[str, Any] = given | {"out": torch.full_like(given["x"], float("nan")), "tokens": tokens}
    for name, (dtype, size) in plan.workspaces.items():
        kind = getattr(torch, dtype)
        elements = evaluate(size, {"T": tokens}) // kind.itemsize
        buffers[name] = torch.full((elements,), float("nan") if kind.is_floating_point else 12345, dtype=kind)
    for spec in plan.specs:
        launch(spec, {name: buffers[source] for name, source in plan.arguments[spec.name].items()}, {"T": tokens})
    return buffers["out"]


def expected_result(shape: ExpertsShape, given: dict[str, Any]) -> torch.Tensor:
    """What the op gives in float32."""
    wide = {
        name: value.float() if value.is_floating_point() else value.long()
        for name, value in given.items()
        if value is not None
    }
    weights = [wide.get(name) for name in ("x", "ids", "scores", "up", "down", "up_bias", "down_bias")]
    kind = (shape.activation, shape.gated, shape.slope, shape.limit, shape.shift)
    weights[1] = given["ids"].long()
    return torch.ops.llmbuild.moe_experts(*weights, *kind)


def check(shape: ExpertsShape, tokens: int, seed: int, tilings: tuple[Regime, ...] | None = SMALL) -> None:
    given = operands(shape, tokens, seed)
    actual = compute(shape, experts_plan(shape, 90, name="moe", tilings=tilings), given)
    assert_near(actual, expected_result(shape, given), TOLERANCE[shape.dtype])


shapes = st.builds(
    ExpertsShape,
    hidden=st.integers(1, 40),
    intermediate=st.integers(1, 40),
    experts=st.integers(3, 6),
    top_k=st.integers(1, 3),
    dtype=st.sampled_from(sorted(DTYPES)),
    activation=st.sampled_from(ACTIVATIONS),
    gated=st.booleans(),
    slope=st.sampled_from([1.0, 1.702]),
    limit=st.sampled_from([None, 2.0]),
    shift=st.sampled_from([0.0, 1.0]),
    up_bias=st.booleans(),
    down_bias=st.booleans(),
    ids_dtype=st.sampled_from(sorted(INTEGERS)),
    scores_dtype=st.sampled_from(sorted(DTYPES)),
)


@settings(max_examples=30, deadline=None)
@given(shape=shapes, tokens=st.integers(1, 7), seed=st.integers(0, 99))
def test_random_shapes(shape, tokens, seed) -> None:
    check(shape, tokens, seed)


@settings(max_examples=25, deadline=None)
@given(
    shape=shapes,
    blocks=st.tuples(*[
        st.builds(
            BlockShape,
            bits=st.sampled_from([8, 4]),
            block_size=st.sampled_from([16, 32, 64]),
            zero=st.integers(0, 15),
            has_offset=st.booleans(),
        )
    ] * 2),
    tokens=st.integers(1, 7),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_block_quantized_experts(shape, blocks, tokens, seed) -> None:
    given = operands(shape, tokens, seed)
    for name, block in zip(("up", "down"), blocks, strict=True):
        experts, rows, columns = given[name].shape
        packed, dense = block_weight(experts * rows, columns, block, seed, 0.25 * 2.0**-block.bits)
        given |= {name: packed["w"], f"{name}_scale": packed["w_scale"], f"{name}_offset": packed.get("w_offset")}
        given[f"{name}_dense"] = dense.view(experts, rows, columns)
    ordinary = given | {name: given[f"{name}_dense"] for name in ("up", "down")}
    actual = compute(shape, experts_plan(shape, 90, name="moe", blocks=blocks, tilings=SMALL), given)
    assert_near(actual, expected_result(shape, ordinary), TOLERANCE[shape.dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation(activation: str) -> None:
    check(ExpertsShape(16, 24, 3, 2, "float32", activation), 3, 1)


@pytest.mark.parametrize("tokens", [1, 24, 25, 40])
def test_the_tilings_that_are_built_in(tokens: int) -> None:
    shape = ExpertsShape(32, 48, 3, 2, up_bias=True)
    assert [regime.most_tokens for regime in regimes(shape, 90)] == [24, 96, None]
    check(shape, tokens, 2, None)


def test_only_one_tiling_is_launched() -> None:
    plan = experts_plan(MIXTRAL, 90, name="moe")
    for tokens in (1, 64, 65, 256, 257, 8192):
        grids = {spec.name: [evaluate(text, {"T": tokens}) for text in spec.grid] for spec in plan.specs}
        height = 16 if tokens <= 64 else 64 if tokens <= 256 else 128
        launched = [name for name, grid in grids.items() if min(grid) > 0]
        assert launched == [f"moe_sort_{height}", f"moe_up_{height}", f"moe_down_{height}", "moe_sum"]
        blocks = tokens * 2 // height + min(8, tokens * 2)
        assert grids[f"moe_up_{height}"][0] == blocks * -(-14336 // (32 if height == 16 else 64))


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 60), top_k=st.integers(1, 3), experts=st.integers(3, 9), seed=st.integers(0, 99))
def test_pairs_are_sorted_into_blocks_of_one_expert(tokens, top_k, experts, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    pairs, height = tokens * top_k, 16
    blocks = pairs // height + min(experts, pairs)
    order = torch.full((blocks * height,), 777, dtype=torch.int32)
    labels = torch.full((blocks,), 777, dtype=torch.int32)
    constants = {"EXPERTS": experts, "TOP_K": top_k, "BINS": 16, "BLOCK_M": height, "CHUNK": 64, "PDL": False}
    run(sort_pairs, (experts,), ids, order, labels, tokens, **constants)
    expected_labels: list[int] = []
    expected_order: list[int] = []
    for expert in range(experts):
        own = (ids.flatten() == expert).nonzero()[:, 0].tolist()
        filled = -(-len(own) // height)
        expected_labels += [expert] * filled
        expected_order += own + [-1] * (filled * height - len(own))
    assert labels.tolist() == expected_labels + [-1] * (blocks - len(expected_labels))
    assert order[: len(expected_order)].tolist() == expected_order


@pytest.mark.parametrize("sm", [80, 90])
def test_it_compiles(sm: int) -> None:
    compile_and_check(GPT_OSS, sm)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [86, 89, 90, 100, 120])
@pytest.mark.parametrize("shape", [MIXTRAL, QWEN, replace(GPT_OSS, dtype="float16")], ids=str)
def test_every_shape_compiles_and_fits(shape: ExpertsShape, sm: int) -> None:
    compile_and_check(shape, sm)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [86, 90])
def test_float32_compiles_and_fits(sm: int) -> None:
    compile_and_check(replace(QWEN, dtype="float32"), sm)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 86, 90, 100])
def test_block_quantized_experts_compile_and_fit(sm: int) -> None:
    compile_and_check(QWEN, sm, (BlockShape(4, 128, 8), BlockShape(8, 32, 128, has_offset=True)))


def compile_and_check(shape: ExpertsShape, sm: int, blocks: tuple[BlockShape, BlockShape] | None = None) -> None:
    for spec in experts_plan(shape, sm, name="moe", blocks=blocks, pdl=sm >= 90).specs:
        assert compile_spec(spec, sm).launch.shared <= SHARED_BYTES[sm] * 1024, spec.name


def test_the_activations_are_those_of_the_op() -> None:
    assert ACTIVATIONS == ops.ACTIVATIONS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 0}, "is not positive"),
        ({"top_k": 9}, "a token cannot visit 9 of 8 experts"),
        ({"activation": "swish"}, "unknown activation 'swish'; known: silu, gelu"),
        ({"ids_dtype": "uint8"}, "dtype 'uint8' is none of int32, int64"),
        ({"scores_dtype": "int8"}, "dtype 'int8' is none of float32"),
    ],
)
def test_refused_shapes(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MIXTRAL, **change)
