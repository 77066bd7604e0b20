"""How the GPU's memory is shared out: what a plan needs, and how many KV blocks fit into the rest."""

from __future__ import annotations

from typing import NamedTuple

from llmbuild.engine.launch_plan import LaunchPlan
from llmbuild.errors import ConfigError, EngineError
from llmbuild.units import human_size

GEMM_WORKSPACE = 32 << 20
MARGIN = 128 << 20  # left alone: the driver's own needs, code of GEMM kernels, fragments
GRAPH_BYTES = 2 << 20  # set aside for each captured graph
INT32_END = 1 << 31  # slots are int32


class Needs(NamedTuple):
    """Bytes that are spent whatever the KV pool's size."""

    weights: int
    arena: int
    counters: int
    inputs: int
    sampling: int
    workspace: int
    graphs: int

    @property
    def total(self) -> int:
        return sum(self) + MARGIN


def block_bytes(plan: LaunchPlan) -> int:
    """Return the bytes of one block of all layers' keys and values."""
    return sum(pool.token_bytes for pool in plan.pools) * plan.limits.block_size


def check_fraction(fraction: float) -> None:
    """Raise ConfigError when a fraction of the memory is not in (0, 1]."""
    if not 0 < fraction <= 1:
        raise ConfigError(f"kv_memory_fraction is {fraction}", hint="allowed: more than 0, at most 1")


def choose_blocks(
    plan: LaunchPlan,
    needs: Needs,
    *,
    free: int,
    fraction: float,
    max_seq_len: int,
    num_blocks: int | None,
    gpu: str,
) -> int:
    """Return how many KV blocks to allocate, without the one that padding rows write to.

    The most are those for `max_batch_size` sequences of `max_seq_len` tokens, the fewest those for one.

    Args:
        free: Bytes of free memory, before anything of `needs` is allocated.
        fraction: How much of what `needs` leaves may be used for KV blocks.
        num_blocks: Blocks that the user asked for; None for what fits.
        gpu: Name of the GPU, for errors.

    Raises:
        ConfigError: The fraction is not in (0, 1].
        EngineError: What is needed does not fit.
    """
    check_fraction(fraction)
    size, limits = block_bytes(plan), plan.limits
    a_sequence = -(-max_seq_len // limits.block_size)
    most = min(a_sequence * limits.max_batch_size, INT32_END // limits.block_size - 1)
    left = free - needs.total - size
    fitting = int(left * fraction) // size if left > 0 and size else (most if left > 0 else 0)
    if num_blocks is not None:
        if left < num_blocks * size:
            raise _too_little(needs, num_blocks * size, f"{num_blocks} KV blocks", free, gpu, "fewer kv_cache_blocks")
        return num_blocks
    if fitting < a_sequence:
        what = f"the KV cache of one sequence of {max_seq_len} tokens"
        raise _too_little(needs, a_sequence * size, what, free, gpu, _advice(needs, a_sequence * size))
    return min(most, fitting)


def _advice(needs: Needs, cache: int) -> str:
    """Return what to lower: that which takes most."""
    largest = max(needs.weights, needs.arena, cache)
    if largest == needs.arena:
        return "convert the model again with a lower --max-num-tokens"
    if largest == cache:
        return "convert the model again with a lower --max-seq-len"
    return "convert the model again with --quant, which makes the weights smaller"


def _too_little(needs: Needs, cache: int, what: str, free: int, gpu: str, advice: str) -> EngineError:
    parts = (
        f"weights {human_size(needs.weights)}, activations {human_size(needs.arena)}, {what} {human_size(cache)}, "
        f"others {human_size(needs.total - needs.weights - needs.arena)}"
    )
    return EngineError(
        f"the GPU has too little free memory: {human_size(needs.total + cache)} are needed, "
        f"{human_size(max(free, 0))} are free",
        where=f"{gpu}: {parts}",
        hint=f"end other processes that use the GPU (nvidia-smi lists them), or {advice}",
    )
