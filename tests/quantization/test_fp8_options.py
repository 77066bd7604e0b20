"""Who can do FP8 recipes is said at once: targets and GPUs that cannot refuse by name, and say what they can."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmbuild.builder.options import BuildConfig, choose
from llmbuild.errors import UnsupportedError
from llmbuild.quantization.recipes import KeepStored, find_recipe


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def described(model: Path, quantization: dict) -> Path:
    (model / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return model


@pytest.mark.parametrize(
    ("words", "where"),
    [({"quant": "fp8-static"}, "--quant"), ({"quant": "int8-wo", "quant_layers": ("*=fp8",)}, "--quant-layer")],
)
def test_a_target_without_products_of_8_bit_floats_names_what_it_has(model: Path, words: dict, where: str) -> None:
    with pytest.raises(
        UnsupportedError, match="the cpu target has no products of 8-bit floats, which recipe"
    ) as caught:
        choose(BuildConfig(model, model / "out", target="cpu", **words))
    assert f"where: {where}\n" in str(caught.value)
    assert "--target cuda, or one of none" in str(caught.value) and "int8-wo" in str(caught.value)
    assert "fp8-block" not in str(caught.value)


def test_gpus_without_8_bit_floats_are_refused_by_name_and_left_out_where_none_are_named(model: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"SM 80, 86 cannot multiply 8-bit floats, which recipe 'fp8' asks for"):
        choose(BuildConfig(model, model / "out", target="cuda", sm="80,86,90", quant="fp8"))
    choices = choose(BuildConfig(model, model / "out", target="cuda", quant="fp8"))
    assert choices.sm == "89,90,100,120" and any("sm 89,90,100,120: those that multiply" in n for n in choices.notes)
    assert choose(BuildConfig(model, model / "out", target="cuda", sm="90", quant="fp8")).sm == "90"
    assert choose(BuildConfig(model, model / "out", target="cuda")).sm is None


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
WEIGHTS_ALONE = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": {"weights": {"type": "float"}, "input_activations": None}},
}


def test_what_a_checkpoint_stores_is_multiplied_where_the_gpus_can(model: Path) -> None:
    described(model, STATIC)
    choices = choose(BuildConfig(model, model / "out", target="cuda"))
    assert choices.recipe.linear == KeepStored(float8_products=True) and choices.sm == "89,90,100,120"
    old = choose(BuildConfig(model, model / "out", target="cuda", sm="80,90"))
    assert old.recipe.linear == KeepStored() and old.sm == "80,90"
    assert "8-bit floats of the checkpoint are dequantized: SM 80 cannot multiply 8-bit floats" in old.notes
    assert choose(BuildConfig(model, model / "out", target="cpu")).recipe.linear == KeepStored()
    described(model, WEIGHTS_ALONE)
    assert choose(BuildConfig(model, model / "out", target="cuda")).sm is None


def test_which_recipes_need_calibration() -> None:
    needs = {
        name: find_recipe(name).calibrated for name in ("fp8", "fp8-lm-head", "fp8-gptq", "fp8-static", "fp8-block")
    }
    assert needs == {"fp8": False, "fp8-lm-head": False, "fp8-gptq": True, "fp8-static": True, "fp8-block": False}
