"""The model under search: its units, what they are under each candidate, and choices measured so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from llmbuild.builder.accuracy.walk import copy_program
from llmbuild.builder.autoquant.choice import NONE, quant_config
from llmbuild.builder.autoquant.config import AutoquantConfig
from llmbuild.builder.autoquant.held_out import HeldOut
from llmbuild.builder.autoquant.result import AUTOQUANT, Measured
from llmbuild.builder.autoquant.search import MOST_MEASUREMENTS, Choice
from llmbuild.builder.autoquant.sensitivity import sensitivities
from llmbuild.builder.autoquant.texts import two_texts
from llmbuild.builder.autoquant.units import Option, find_options, find_units, other_bytes
from llmbuild.builder.build import Progress, under
from llmbuild.builder.calibration import Calibration
from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.ir import Program
from llmbuild.builder.options import BuildConfig
from llmbuild.builder.pipeline import LAST_EXACT, optimize
from llmbuild.builder.quant_config import QuantConfig
from llmbuild.errors import ConfigError
from llmbuild.quantization.recipes import customized, find_recipe


class Subject:
    """See the module.

    Args:
        config: What is searched.
        dtype: Of the engine, "bfloat16": what is not quantized has it. Everything here is computed in float32.
        progress: Told what is going on.

    Raises:
        ConfigError: A text cannot be used, or no candidate rounds anything.
        UserError: The model cannot be read.
    """

    def __init__(self, config: AutoquantConfig, dtype: str, progress: Progress | None) -> None:
        self.config = config
        self.tried_on, self.measured_on = two_texts(config)
        program, self.exact = _load(config, progress)
        self.units = find_units(self.exact)
        self.calibration: Calibration | None = None
        if config.calibrated:
            given = BuildConfig(config.model, config.output, calibration=config.calibration)
            self.calibration = Calibration(given, under("calibrate", progress))
        itemsize: int = getattr(torch, dtype).itemsize
        self._plain, *by_recipe = (
            find_options(self.exact, self.units, name, itemsize, self.calibration)
            for name in (NONE, *config.candidates)
        )
        self.options: list[list[Option]] = [list(each) for each in zip(*by_recipe, strict=True)]
        if all(option.exact for each in self.options for option in each):
            raise ConfigError(
                f"no weight of {program.info.name} is rounded by any of {', '.join(config.candidates)}",
                where="--candidates",
                hint="give recipes of fewer bits than the checkpoint has",
            )
        self._other = other_bytes(self.exact, self.units, itemsize)
        self.windows = self.tried_on.windows(self.exact)
        self.held_out = HeldOut(program, self.measured_on.windows(self.exact))
        self.measured: dict[Choice, Measured] = {}
        self._names = {self._plainest(self.uniform(place)): name for place, name in enumerate(config.candidates)}
        self._report = under("search", progress)

    def losses(self, progress: Callable[[int, int, str], None]) -> list[list[float]]:
        """Return the KL of each option of each unit, alone."""
        return sensitivities(self.exact, self.units, self.options, self.windows, progress)

    def costs(self) -> list[list[int]]:
        """Return the bytes of each option of each unit: all of them, or those that a decode step reads."""
        reads = self.config.objective == "decode"
        return [[option.read if reads else option.stored for option in each] for each in self.options]

    def uniform(self, option: int) -> Choice:
        """Return the choice of one candidate for all units."""
        return tuple(option for _ in self.units)

    def measure(self, choice: Choice) -> Measured:
        """Return the figures of a choice on the held-out text: of the program that a build with its config makes.

        Raises:
            AccuracyError: Logits are no distribution.
        """
        choice = self._plainest(choice)
        if choice not in self.measured:
            chosen = [each[option] for each, option in zip(self.options, choice, strict=True)]
            stored = self._other[0] + sum(option.stored for option in chosen)
            read = self._other[1] + sum(option.read for option in chosen)
            figures = self.held_out.figures(self._built(self.quant_config(choice)))
            name = self._names.get(choice, AUTOQUANT)
            self.measured[choice] = Measured(name, choice, stored, read, figures)
            most = MOST_MEASUREMENTS + len(self.config.candidates)
            label = f"{stored / 1e6:.0f} MB: KL {figures.kl_mean:.4g}"
            self._report(min(len(self.measured), most - 1), most, label)
        return self.measured[choice]

    def best(self) -> Measured | None:
        """Return the cheapest choice that was measured to keep the bound, if any did."""
        holding = [each for each in self.measured.values() if each.figures.kl_mean <= self.config.max_kl]
        reads = self.config.objective == "decode"
        return min(
            holding,
            key=lambda each: (each.read if reads else each.stored, each.figures.kl_mean, each.choice),
            default=None,
        )

    def quant_config(self, choice: Choice) -> QuantConfig:
        """Return the config of a choice."""
        return quant_config(self.exact, self.units, self.recipes(choice))

    def recipes(self, choice: Choice) -> Sequence[str]:
        """Return the recipe of each unit; "none" where another leaves it in the computation dtype."""
        names = self.config.candidates
        return [NONE if self._is_plain(unit, option) else names[option] for unit, option in enumerate(choice)]

    def _built(self, config: QuantConfig) -> Program:
        program = copy_program(self.exact)
        recipe = customized(config.quant, config.exclude, config.quant_layers)
        optimize(program, recipe, calibrate=self.calibration, after=LAST_EXACT)
        return program

    def _plainest(self, choice: Choice) -> Choice:
        """Return the choice with the candidate "none", if it is one, wherever another has no effect."""
        if NONE not in self.config.candidates:
            return choice
        none = self.config.candidates.index(NONE)
        return tuple(none if self._is_plain(unit, option) else option for unit, option in enumerate(choice))

    def _is_plain(self, unit: int, option: int) -> bool:
        chosen = self.options[unit][option]
        return chosen.exact and chosen.stored == self._plain[unit].stored


def _load(config: AutoquantConfig, progress: Progress | None) -> tuple[Program, Program]:
    """Return the unquantized program as a target gets it, and as it is before formats are chosen."""
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

    optimize(program, find_recipe(NONE), after_pass=keep)
    return program, kept[0]
