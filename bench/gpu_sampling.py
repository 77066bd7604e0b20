"""Times of the sampling kernels on a GPU, beside torch in the same run.

    python bench/gpu_sampling.py [--kernels] [--save]

Rows of 128,256 bfloat16 logits, sampled greedily, with top-k 50 and top-p 0.95, and with top-p 0.95 alone. Tokens are
compared with the host's sampler first. Times are those of a CUDA graph that holds many calls, divided by their number:
what sampling costs behind a model. --kernels times each kernel too. Needs torch with CUDA and Triton; llmbuild need not
be installed. JSON lines first, a table last.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import uninstalled  # noqa: F401
from gpu_attention import capability, time_us
from records import emit, environment, table, write_results
from torch import Tensor

from llmbuild.engine.expressions import evaluate
from llmbuild.plugins.kernels.sampling_plan import SamplingLaunch, sampling_plan
from llmbuild.runtime.sampler import sample
from llmbuild.runtime.sampling_batch import SamplingBatch

DEVICE = "cuda"
COLUMNS = 128_256
ROWS = (1, 8, 64, 256)
KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
CHECKED = 8  # rows that are compared with the host's


def make_batch(rows: int, kind: str) -> SamplingBatch:
    batch = SamplingBatch.greedy(rows)
    values = {name: np.full(rows, value, getattr(batch, name).dtype) for name, value in KINDS[kind].items()}
    seeds = np.random.default_rng(rows).integers(0, 2**64, rows, dtype=np.uint64)
    return batch._replace(**values, seeds=seeds, all_greedy=not KINDS[kind])


class Ours:
    """The arrays of a plan on the GPU, and its launches."""

    def __init__(self, logits: Tensor, batch: SamplingBatch) -> None:
        self.sizes = {"L": len(logits), "T": len(logits)}
        self.plan = sampling_plan(COLUMNS, COLUMNS, "bfloat16", 1, capability(), pdl=capability() >= 90)
        self.arrays = {"logits": logits}
        for array in (*self.plan.workspaces, *self.plan.inputs, *self.plan.state):
            size = evaluate(array.size, self.sizes)
            name = array.name.removeprefix(self.plan.prefix + "_")
            self.arrays[name] = torch.zeros(size, dtype=getattr(torch, array.dtype), device=DEVICE)
        for name in ("temperature", "top_k", "top_p", "min_p"):
            self.arrays[name].copy_(torch.from_numpy(getattr(batch, name)))
        self.arrays["seeds"].copy_(torch.from_numpy(batch.seeds.view(np.int32)))
        self.launches = self.plan.greedy if batch.all_greedy else self.plan.full

    def run(self, launches: Iterable[SamplingLaunch]) -> None:
        for each in launches:
            spec = each.spec
            given: dict[str, Any] = {
                name: self.arrays[array.removeprefix(self.plan.prefix + "_")] for name, array in each.arrays.items()
            }
            grid = tuple(evaluate(text, self.sizes) for text in spec.grid)
            spec.function[grid](**given, **dict(spec.constants), num_warps=spec.num_warps, **spec.options)

    def check(self, logits: Tensor, batch: SamplingBatch) -> None:
        """Compare some tokens with the host's; rounding may move one of them."""
        self.run(self.launches)
        found = self.arrays["token_ids"][:CHECKED].tolist()
        part = batch._replace(
            **{name: value[:CHECKED] for name, value in batch._asdict().items() if isinstance(value, np.ndarray)}
        )
        expected = sample(logits[:CHECKED].float().cpu().numpy(), part).token_ids.tolist()
        if sum(a != b for a, b in zip(found, expected, strict=True)) > 1 or self.arrays["status"].any():
            raise SystemExit(f"wrong tokens: {found}, not {expected}")


def torch_call(logits: Tensor, batch: SamplingBatch) -> Callable[[int], None]:
    """Argmax; or softmax, a full sort, the cuts, and the draw as torch.multinomial makes it: without its checks, which
    wait for the GPU."""

    def greedy(_: int) -> None:
        logits.argmax(-1)

    def full(_: int) -> None:
        temperature, k, p = (float(values[0]) for values in (batch.temperature, batch.top_k, batch.top_p))
        ordered, ids = torch.sort(logits.float() / temperature, descending=True)
        if k:
            ordered[:, int(k) :] = float("-inf")
        probabilities = torch.softmax(ordered, -1)
        probabilities[probabilities.cumsum(-1) - probabilities >= p] = 0.0
        drawn = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)
        ids.gather(1, drawn)

    return greedy if batch.all_greedy else full


def measure(rows: int, kind: str, by_kernel: bool) -> list[dict[str, Any]]:
    torch.manual_seed(rows)
    logits = (torch.randn(rows, COLUMNS, device=DEVICE) * 3).bfloat16()
    batch = make_batch(rows, kind)
    ours = Ours(logits, batch)
    ours.check(logits, batch)
    work: dict[str, Any] = {"kind": kind, "rows": rows}
    records = [
        work | {"sampler": "ours", "us": round(time_us(lambda _: ours.run(ours.launches), 1), 2)},
        work | {"sampler": "torch", "us": round(time_us(torch_call(logits, batch), 1), 2)},
    ]
    for each in ours.launches if by_kernel else ():
        ours.run(ours.launches)  # what this one reads
        us = time_us(lambda _, each=each: ours.run([each]), 1)  # type: ignore[misc]
        records.append(work | {"kernel": each.spec.name, "us": round(us, 2)})
    return [emit(**record) for record in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kernels", action="store_true", help="time each kernel by itself too")
    parser.add_argument("--save", action="store_true", help="write bench/results/<date>-gpu-sampling.jsonl")
    options = parser.parse_args()
    card = torch.cuda.get_device_properties(0)
    about = emit(**environment(["torch", "triton", "numpy"]), gpu=card.name, multiprocessors=card.multi_processor_count)
    records = [record for kind in KINDS for rows in ROWS for record in measure(rows, kind, options.kernels)]
    if options.save:
        write_results("gpu-sampling", [about, *records])
    lines = [
        {"kind": kind, "rows": rows}
        | {
            each["sampler"]: each["us"]
            for each in records
            if (each["kind"], each["rows"]) == (kind, rows) and "sampler" in each
        }
        for kind in KINDS
        for rows in ROWS
    ]
    table("Sampling, microseconds a call", lines, ["kind", "rows", "ours", "torch"])


if __name__ == "__main__":
    main()
