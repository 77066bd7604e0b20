"""What a model directory says about how its weights are quantized, and the format that reads it.

Three places say it: `quantization_config` in config.json (`compression_config` in old files of compressed-tensors), and
`hf_quant_config.json` of NVIDIA's Model Optimizer. Light to import: options are settled before torch is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbuild.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    from llmbuild.quantization.formats import Format

CONFIG = "config.json"
KEYS = ("quantization_config", "compression_config")
MODELOPT_CONFIG = "hf_quant_config.json"
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "modelopt")

UNQUANTIZED = "convert the unquantized checkpoint, with --quant int8-wo or int4-wo"
# What can be done about methods that are not read.
INSTEAD = {
    "marlin": "this packing belongs to one kernel: convert the GPTQ checkpoint that it was made from",
    "gptq_marlin": "this packing belongs to one kernel: convert the GPTQ checkpoint that it was made from",
    "awq_marlin": "this packing belongs to one kernel: convert the AWQ checkpoint that it was made from",
    "bitsandbytes": f"its blocks are a table of values, which no target reads; {UNQUANTIZED}",
    "mxfp4": f"4-bit floats are not read yet; {UNQUANTIZED}",
    "auto-round": "export it with format auto_gptq or auto_awq",
    "intel/auto-round": "export it with format auto_gptq or auto_awq",
}


def stored_quantization(directory: Path) -> dict[str, Any] | None:
    """Return how the weights in `directory` are quantized, with its quant_method; None if they are not.

    A config that cannot be read says nothing here: whoever loads it tells what is wrong with it.

    Raises:
        ModelError: Two files contradict each other.
    """
    config = _read(directory / CONFIG)
    described = next((config[key] for key in KEYS if isinstance(config.get(key), dict) and config[key]), None)
    modelopt = _read(directory / MODELOPT_CONFIG).get("quantization")
    if not isinstance(modelopt, dict):
        return None if described is None else {"quant_method": _method(described), **described}
    ours = {"quant_method": "modelopt", **modelopt}
    if described is None:
        return ours
    method, algo = _method(described), described.get("quant_algo")
    if method != "modelopt" or (algo is not None and algo != modelopt.get("quant_algo")):
        raise ModelError(
            f"{CONFIG} says that weights are quantized by {algo or method}, {MODELOPT_CONFIG} by "
            f"{modelopt.get('quant_algo')}",
            where=str(directory),
            hint="remove the one that is wrong",
        )
    return ours


def stored_cache(described: dict[str, Any] | None) -> str | None:
    """Return what a checkpoint says of its KV cache: "fp8" (e4m3, a scale for keys and one for values), another name
    for a scheme that is not read, None if it says nothing."""
    if described is None:
        return None
    algo = described.get("kv_cache_quant_algo")
    if algo is not None:
        return "fp8" if algo == "FP8" else str(algo)
    scheme = described.get("kv_cache_scheme")
    if not scheme:
        return None
    wanted = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    known = isinstance(scheme, dict) and all(scheme.get(key, value) == value for key, value in wanted.items())
    return "fp8" if known else "kv_cache_scheme"


def _method(described: dict[str, Any]) -> str | None:
    return described.get("quant_method") or ("modelopt" if "quant_algo" in described else None)


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def stores_float8(described: dict[str, Any] | None) -> bool:
    """Whether weights are stored as 8-bit floats for products with activations that are rounded to such.

    described: From `stored_quantization`.
    """
    if described is None:
        return False
    if described["quant_method"] == "modelopt":
        return described.get("quant_algo") in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
    groups = described.get("config_groups")
    parts = [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    floats = [
        all((each.get(k) or {}).get("type") == "float" for k in ("weights", "input_activations")) for each in parts
    ]
    return described["quant_method"] == "fp8" or any(floats)


def find_format(described: dict[str, Any]) -> Format:
    """Return the format that reads the checkpoint.

    Args:
        described: From `stored_quantization`.

    Raises:
        UnsupportedError: Its method, or an option of it, is not one that is read.
        ModelError: The config contradicts itself.
    """
    from llmbuild.quantization import formats_modelopt
    from llmbuild.quantization.formats_awq import AWQ
    from llmbuild.quantization.formats_compressed import CompressedTensors
    from llmbuild.quantization.formats_fp8 import FP8
    from llmbuild.quantization.formats_gptq import GPTQ

    method = described["quant_method"]
    if method == "gptq":
        return GPTQ.parse(described)
    if method == "awq":
        return AWQ.parse(described)
    if method == "compressed-tensors":
        return CompressedTensors.parse(described)
    if method == "fp8":
        return FP8.parse(described)
    if method == "modelopt":
        return formats_modelopt.parse(described)
    raise UnsupportedError(
        f"the checkpoint is quantized by {method!r}, which llmbuild cannot read",
        where=f"{CONFIG}: quantization_config.quant_method",
        hint=f"{INSTEAD.get(str(method), UNQUANTIZED)}; known: {', '.join(METHODS)}",
    )
