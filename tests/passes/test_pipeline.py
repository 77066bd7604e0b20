"""The pipeline's own promises: order, hook, verification, and errors that name the pass."""

from __future__ import annotations

import pytest
import torch

from llmbuild.builder import pipeline
from llmbuild.builder.ir import Rewrite
from llmbuild.builder.pipeline import PassError, optimize, phases
from llmbuild.builder.verify import Verifier
from llmbuild.quantization.recipes import find_recipe
from support.small_programs import random, small_program

NONE = find_recipe("none")


def program():
    return small_program(lambda x, p, w: torch.nn.functional.linear(x, w), w=random(16, 16))


def test_every_pass_is_logged_and_reported_to_the_hook_in_order() -> None:
    seen: list[str] = []
    subject = program()
    optimize(subject, NONE, after_pass=lambda name, _: seen.append(name))
    names = [name for name, _ in phases(NONE)]
    assert seen == names == [rewrite.name for rewrite in subject.rewrites]
    assert len(set(names)) == len(names)


def test_a_pass_that_breaks_metadata_is_named_with_those_before_it(monkeypatch) -> None:
    def breaks(program):
        node = next(node for node in program.graph.nodes if "linear" in str(node.target))
        node.meta["val"] = node.meta["val"].double()
        return Rewrite("breaks", 1)

    monkeypatch.setattr(pipeline, "rope", breaks)
    with pytest.raises(
        PassError, match=r"pass 'rope' failed \(after complex_rope, cleanup, cse, .*cse_weights\): linear"
    ) as caught:
        optimize(program(), NONE)
    assert "float64" in str(caught.value)


def test_a_pass_that_fails_is_named(monkeypatch) -> None:
    def fails(program):
        raise AssertionError("the wheel came off")

    monkeypatch.setattr(pipeline, "cleanup", fails)
    with pytest.raises(PassError, match=r"pass 'cleanup' failed \(after complex_rope\): the wheel came off"):
        optimize(program(), NONE)


def test_the_verifier_compares_weights_with_placeholders() -> None:
    subject = program()
    Verifier().check(subject)
    subject.weights["w"] = subject.weights["table"]
    with pytest.raises(AssertionError, match=r"w is \(16, 16\) torch.float32, its weight \(32, 16\)"):
        Verifier().check(subject)


def test_the_verifier_wants_a_weight_for_every_placeholder() -> None:
    subject = program()
    del subject.weights["w"]
    with pytest.raises(AssertionError, match=r"placeholders and weights differ: \{'w'\}"):
        Verifier().check(subject)


def test_the_verifier_rechecks_what_changed() -> None:
    subject, verifier = program(), Verifier()
    verifier.check(subject)
    node = next(node for node in subject.graph.nodes if "linear" in str(node.target))
    node.args = (subject.placeholder("table"), node.args[1])
    with pytest.raises(AssertionError, match="should be"):
        verifier.check(subject)
