"""The sampling options that `run` and `chat` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from llmbuild.runtime.llm import LLM
    from llmbuild.runtime.sampling_params import SamplingParams

# No bounds here: SamplingParams checks its values itself, with one message for the command line and for Python.
MaxTokens = Annotated[
    int | None, typer.Option(help="Longest completion in tokens; left out: up to the engine's limit.")
]
Temperature = Annotated[
    float | None, typer.Option(help="0 takes the likeliest token; left out: the model's own default.")
]
TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest tokens that add up to this probability.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; left out: the target chooses.")]
Gpu = Annotated[int | None, typer.Option("--device", min=0, help="Number of the GPU, cuda engines only. Default: 0.")]
KvMemory = Annotated[
    float | None,
    typer.Option(
        "--kv-memory-fraction",
        help="How much of the memory left free may hold KV blocks, cuda engines only. Default: 0.9.",
    ),
]


def sampling_params(
    llm: LLM, *, max_tokens: int | None, temperature: float | None, top_p: float | None, seed: int | None
) -> SamplingParams:
    """Return the model's default parameters with the given options in their place.

    Raises:
        RequestError: A value is outside its range.
    """
    from dataclasses import replace

    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    return replace(llm.default_params, **{name: value for name, value in given.items() if value is not None})
