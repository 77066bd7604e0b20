"""Chat templates with the conventions of Hugging Face, in a sandbox: a template is data that came with a model."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmbuild.errors import RequestError


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text.
        variables: What every rendering sees, such as bos_token and eos_token.

    Raises:
        RequestError: The template does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template does not compile: {error}", where="chat_template.jinja") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the prompt's text.

        Args:
            messages: Each with "role" and "content".
            add_generation_prompt: End with the beginning of the assistant's turn.
            variables: More of what the template knows, such as tools.

        Raises:
            RequestError: No messages, a message without a role, or one that the template refuses.
        """
        if isinstance(messages, (str, Mapping)) or not messages:
            raise RequestError("chat needs a list of messages", hint='[{"role": "user", "content": "..."}]')
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise RequestError(
                    f"message {index} has no role: {message!r}", hint='{"role": "user", "content": "..."}'
                )
        values = {**self._variables, "tools": None, "documents": None, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # Template code fails on messages it was not written for with any of these.
            raise RequestError(f"the chat template refuses these messages: {error}") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which is no part of a prompt.
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; rendering shows them as is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
