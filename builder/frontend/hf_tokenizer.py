"""The tokenizer of a Hugging Face directory, as the few files that the runtime reads without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from llmbuild.builder.frontend.hf_model import GENERATION_CONFIG
from llmbuild.errors import ModelError

# Any of these means that there is a tokenizer; the others only add to it.
_SIGNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
)
FILES = (*_SIGNS, "added_tokens.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json")


def tokenizer_files(directory: Path, *, trust_remote_code: bool = False) -> dict[str, bytes]:
    """Return the files of the engine's `tokenizer/` folder by name.

    `tokenizer.json` and `tokenizer_config.json`; `chat_template.jinja` and `generation_config.json` if there are any.

    The tokenizer is opened by transformers, which also converts old forms, and written as transformers uses it: options
    of `tokenizer_config.json` that change ids (`add_bos_token`, added tokens) are in the result. Empty without any
    tokenizer file.

    Raises:
        ModelError: there are tokenizer files, but no fast tokenizer can be made of them.
    """
    files: dict[str, bytes] = {}
    if (directory / GENERATION_CONFIG).is_file():
        files[GENERATION_CONFIG] = (directory / GENERATION_CONFIG).read_bytes()
    if not any((directory / sign).is_file() for sign in _SIGNS):
        return files
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
        raise _unreadable(directory, str(error)) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _unreadable(directory, f"{type(tokenizer).__name__} has no tokenizers backend")
    return files | describe(backend, special_tokens(tokenizer), chat_template(tokenizer))


def describe(backend: Any, specials: dict[str, str | None], template: str | None) -> dict[str, bytes]:
    """Serialise a `tokenizers.Tokenizer` and its facts into deterministic files.

    Args:
        backend: The tokenizer; its padding and truncation settings are dropped.
        specials: "bos_token", "eos_token" and "pad_token" as strings, None where there is none.
        template: Jinja chat template, or None.
    """
    backend.no_padding()
    backend.no_truncation()
    config = json.dumps(specials, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    files = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": config.encode()}
    if template:
        files["chat_template.jinja"] = template.encode()
    return files


def special_tokens(tokenizer: Any) -> dict[str, str | None]:
    return {key: getattr(tokenizer, key, None) for key in ("bos_token", "eos_token", "pad_token")}


def chat_template(tokenizer: Any) -> str | None:
    """The chat template, or the one named "default" when there are several."""
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, dict) else template


def _unreadable(directory: Path, reason: str) -> ModelError:
    line = next((line for line in reason.splitlines() if line.strip()), "unknown reason")
    return ModelError(
        f"the tokenizer cannot be read: {line}",
        where=str(directory),
        hint="save it once with transformers as tokenizer.json, or install the package that it needs",
    )
