"""Seeded 2-layer models of many families, made in milliseconds, and a byte-level tokenizer to save beside them.

Norm weights, biases and sinks are randomised too, so that nothing hides behind ones and zeros.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from support.families import FAMILIES, MOE_FAMILIES, VOCAB_SIZE

EOS, BOS, PAD = 256, 257, 258
EOS_TOKEN, BOS_TOKEN, PAD_TOKEN = "<|end|>", "<|begin|>", "<|pad|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)

_BASE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    max_position_embeddings=512,
    bos_token_id=BOS,
    eos_token_id=EOS,
    pad_token_id=PAD,
)


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """Return the 2-layer config of `model_type`. Raises KeyError for a family not in `FAMILIES` or `MOE_FAMILIES`."""
    values = {**_BASE, **{**FAMILIES, **MOE_FAMILIES}[model_type]}
    defaults = {key: value for key, value in values.items() if value is not None}
    return AutoConfig.for_model(model_type, **(defaults | overrides))


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a float32 model on the CPU, in eval mode, whose weights depend on `seed` alone.

    Weights are scaled so that activations neither vanish nor saturate: greedy tokens then differ between prompts.

    Args:
        model_type: A key of `FAMILIES` or `MOE_FAMILIES`.
        seed: Seed of the weights.
        **overrides: Config values that replace the tiny defaults.
    """
    with torch.random.fork_rng(devices=[]):  # some families draw sinks or biases, to which the noise is added
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides), attn_implementation="eager")
    model = model.float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim <= 1:
                parameter.add_(noise * 0.1)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise * 0.04)
            else:
                parameter.copy_(noise * (1.5 / math.sqrt(min(parameter.shape[-2:]))))
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point():  # such as the bias of a router
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model


def save_tiny(
    model: PreTrainedModel, directory: Path, max_shard_size: str | None = None, tokenizer: bool = True
) -> Path:
    """Write `model` as a Hugging Face directory and return it.

    Args:
        model: A model from `tiny_model`.
        directory: Target folder, made if absent.
        max_shard_size: For example "60KB" to get several shards and an index; None for one file.
        tokenizer: Also write the byte-level tokenizer and its chat template.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size or "1GB")
    if tokenizer:
        write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` (byte-level BPE, VOCAB_SIZE tokens) and `tokenizer_config.json` with a chat template."""
    (directory / "tokenizer.json").write_text(byte_level_tokenizer().to_str())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def byte_level_tokenizer() -> Any:
    """Return a `tokenizers.Tokenizer`: every byte is a token, so that any text encodes and may split characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _byte_characters()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    specials = [EOS_TOKEN, BOS_TOKEN, PAD_TOKEN]
    vocabulary.update({token: 256 + index for index, token in enumerate(specials)})
    merges = []
    for merge in _MERGES.split():
        left, right = merge.split("+")
        merges.append((left, right))
        vocabulary[left + right] = len(vocabulary)
    assert len(vocabulary) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


_MERGES = (
    "t+h h+e i+n e+r a+n r+e o+n Ġ+t Ġ+a Ġ+s Ġ+w th+e Ġt+he an+d Ġ+and in+g e+n i+s o+u a+t e+s o+r Ġ+o Ġo+f Ġ+c "
    "l+l Ġ+h Ġ+b Ġ+p"
)


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte 0..255 in byte-level BPE."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, spare = [], 256
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters
