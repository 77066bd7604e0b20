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
from typing import Any, NamedTuple

from records import emit, environment, package_version, table, write_results

from llmbuild.engine.reader import open_engine
from llmbuild.runtime.core import EngineCore
from llmbuild.runtime.executor import PendingTokens, StepInput
from llmbuild.runtime.executors.cuda.executor import CudaExecutor
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.request import make_request
from llmbuild.runtime.sampler import SampledTokens
from llmbuild.runtime.sampling_params import SamplingParams


class Events(NamedTuple):
    """One run. begin: seconds. ends: when each step's tokens were there. counts: how many tokens those were."""

    begin: float
    ends: list[float]
    counts: list[int]

    @property
    def seconds(self) -> float:
        return self.ends[-1] - self.begin


class Server:
    """An engine, stepped as `LLM` does it; with random weights if it has none."""

    def __init__(self, path: Path) -> None:
        begin = time.perf_counter()
        engine = open_engine(path, requirements=False)
        self.limits = ServingLimits.of(engine.manifest)
        self.has_weights = any(entry.path.startswith("weights/") for entry in engine.manifest.files)
        self.executor = CudaExecutor(engine, random_weights=not self.has_weights)
        self.loaded_s = time.perf_counter() - begin
        self.executor.warm_up()
        self.ready_s = time.perf_counter() - begin
        self.sampled: list[int] = []  # rows of each step that was put
        self.waited = 0.0  # seconds for the GPU, since the last run began
        self._execute = self.executor.execute_async
        self.executor.execute_async = self._counted  # type: ignore[method-assign]
        self.core = EngineCore(self.executor, self.limits, None)
        self.count = 0

    def start(self) -> dict[str, Any]:
        """Seconds from opening the engine until it was loaded, and until it was ready; where the weights came from.

        anonymous_mb: resident memory of the process that is no file's.
        """
        source = "disk" if self.has_weights else "random"
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        resident = int(status["RssAnon"].split()[0]) // 1024
        about = {"seconds": round(self.ready_s, 2), "loaded_s": round(self.loaded_s, 2), "weights": source}
        return about | {"anonymous_mb": resident}

    def _counted(self, step: StepInput, *rest: Any) -> PendingTokens:
        self.sampled.append(len(step.logits_indices))
        pending = self._execute(step, *rest)

        def result() -> SampledTokens:
            begin = time.perf_counter()
            tokens = pending.result()
            self.waited += time.perf_counter() - begin
            return tokens

        return PendingTokens(result)

    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Queue greedy requests of so many new tokens each."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        pool = self.executor.num_blocks * self.executor.block_size
        for prompt in prompts:
            self.count += 1
            self.core.add(make_request(str(self.count), prompt, params, self.limits, pool_tokens=pool))

    def run(self, prompts: list[list[int]], max_tokens: int) -> Events:
        """Serve all prompts at once."""
        self.sampled.clear()
        self.waited = 0.0
        begin = time.perf_counter()
        self.add(prompts, max_tokens)
        ends = []
        while self.core.has_work:
            self.core.step()
            ends.append(time.perf_counter())
        # Steps overlap: the tokens of a step are there when the call after the one that put it returns.
        return Events(begin, ends[1:], list(self.sampled))


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(10, vocab) for _ in range(length)] for _ in range(count)]


def decode(server: Server, batch: int, isl: int, osl: int, rounds: int = 2) -> dict[str, Any]:
    """Milliseconds a step, the best of the rounds.

    ms_per_step: from the step in which every sequence has its first token to the end, for `batch` tokens.
    ms_median: of the steps with all sequences in them. ms_diff: (time of osl tokens - time of one) / (osl - 1), the
    same of what a client sees. host_us: microseconds a step in which the host worked and did not wait.
    """
    vocab = server.limits.vocab_size
    server.run(random_prompts(batch, isl, vocab, 99), min(8, osl))
    found = []
    for seed in range(rounds):
        one = server.run(random_prompts(batch, isl, vocab, 50 + seed), 1).seconds
        run = server.run(random_prompts(batch, isl, vocab, 1 + seed), osl)
        first = run.counts.index(batch)
        whole = [step for step, count in enumerate(run.counts) if step > first and count == batch]
        steps = [(run.ends[step] - run.ends[step - 1]) * 1e3 for step in whole]
        per_step = (run.ends[-1] - run.ends[first]) / sum(run.counts[first + 1 :]) * batch * 1e3
        host = (run.seconds - server.waited) / len(run.ends) * 1e6
        found.append((per_step, statistics.median(steps), (run.seconds - one) / (osl - 1) * 1e3, host))
    per_step, median, difference, host = min(found)
    return {
        "kind": "decode",
        "B": batch,
        "isl": isl,
        "osl": osl,
        "ms_per_step": round(per_step, 4),
        "ms_median": round(median, 4),
        "ms_diff": round(difference, 4),
        "host_us": round(host, 1),
        "out_tok_s": round(batch / per_step * 1e3, 1),
    }


def first_token(server: Server, isl: int, rounds: int = 5) -> dict[str, Any]:
    vocab = server.limits.vocab_size
    server.run(random_prompts(1, isl, vocab, 3), 1)
    times = []
    for seed in range(rounds):
        times.append(server.run(random_prompts(1, isl, vocab, 10 + seed), 1).seconds * 1e3)
    return {
        "kind": "ttft",
        "B": 1,
        "isl": isl,
        "ms_median": round(statistics.median(times), 2),
        "ms_min": round(min(times), 2),
    }


def throughput(server: Server, count: int, isl: int, osl: int) -> dict[str, Any]:
    """prefill_s: seconds until every request had its first token."""
    run = server.run(random_prompts(count, isl, server.limits.vocab_size, 7), osl)
    whole = run.counts.index(count) if count in run.counts else len(run.ends) - 1
    return {
        "kind": "throughput",
        "B": count,
        "isl": isl,
        "osl": osl,
        "seconds": round(run.seconds, 3),
        "prefill_s": round(run.ends[whole] - run.begin, 3),
        "steps": len(run.ends),
        "out_tok_s": round(count * osl / run.seconds, 1),
    }


def peers(path: Path) -> list[dict[str, Any]]:
    """Return the records that peers printed, in the names of ours."""
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line) if line.startswith("{") else {}
        if "start_s" in row:
            row |= {"peer": f"{row['peer']}-{row['version']}", "kind": "start", "seconds": row["start_s"]}
        names = {"n": "B", "sec": "seconds"} if row.get("kind") == "throughput" else {}
        if "kind" in row:
            found.append({names.get(name, name): value for name, value in row.items()})
    return found


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
    rows = [emit(**who, kind="start", **server.start())]
    for batch in filter(None, arguments.batches.split(",")):
        rows.append(emit(**who, **decode(server, int(batch), arguments.isl, arguments.osl)))
    for isl in filter(None, arguments.ttft.split(",")):
        rows.append(emit(**who, **first_token(server, int(isl))))
    for text in filter(None, arguments.throughput.split(",")):
        rows.append(emit(**who, **throughput(server, *map(int, text.split("x")))))
    if arguments.peers:
        rows += peers(arguments.peers)
    for kind, columns in (
        ("decode", ["peer", "tag", "B", "isl", "osl", "ms_per_step", "ms_median", "ms_diff", "host_us", "out_tok_s"]),
        ("ttft", ["peer", "tag", "isl", "ms_median", "ms_min"]),
        ("throughput", ["peer", "tag", "B", "isl", "osl", "seconds", "prefill_s", "steps", "out_tok_s"]),
    ):
        table(kind, [row for row in rows if row.get("kind") == kind], columns)
    if arguments.save:
        print(f"\nwritten to {write_results(arguments.save, records + rows).name}")


if __name__ == "__main__":
    main()
