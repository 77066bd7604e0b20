"""Thresholds, the record and its plot."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from llmbuild.builder.accuracy.layers import Layer, LayerError, LayerErrors
from llmbuild.builder.accuracy.measures import Figures
from llmbuild.builder.accuracy.plot import layers_svg
from llmbuild.builder.accuracy.record import Thresholds, check, figures_to_dict, layers_to_list, rounded
from llmbuild.builder.options import BuildConfig
from llmbuild.errors import AccuracyError, ConfigError

FIGURES = Figures(
    100, 99, kl_mean=0.05, kl_p99=0.5, kl_max=1.25, top1=0.9, logits_error=0.125, reference_ppl=20.0, candidate_ppl=21.0
)
LAYERS = LayerErrors(
    (
        LayerError(Layer("linear", "m.0.q"), 0.02, 0.02, 0.999, 0.03, 4),
        LayerError(Layer("attention", "layer 0"), 0.9, 0.9, 0.99, 1.0, 0),
        LayerError(Layer("linear", "m.0.down"), 0.3, 0.2, 0.95, math.inf, 1),
        LayerError(Layer("linear", "m.1.{k,q}"), 0.1, 0.1, 0.97, 0.2, 2),
    ),
    (),
)


@pytest.mark.parametrize(
    "thresholds",
    [
        Thresholds(),
        Thresholds(max_kl=0.05),
        Thresholds(max_ppl_increase=0.0501),
        Thresholds(min_top1=0.9),
        Thresholds(0.06, 0.06, 0.89),
    ],
)
def test_kept(thresholds: Thresholds) -> None:
    assert thresholds.missed(FIGURES) == []
    check(thresholds, FIGURES, LAYERS, "int4-wo")


def test_missed_names_figures_thresholds_layers_and_what_to_do() -> None:
    with pytest.raises(AccuracyError) as caught:
        check(Thresholds(0.01, 0.04, 0.95), FIGURES, LAYERS, "int4-wo")
    assert str(caught.value) == (
        "too far from the unquantized model: mean KL 0.05 is above --max-kl 0.01; perplexity rose by 0.05, from 20 to "
        "21, which is above --max-ppl-increase 0.04; top-1 agreement 0.9 is below --min-top1 0.95\n"
        "  where: worst layers: m.0.down (0.2), m.1.{k,q} (0.1), m.0.q (0.02)\n"
        "  next:  leave the worst out: --exclude 'm.0.down*' --exclude 'm.0.q*'; "
        "or choose a recipe with more bits: --quant int8-wo; or allow more"
    )


def test_missed_without_layers_and_by_other_recipes() -> None:
    with pytest.raises(AccuracyError) as caught:
        check(Thresholds(max_kl=0), FIGURES, None, "int8-wo")
    assert caught.value.where is None
    assert caught.value.hint == "choose a recipe with more bits: --quant none; or allow more"
    with pytest.raises(AccuracyError) as caught:
        check(Thresholds(max_kl=0), FIGURES, None, "none")
    assert caught.value.hint == "convert again with a --quant of more bits; or allow more"


def test_missed_with_a_quantized_cache_alone_and_beside_weights() -> None:
    plain = LayerErrors(tuple(each._replace(own=0.0) for each in LAYERS.errors if each.layer.kind == "linear"), ())
    alone = LayerErrors((*plain.errors, LAYERS.errors[1]), ())
    with pytest.raises(AccuracyError) as caught:
        check(Thresholds(max_kl=0), FIGURES, alone, "none", quantized_cache=True)
    assert caught.value.where == "worst attention: layer 0 (0.9)"
    assert caught.value.hint == "leave the KV cache unrounded: --kv-cache-dtype with what --dtype is; or allow more"
    with pytest.raises(AccuracyError) as caught:
        check(Thresholds(max_kl=0), FIGURES, LAYERS, "int8-wo", quantized_cache=True)
    assert caught.value.where == "worst layers: m.0.down (0.2), m.1.{k,q} (0.1), m.0.q (0.02)"
    assert str(caught.value.hint).startswith(
        "leave the KV cache unrounded: --kv-cache-dtype with what --dtype is; or leave the"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_missed(value: float) -> None:
    figures = Figures(1, 1, value, value, value, 1.0, value, 2.0, value)
    assert len(Thresholds(1e9, 1e9, 0).missed(figures)) == 2


def test_rounding() -> None:
    assert [rounded(value) for value in (123.456, 0.0012345, 1.6e-7, 0.0, -1e-9)] == [123.0, 0.00123, 0.0, 0.0, 0.0]
    assert rounded(math.inf) is None and rounded(math.nan) is None
    assert math.copysign(1, rounded(-1e-9) or 0.0) == 1


def test_record() -> None:
    assert figures_to_dict(FIGURES) == {
        "tokens": 100,
        "predicted": 99,
        "kl": {"mean": 0.05, "p99": 0.5, "max": 1.25},
        "top1": 0.9,
        "logits_error": 0.125,
        "perplexity": {"reference": 20.0, "candidate": 21.0, "increase": 0.05},
    }
    assert layers_to_list(LAYERS)[2] == {
        "kind": "linear",
        "name": "m.0.down",
        "error": 0.3,
        "own": 0.2,
        "cosine": 0.95,
        "worst_error": None,
        "worst_token": 1,
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_kl": -0.1}, "max_kl is -0.1"),
        ({"max_kl": math.nan}, "max_kl is nan"),
        ({"max_ppl_increase": True}, "max_ppl_increase is True"),
        ({"min_top1": 1.5}, "min_top1 is 1.5"),
        ({"min_top1": "x"}, "min_top1 is 'x'"),
        ({"accuracy_tokens": 1}, "accuracy_tokens is 1"),
    ],
)
def test_thresholds_out_of_range(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        BuildConfig(model="m", output="e", **values)  # type: ignore[arg-type]
    assert caught.value.where == "--" + next(iter(values)).replace("_", "-")
    assert caught.value.hint


def test_what_has_accuracy_measured() -> None:
    assert not BuildConfig(model="m", output="e").measures_accuracy  # type: ignore[arg-type]
    for values in ({"max_kl": 0}, {"min_top1": 0.0}, {"accuracy_text": "t"}, {"accuracy_tokens": 2}):
        assert BuildConfig(model="m", output="e", **values).measures_accuracy  # type: ignore[arg-type]


def test_plot_shows_every_layer_at_its_height() -> None:
    layers = [*layers_to_list(LAYERS), {"kind": "linear", "name": "a<b&c", "error": None, "own": 0.1}]
    svg = layers_svg(layers, "x < y")
    assert svg == layers_svg(layers, "x < y")
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    bars = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    assert [float(bar.get("height") or 0) for bar in bars] == [4.4, 200.0, 66.7, 22.2, 200.0]
    assert [bar.find(f"{space}title").text for bar in bars][-1] == "linear a<b&c: error infinite, own 0.1"  # type: ignore[union-attr]
    assert next(text.text for text in root.iter(f"{space}text")) == "x < y"
    assert "href" not in svg


def test_plot_of_no_error_and_of_no_layer() -> None:
    assert 'height="0.0"' in layers_svg([{"kind": "block", "name": "layer 0", "error": 0.0, "own": 0.0}], "t")
    ElementTree.fromstring(layers_svg([], "t"))
