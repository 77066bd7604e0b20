"""The cuda target on a GPU, with random weights: decode, time to first token, throughput, start.

    python bench/plan_engine.py llama-3.1-8b ENGINE          (anywhere)
    python bench/h200.py ENGINE [--batches 1,8,64,256] [--save NAME]

Prompts are random ids, the end of sequence is ignored, sampling is greedy. JSON lines first, tables last. A peer's
records have the same shape, so that its lines can be put beside ours (`--peers FILE`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from records import emit, environment, package_version, table, write_results

from llmbuild.engine.reader import open_engine
from llmbuild.runtime.core import EngineCore
from llmbuild.runtime.executors.cuda.executor import CudaExecutor
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.request import make_request
from llmbuild.runtime.sampling_params import SamplingParams


class Server:
    """An engine with random weights, stepped as `LLM` does it."""

    def __init__(self, path: Path) -> None:
        begin = time.perf_counter()
        engine = open_engine(path, requirements=False)
        self.limits = ServingLimits.of(engine.manifest)
        self.executor = CudaExecutor(engine, random_weights=True)
        self.loaded_s = time.perf_counter() - begin
        self.executor.warm_up()
        self.ready_s = time.perf_counter() - begin
        self.core = EngineCore(self.executor, self.limits, None)
        self.count = 0

    def run(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[float]]:
        """Serve all prompts at once; return when it began, and when each step ended."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        pool = self.executor.num_blocks * self.executor.block_size
        begin = time.perf_counter()
        for prompt in prompts:
            self.count += 1
            self.core.add(make_request(str(self.count), prompt, params, self.limits, pool_tokens=pool))
        ends = []
        while self.core.has_work:
            self.core.step()
            ends.append(time.perf_counter())
        return begin, ends


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(10, vocab) for _ in range(length)] for _ in range(count)]


def decode(server: Server, batch: int, isl: int, osl: int, rounds: int = 2) -> dict[str, Any]:
    """ms_per_step: (time of osl tokens - time of one) / (osl - 1). ms_median: of the steps after the prompts."""
    vocab = server.limits.vocab_size
    server.run(random_prompts(batch, isl, vocab, 99), min(8, osl))
    found = []
    for seed in range(rounds):
        begin, ends = server.run(random_prompts(batch, isl, vocab, 50 + seed), 1)
        one = ends[-1] - begin
        begin, ends = server.run(random_prompts(batch, isl, vocab, 1 + seed), osl)
        steps = [later - earlier for earlier, later in zip(ends[-osl:], ends[-osl + 1 :], strict=False)]
        found.append(((ends[-1] - begin - one) / (osl - 1) * 1e3, statistics.median(steps) * 1e3))
    per_step, median = min(found)
    return {
        "kind": "decode",
        "B": batch,
        "isl": isl,
        "osl": osl,
        "ms_per_step": round(per_step, 4),
        "ms_median": round(median, 4),
        "out_tok_s": round(batch / per_step * 1e3, 1),
    }


def first_token(server: Server, isl: int, rounds: int = 5) -> dict[str, Any]:
    vocab = server.limits.vocab_size
    server.run(random_prompts(1, isl, vocab, 3), 1)
    times = []
    for seed in range(rounds):
        begin, ends = server.run(random_prompts(1, isl, vocab, 10 + seed), 1)
        times.append((ends[-1] - begin) * 1e3)
    return {
        "kind": "ttft",
        "B": 1,
        "isl": isl,
        "ms_median": round(statistics.median(times), 2),
        "ms_min": round(min(times), 2),
    }


def throughput(server: Server, count: int, isl: int, osl: int) -> dict[str, Any]:
    begin, ends = server.run(random_prompts(count, isl, server.limits.vocab_size, 7), osl)
    seconds = ends[-1] - begin
    return {
        "kind": "throughput",
        "B": count,
        "isl": isl,
        "osl": osl,
        "seconds": round(seconds, 3),
        "steps": len(ends),
        "out_tok_s": round(count * osl / seconds, 1),
    }


def gpu() -> str:
    from llmbuild.runtime.executors.cuda.driver import Device

    device = Device(0)
    try:
        return device.name
    finally:
        device.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--isl", type=int, default=128)
    parser.add_argument("--osl", type=int, default=128)
    parser.add_argument("--ttft", default="2048,8192", help="prompt lengths; empty: none")
    parser.add_argument("--throughput", default="256x1024x128,256x128x512", help="requests x prompt x new; empty: none")
    parser.add_argument("--tag", default="bf16")
    parser.add_argument("--peers", type=Path, help="JSON lines of peers that ran on the same machine")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/DATE-NAME.jsonl")
    arguments = parser.parse_args()

    records = [emit(**environment(("llmbuild", "cuda-bindings", "nvidia-cublas", "numpy")), gpu=gpu())]
    who = {"peer": f"llmbuild-{package_version('llmbuild')}", "tag": arguments.tag}
    server = Server(arguments.engine)
    rows = [emit(**who, kind="start", seconds=round(server.ready_s, 2), loaded_s=round(server.loaded_s, 2))]
    for batch in filter(None, arguments.batches.split(",")):
        rows.append(emit(**who, **decode(server, int(batch), arguments.isl, arguments.osl)))
    for isl in filter(None, arguments.ttft.split(",")):
        rows.append(emit(**who, **first_token(server, int(isl))))
    for text in filter(None, arguments.throughput.split(",")):
        rows.append(emit(**who, **throughput(server, *map(int, text.split("x")))))
    if arguments.peers:
        rows += [json.loads(line) for line in arguments.peers.read_text().splitlines() if line.startswith("{")]
    for kind, columns in (
        ("decode", ["peer", "tag", "B", "isl", "osl", "ms_per_step", "ms_median", "out_tok_s"]),
        ("ttft", ["peer", "tag", "isl", "ms_median", "ms_min"]),
        ("throughput", ["peer", "tag", "B", "isl", "osl", "seconds", "steps", "out_tok_s"]),
    ):
        table(kind, [row for row in rows if row.get("kind") == kind], columns)
    if arguments.save:
        print(f"\nwritten to {write_results(arguments.save, records + rows).name}")


if __name__ == "__main__":
    main()
