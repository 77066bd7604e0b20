"""Runs the launches of a sampling plan on arrays in this process, and fills those arrays from a SamplingBatch."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from llmbuild.engine.expressions import evaluate
from llmbuild.plugins.kernels.sampling_plan import SamplingLaunch, SamplingPlan, sampling_plan
from llmbuild.runtime.sampling_batch import SamplingBatch
from support.kernels import run

POISON = 0x5A  # every byte of a workspace: nothing may depend on what a kernel did not write


class Sampler:
    """All arrays of a plan for L rows, by their names without the prefix; `logits` and `input_ids` beside them."""

    def __init__(
        self, columns: int, num_tokens: int, rows: int, *, dtype: str = "float32", max_rows: int = 4, tokens: int = 8
    ) -> None:
        self.plan: SamplingPlan = sampling_plan(columns, num_tokens, dtype, max_rows, 90, entries=1024)
        self.sizes = {"L": rows, "T": tokens}
        self.arrays: dict[str, torch.Tensor] = {
            "logits": torch.zeros(rows, columns, dtype=getattr(torch, dtype)),
            "input_ids": torch.zeros(tokens, dtype=torch.int32),
        }
        for array in (*self.plan.workspaces, *self.plan.inputs, *self.plan.state):
            size, kind = evaluate(array.size, self.sizes), getattr(torch, array.dtype)
            poisoned = torch.full((size * kind.itemsize,), POISON, dtype=torch.uint8).view(kind)
            name = array.name.removeprefix(self.plan.prefix + "_")
            self.arrays[name] = torch.zeros(size, dtype=kind) if array in self.plan.state else poisoned

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name].numpy()

    def launch(self, launches: Iterable[SamplingLaunch]) -> None:
        """Run kernels in order, but those of an empty grid."""
        for each in launches:
            grid = [evaluate(text, self.sizes) for text in each.spec.grid]
            if math.prod(grid) == 0:
                continue
            given = {
                name: self.arrays[array.removeprefix(self.plan.prefix + "_")] for name, array in each.arrays.items()
            }
            given |= {name: evaluate(text, self.sizes) for name, text in each.numbers.items()}
            spec = each.spec
            run(spec.function, grid, **given, **dict(spec.constants), **spec.options, num_warps=spec.num_warps)

    def load(self, logits: np.ndarray, batch: SamplingBatch) -> None:
        """Write logits [L, columns] and the batch, its extras too: penalties through `enter`."""
        self.arrays["logits"].copy_(torch.from_numpy(np.ascontiguousarray(logits)))
        for name in ("temperature", "top_k", "top_p", "min_p", "presence", "frequency", "repetition"):
            self[name][:] = getattr(batch, name)
        self["seeds"][:] = batch.seeds.view(np.int32)  # little-endian: the lower word first
        self["streams"][:], self["token_indices"][:] = batch.streams, batch.token_indices
        self["count_rows"][:] = self["logprob_counts"][:] = -1
        extras = batch.extras or [None] * self.sizes["L"]
        for row, extra in enumerate(extras):
            if extra is not None and extra.logprobs is not None:
                self["logprob_counts"][row] = extra.logprobs
            if extra is not None and extra.output is not None:
                self["count_rows"][row] = self.enter(row, extra.prompt, extra.output)
        self._list("allowed", [extra and extra.allowed for extra in extras])
        self._list("banned", [extra and extra.banned for extra in extras])
        self._list("bias", [extra and extra.bias and extra.bias[0] for extra in extras])
        added = [extra.bias[1] for extra in extras if extra is not None and extra.bias is not None]
        self["bias_values"][: sum(map(len, added))] = np.concatenate([*added, np.empty(0, np.float32)])

    def enter(self, row: int, prompt: np.ndarray, output: np.ndarray, piece: int = 100) -> int:
        """Write a row of counts, so many tokens at once; returns the row."""
        ids = np.concatenate((prompt, output))
        for start in range(0, max(len(ids), 1), piece):
            part = ids[start : start + piece]
            self["entering"][:] = row, len(part), min(max(len(prompt) - start, 0), len(part)), start == 0
            self["entering_ids"][: len(part)] = part
            self.launch(self.plan.enter)
        return row

    def _list(self, name: str, rows: list[np.ndarray | None]) -> None:
        lists = [np.empty(0, np.int32) if ids is None else ids for ids in rows]
        self[f"{name}_offsets"][:] = np.cumsum([0, *map(len, lists)])
        self[f"{name}_ids"][: sum(map(len, lists))] = np.concatenate([*lists, np.empty(0, np.int32)])

    def sample(self, logits: np.ndarray, batch: SamplingBatch) -> list[int]:
        """Load and sample as an executor would; return the tokens, -1 for rows whose status is not 0."""
        self.load(logits, batch)
        plain = self.plan.greedy if batch.all_greedy else self.plan.full
        self.launch(self.plan.adjusted if batch.extras is not None else plain)
        if batch.extras is not None and any(extra is not None and extra.logprobs is not None for extra in batch.extras):
            self.launch(self.plan.logprobs)
        return np.where(self["status"] == 0, self["token_ids"], -1).tolist()


def sampler_for(logits: np.ndarray, batch: SamplingBatch, *, dtype: str = "float32") -> Sampler:
    rows, columns = logits.shape
    return Sampler(columns, batch.num_tokens or columns, rows, dtype=dtype, max_rows=max(rows, 1))
