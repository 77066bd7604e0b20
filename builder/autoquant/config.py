"""What `llmbuild autoquant` is asked for, and what is refused before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmbuild.builder.options import BuildConfig, check_thresholds, choose
from llmbuild.errors import ConfigError, UserError, nearest
from llmbuild.quantization.recipes import KeepStored, find_recipe, named, needs_gram, observes

OBJECTIVES = ("size", "decode")
DEFAULT_CANDIDATES = ("int4-wo", "int8-wo", "none")
DEFAULT_SENSITIVITY_TOKENS = 512
DEFAULT_ACCURACY_TOKENS = 2048
PLOT_SUFFIX = ".svg"


@dataclass(frozen=True)
class AutoquantConfig:
    """What to search.

    Args:
        model: Hugging Face directory, or a `.gguf` file.
        output: The quant config to write; its plot is beside it, with the suffix .svg.
        max_kl: Most mean KL from the unquantized model, in nats, on the accuracy text.
        target, dtype, sm: As `BuildConfig` has them: what the engine will be for.
        candidates: Names of the recipes to choose from.
        calibration: File of statistics for candidates that round weights by GPTQ: read if it exists, else gathered
            over documentation strings and written. A build of the result must be given the same.
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
    calibration: Path | None = None
    objective: str = "size"
    sensitivity_text: Path | None = None
    sensitivity_tokens: int = DEFAULT_SENSITIVITY_TOKENS
    accuracy_text: Path | None = None
    accuracy_tokens: int = DEFAULT_ACCURACY_TOKENS
    force: bool = False
    trust_remote_code: bool = False
    ignore_config_keys: tuple[str, ...] = ()

    @property
    def plot(self) -> Path:
        return self.output.with_suffix(PLOT_SUFFIX)

    def __post_init__(self) -> None:
        if self.output == self.plot:
            raise ConfigError(
                f"{self.output} is where the plot goes", where="--output", hint="give a path that ends in .json"
            )
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

        if self.calibration is not None and not self.calibrated:
            raise ConfigError(
                f"none of {', '.join(self.candidates)} needs calibration",
                where="--calibration",
                hint="leave the option out",
            )

    @property
    def calibrated(self) -> bool:
        """Whether a candidate needs statistics of what linears read."""
        return any(observes(find_recipe(name).linear) for name in self.candidates)

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
            if observes(scheme) and not needs_gram(scheme):
                raise ConfigError(
                    f"recipe {name!r} scales what linears read, which the search cannot try in one place alone",
                    where=where,
                    hint="search among recipes that round weights to nearest or by GPTQ",
                )
            if observes(scheme) and self.calibration is None:
                raise ConfigError(
                    f"recipe {name!r} needs calibration, and a build of the result the same",
                    where="--calibration",
                    hint="give a file, which is written if it does not exist; convert --calibration reads it",
                )
            try:
                choose(BuildConfig(self.model, self.output, target=self.target, sm=self.sm, quant=name))
            except UserError as error:
                at = where if error.where == "--quant" else error.where
                raise type(error)(error.what, where=at, hint=error.hint) from None
