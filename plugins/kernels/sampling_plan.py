"""`sampling_plan`: the sampling kernels of an engine, in order, with the arrays that they need.

greedy    the likeliest token of each row
full      everything but penalties, bias and lists; greedy rows may be among them
adjusted  the same with them
logprobs  after any of the three, if a row asks for them
count     after any of the three, if a row has penalties
enter     before a step, for a sequence with penalties that enters (or enters again)
feed      before a step, if tokens of it are still being sampled
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton

from llmbuild.engine.expressions import cdiv
from llmbuild.plugins.kernels.kv_store import FLOATS
from llmbuild.plugins.kernels.paged_attention_decode import arguments_of
from llmbuild.plugins.kernels.sampling_adjust import adjust_listed, adjust_logits
from llmbuild.plugins.kernels.sampling_bins import BINS, sample_bins
from llmbuild.plugins.kernels.sampling_counts import clear_counts, enter_counts, update_counts
from llmbuild.plugins.kernels.sampling_cuts import sample_cuts
from llmbuild.plugins.kernels.sampling_draw import sample_draw, sample_sums
from llmbuild.plugins.kernels.sampling_edges import LISTED, sample_edges, sample_list
from llmbuild.plugins.kernels.sampling_feed import feed_tokens
from llmbuild.plugins.kernels.sampling_greedy import sample_greedy, sample_peaks
from llmbuild.plugins.kernels.sampling_logprobs import MOST_LOGPROBS, logprob_chunks, logprob_rows
from llmbuild.plugins.kernels.sampling_order import MOST_TOKENS
from llmbuild.plugins.kernels.spec import POINTER_TYPES, Constant, KernelSpec

CHUNK = 4096  # columns of a program
BLOCK = 64  # columns of a block, see sampling_edges.py
STEP = 2048  # candidates looked at at once
ENTRIES = 1 << 16  # of a kind of list in a step, all rows together


@dataclass(frozen=True)
class Array:
    """size: elements, an expression in T and L."""

    name: str
    dtype: str
    size: str


@dataclass(frozen=True)
class SamplingLaunch:
    """A kernel and what it is launched with: arrays for its pointers, expressions for its integers.

    arrays: argument -> name of an array of the plan, or "logits" or "input_ids", which are the step's.
    """

    spec: KernelSpec
    arrays: Mapping[str, str]
    numbers: Mapping[str, str]


@dataclass(frozen=True)
class SamplingPlan:
    """See the module for the lists of launches.

    workspaces: written and read within a step. inputs: written by the host before a step. state: stays on the device
    from step to step, all zeros at first; token_ids, status and the results of logprobs are read by the host.
    num_tokens: columns that can be sampled.
    """

    greedy: tuple[SamplingLaunch, ...]
    full: tuple[SamplingLaunch, ...]
    adjusted: tuple[SamplingLaunch, ...]
    logprobs: tuple[SamplingLaunch, ...]
    count: tuple[SamplingLaunch, ...]
    enter: tuple[SamplingLaunch, ...]
    feed: tuple[SamplingLaunch, ...]
    workspaces: tuple[Array, ...]
    inputs: tuple[Array, ...]
    state: tuple[Array, ...]
    num_tokens: int
    prefix: str

    @property
    def launches(self) -> tuple[SamplingLaunch, ...]:
        return (
            *self.greedy, *self.full, *self.adjusted, *self.logprobs, *self.count, *self.enter, *self.feed
        )  # fmt: skip

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """Each kernel once."""
        return tuple({launch.spec.name: launch.spec for launch in self.launches}.values())


def sampling_plan(
    columns: int,
    num_tokens: int,
    logits_dtype: str,
    max_rows: int,
    sm: int,
    *,
    name_prefix: str = "sample",
    pdl: bool = False,
    entries: int = ENTRIES,
) -> SamplingPlan:
    """Plan the sampling of logits [L, columns], of which columns from `num_tokens` on are padding.

    Args:
        max_rows: Most sequences at once: as many rows of counts.
        sm: Compute capability as 90.
        name_prefix: Of the names of kernels and arrays.
        pdl: Programmatic dependent launch, on SM 90 and up.
        entries: Most entries of a kind of list in a step, all rows together, and of ids that enter at once.

    Raises:
        ValueError: Another dtype than float32, float16 or bfloat16, or not 1 <= num_tokens <= columns, 2**18.
    """
    if logits_dtype not in FLOATS:
        raise ValueError(f"logits of {logits_dtype} are not sampled; {', '.join(FLOATS)} are")
    if not 1 <= num_tokens <= min(columns, MOST_TOKENS):
        raise ValueError(f"{num_tokens} tokens in {columns} columns; 1 to {min(columns, MOST_TOKENS)} can be sampled")
    return _Planner(columns, num_tokens, logits_dtype, name_prefix, pdl and sm >= 90).plan(max_rows, entries)


class _Planner:
    def __init__(self, columns: int, num_tokens: int, logits_dtype: str, prefix: str, pdl: bool) -> None:
        chunk = min(CHUNK, max(BLOCK, triton.next_power_of_2(num_tokens)))
        self._chunks = cdiv(num_tokens, chunk)
        self._blocks = self._chunks * chunk // BLOCK
        self._prefix, self._logits_dtype, self._columns = prefix, logits_dtype, columns
        self._num_tokens = num_tokens
        self._constants: dict[str, Constant] = {
            "COLUMNS": columns,
            "TOKENS": num_tokens,
            "CHUNK": chunk,
            "CHUNKS": self._chunks,
            "CHUNKS_BLOCK": triton.next_power_of_2(self._chunks),
            "BLOCKS": self._blocks,
            "BLOCKS_BLOCK": triton.next_power_of_2(self._blocks),
            "BINS": int(BINS),
            "BINS_EACH": triton.next_power_of_2(cdiv(int(BINS), self._chunks)),
            "STEP": STEP,
            "MOST": MOST_LOGPROBS,
            "MOST_BLOCK": triton.next_power_of_2(MOST_LOGPROBS),
            "PDL": pdl,
        }
        self._options = {"launch_pdl": True} if pdl else {}

    def plan(self, max_rows: int, entries: int) -> SamplingPlan:
        self._arrays = {
            kind: [Array(name, dtype, size) for dtype, sizes in table.items() for name, size in sizes.items()]
            for kind, table in self._tables(max_rows, entries).items()
        }
        self._dtypes = {array.name: array.dtype for group in self._arrays.values() for array in group}
        self._dtypes["input_ids"] = "int32"
        grid = (str(self._chunks), "L", "1")
        adjust = [
            self._launch("adjust", adjust_logits, grid, 4, options={"enable_fp_fusion": False}),
            self._launch("adjust_listed", adjust_listed, ("L", "1", "1"), 4, BLOCK=256,
                         options={"enable_fp_fusion": False}),
        ]  # fmt: skip
        wide = 1024
        return SamplingPlan(
            greedy=(
                self._launch("peaks_only", sample_peaks, grid, 4, BLOCK=BLOCK, block_keys=None, bin_weights=None),
                self._launch("greedy", sample_greedy, ("L", "1", "1"), 1),
            ),
            full=self._full("", "logits"),
            adjusted=(*adjust, *self._full("adjusted_", "values")),
            logprobs=(
                self._launch("logprob_chunks", logprob_chunks, grid, 4),
                self._launch("logprob_rows", logprob_rows, ("L", "1", "1"), 4),
            ),
            count=(self._launch("count", update_counts, ("cdiv(L, 256)", "1", "1"), 4, BLOCK=256),),
            enter=(
                self._launch("clear", clear_counts, (str(cdiv(self._columns, wide)), "1", "1"), 4, BLOCK=wide),
                self._launch("enter", enter_counts, (str(cdiv(entries, wide)), "1", "1"), 4, BLOCK=wide),
            ),
            feed=(self._launch("feed", feed_tokens, ("cdiv(T, 256)", "1", "1"), 4, BLOCK=256),),
            workspaces=self._named("workspaces"),
            inputs=self._named("inputs"),
            state=self._named("state"),
            num_tokens=self._num_tokens,
            prefix=self._prefix,
        )

    def _full(self, name: str, source: str) -> tuple[SamplingLaunch, ...]:
        """The kernels of full sampling that read the array `source`."""
        by_chunk, by_row = (str(self._chunks), "L", "1"), ("L", "1", "1")
        read = {"logits": source}
        return (
            self._launch(f"{name}peaks", sample_peaks, by_chunk, 4, read, BLOCK=BLOCK),
            self._launch(f"{name}bins", sample_bins, by_chunk, 8, read),
            self._launch("edges", sample_edges, by_row, 4),
            self._launch(f"{name}list", sample_list, by_chunk, 4, read),
            self._launch(f"{name}cuts", sample_cuts, by_row, 8, read),
            self._launch(f"{name}sums", sample_sums, by_chunk, 8, read),
            self._launch(f"{name}draw", sample_draw, by_row, 8, read),
        )

    def _launch(
        self,
        name: str,
        function: Any,
        grid: tuple[str, str, str],
        num_warps: int,
        renamed: Mapping[str, str] | None = None,
        options: Mapping[str, int | bool] | None = None,
        **given: Constant,
    ) -> SamplingLaunch:
        """renamed: argument -> array, where they are not called the same. given: further constants."""
        known = self._constants | given
        constants = {each: known[each] for each in function.arg_names if each in known}
        numbers = {each: size for each, size in (("tokens", "T"), ("rows", "L")) if each in function.arg_names}
        arrays = {
            each: (renamed or {}).get(each, each)
            for each in function.arg_names
            if each not in constants and each not in numbers
        }
        types = {each: POINTER_TYPES[self._dtype(array)] for each, array in arrays.items()}
        types |= dict.fromkeys(numbers, "i32")
        spec = KernelSpec(
            f"{self._prefix}_{name}",
            function,
            **arguments_of(function, types, constants),
            grid=grid,
            num_warps=num_warps,
            options={**self._options, **(options or {})},
        )
        return SamplingLaunch(spec, {each: self._array(array) for each, array in arrays.items()}, numbers)

    def _dtype(self, array: str) -> str:
        return self._logits_dtype if array == "logits" else self._dtypes[array]

    def _array(self, name: str) -> str:
        return name if name in ("logits", "input_ids") else f"{self._prefix}_{name}"

    def _named(self, kind: str) -> tuple[Array, ...]:
        return tuple(Array(self._array(array.name), array.dtype, array.size) for array in self._arrays[kind])

    def _tables(self, max_rows: int, entries: int) -> dict[str, dict[str, dict[str, str]]]:
        """kind of array -> dtype -> name -> size."""
        by_chunk, by_list = f"L * {self._chunks}", f"L * {LISTED.value}"
        most = f"{by_chunk} * {MOST_LOGPROBS}"
        workspaces = {
            "int32": {
                "peak_keys": by_chunk,
                "peak_ids": by_chunk,
                "block_keys": f"L * {self._blocks}",
                "edges": "L",
                "listed": "L",
                "list_keys": by_list,
                "list_ids": by_list,
                "cut_keys": "L",
                "cut_ids": "L",
                "part_keys": most,
                "part_ids": most,
                "part_ranks": by_chunk,
            },
            "int64": {
                "bin_weights": f"L * {BINS.value}",
                "above_edge": "L",
                "totals": "L",
                "chunk_sums": by_chunk,
            },
            "float32": {"part_sums": by_chunk, "values": f"L * {self._columns}"},
        }
        floats = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
        integers = ("top_k", "streams", "token_indices", "count_rows", "logprob_counts")
        offsets = ("allowed_offsets", "bias_offsets", "banned_offsets")
        lists = ("allowed_ids", "bias_ids", "banned_ids", "entering_ids")
        inputs = {
            "float32": dict.fromkeys(floats, "L") | {"bias_values": str(entries)},
            "int32": dict.fromkeys(integers, "L")
            | {"seeds": "2 * L", "feed_sources": "T", "entering": "4"}
            | dict.fromkeys(offsets, "L + 1")
            | dict.fromkeys(lists, str(entries)),
        }
        reported = f"L * {1 + MOST_LOGPROBS}"
        state = {
            "int32": {
                "token_ids": "L",
                "status": "L",
                "logprob_ids": reported,
                "ranks": "L",
                "counts": str(max_rows * self._columns),
            },
            "float32": {"logprobs": reported},
        }
        return {"workspaces": workspaces, "inputs": inputs, "state": state}
