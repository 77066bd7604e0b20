"""`llmbuild autoquant`: units → what each recipe costs and loses in them → descent → measured choice → quant config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmbuild.builder.autoquant.config import AutoquantConfig
from llmbuild.builder.build import Progress, under
from llmbuild.builder.options import check_build_packages
from llmbuild.errors import AccuracyError, ConfigError

if TYPE_CHECKING:
    from llmbuild.builder.accuracy.measures import Figures
    from llmbuild.builder.accuracy.texts import Text
    from llmbuild.builder.accuracy.windows import Window
    from llmbuild.builder.autoquant.result import Autoquant, Measured
    from llmbuild.builder.autoquant.search import Choice
    from llmbuild.builder.autoquant.units import Option, Unit
    from llmbuild.builder.calibration import Calibration
    from llmbuild.builder.ir import Program
    from llmbuild.builder.quant_config import QuantConfig
    from llmbuild.quantization.recipes import Recipe

NONE = "none"
WORST = 3  # units that an error names
PLOT_SUFFIX = ".svg"


def autoquant(config: AutoquantConfig, progress: Progress | None = None) -> Autoquant:
    """Search the precision of each unit and write the quant config and its plot.

    Raises:
        AccuracyError: No choice keeps the bound, or logits are no distribution.
        ConfigError: A file exists, a text cannot be used, or the model has nothing to choose for.
        UserError: The model cannot be read.
    """
    from llmbuild.builder.calibrate_model import check_new

    plot = config.output.with_suffix(PLOT_SUFFIX)
    for path in (config.output, plot):
        check_new(path, force=config.force)
    check_build_packages()
    under("trace", progress)(0, 1, "importing torch and transformers")
    from llmbuild.builder.autoquant.result import Autoquant, pareto_plot
    from llmbuild.builder.autoquant.search import descent, search

    subject = Subject(config, progress)
    losses = subject.losses(under("sensitivity", progress))
    costs = [[subject.cost(option) for option in each] for each in subject.options]
    found = search(descent(costs, losses), subject.kl_of, config.max_kl)
    if found.choice is None:
        raise subject.unreachable(losses)
    for number in range(len(config.candidates)):
        subject.measure(tuple(number for _ in subject.units))
    choice = subject.plainest(found.choice)
    chosen = subject.measure(choice)
    section = subject.section(chosen)
    written = subject.quant_config(choice).model_copy(update={"search": section})
    measured = sorted(subject.measured.values(), key=lambda each: (each.stored, each.name, each.figures.kl_mean))
    config.output.write_text(written.to_json(), encoding="utf-8")
    plot.write_text(pareto_plot(measured, config.max_kl, config.objective), encoding="utf-8")
    return Autoquant(config.output, plot, section, chosen, measured, subject.results(choice, losses), subject.notes)


def calibration_of(config: AutoquantConfig, progress: Any) -> Calibration | None:
    """Return what gives statistics; None where no candidate needs them."""
    from llmbuild.builder.calibration import Calibration
    from llmbuild.builder.options import BuildConfig

    if not config.calibrated:
        return None
    return Calibration(BuildConfig(config.model, config.output, calibration=config.calibration), progress)


def two_texts(config: AutoquantConfig) -> tuple[Text, Text]:
    """Return the text that recipes are tried on, and the one that choices are measured on.

    Raises:
        ConfigError: They are the same, or one cannot be read.
    """
    from llmbuild.builder.accuracy.quantized import CHARACTERS_A_TOKEN
    from llmbuild.builder.accuracy.texts import load_text

    needed = CHARACTERS_A_TOKEN * config.sensitivity_tokens
    tried = load_text(config.sensitivity_text, "calibration", characters=needed, option="--sensitivity-text")
    needed = CHARACTERS_A_TOKEN * config.accuracy_tokens
    measured = load_text(config.accuracy_text, "evaluation", characters=needed, option="--accuracy-text")
    if tried.sha256 == measured.sha256:
        raise ConfigError(
            f"{measured.source} is both what is tried on and what is measured on",
            where="--accuracy-text",
            hint="give two texts, or leave one out",
        )
    return tried, measured


class Subject:
    """One model under search: its units and their options, and choices measured so far."""

    def __init__(self, config: AutoquantConfig, progress: Progress | None) -> None:
        import torch

        from llmbuild.builder.accuracy.walk import copy_program
        from llmbuild.builder.autoquant.held_out import HeldOut
        from llmbuild.builder.autoquant.units import find_options, find_units, other_bytes
        from llmbuild.builder.frontend.load import load_program
        from llmbuild.builder.pipeline import LAST_EXACT, optimize
        from llmbuild.quantization.recipes import find_recipe

        self.config = config
        self.notes: list[str] = []
        self.dtype = self._dtype()
        self.sensitivity_text, self.accuracy_text = two_texts(config)
        program = load_program(
            config.model,
            dtype=torch.float32,
            progress=under("trace", progress),
            trust_remote_code=config.trust_remote_code,
            ignore_config_keys=config.ignore_config_keys,
        )
        kept: list[Program] = []

        def keep(name: str, at: Program) -> None:
            if name == LAST_EXACT:
                kept.append(copy_program(at))

        optimize(program, find_recipe("none"), after_pass=keep)
        (self.exact,) = kept
        itemsize = getattr(torch, self.dtype).itemsize
        self.units: list[Unit] = find_units(self.exact)
        self.calibration = calibration_of(config, under("calibrate", progress))
        plain, *by_recipe = (
            find_options(self.exact, self.units, name, itemsize, self.calibration)
            for name in ("none", *config.candidates)
        )
        self.plain: list[Option] = plain
        self.options: list[list[Option]] = [list(each) for each in zip(*by_recipe, strict=True)]
        if all(option.exact for each in self.options for option in each):
            raise ConfigError(
                f"no weight of {program.info.name} is rounded by any of {', '.join(config.candidates)}",
                where="--candidates",
                hint="give recipes of fewer bits than the checkpoint has",
            )
        self.other = other_bytes(self.exact, self.units, itemsize)
        self.sensitivity_windows = self._windows(self.sensitivity_text, config.sensitivity_tokens)
        windows = self._windows(self.accuracy_text, config.accuracy_tokens)
        self.held_out = HeldOut(program, windows)
        self.measured: dict[Choice, Measured] = {}
        self._report = under("search", progress)

    def losses(self, progress: Any) -> list[list[float]]:
        """Return the KL of each option of each unit, alone."""
        from llmbuild.builder.autoquant.sensitivity import sensitivities

        return sensitivities(self.exact, self.units, self.options, self.sensitivity_windows, progress)

    def cost(self, option: Option) -> int:
        return option.read if self.config.objective == "decode" else option.stored

    def kl_of(self, choice: Choice) -> float:
        return self.measure(choice).figures.kl_mean

    def measure(self, choice: Choice) -> Measured:
        """Return the figures of a choice on the held-out text: of the program that a build with its config makes."""
        from llmbuild.builder.accuracy.walk import copy_program
        from llmbuild.builder.autoquant.result import AUTOQUANT, Measured
        from llmbuild.builder.autoquant.search import MOST_MEASUREMENTS
        from llmbuild.builder.pipeline import LAST_EXACT, optimize

        choice = self.plainest(choice)
        if choice not in self.measured:
            chosen = [each[option] for each, option in zip(self.options, choice, strict=True)]
            config = self.quant_config(choice)
            program = copy_program(self.exact)
            optimize(program, self._recipe(config), calibrate=self.calibration, after=LAST_EXACT)
            stored = self.other[0] + sum(option.stored for option in chosen)
            read = self.other[1] + sum(option.read for option in chosen)
            uniform = len(set(choice)) == 1
            name = self.config.candidates[choice[0]] if uniform else AUTOQUANT
            self.measured[choice] = Measured(name, stored, read, self._figures(program))
            most = MOST_MEASUREMENTS + len(self.config.candidates)
            kl = self.measured[choice].figures.kl_mean
            self._report(min(len(self.measured), most - 1), most, f"{stored / 1e6:.0f} MB: KL {kl:.4g}")
        return self.measured[choice]

    def plainest(self, choice: Choice) -> Choice:
        """Return the choice with "none" wherever another recipe has no effect."""
        if NONE not in self.config.candidates:
            return choice
        none = self.config.candidates.index(NONE)
        return tuple(none if self._is_plain(unit, option) else option for unit, option in enumerate(choice))

    def _is_plain(self, unit: int, option: int) -> bool:
        """Whether an option leaves a unit in the computation dtype."""
        chosen = self.options[unit][option]
        return chosen.exact and chosen.stored == self.plain[unit].stored

    @staticmethod
    def _recipe(config: QuantConfig) -> Recipe:
        from llmbuild.quantization.recipes import customized

        return customized(config.quant, config.exclude, config.quant_layers)

    def _figures(self, program: Program) -> Figures:
        return self.held_out.figures(program)

    def quant_config(self, choice: Choice) -> QuantConfig:
        from llmbuild.builder.autoquant.choice import quant_config

        names = self.config.candidates
        recipes = [NONE if self._is_plain(unit, option) else names[option] for unit, option in enumerate(choice)]
        return quant_config(self.exact, self.units, recipes)

    def unreachable(self, losses: Sequence[Sequence[float]]) -> AccuracyError:
        """Return the error where even the choice that loses least misses the bound."""
        from llmbuild.builder.accuracy.record import shown

        best = min(self.measured.values(), key=lambda each: each.figures.kl_mean)
        least = sorted(((min(each), unit.name) for each, unit in zip(losses, self.units, strict=True)), reverse=True)
        named = ", ".join(f"{name} (KL {shown(loss)} alone)" for loss, name in least[:WORST] if loss > 0)
        more = "" if "none" in self.config.candidates else " and none"
        return AccuracyError(
            f"no choice of {', '.join(self.config.candidates)} keeps the mean KL within --max-kl "
            f"{self.config.max_kl:g}: the best reaches {shown(best.figures.kl_mean)}",
            where=f"worst units: {named}" if named else None,
            hint=f"allow more, or give --candidates with more bits: int8-wo{more}",
        )

    def section(self, chosen: Measured) -> dict[str, Any]:
        """Return what the config tells of the search: what was asked for, on what, and what was measured."""
        import llmbuild
        from llmbuild.builder.calibration import model_sha256

        config = self.config
        return {
            "llmbuild": llmbuild.__version__,
            "model": self.exact.info.name,
            "model_sha256": model_sha256(self.exact),
            "target": config.target,
            "dtype": self.dtype,
            "candidates": list(config.candidates),
            "objective": config.objective,
            "max_kl": config.max_kl,
            "sensitivity": self._text(self.sensitivity_text, sum(map(len, self.sensitivity_windows))),
            "accuracy": self._text(self.accuracy_text, self.held_out.tokens),
            "calibration": None if self.calibration is None else self.calibration.section(),
            "measured": chosen.to_dict(),
        }

    def results(self, choice: Choice, losses: Sequence[Sequence[float]]) -> list[Any]:
        """Return what became of each unit."""
        from llmbuild.builder.autoquant.result import UnitResult

        found = []
        for unit, options, option, alone in zip(self.units, self.options, choice, losses, strict=True):
            chosen = options[option]
            loss = dict(zip(self.config.candidates, alone, strict=True))
            found.append(UnitResult(unit.name, chosen.recipe, chosen.stored, chosen.read, loss))
        return found

    def _dtype(self) -> str:
        from llmbuild.builder.targets.registry import find_target
        from llmbuild.errors import UnsupportedError

        target = find_target(self.config.target)
        if self.config.dtype is None:
            self.notes.append(f"dtype {target.dtypes[0]}: what the {target.name} target computes in")
            return target.dtypes[0]
        if self.config.dtype not in target.dtypes:
            raise UnsupportedError(
                f"the {target.name} target does not compute in {self.config.dtype}",
                where="--dtype",
                hint=f"use --dtype {' or '.join(target.dtypes)}",
            )
        return self.config.dtype

    def _windows(self, text: Text, tokens: int) -> list[Window]:
        from llmbuild.builder.accuracy.windows import WINDOW, cut, encode

        info = self.exact.info
        encoded = encode(self.exact.tokenizer_files.get("tokenizer.json"), text.content, info.bos_token_id)
        length = min(WINDOW, info.max_position_embeddings)
        return cut(encoded, tokens=tokens, length=length, vocab_size=info.vocab_size, source=text.source)

    @staticmethod
    def _text(text: Text, tokens: int) -> dict[str, Any]:
        return {"source": text.source, "sha256": text.sha256, "tokens": tokens}
