"""What a build tells about accuracy: thresholds, the record in `report.json`, and the error when one is missed.

Figures are rounded before they are written: sums of floats differ in the last digits from machine to machine, and with
the number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llmbuild.builder.accuracy.layers import LayerErrors
from llmbuild.builder.accuracy.measures import Figures
from llmbuild.errors import AccuracyError


@dataclass(frozen=True)
class Thresholds:
    """What a measured model must keep to; None asks for nothing.

    max_kl: most mean KL, in nats. max_ppl_increase: most increase of the perplexity, 0.01 for 1 %. min_top1: least
    share of tokens with the same largest logit.
    """

    max_kl: float | None = None
    max_ppl_increase: float | None = None
    min_top1: float | None = None

    def missed(self, figures: Figures) -> list[str]:
        """Return one text for each threshold that is missed, with the figure and the threshold."""
        found = []
        if self.max_kl is not None and not figures.kl_mean <= self.max_kl:
            found.append(f"mean KL {shown(figures.kl_mean)} is above --max-kl {self.max_kl:g}")
        if self.max_ppl_increase is not None and not figures.ppl_increase <= self.max_ppl_increase:
            found.append(
                f"perplexity rose by {shown(figures.ppl_increase)}, from {shown(figures.reference_ppl)} to "
                f"{shown(figures.candidate_ppl)}, which is above --max-ppl-increase {self.max_ppl_increase:g}"
            )
        if self.min_top1 is not None and not figures.top1 >= self.min_top1:
            found.append(f"top-1 agreement {shown(figures.top1)} is below --min-top1 {self.min_top1:g}")
        return found

    def to_dict(self) -> dict[str, float]:
        named = {"max_kl": self.max_kl, "max_ppl_increase": self.max_ppl_increase, "min_top1": self.min_top1}
        return {name: value for name, value in named.items() if value is not None}


def shown(value: float) -> str:
    """Return a figure for people: four digits."""
    return f"{value:.4g}"


def rounded(value: float) -> float | None:
    """Return at most three significant digits and six places; None for what JSON cannot hold (infinity, NaN)."""
    if not math.isfinite(value):
        return None
    return round(float(f"{value:.3g}"), 6) + 0.0  # and no -0.0


def figures_to_dict(figures: Figures) -> dict[str, Any]:
    return {
        "tokens": figures.tokens,
        "predicted": figures.predicted,
        "kl": {"mean": rounded(figures.kl_mean), "p99": rounded(figures.kl_p99), "max": rounded(figures.kl_max)},
        "top1": rounded(figures.top1),
        "logits_error": rounded(figures.logits_error),
        "perplexity": {
            "reference": rounded(figures.reference_ppl),
            "candidate": rounded(figures.candidate_ppl),
            "increase": rounded(figures.ppl_increase),
        },
    }


def layers_to_list(layers: LayerErrors) -> list[dict[str, Any]]:
    return [
        {
            "kind": each.layer.kind,
            "name": each.layer.name,
            "error": rounded(each.error),
            "own": rounded(each.own),
            "cosine": rounded(each.cosine),
            "worst_error": rounded(each.worst_error),
            "worst_token": each.worst_token,
        }
        for each in layers.errors
    ]


def check(
    thresholds: Thresholds,
    figures: Figures,
    layers: LayerErrors | None,
    quant: str | None,
    *,
    quantized_cache: bool = False,
) -> None:
    """Raise AccuracyError when a threshold is missed.

    Args:
        layers: Errors of the layers, where they are known.
        quant: The recipe that was built, where one was.
        quantized_cache: Whether the KV cache is not in the computation dtype.
    """
    missed = thresholds.missed(figures)
    if not missed:
        return
    worst = [] if layers is None else [each for each in layers.worst() if each.own > 0]
    named = ", ".join(f"{each.layer.name} ({shown(each.own)})" for each in worst)
    where = f"worst layers: {named}" if worst else None
    if layers is not None and not worst and quantized_cache:
        cached = [each for each in layers.worst(kinds=("attention",)) if each.own > 0]
        where = "worst attention: " + ", ".join(f"{each.layer.name} ({shown(each.own)})" for each in cached)
    raise AccuracyError(
        f"too far from the unquantized model: {'; '.join(missed)}",
        where=where,
        hint=advice(worst, quant, quantized_cache=quantized_cache),
    )


def advice(worst: list[Any], quant: str | None, *, quantized_cache: bool) -> str:
    """Return what to try: other layers, another recipe, another cache, another threshold."""
    options = []
    if quantized_cache:
        options.append("leave the KV cache unrounded: --kv-cache-dtype with what --dtype is")
    excluded = [each.layer.name for each in worst if "{" not in each.layer.name and "*" not in each.layer.name]
    if excluded:
        options.append("leave the worst out: " + " ".join(f"--exclude '{name}*'" for name in excluded))
    if quant is not None and quant != "none":
        options.append(f"choose a recipe with more bits: --quant {'none' if quant.startswith('int8') else 'int8-wo'}")
    if not options:
        options.append("convert again with a --quant of more bits")
    return "; or ".join(options) + "; or allow more"
