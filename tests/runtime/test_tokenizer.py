from __future__ import annotations

import datetime
import json

import pytest
import tokenizers

from llmbuild.errors import EngineError, RequestError
from llmbuild.runtime.chat_template import ChatTemplate
from llmbuild.runtime.tokenizer import Tokenizer
from support.tiny_tokenizers import BOS, bpe_definition, byte_definition

CHATML = (
    "{% for message in messages %}\n"
    "    {{- bos_token if loop.first }}{{ message['role'] + ': ' + message['content'] + '\\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "assistant:\n"
    "{%- endif %}\n"
)
HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages=HELLO, **variables) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **variables)


def test_white_space_around_blocks_is_trimmed_as_models_expect() -> None:
    assert render(CHATML) == "<s>user: hello\nassistant:"
    assert render(CHATML, add_generation_prompt=False) == "<s>user: hello\n"


def test_helpers_of_hugging_face() -> None:
    assert render("{{ tools | tojson }}", tools=[{"name": "é<"}]) == '[{"name": "é<"}]'
    assert render("{{ x | tojson(indent=1) }}", x={"a": 1}) == '{\n "a": 1\n}'
    assert render("{{ strftime_now('%Y') }}") == datetime.datetime.now().strftime("%Y")
    assert render("{% generation %}in {{ 'side' }}{% endgeneration %} out") == "in side out"
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}") == "13"
    assert render("{{ 'none' if tools is none }}") == "none"


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{{ bos_token }}{%- for m in messages %}\n  {% if loop.last %}{{ m | tojson }}{% endif %}\n{% endfor %}\n\n x ",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 1 %}{% break %}{% endfor %}{{ ns.n }}",
        "{% macro f(x) %}<{{ x }}>{% endmacro %}\n{{ f(messages[0].role) }}{{ tools }}{{ documents is none }}",
    ],
)
def test_renders_as_transformers_does(source) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for prompt in (True, False):
        [expected], _ = utils.render_jinja_template(
            conversations=[HELLO], chat_template=source, add_generation_prompt=prompt, bos_token="<s>"
        )
        assert render(source, add_generation_prompt=prompt) == expected


def test_a_template_may_refuse() -> None:
    with pytest.raises(RequestError, match="the chat template refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="the chat template refuses these messages"):
        render("{{ messages[0]['content'] + 1 }}")


def test_a_template_is_sandboxed() -> None:
    with pytest.raises(RequestError, match="unsafe"):
        render("{{ ''.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="unsafe"):
        render("{{ messages.append(1) }}")


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(RequestError, match=r"the chat template does not compile: .*endfor"):
        render("{% for m in messages %}")


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "needs a list of messages"),
        ("hi", "needs a list of messages"),
        ([{"content": "x"}], "message 0 has no role"),
    ],
)
def test_wrong_messages(messages, text) -> None:
    with pytest.raises(RequestError, match=text):
        render(CHATML, messages)


def test_no_chat_template_says_what_to_do() -> None:
    with pytest.raises(RequestError) as caught:
        Tokenizer(byte_definition()).encode_chat(HELLO)
    assert caught.value.what == "the model has no chat template"
    assert "use generate() with a plain prompt" in str(caught.value)


def test_chat_ids_get_no_second_bos() -> None:
    library = tokenizers.Tokenizer.from_str(byte_definition())
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer = Tokenizer(library.to_str(), config={"bos_token": {"content": "<s>"}}, chat_template=CHATML)
    assert tokenizer.encode("hi") == [BOS, *b"hi"]
    assert tokenizer.encode_chat(HELLO) == [BOS, *b"user: hello\nassistant:"]


def test_a_truncation_left_in_the_file_is_not_applied() -> None:
    library = tokenizers.Tokenizer.from_str(byte_definition())
    library.enable_truncation(4)
    library.enable_padding(length=8, pad_token="</s>")
    assert Tokenizer(library.to_str()).encode("hello world") == [*b"hello world"]


def test_load_reads_the_engine_s_folder(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text(bpe_definition(), "utf-8")
    assert not Tokenizer.load(tmp_path).has_chat_template
    (tmp_path / "chat_template.jinja").write_text(CHATML, "utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": None}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.render_chat(HELLO) == "<s>user: hello\nassistant:"
    assert loaded.generation_config == {"temperature": 0.5}


def test_load_errors(tmp_path) -> None:
    with pytest.raises(EngineError, match="the engine has no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match="the tokenizer cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(byte_definition(), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(EngineError, match="not valid JSON"):
        Tokenizer.load(tmp_path)
