"""`llmbuild chat`: a conversation on the terminal, or a list of messages from a pipe, one a line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmbuild.cli.errors import reporting
from llmbuild.cli.sampling import Gpu, KvMemory, MaxTokens, Seed, Temperature, Threads, TopP, sampling_params

if TYPE_CHECKING:
    from llmbuild.runtime.llm import LLM
    from llmbuild.runtime.sampling_params import SamplingParams


def chat(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine directory.")],
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    threads: Threads = None,
    device: Gpu = None,
    kv_memory_fraction: KvMemory = None,
) -> None:
    """Talk to an engine. /reset forgets the conversation, /exit or end of input leaves."""
    with reporting():
        from llmbuild import LLM

        with LLM(engine, num_threads=threads, device=device, kv_memory_fraction=kv_memory_fraction) as llm:
            params = sampling_params(llm, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
            Conversation(llm, params, system, interactive=sys.stdin.isatty()).run()


class Conversation:
    """The messages so far, and the loop that adds to them.

    Args:
        interactive: Show a prompt, and go on after a message that the engine refuses. Otherwise that is an error.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, *, interactive: bool) -> None:
        self.llm = llm
        self.params = params
        self.first = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.first)
        self.interactive = interactive

    def run(self) -> None:
        from llmbuild.errors import RequestError

        if self.interactive:
            print("/reset forgets the conversation, /exit leaves", file=sys.stderr)
        while (line := self._read()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self.messages = list(self.first)
            elif text:
                try:
                    self._answer(text)
                except RequestError as error:
                    if not self.interactive:
                        raise
                    print(f"error: {error}\n  /reset starts over", file=sys.stderr)

    def _read(self) -> str | None:
        try:
            return input("> ") if self.interactive else input()
        except EOFError:
            return None

    def _answer(self, text: str) -> None:
        """Stream the answer; it becomes part of the conversation, also when the keyboard interrupts it."""
        messages = [*self.messages, {"role": "user", "content": text}]
        outputs = self.llm.stream_chat(messages, self.params)
        answer = ""
        try:
            for output in outputs:
                answer = output.outputs[0].text
                sys.stdout.write(output.outputs[0].new_text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            print(" [interrupted]", end="")
        print(flush=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
