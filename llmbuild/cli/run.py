"""`llmbuild run`: complete one prompt, or answer one message, streaming to the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmbuild.cli.console import print_json, stdout_kept_clean
from llmbuild.cli.errors import reporting
from llmbuild.cli.sampling import Gpu, KvMemory, MaxTokens, Seed, Temperature, Threads, TopP, sampling_params

if TYPE_CHECKING:
    from llmbuild.runtime.outputs import RequestOutput


def run(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine directory.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="Prompt, or message with --chat.")],
    chat: Annotated[bool, typer.Option("--chat", help="Answer TEXT as a message, with the chat template.")] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    threads: Threads = None,
    device: Gpu = None,
    kv_memory_fraction: KvMemory = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when finished, instead of streaming.")
    ] = False,
) -> None:
    """Complete a prompt with an engine."""
    with reporting(as_json=as_json):
        from llmbuild import LLM

        with LLM(engine, num_threads=threads, device=device, kv_memory_fraction=kv_memory_fraction) as llm:
            params = sampling_params(llm, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
            if chat:
                outputs = llm.stream_chat([{"role": "user", "content": prompt}], params)
            else:
                outputs = llm.stream(prompt, params)
            if as_json:
                with stdout_kept_clean():
                    *_, last = outputs
                print_json(_result(last, prompt))
            else:
                for output in outputs:
                    sys.stdout.write(output.outputs[0].new_text)
                    sys.stdout.flush()
                print()


def _result(output: RequestOutput, prompt: str) -> dict[str, Any]:
    """Return what `--json` prints: text, ids and why it ended, with the times of the request."""
    completion, metrics = output.outputs[0], output.metrics
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(completion.token_ids),
        "first_token_s": metrics.first_token_s,
        "finished_s": metrics.finished_s,
    }
