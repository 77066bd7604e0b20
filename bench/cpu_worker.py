"""One contender of `bench/cpu.py`, in a process of its own: reads JSON commands on stdin, answers JSON on stdout.

A command {"prompts": [[id, ...], ...], "max_tokens": N} makes the contender generate N tokens (greedy, end of sequence
ignored) for all prompts, as concurrently as it can, and answer {"seconds": wall time, "tokens": [[id, ...], ...]}.
Only the standard library is imported until the contender is known: llama.cpp may live in another interpreter.
`requantize SOURCE TARGET` writes the GGUF of llama.cpp's 8-bit contender instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], list[list[int]]]


def llmbuild(path: str, threads: int) -> Generate:
    from llmbuild import LLM, SamplingParams

    llm = LLM(path, num_threads=threads)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]

    return generate


def huggingface(path: str, threads: int, attention: str) -> Generate:
    """transformers `generate` on a static batch. Prompts of one command must be equally long (no padding)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    folder, name = os.path.split(path)
    source = (
        {"pretrained_model_name_or_path": folder, "gguf_file": name}
        if name.endswith(".gguf")
        else {"pretrained_model_name_or_path": path}
    )
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].tolist()

    return generate


def llama_cpp(path: str, threads: int) -> Generate:
    """llama.cpp through its Python bindings, one sequence after another (its low-level batch API is not wrapped)."""
    from llama_cpp import Llama

    model = Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        outputs = []
        for prompt in prompts:
            model.reset()
            tokens: list[int] = []
            for token in model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
                tokens.append(int(token))
                if len(tokens) == max_tokens:
                    break
            outputs.append(tokens)
        return outputs

    return generate


def requantize(source: str, target: str) -> None:
    """Write a GGUF with all its matrices in Q8_0, by llama.cpp's own quantizer."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.allow_requantize = True
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp does not quantize {source}")


def main() -> None:
    if sys.argv[1] == "requantize":
        return requantize(*sys.argv[2:])
    kind, path, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print on stdout; the answers must stay clean
    if kind == "llmbuild":
        generate = llmbuild(path, threads)
    elif kind in ("hf-eager", "hf-sdpa"):
        generate = huggingface(path, threads, kind.removeprefix("hf-"))
    elif kind == "llama.cpp":
        generate = llama_cpp(path, threads)
    else:
        raise SystemExit(f"unknown contender {kind!r}")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        start = time.perf_counter()
        tokens = generate(command["prompts"], command["max_tokens"])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
