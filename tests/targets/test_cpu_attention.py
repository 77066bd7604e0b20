"""Every feature of attention in both forms of the cpu target, against `plugins/attention_reference.py`.

Sequences join, prefill in pieces across block and window edges, decode and leave (`cpu_engines.scenario`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from llmbuild.builder.ir import Constant, Program
from llmbuild.builder.passes.edit import arguments, fake_mode_of
from llmbuild.builder.targets.cpu import native_library
from support.cpu_engines import compiled, needs_compiler, open_session, oracle_logits, session_logits
from support.traced import optimized

SINKS, SLOPES = [0.5, -1.0, 2.0, 0.0], [0.1, 0.2, 0.05, 0.4]


class Case(NamedTuple):
    """family and config: a tiny model whose attention has a certain geometry. extras: arguments put into its ops."""

    family: str
    config: dict[str, Any] = {}
    extras: dict[str, Any] = {}


CASES = {
    "no groups": Case("llama", dict(num_key_value_heads=4)),
    "grouped": Case("llama"),
    "one kv head": Case("llama", dict(num_key_value_heads=1)),
    "heads wider than hidden over heads": Case("llama", dict(head_dim=32)),
    "values narrower than keys": Case("minicpm3"),
    "window": Case("llama", extras=dict(window=5)),
    "window of one": Case("llama", extras=dict(window=1)),
    "window in one layer": Case("gemma2", dict(attn_logit_softcapping=None)),
    "softcap": Case("llama", extras=dict(softcap=2.0)),
    "sinks": Case("llama", extras=dict(sinks=SINKS)),
    "alibi": Case("llama", extras=dict(alibi_slopes=SLOPES)),
    "values narrower than keys, with all else": Case(
        "minicpm3", extras=dict(scale=0.7, window=5, softcap=2.0, sinks=SINKS, alibi_slopes=SLOPES)
    ),
    "everything": Case("llama", extras=dict(scale=0.7, window=5, softcap=2.0, sinks=SINKS, alibi_slopes=SLOPES)),
    "heads of 12 channels": Case("llama", dict(head_dim=12), dict(window=5, softcap=2.0, sinks=SINKS)),
}


@pytest.mark.parametrize("name", CASES)
def test_feature(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    program = optimized(case.family, **case.config)
    plain = oracle_logits(program)
    put_in(program, case.extras)
    expected = oracle_logits(program)
    if case.extras:
        assert difference(plain, expected) > 1e-3  # the feature shows
    for native in (False, True) if native_library.find_compiler() else (False,):
        directory = tmp_path / str(native)
        target = compiled(program, directory, native=native)
        assert target.section["attention"] == ("paged" if native and name != "heads of 12 channels" else "dense")
        got = session_logits(open_session(directory, target), target)
        assert difference(got, expected) < 1e-5, f"native={native}"


@needs_compiler
def test_the_fallback_is_named(tmp_path: Path) -> None:
    """Heads of 12 channels: attention in standard operators, and the report says why."""
    program = optimized("llama", head_dim=12)
    compiled(program, tmp_path / "engine", native=True)
    assert program.rewrites[-1].declined[-1] == (
        "attention in standard operators: layer 0 has heads of 12 channels (multiples of 8 up to 512 are known)"
    )


def put_in(program: Program, extras: dict[str, Any]) -> None:
    """Replace arguments of all attention ops; lists become weights."""
    mode = fake_mode_of(program.graph)
    weights = {}
    for name, value in extras.items():
        if isinstance(value, list):
            tensor = torch.tensor(value)
            weights[name] = program.add_weight(name, Constant(tensor), mode.from_tensor(tensor))
    op = torch.ops.llmbuild.paged_attention.default
    names = [argument.name for argument in op._schema.arguments]
    for node in program.graph.nodes:
        if node.target is op:
            given = dict(zip(names, arguments(node), strict=True)) | extras | weights
            node.args, node.kwargs = tuple(given[name] for name in names), {}


def difference(got: list, expected: list) -> float:
    """Largest absolute difference over all steps, relative to the largest logit."""
    scale = max(float(abs(logits).max()) for logits in expected)
    return max(float(abs(a - b).max()) for a, b in zip(got, expected, strict=True)) / scale
