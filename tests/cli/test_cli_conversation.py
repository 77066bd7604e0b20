"""The loop of `llmbuild chat` at a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from llmbuild.cli.chat import Conversation
from llmbuild.errors import RequestError


class EchoLLM:
    """Answers "<last message>!" word by word, and keeps what it was asked. "long" is refused, "stop" interrupted."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []

    def stream_chat(self, messages: list[dict[str, str]], params: Any) -> Iterator[Any]:
        self.asked.append(messages)
        text = messages[-1]["content"]
        if text == "long":
            raise RequestError("the prompt is too long", hint="shorten it")
        return self._answer(text)

    def _answer(self, text: str) -> Iterator[Any]:
        yield SimpleNamespace(outputs=[SimpleNamespace(text=text, new_text=text)])
        if text == "stop":
            raise KeyboardInterrupt
        yield SimpleNamespace(outputs=[SimpleNamespace(text=text + "!", new_text="!")])


@pytest.fixture
def talk(monkeypatch):
    def run(*lines: str, interactive: bool = True, system: str | None = None) -> EchoLLM:
        waiting = list(lines)
        prompts = []

        def read(prompt: str = "") -> str:
            prompts.append(prompt)
            if not waiting:
                raise EOFError
            return waiting.pop(0)

        monkeypatch.setattr("builtins.input", read)
        llm: Any = EchoLLM()
        Conversation(llm, params=None, system=system, interactive=interactive).run()  # type: ignore[arg-type]
        assert set(prompts) == {"> " if interactive else ""}
        return llm

    return run


def test_each_question_carries_the_conversation(talk, capsys):
    llm = talk("hi", "", "you", system="be kind")
    assert [[message["content"] for message in messages] for messages in llm.asked] == [
        ["be kind", "hi"],
        ["be kind", "hi", "hi!", "you"],
    ]
    assert capsys.readouterr().out == "hi!\nyou!\n"


def test_reset_keeps_the_system_message(talk):
    llm = talk("hi", " /reset ", "you", "/exit", "never", system="be kind")
    assert [message["content"] for message in llm.asked[-1]] == ["be kind", "you"]
    assert len(llm.asked) == 2


def test_refused_message_is_told_and_forgotten(talk, capsys):
    llm = talk("long", "you")
    assert [message["content"] for message in llm.asked[-1]] == ["you"]
    assert "error: the prompt is too long\n  next:  shorten it\n  /reset starts over\n" in capsys.readouterr().err


def test_refused_message_from_a_pipe_is_an_error(talk):
    with pytest.raises(RequestError, match="too long"):
        talk("long", "you", interactive=False)


def test_interrupted_answer_stays_in_the_conversation(talk, capsys):
    llm = talk("stop", "you")
    assert [message["content"] for message in llm.asked[-1]] == ["stop", "stop", "you"]
    assert "stop [interrupted]\n" in capsys.readouterr().out


def test_interrupt_of_a_piped_conversation_leaves(talk):
    with pytest.raises(KeyboardInterrupt):
        talk("stop", "you", interactive=False)
