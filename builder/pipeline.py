"""From the traced graph to the graph that targets compile: all phases, in order, on this screen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llmbuild.builder.ir import Program, Rewrite
from llmbuild.builder.passes.activation import activation
from llmbuild.builder.passes.add_rms_norm import add_rms_norm
from llmbuild.builder.passes.canonical_linear import canonical_linear
from llmbuild.builder.passes.cleanup import cleanup
from llmbuild.builder.passes.complex_rope import complex_rope
from llmbuild.builder.passes.cse import cse
from llmbuild.builder.passes.drop_batch_axis import drop_batch_axis
from llmbuild.builder.passes.float8_products import use_float8
from llmbuild.builder.passes.fold_weights import fold_weights
from llmbuild.builder.passes.gated_activation import gated_activation
from llmbuild.builder.passes.gather_rows import gather_rows
from llmbuild.builder.passes.layer_norm import layer_norm
from llmbuild.builder.passes.linear_inputs import Calibrate
from llmbuild.builder.passes.merge_linears import merge_linears
from llmbuild.builder.passes.one_expert import one_expert
from llmbuild.builder.passes.quantize_cache import quantize_cache
from llmbuild.builder.passes.quantize_weights import choose_formats, use_blocks
from llmbuild.builder.passes.rms_norm import rms_norm
from llmbuild.builder.passes.rope import rope
from llmbuild.builder.passes.stack_experts import stack_experts
from llmbuild.builder.verify import Verifier
from llmbuild.quantization.recipes import Recipe

Pass = Callable[[Program], Rewrite]

# The passes up to this one change how the model is written, those after it what is computed.
LAST_EXACT = "add_rms_norm"


def phases(recipe: Recipe, calibrate: Calibrate | None = None) -> list[tuple[str, Pass]]:
    """The passes in the order in which they run."""
    return [
        # One spelling, no batch axis, no computation on weights.
        ("complex_rope", complex_rope),
        ("cleanup", cleanup),
        ("cse", cse),
        ("drop_batch_axis", drop_batch_axis),
        ("cleanup_tokens", cleanup),
        ("canonical_linear", canonical_linear),
        ("one_expert", one_expert),
        ("stack_experts", stack_experts),
        ("fold_weights", fold_weights),
        ("cse_weights", cse),
        # Canonical ops. Norms before their sums, activations before their gates.
        ("rope", rope),
        ("rms_norm", rms_norm),
        ("layer_norm", layer_norm),
        ("activation", activation),
        ("gated_activation", gated_activation),
        ("cleanup_heads", cleanup),
        ("add_rms_norm", add_rms_norm),
        # Precision, then the merges that it allows.
        ("choose_formats", partial(choose_formats, recipe=recipe, calibrate=calibrate)),
        ("merge_linears", merge_linears),
        ("gather_rows", gather_rows),
        ("use_blocks", use_blocks),
        ("use_float8", use_float8),
        ("quantize_cache", partial(quantize_cache, recipe=recipe)),
        ("cleanup_last", cleanup),
        ("cse_last", cse),
    ]


def optimize(
    program: Program,
    recipe: Recipe,
    *,
    calibrate: Calibrate | None = None,
    after_pass: Callable[[str, Program], None] | None = None,
    after: str | None = None,
) -> None:
    """Run all passes on `program`, in place, and append what they did to `program.rewrites`.

    Args:
        calibrate: Gives the statistics that a calibrated recipe asks for.
        after_pass: Called with each pass's name and the program once the pass is verified: dumps, timing, comparisons.
        after: Run those behind this pass alone; those before ran already.

    Raises:
        PassError: A pass failed or left a graph that does not verify.
        UserError: The recipe does not fit the model.
    """
    verifier = Verifier()
    done: list[str] = []
    passes = phases(recipe, calibrate)
    if after is not None:
        passes = passes[[name for name, _ in passes].index(after) + 1 :]
    for name, apply in passes:
        try:
            rewrite = apply(program)
            verifier.check(program)
        except AssertionError as error:
            raise PassError(name, done, str(error)) from error
        rewrite.name = name
        program.rewrites.append(rewrite)
        done.append(name)
        if after_pass is not None:
            after_pass(name, program)


class PassError(RuntimeError):
    """A defect of a pass: names it, and the passes that ran before it."""

    def __init__(self, name: str, before: list[str], what: str) -> None:
        super().__init__(f"pass {name!r} failed (after {', '.join(before) or 'nothing'}): {what}")
        self.name = name
