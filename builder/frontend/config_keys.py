"""Keys of `config.json` that transformers does not know: refused by name when they could change what is computed.

A key that no code reads has no effect, so the model would convert and answer wrongly without a word: its authors'
code scales, clips or rotates by that key, transformers' does not. Names tell: `logit_softcapping` is refused,
`experts_per_token` is told in the report. docs/decisions/0002-unknown-config-keys.md says why this is the policy.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from llmbuild.errors import ConfigError, UnsupportedError, nearest

OPTION = "--ignore-config-key"

# Words (between underscores) by which a key says how something is computed.
COMPUTES = re.compile(
    r"(^|_)(scal(e|es|ing)|multipliers?|mult|mup|(soft)?cap(ping|s)?|clip|clamp|(ln|\w*norm\w*)|eps(ilon)?|act(ivation)?s?|"
    r"acts?_fn|rope|rotary|theta|yarn|alibi|pos(ition)?s?|window|swa|sparse|sparsity|rout(er|ing|ed)|scor(e|es|ing)|topk|"
    r"gat(e|ed|ing)|residuals?|sinks?|attn|attention|softmax|logits?|bias|temperature|tempering|interleaved?)(_|$)"
)

# Keys with such a word about something else than what the model computes from its tokens. Patterns for whole keys.
HARMLESS = re.compile(
    "|".join(
        (
            # what may run it
            r"_.*|.*version.*|use_(flash|fast|kernel|triton|mem|sdpa|fused).*|(attn|experts)_implementation|fused_.*",
            r"quantization_config|auto_map|.*_kernels?|onnx_.*",
            # training
            r".*(drop|loss|init).*|gradient_.*|lora.*|peft.*|train.*|router_jitter.*|classifier_.*|cross_attention_.*",
            # which layers have a window: windows are compared with the graph's (contract.py)
            r"max_window_layers|attention_softmax_in_fp32|masked_softmax_fusion|skip_bias_add(_qkv)?|bias_dropout_fusion",
        )
    )
)

# What transformers' code of a model computes in any case, so that it has no key for it. Another value is refused.
COMPUTED_ANYWAY: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"scoring_func": "softmax", "moe_layer_freq": 1},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    "llama": {"rope_interleaved": False},
    "bloom": {"offset_alibi": 100},
}


def check_keys(raw: dict[str, Any], config: PretrainedConfig, ignored: Collection[str] = ()) -> list[str]:
    """Refuse unknown keys that could change numerics.

    Null, false, 0 and empty values never refuse: they switch something off that is not there. Nor does a factor of 1,
    or what a known key says too: a text or a fraction under any name (`hidden_act` beside `hidden_activation`), another
    value under a name that ends in the known one (`swa_head_dim` beside `head_dim`).

    Args:
        raw: `config.json` as it is.
        config: What transformers made of it.
        ignored: Keys that the user takes responsibility for.

    Returns:
        Lines for the report: what was ignored on request, and the unknown keys that do not matter.

    Raises:
        UnsupportedError: Naming all such keys at once.
        ConfigError: An ignored key is not in the file, or transformers does use it.
    """
    unknown = [key for key, value in raw.items() if value and not is_known(key, config)]
    for key in ignored:
        if key not in raw:
            raise ConfigError(f"config.json has no key {key!r}", where=OPTION, hint=nearest(key, unknown or list(raw)))
        if is_known(key, config):
            raise ConfigError(
                f"config key {key!r} is one that {type(config).__name__} reads, so it cannot be ignored",
                where=OPTION,
                hint="edit config.json if its value is wrong",
            )
    refused = [key for key in unknown if key not in ignored and matters(key, raw, config)]
    if refused:
        listed = ", ".join(f"{key} = {shown(raw[key])}" for key in refused)
        raise UnsupportedError(
            f"config key(s) that transformers' {type(config).__name__} does not know: {listed}",
            where="config.json",
            hint="the model may need code that transformers does not have; if such a key changes nothing that is "
            "computed, allow it: " + " ".join(f"{OPTION} {key}" for key in refused),
        )
    rest = [key for key in unknown if key not in ignored and not HARMLESS.fullmatch(key)]
    told = [f"config key {key} = {shown(raw[key])} ignored, as asked" for key in ignored]
    if rest:
        told.append(f"config keys that transformers does not know, taken as remarks: {', '.join(sorted(rest))}")
    return told


def matters(key: str, raw: dict[str, Any], config: PretrainedConfig) -> bool:
    """Whether an unknown key could change what is computed."""
    value = raw[key]
    if not COMPUTES.search(key) or HARMLESS.fullmatch(key) or key in generation_keys():
        return False
    if (value == 1 and value is not True) or COMPUTED_ANYWAY.get(config.model_type, {}).get(key) == value:
        return False
    telling = isinstance(value, str) or (isinstance(value, float) and not value.is_integer())
    same = [other for other in raw if other != key and raw[other] == value and is_known(other, config)]
    return not same if telling else not any(key.endswith(f"_{other}") for other in same)


def is_known(key: str, config: PretrainedConfig) -> bool:
    """Whether the config class declares `key`, or its code or the model's reads it."""
    kind = type(config)
    if key in kind.attribute_map or key in declared(kind) or hasattr(kind, key):
        return True
    quoted = re.escape(key)
    return re.search(rf"""["']{quoted}["']|\b(config|self)\.{quoted}\b""", code_of(kind)) is not None


def declared(kind: type) -> frozenset[str]:
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return frozenset(fields | set(inspect.signature(kind).parameters))


def code_of(kind: type) -> str:
    """Return the source of the config class, of its base classes, and of the models beside it; docstrings aside."""
    files = [Path(inspect.getfile(each)) for each in kind.__mro__ if each is not object]
    files += [file.with_name(file.name.replace("configuration_", "modeling_")) for file in files]
    return read_code(tuple(dict.fromkeys(files)))


@lru_cache(maxsize=8)
def read_code(files: tuple[Path, ...]) -> str:
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return re.sub(r'"""(?s:.*?)"""', "", text)


@lru_cache(maxsize=1)
def generation_keys() -> frozenset[str]:
    """Return the keys of a generation config, which old checkpoints have in `config.json`."""
    return frozenset(GenerationConfig().to_dict())


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
