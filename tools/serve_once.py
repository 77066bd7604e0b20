"""Serve a few prompts with an engine, for tools that watch a process (compute-sanitizer and the like).

    compute-sanitizer --tool memcheck --error-exitcode 9 python tools/serve_once.py ENGINE [ENGINE ...]

Prompts of random ids arrive at once, some longer than a block, some sampled; the answers are printed. No torch
is imported, so that the tool sees the engine's kernels and the GEMM library's alone.
"""

from __future__ import annotations

import argparse
import random

from llmbuild import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--max-tokens", type=int, default=6)
    arguments = parser.parse_args()
    for engine in arguments.engines:
        with LLM(engine, kv_cache_blocks=64) as llm:
            draw = random.Random(0)
            vocab = llm.limits.vocab_size
            prompts = [[draw.randrange(vocab) for _ in range(length)] for length in (1, 5, 21, 40)]
            shared = {"max_tokens": arguments.max_tokens, "ignore_eos": True}
            params = [
                SamplingParams(temperature=0.0, **shared),
                SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=1, **shared),
                SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.2, seed=2, logprobs=2, **shared),
                SamplingParams(temperature=0.0, presence_penalty=0.5, **shared),
            ]
            for answer in llm.generate(prompts, params):
                print(engine, answer.outputs[0].token_ids, flush=True)


if __name__ == "__main__":
    main()
