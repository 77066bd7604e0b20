"""Calibration: run windows of tokens through the graph and gather what linears read and KV caches store, by layers.

The graph is cut into segments, each of which ends with an attention; all windows go through one segment before the
next begins:

    | embedding, norm, q k v, attention | o, norm, gate up down, norm, q k v, attention | ... | o, norm, ..., lm_head |

In memory are the weights of one segment, what that segment makes of one window, and for every window the values that
later segments read, in the computation dtype: at these cuts little more than the residual and the attention's output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from llmbuild.builder.ir import INPUT_NAMES, Program, WeightExpr
from llmbuild.builder.oracle import is_assertion, last_uses
from llmbuild.builder.passes.edit import is_call
from llmbuild.builder.passes.linear_inputs import LinearInput
from llmbuild.plugins.attention_reference import PagedState, paged_state
from llmbuild.quantization.calibration.statistics import InputStatistics

ATTENTION = torch.ops.llmbuild.paged_attention.default

Progress = Callable[[int, int, str], None]  # done, total, label; in windows times segments


def calibrate(
    program: Program,
    windows: Sequence[Sequence[int]],
    inputs: Sequence[LinearInput],
    *,
    grams: Collection[str],
    write: Callable[[str, InputStatistics], None],
    progress: Progress | None = None,
) -> None:
    """Gather statistics of `inputs` and give each to `write` as soon as all windows have passed it.

    Args:
        program: Before linears are merged. Not changed.
        windows: Token ids, each the beginning of a text of its own.
        inputs: Of this program.
        grams: Keys of the inputs whose Gram matrix is wanted.
        progress: Told after each window of each segment.

    Raises:
        ModelError: An input holds NaN or infinity; the message names the linear.
    """
    if not windows or not all(len(window) for window in windows):
        raise ValueError("calibration needs windows, of at least one token each")
    by_node: dict[fx.Node, list[LinearInput]] = {}
    for each in inputs:
        by_node.setdefault(each.x, []).append(each)
    parts = segments(program.graph, by_node)
    dead_after = last_uses(program.graph)
    carried = [placeholders(program, window) for window in windows]
    for place, nodes in enumerate(parts):
        gathered = {
            each.key: InputStatistics.empty(each.columns, gram=each.key in grams)
            for node in nodes
            for each in by_node.get(node, ())
        }
        weights = SegmentWeights(program)
        for number, values in enumerate(carried):
            with paged_state(one_window(len(windows[number]))), torch.inference_mode():
                for node, value in run(nodes, values, weights, dead_after):
                    for each in by_node.get(node, ()):
                        gathered[each.key].add(value, name=each.key, window=number)
            if progress is not None:
                progress(place * len(windows) + number + 1, len(parts) * len(windows), f"layer {place}")
        for key, statistics in gathered.items():
            write(key, statistics)


def segments(graph: fx.Graph, wanted: Collection[fx.Node]) -> list[list[fx.Node]]:
    """Return the calls of the graph up to the last one that is wanted, cut after each attention."""
    calls = [node for node in graph.nodes if node.op == "call_function" and not is_assertion(node)]
    last = max((place for place, node in enumerate(calls) if node in wanted), default=-1)
    parts: list[list[fx.Node]] = [[]]
    for node in calls[: last + 1]:
        parts[-1].append(node)
        if is_call(node, ATTENTION):
            parts.append([])
    return [part for part in parts if part]


class SegmentWeights:
    """The weights that one segment reads, loaded when they are read first and freed with this object.

    Args:
        program: Whose weights.
        others: By name, weights that are in their place.
        shared: Holds the weights that are not among `others`.
    """

    def __init__(
        self,
        program: Program,
        others: Mapping[str, WeightExpr] | None = None,
        shared: SegmentWeights | None = None,
    ) -> None:
        self.expressions = program.weights if others is None else others
        self.shared = shared
        self.loaded: dict[str, Tensor] = {}

    def load(self, name: str) -> Tensor:
        if self.shared is not None and name not in self.expressions:
            return self.shared.load(name)
        if name not in self.loaded:
            self.loaded[name] = self.expressions[name].load()
        return self.loaded[name]


def run(
    nodes: Sequence[fx.Node],
    values: dict[fx.Node, Any],
    weights: SegmentWeights,
    dead_after: Mapping[fx.Node, Sequence[fx.Node]],
    calls: Mapping[fx.Node, Callable[..., Any]] | None = None,
) -> Iterator[tuple[fx.Node, Any]]:
    """Execute a segment for one window and yield each node with its value. `values` keeps what is read later.

    calls: what some nodes do instead of what they are.
    """

    def value_of(node: fx.Node) -> Any:
        return weights.load(node.name) if node.op == "placeholder" and node not in values else values[node]

    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
        target = (calls or {}).get(node, node.target)
        assert callable(target)
        values[node] = target(*args, **kwargs)
        yield node, values[node]
        for dead in dead_after.get(node, ()):
            values.pop(dead, None)


def placeholders(program: Program, window: Sequence[int]) -> dict[fx.Node, Any]:
    """Return the values of the graph's inputs for one window; all rows of logits are asked for."""
    positions = torch.arange(len(window), dtype=torch.int32)
    given = dict(zip(INPUT_NAMES, (torch.tensor(window, dtype=torch.int32), positions, positions), strict=True))
    return {program.placeholder(name): value for name, value in given.items()}


def one_window(tokens: int) -> PagedState:
    """Return an empty cache of one block that holds a whole window."""
    state = PagedState(num_blocks=1, block_size=tokens)
    state.set_step(
        torch.arange(tokens), torch.zeros(1, 1), torch.tensor([tokens], dtype=torch.int32), torch.tensor([0, tokens])
    )
    return state
