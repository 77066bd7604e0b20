"""Tiny models, each traced once a process: tracing takes most of the time of a test that looks at what comes after it.

Passes change a program in place, so that each caller gets a copy. Tests of tracing itself trace for themselves.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from llmbuild.builder.accuracy.walk import copy_program
from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.ir import Program
from llmbuild.builder.pipeline import optimize
from llmbuild.quantization.recipes import find_recipe
from support.tiny_models import save_tiny, tiny_model


def traced(family: str, *, dtype: torch.dtype = torch.float32, **config: Any) -> Program:
    """Return a program as the frontend leaves it, the caller's to change.

    Args:
        family: A key of `FAMILIES` or `MOE_FAMILIES`.
        dtype: What it computes in.
        **config: Config values in place of the tiny defaults, made of what JSON has.
    """
    return copied(_traced(family, dtype, _key(config)))


def optimized(family: str, recipe: str = "none", *, dtype: torch.dtype = torch.float32, **config: Any) -> Program:
    """Return a program after all passes of a recipe that needs no calibration, the caller's to change."""
    return copied(_optimized(family, recipe, dtype, _key(config)))


def saved(family: str, **config: Any) -> Path:
    """Return the directory of the model, with its tokenizer, which nobody may write to."""
    return _saved(family, _key(config))


def _key(config: dict[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


@cache
def _saved(family: str, config: str) -> Path:
    """Weights are read from it whenever an expression is loaded, so that it lives as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="traced-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save_tiny(tiny_model(family, **json.loads(config)), folder / family)


@cache
def _traced(family: str, dtype: torch.dtype, config: str) -> Program:
    return load_program(_saved(family, config), dtype=dtype)


@cache
def _optimized(family: str, recipe: str, dtype: torch.dtype, config: str) -> Program:
    program = copied(_traced(family, dtype, config))
    optimize(program, find_recipe(recipe))
    return program


def copied(program: Program) -> Program:
    """Return a copy with the log of what was done so far, which `copy_program` starts anew."""
    copy = copy_program(program)
    copy.rewrites = list(program.rewrites)
    copy.cache_scales = program.cache_scales
    return copy
