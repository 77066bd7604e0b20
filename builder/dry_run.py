"""What `llmbuild convert` would do with a model: traced, fused and checked against the target, no weight read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmbuild.builder.options import (
    BuildConfig,
    check_build_packages,
    choose,
    resolve_cache,
    resolve_dtype,
    resolve_limits,
)
from llmbuild.builder.report import passes_to_list
from llmbuild.errors import ConfigError

if TYPE_CHECKING:
    from llmbuild.builder.memory import MemoryEstimate


@dataclass(frozen=True)
class DryRun:
    """The facts of one model.

    Attributes:
        architecture: Class of transformers.
        parameters: Number of weights' elements, tied ones once.
        kv_bytes: Bytes of the KV cache per token, all layers.
        nodes: Graph nodes traced, and after the passes.
        passes: What each pass did: name, count, declined.
        unsupported: What the target cannot lower, one line each; empty when the model converts.
        notes: Choices made for the user.
        weights_checked: Whether a checkpoint was there to check the names and shapes of its tensors.
        memory: What converting needs at its peak.
    """

    architecture: str
    parameters: int
    kv_bytes: int
    nodes: tuple[int, int]
    passes: list[dict[str, Any]]
    unsupported: list[str]
    notes: list[str]
    weights_checked: bool
    memory: MemoryEstimate

    def to_dict(self) -> dict[str, Any]:
        """Return what `llmbuild convert --dry-run --json` prints."""
        return {
            "architecture": self.architecture,
            "parameters": self.parameters,
            "kv_bytes_per_token": self.kv_bytes,
            "graph_nodes": {"traced": self.nodes[0], "optimized": self.nodes[1]},
            "passes": self.passes,
            "unsupported": self.unsupported,
            "notes": self.notes,
            "weights_checked": self.weights_checked,
            "memory": self.memory.to_dict(),
        }


def dry_run(config: BuildConfig) -> DryRun:
    """Trace the model at `config.model`, run the passes and ask the target about every node.

    A directory that holds nothing but `config.json` will do: names and shapes of tensors are then not checked.

    Raises:
        UserError: As `build`, except that what the target cannot lower is returned and not raised.
    """
    if config.measures_accuracy:
        raise ConfigError(
            "a dry run reads no weights, so that it measures no accuracy",
            where="--dry-run",
            hint="leave it out, or the thresholds and the --accuracy options",
        )
    choices = choose(config)
    check_build_packages()
    import torch

    from llmbuild.builder import memory, sections
    from llmbuild.builder.calibration import NothingKnown
    from llmbuild.builder.frontend.load import load_program
    from llmbuild.builder.frontend.no_checkpoint import NoCheckpoint
    from llmbuild.builder.ir import source_line
    from llmbuild.builder.pipeline import optimize
    from llmbuild.builder.targets.registry import find_target

    notes = list(choices.notes)
    target = find_target(choices.target)
    dtype = resolve_dtype(config, target, notes)
    choices = resolve_cache(config, choices, target, dtype, notes)
    program = load_program(
        config.model,
        dtype=getattr(torch, dtype),
        max_seq_len=config.max_seq_len,
        trust_remote_code=config.trust_remote_code,
        ignore_config_keys=config.ignore_config_keys,
        dry=True,
    )
    limits = resolve_limits(config, program.info, notes)
    traced = len(program.graph.nodes)
    parameters = sum(math.prod(weight.shape) for weight in program.weights.values() if weight.sources())
    checked = not any(NoCheckpoint.notices[0] in rewrite.declined for rewrite in program.rewrites)
    recipe = choices.recipe
    if recipe.kv_cache is not None and not checked:  # its scales are not here either
        recipe = replace(recipe, kv_cache=replace(recipe.kv_cache, stored=False))
    optimize(program, recipe, calibrate=lambda *_: NothingKnown())
    found = memory.estimate(program)
    memory.check(found, config.memory_limit)
    reasons = [(node, target.supports(node)) for node in program.graph.nodes]
    return DryRun(
        architecture=program.info.architecture,
        parameters=parameters,
        kv_bytes=sections.kv_cache(program, dtype, limits, choices.recipe.kv_cache).token_bytes,
        nodes=(traced, len(program.graph.nodes)),
        passes=passes_to_list(program.rewrites),
        unsupported=[f"{n.name} ({n.target}): {reason} [{source_line(n)}]" for n, reason in reasons if reason],
        notes=notes,
        weights_checked=checked,
        memory=found,
    )
