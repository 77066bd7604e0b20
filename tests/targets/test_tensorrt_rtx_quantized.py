"""Recipes as engines of tensorrt-rtx: Q/DQ around products of 8-bit numbers, weights that stay in 4 or 8 bits.

Each is built for real, and its graph runs in onnxruntime beside the oracle of the very program that was lowered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmbuild.builder.ir import Program
from llmbuild.builder.pipeline import optimize
from llmbuild.builder.targets.base import CompiledTarget, CompileOptions
from llmbuild.builder.targets.tensorrt import rtx
from llmbuild.errors import UnsupportedError
from llmbuild.quantization.recipes import find_recipe
from support.calibrated import gathered
from support.rounding import check_rounded_alike
from support.tensorrt_graphs import LIMITS, row_errors, twin_of
from support.traced import traced

BF16 = torch.bfloat16
WINDOWS = [np.random.default_rng(2).integers(0, 256, 48).tolist() for _ in range(2)]
FAMILIES = ("llama", "qwen3", "mixtral")
# recipe -> (GPUs, type that the inputs of products have, type of their weights)
PRODUCTS = {
    "fp8": ("89,120", "FP8"),
    "fp8-static": ("89,120", "FP8"),
    "int8": ("80,86,89,120", "Int8"),
    "int8-sq": ("80,86,89,120", "Int8"),
    "int8-sq-static": ("80,86,89,120", "Int8"),
}
WEIGHTS = {"int4-wo-g32": "Int4", "int8-wo-channel": "Int8"}
# Qwen3 in fp8 is built in test_tensorrt_rtx.py.
QUICK = {("llama", "fp8"), ("mixtral", "fp8"), ("llama", "int8"), ("qwen3", "int8"), ("mixtral", "int8")}


def cases(recipes: Any, quick: set[tuple[str, str]]) -> list[Any]:
    pairs = [(family, recipe) for recipe in recipes for family in FAMILIES]
    return [pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.slow]) for pair in pairs]


def program_of(family: str, recipe: str, dtype: torch.dtype, **overrides: int) -> Program:
    program = traced(family, dtype=dtype, **overrides)
    optimize(program, find_recipe(recipe), calibrate=gathered(WINDOWS))
    return program


def build(program: Program, directory: Path, sm: str) -> tuple[CompiledTarget, list[dict[str, Any]]]:
    """Build an engine; return what `compile` says and the layers after fusion."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    compiled = rtx.RtxTarget().compile(program, CompileOptions(LIMITS, "bfloat16", None, sm, ()), directory)
    return compiled, json.loads((directory / rtx.LAYERS).read_text())["layers"]


@pytest.mark.parametrize(("family", "recipe"), cases(PRODUCTS, QUICK))
def test_products_take_8_bit_inputs_after_fusion(family: str, recipe: str, tmp_path: Path) -> None:
    """Every product that the graph has in 8 bits is one in the engine, for both profiles."""
    sm, kind = PRODUCTS[recipe]
    program = program_of(family, recipe, BF16)
    products = {node.name for node in program.graph.nodes if "linear_scaled" in str(node.target)}
    compiled, found = build(program, tmp_path / "engine", sm)
    assert compiled.section["sms"] == [int(each) for each in sm.split(",")]
    assert len(products) >= 4
    for profile in (0, 1):
        layers = [layer for layer in found if layer["profile"] == profile]
        multiplied = [layer for layer in layers if kind in layer["inputs"] and kind in layer["weights"]]
        assert {name for layer in multiplied for name in layer["nodes"]} >= products


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", WEIGHTS)
def test_weights_alone(family: str, recipe: str, tmp_path: Path) -> None:
    program = program_of(family, recipe, BF16)
    _, found = build(program, tmp_path / "engine", "80,89,120")
    assert WEIGHTS[recipe] in {kind for layer in found for kind in layer["weights"]}
    assert program.rewrites[-1].count >= 8


@pytest.mark.parametrize(
    ("family", "recipe"), cases([*PRODUCTS, *WEIGHTS], {("mixtral", "int8"), ("qwen3", "int8-sq")})
)
def test_graph_gives_the_oracles_logits(family: str, recipe: str) -> None:
    """Prompts in chunks beside decodes, over slots that earlier steps wrote; all rounding included."""
    program = program_of(family, recipe, torch.float32)
    errors, largest = row_errors(program, twin_of(program))
    assert largest > 0.1
    if recipe in WEIGHTS:
        assert errors.max() < 3e-5 * max(1.0, largest)
        return
    check_rounded_alike(errors / largest)


def test_scales_of_square_blocks_are_refused(tmp_path: Path) -> None:
    """All products are named, each with its line in the model's code."""
    program = program_of("llama", "fp8-block", BF16, hidden_size=256, num_hidden_layers=1)
    products = [node.name for node in program.graph.nodes if "linear_scaled" in str(node.target)]
    with pytest.raises(UnsupportedError, match="TensorRT multiplies with one a row or one for all") as caught:
        build(program, tmp_path / "engine", "89,120")
    assert len(products) == 4
    assert caught.value.what.count("scales for blocks of 128×128") == caught.value.what.count(".py:") == 4
    assert not (tmp_path / "engine").exists()
