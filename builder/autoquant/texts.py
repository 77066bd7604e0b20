"""The two texts of a search: one that recipes are tried on, alone, and one that choices are measured on."""

from __future__ import annotations

from typing import Any, NamedTuple

from llmbuild.builder.accuracy.quantized import CHARACTERS_A_TOKEN
from llmbuild.builder.accuracy.texts import Purpose, Text, load_text
from llmbuild.builder.accuracy.windows import WINDOW, Window, cut, encode
from llmbuild.builder.autoquant.config import AutoquantConfig
from llmbuild.builder.ir import Program
from llmbuild.errors import ConfigError


class TextInUse(NamedTuple):
    """tokens: at most that many of the text are run."""

    text: Text
    tokens: int

    def windows(self, program: Program) -> list[Window]:
        """Return windows of the text's tokens.

        Raises:
            ConfigError: The tokenizer or the text cannot be used.
        """
        info = program.info
        encoded = encode(program.tokenizer_files.get("tokenizer.json"), self.text.content, info.bos_token_id)
        length = min(WINDOW, info.max_position_embeddings)
        return cut(encoded, tokens=self.tokens, length=length, vocab_size=info.vocab_size, source=self.text.source)

    def to_dict(self, windows: list[Window]) -> dict[str, Any]:
        return {"source": self.text.source, "sha256": self.text.sha256, "tokens": sum(map(len, windows))}


def two_texts(config: AutoquantConfig) -> tuple[TextInUse, TextInUse]:
    """Return the text of the trials, and that of the measurements.

    Raises:
        ConfigError: They are the same, or one cannot be read.
    """

    def load(name: str, purpose: Purpose) -> TextInUse:
        tokens = getattr(config, f"{name}_tokens")
        path, option = getattr(config, f"{name}_text"), f"--{name}-text"
        return TextInUse(load_text(path, purpose, characters=CHARACTERS_A_TOKEN * tokens, option=option), tokens)

    tried, measured = load("sensitivity", "calibration"), load("accuracy", "evaluation")
    if tried.text.sha256 == measured.text.sha256:
        raise ConfigError(
            f"{measured.text.source} is both what is tried on and what is measured on",
            where="--accuracy-text",
            hint="give two texts, or leave one out",
        )
    return tried, measured
