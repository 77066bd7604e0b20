"""What `llmbuild autoquant` is asked for, and what is refused before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmbuild.builder.options import BuildConfig, check_thresholds, choose
from llmbuild.errors import ConfigError, UserError, nearest
from llmbuild.quantization.recipes import KeepStored, named, observes

OBJECTIVES = ("size", "decode")
DEFAULT_CANDIDATES = ("int4-wo", "int8-wo", "none")
DEFAULT_SENSITIVITY_TOKENS = 512
DEFAULT_ACCURACY_TOKENS = 2048


@dataclass(frozen=True)
class AutoquantConfig:
    """What to search.

    Args:
        model: Hugging Face directory, or a `.gguf` file.
        output: The quant config to write; its plot is beside it, with the suffix .svg.
        max_kl: Most mean KL from the unquantized model, in nats, on the accuracy text.
        target, dtype, sm: As `BuildConfig` has them: what the engine will be for.
        candidates: Names of the recipes to choose from.
        objective: "size": fewest bytes of weights. "decode": fewest that a decode step of one token reads.
        sensitivity_text, sensitivity_tokens: Text that every recipe of every unit is tried on, alone.
        accuracy_text, accuracy_tokens: Text that choices are measured on.
        force: Replace files that exist.

    Raises:
        ConfigError: An option is out of range, or a candidate is unknown, given twice, or cannot be tried.
        UnsupportedError: The target has no products that a candidate asks for.
    """

    model: Path
    output: Path
    max_kl: float
    target: str = "cpu"
    dtype: str | None = None
    sm: str | None = None
    candidates: tuple[str, ...] = DEFAULT_CANDIDATES
    objective: str = "size"
    sensitivity_text: Path | None = None
    sensitivity_tokens: int = DEFAULT_SENSITIVITY_TOKENS
    accuracy_text: Path | None = None
    accuracy_tokens: int = DEFAULT_ACCURACY_TOKENS
    force: bool = False
    trust_remote_code: bool = False
    ignore_config_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_thresholds({"max_kl": self.max_kl})
        if self.objective not in OBJECTIVES:
            raise ConfigError(
                f"unknown objective {self.objective!r}",
                where="--objective",
                hint=nearest(self.objective, list(OBJECTIVES)),
            )
        for name in ("sensitivity_tokens", "accuracy_tokens"):
            if getattr(self, name) < 2:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}",
                    where="--" + name.replace("_", "-"),
                    hint="it must be an integer of at least 2",
                )
        self._check_candidates()

    def _check_candidates(self) -> None:
        where = "--candidates"
        if len(self.candidates) < 2 or len(set(self.candidates)) < len(self.candidates):
            raise ConfigError(
                f"the candidates are {', '.join(self.candidates) or 'none at all'}",
                where=where,
                hint=f"give at least two, each once, such as {','.join(DEFAULT_CANDIDATES)}",
            )
        for name in self.candidates:
            scheme = named(name, where).linear
            if isinstance(scheme, KeepStored):
                raise ConfigError(
                    f"recipe {name!r} keeps what a checkpoint stores, which is no choice",
                    where=where,
                    hint="a weight that is stored in as few bits as a candidate asks for is kept anyway",
                )
            if observes(scheme):
                raise ConfigError(
                    f"recipe {name!r} needs calibration, which the search does without",
                    where=where,
                    hint="search among recipes that need none; --quant-layer can replace one in the result",
                )
            try:
                choose(BuildConfig(self.model, self.output, target=self.target, sm=self.sm, quant=name))
            except UserError as error:
                at = where if error.where == "--quant" else error.where
                raise type(error)(error.what, where=at, hint=error.hint) from None
