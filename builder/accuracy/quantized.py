"""The accuracy of a quantized program against the unquantized one, on the oracle, before an engine is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbuild.builder.accuracy.layers import LayerErrors, layer_errors
from llmbuild.builder.accuracy.measures import Figures, compare, rows_a_step
from llmbuild.builder.accuracy.plot import layers_svg
from llmbuild.builder.accuracy.record import figures_to_dict, layers_to_list
from llmbuild.builder.accuracy.texts import Text, load_text
from llmbuild.builder.accuracy.walk import Runner
from llmbuild.builder.accuracy.windows import BLOCK_SIZE, WINDOW, Window, cut, encode
from llmbuild.builder.ir import Program

DEFAULT_TOKENS = 2048
LAYER_TOKENS = 128  # of the first window, for the errors of the layers
CHARACTERS_A_TOKEN = 8  # more than tokenizers reach on documentation
HELD_BYTES = 4 << 30  # of weights of both programs; more are loaded again in each step

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Measured:
    """What was found. text: what was run, of which `figures.tokens` tokens."""

    figures: Figures
    layers: LayerErrors
    text: Text

    def to_dict(self) -> dict[str, Any]:
        """Return the record for `report.json`, rounded."""
        return {
            "text": text_to_dict(self.text),
            **figures_to_dict(self.figures),
            "layers": layers_to_list(self.layers),
            "unmatched": [f"{layer.kind} {layer.name}" for layer in self.layers.unmatched],
        }

    def svg(self, quant: str) -> str:
        return layers_svg(self.to_dict()["layers"], f"Relative error of each layer's output, {quant}")


def text_to_dict(text: Text) -> dict[str, str]:
    return {"source": text.source, "sha256": text.sha256}


def evaluation_windows(
    path: Path | None,
    definition: bytes | None,
    *,
    tokens: int,
    length: int,
    vocab_size: int,
    bos_token_id: int | None,
    option: str,
) -> tuple[Text, list[Window]]:
    """Return the text to measure on and its windows.

    Args:
        path: The user's file; None for documentation strings.
        definition: tokenizer.json.
        tokens: Most tokens of the text.
        length: Longest sequence that both models can run; windows are at most `WINDOW`.
        option: What the user gives the path with.

    Raises:
        ConfigError: The text or the tokenizer cannot be used.
    """
    text = load_text(path, "evaluation", characters=CHARACTERS_A_TOKEN * tokens, option=option)
    encoded = encode(definition, text.content, bos_token_id)
    length = min(WINDOW, length)
    return text, cut(encoded, tokens=tokens, length=length, vocab_size=vocab_size, source=text.source)


def measure(
    reference: Program,
    candidate: Program,
    text: Text,
    windows: list[Window],
    *,
    max_memory: int | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Run both programs on the oracle and compare logits, and the layers' outputs on the beginning of the text.

    Args:
        reference: Unquantized.
        candidate: As a target gets it.
        max_memory: What the user allows; weights are then not held but loaded when a node reads them.

    Raises:
        AccuracyError: Logits are no distribution.
    """
    report = progress or (lambda done, total, label: None)
    hold = max_memory is None and weight_bytes(reference) + weight_bytes(candidate) <= HELD_BYTES
    exact, quantized = Runner(reference, hold=hold), Runner(candidate, hold=hold)
    total = sum(map(len, windows))
    figures = compare(
        exact.forward,
        quantized.forward,
        windows,
        chunk=rows_a_step(candidate.info.vocab_size, WINDOW),
        block_sizes=(BLOCK_SIZE, BLOCK_SIZE),
        progress=lambda done, _: report(done, total + 1, "tokens"),
    )
    layers = layer_errors(exact, quantized, windows[0][:LAYER_TOKENS])
    report(total + 1, total + 1, "layers")
    return Measured(figures, layers, text)


def weight_bytes(program: Program) -> int:
    """Return the bytes of all weights when they are loaded."""
    return sum(math.prod(weight.shape) * weight.dtype.itemsize for weight in program.weights.values())
