"""SmolLM2 on the CPU: engines of every recipe beside Hugging Face eager and llama.cpp, in one run.

    python bench/cpu.py MODEL.gguf [--llama-python PYTHON] [--threads 2] [--rounds 5] [--save]

Every contender is a process that stays loaded; the rounds go through all of them in turn, so that a drift of the
machine's speed meets all alike, and the best round of each is compared. Times are differences of whole calls:

    ms per decode step = (t(prompt, 1 + N tokens) - t(prompt, 1 token)) / N        TTFT = t(prompt, 1 token)

The recipes that round are made from the float32 checkpoint that the GGUF stands for, since they leave the blocks of a
GGUF as they are. llama.cpp runs the GGUF, and the same model in Q8_0, which it makes itself; each of our engines is
compared with the one of its bits. JSON lines first, tables last.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from records import emit, environment, package_version, table, write_results

RECIPES = ("gguf", "none", "int8-wo", "int8", "int4-wo")
EIGHT_BITS = ("int8-wo", "int8")
WORKER = Path(__file__).with_name("cpu_worker.py")


class Contender:
    """A worker process and what it needs to be asked."""

    def __init__(self, peer: str, tag: str, python: str, kind: str, path: Path, threads: int) -> None:
        self.peer, self.tag, self.kind = peer, tag, kind
        self.process = subprocess.Popen(
            [python, str(WORKER), kind, str(path), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.peer} {self.tag} ended with {self.process.wait()}")
        return json.loads(line)

    def seconds(self, prompts: list[list[int]], max_tokens: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self.read()
        assert all(len(tokens) == max_tokens for tokens in answer["tokens"]), f"{self.peer}: too few tokens"
        return answer["seconds"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def make_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    chosen = random.Random(seed)
    return [[chosen.randrange(100, 40000) for _ in range(length)] for _ in range(count)]


def convert(model: Path, recipe: str, directory: Path) -> Path:
    engine = directory / f"{recipe}.engine"
    command = [sys.executable, "-m", "llmbuild", "convert", str(model), "-o", str(engine)]
    command += ["--target", "cpu", "--quant", recipe, "--max-batch-size", "16", "--max-seq-len", "2048", "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return engine


def write_float_checkpoint(gguf: Path, directory: Path) -> Path:
    """Write the GGUF's weights, dequantized to float32, as a Hugging Face directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    # The loaded model is marked as quantized, though its weights are not any more: a model so marked is not written.
    del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)
    return directory


def directory_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def measure(contenders: list[Contender], rounds: int, batch: int, isl: int, osl: int) -> list[dict[str, Any]]:
    """Decode step time and TTFT of every contender at one batch size; the rounds interleave the contenders."""
    times: dict[int, list[tuple[float, float]]] = {index: [] for index in range(len(contenders))}
    for round_number in range(rounds + 1):  # round 0 warms up
        prompts = make_prompts(batch, isl, seed=round_number)
        for index, contender in enumerate(contenders):
            one = contender.seconds(prompts, 1)
            many = contender.seconds(prompts, 1 + osl)
            if round_number > 0:
                times[index].append((one, many))
    records = []
    for index, contender in enumerate(contenders):
        steps = [(many - one) / osl * 1e3 for one, many in times[index]]
        record = {
            "peer": contender.peer,
            "tag": contender.tag,
            "kind": "decode" if batch == 1 else "throughput",
            "B": batch,
            "isl": isl,
            "osl": osl,
            "ms_per_step": round(min(steps), 3),
            "ms_median": round(statistics.median(steps), 3),
            "ttft_ms": round(min(one for one, _ in times[index]) * 1e3, 2),
            "out_tok_s": round(batch * (1 + osl) / min(many for _, many in times[index]), 1),
        }
        records.append(emit(**record))
    return records


def add_ratios(records: list[dict[str, Any]]) -> None:
    """Ratios of output tokens per second against each peer present, llama.cpp at equal bits; above 1 is faster."""
    peers = {(row["peer"].split("-transformers")[0], row["tag"]): row for row in records}
    for row in records:
        bits = "Q8_0" if row["tag"] in (*EIGHT_BITS, "Q8_0") else "Q4_1"
        for name, peer in (("vs_hf_eager", ("hf-eager", "float32")), ("vs_llama_cpp", ("llama.cpp", bits))):
            base = peers.get(peer)
            if base is not None:
                over, under = (base, row) if row["B"] == 1 else (row, base)
                key = "ms_per_step" if row["B"] == 1 else "out_tok_s"
                row[name] = round(over[key] / under[key], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file of SmolLM2-135M-Instruct")
    parser.add_argument("--llama-python", help="interpreter in which llama-cpp-python is installed; left out: no peer")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isl", type=int, default=128, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=64, help="decode steps that are timed")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--save", action="store_true", help="write bench/results/DATE-cpu.jsonl")
    arguments = parser.parse_args()

    records = [emit(**environment(("llmbuild", "onnxruntime", "torch", "transformers", "numpy")))]
    ours = f"llmbuild-{package_version('llmbuild')}"
    with tempfile.TemporaryDirectory() as folder:
        contenders = []
        recipes = arguments.recipes.split(",")
        rounded = [recipe for recipe in recipes if recipe not in ("gguf", "none")]
        checkpoint = write_float_checkpoint(arguments.model, Path(folder) / "float32") if rounded else None
        for recipe in recipes:
            model = checkpoint if checkpoint is not None and recipe in rounded else arguments.model
            engine = convert(model, recipe, Path(folder))
            records.append(emit(peer=ours, tag=recipe, kind="size", bytes=directory_bytes(engine)))
            contenders.append(Contender(ours, recipe, sys.executable, "llmbuild", engine, arguments.threads))
        hf = f"hf-eager-transformers-{package_version('transformers')}"
        contenders.append(Contender(hf, "float32", sys.executable, "hf-eager", arguments.model, arguments.threads))
        if arguments.llama_python:
            python, wide = arguments.llama_python, Path(folder) / "q8_0.gguf"
            subprocess.run([python, str(WORKER), "requantize", str(arguments.model), str(wide)], check=True)
            for tag, model in (("Q4_1", arguments.model), ("Q8_0", wide)):
                contenders.append(Contender("llama.cpp", tag, python, "llama.cpp", model, arguments.threads))
        decode = measure(contenders, arguments.rounds, 1, arguments.isl, arguments.osl)
        throughput = measure(
            contenders, max(1, arguments.rounds // 2), arguments.concurrency, arguments.isl, arguments.osl
        )
        for contender in contenders:
            contender.close()
    add_ratios(decode)
    add_ratios(throughput)
    records += decode + throughput
    columns = ["peer", "tag", "B", "ms_per_step", "ms_median", "ttft_ms", "out_tok_s", "vs_hf_eager", "vs_llama_cpp"]
    table(f"decode, batch 1, {arguments.isl} prompt tokens, {arguments.threads} threads", decode, columns)
    table(f"{arguments.concurrency} requests at once (llama.cpp: one after another)", throughput, columns)
    table("engine size", [row for row in records if row["kind"] == "size"], ["peer", "tag", "bytes"])
    if arguments.save:
        print(f"\nwritten to {write_results('cpu', records).name}")


if __name__ == "__main__":
    main()
