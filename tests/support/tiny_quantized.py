"""Tiny models saved as quantized checkpoints of each layout, written here from the published formats.

A layout rounds a weight [N, K] to numbers that it stores, and says which float32 values they stand for. Packing is
written value by value, to be unlike what reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.tiny_models import save_tiny

# weight [N, K] -> tensors by the last word of their names, and the float32 [N, K] that they stand for
Store = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Stored:
    """A layout. config: `quantization_config`. modelopt: `hf_quant_config.json`. label: its name in reports.

    blocks: (bits, block size, zero, has offset) of a weight of 64 columns; None when it is only dequantized.
    """

    label: str
    config: dict[str, Any] | None
    store: Store
    blocks: tuple[int, int, int, bool] | None
    modelopt: dict[str, Any] | None = None
    notices: tuple[str, ...] = field(default=())


def rounded(weight: Tensor, bits: int, group: int, *, zeros: bool, dtype: torch.dtype, least: int = 0):
    """Return q and zero (int64 [N, K] and [N, G]) in 0 .. 2**bits - 1, scale [N, G] in `dtype`, and the values."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // group, group)
    most = 2**bits - 1
    if zeros:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / most).to(dtype)
        zero = (-low / scale.float()).round().clamp(least, most - least).long()
    else:
        scale = (groups.abs().amax(-1) / (most // 2)).to(dtype)
        zero = torch.full(scale.shape, 2 ** (bits - 1))
    q = ((groups / scale.float()[..., None]).round().long() + zero[..., None]).clamp(0, most)
    # 16-bit scales: no rounding in float64, and none on the way to float32. Else rounded once, as in float32.
    values = ((q - zero[..., None]).double() * scale.double()[..., None]).float()
    return q.reshape(rows, columns), zero, scale, values.reshape(rows, columns)


def packed(values: Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack int64 values along an axis into int32 words; bits·i hold value order[i] of each run."""
    matrix = values.numpy().astype(np.uint64)
    matrix = matrix if axis == 1 else matrix.T
    per = 32 // bits
    words = np.zeros((matrix.shape[0], -(-matrix.shape[1] // per)), np.uint64)
    for column in range(words.shape[1] * per):
        word, place = divmod(column, per)
        taken = word * per + (order or range(per))[place]
        if taken < matrix.shape[1]:
            words[:, word] |= matrix[:, taken] << np.uint64(bits * place)
    words = words if axis == 1 else words.T
    return torch.from_numpy(np.ascontiguousarray(words.astype(np.uint32)).view(np.int32))


# --------------------------------------------------------------------------------------------------- GPTQ, AWQ
def gptq(bits: int, group: int | None, *, sym: bool, version: int = 1, dtype=torch.float16, order=None) -> Store:
    """order: a permutation of the columns of a weight of that many, along which they are grouped (act-order)."""

    def store(weight: Tensor):
        columns = weight.shape[1]
        size = group or columns
        index = torch.arange(columns) // size
        if order is not None:
            place = torch.randperm(columns, generator=torch.Generator().manual_seed(order))
            inverse = place.argsort()
            index = index[inverse]
            q, zero, scale, values = rounded(weight[:, place], bits, size, zeros=not sym, dtype=dtype, least=1)
            q, values = q[:, inverse], values[:, inverse]
        else:
            q, zero, scale, values = rounded(weight, bits, size, zeros=not sym, dtype=dtype, least=1)
        tensors = {
            "qweight": packed(q.T, bits, 0),
            "qzeros": packed(zero.T - int(version == 1), bits, 1),
            "scales": scale.T.contiguous(),
            "g_idx": index.int(),
        }
        return tensors, values

    return store


def awq(group: int | None) -> Store:
    def store(weight: Tensor):
        q, zero, scale, values = rounded(weight, 4, group or weight.shape[1], zeros=True, dtype=torch.float16)
        tensors = {
            "qweight": packed(q.T, 4, 1, AWQ_ORDER),
            "qzeros": packed(zero.T, 4, 1, AWQ_ORDER),
            "scales": scale.T.contiguous(),
        }
        return tensors, values

    return store


# --------------------------------------------------------------------------------------------- compressed-tensors
def pack_quantized(bits: int, group: int | None, *, sym: bool, dtype=torch.bfloat16) -> Store:
    def store(weight: Tensor):
        q, zero, scale, values = rounded(weight, bits, group or weight.shape[1], zeros=not sym, dtype=dtype)
        tensors = {
            "weight_packed": packed(q, bits, 1),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        return tensors | ({} if sym else {"weight_zero_point": packed(zero, bits, 0)}), values

    return store


def int_quantized(*, sym: bool, single: bool = False) -> Store:
    def store(weight: Tensor):
        source = weight.reshape(1, -1) if single else weight
        q, zero, scale, values = rounded(source, 8, source.shape[1], zeros=not sym, dtype=torch.bfloat16)
        tensors = {"weight": (q - 128).to(torch.int8).reshape(weight.shape), "weight_scale": scale}
        if not sym:
            tensors["weight_zero_point"] = (zero - 128).to(torch.int8)
        if single:
            tensors = {name: value if name == "weight" else value.reshape(1) for name, value in tensors.items()}
        return tensors, values.reshape(weight.shape)

    return store


# --------------------------------------------------------------------------------------------------------- float8
def float8(kind: str, *, name: str = "weight_scale", block: tuple[int, int] = (32, 16), static: bool = False) -> Store:
    """kind: "tensor", "channel" or "block"."""

    def store(weight: Tensor):
        rows, columns = weight.shape
        high, wide = {"tensor": (rows, columns), "channel": (1, columns), "block": block}[kind]
        down, across = -(-rows // high), -(-columns // wide)
        scale = torch.zeros(down, across)
        stored, values = torch.zeros(rows, columns).to(torch.float8_e4m3fn), torch.zeros(rows, columns)
        for i in range(down):
            for j in range(across):
                part = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
                scale[i, j] = weight[part].abs().max() / 448
                stored[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
                values[part] = stored[part].float() * scale[i, j]
        tensors = {"weight": stored, name: scale.reshape(()) if kind == "tensor" else scale}
        return tensors | ({"input_scale": torch.tensor(0.5)} if static else {}), values

    return store


# ------------------------------------------------------------------------------------------------------- ModelOpt
def modelopt_int4(group: int) -> Store:
    def store(weight: Tensor):
        q, _, scale, values = rounded(weight, 4, group, zeros=False, dtype=torch.bfloat16)
        signed = (q - 8).numpy()
        halves = (signed[0::2] & 15) | ((signed[1::2] & 15) << 4)
        return {"weight": torch.from_numpy(halves.astype(np.uint8)), "weight_scale": scale}, values

    return store


def compressed(format_name: str, weights: dict[str, Any], **other: Any) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors for all linears but lm_head."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **other,
    }


def with_activations(config: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    """The same, with activations quantized too."""
    group = config["config_groups"]["group_0"] | {"input_activations": described}
    return {**config, "config_groups": {"group_0": group}}


def gptq_config(bits: int, group: int, sym: bool, **other: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": False, **other}


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
INT = dict(type="int", symmetric=True)
PER_TOKEN = dict(type="float", symmetric=True, num_bits=8, strategy="token", dynamic=True)

STORED: dict[str, Stored] = {
    "gptq": Stored("GPTQ int4, groups of 32", gptq_config(4, 32, True), gptq(4, 32, sym=True), (4, 32, 8, False)),
    "gptq-zeros": Stored(
        "GPTQ int4, groups of 32", gptq_config(4, 32, False), gptq(4, 32, sym=False), (4, 32, 8, True)
    ),
    "gptq-v2-int8-channel": Stored(
        "GPTQ int8, a scale a row",
        gptq_config(8, -1, False, checkpoint_format="gptq_v2"),
        gptq(8, None, sym=False, version=2, dtype=torch.bfloat16),
        (8, 64, 128, True),
    ),
    "awq": Stored("AWQ int4, groups of 32", AWQ_CONFIG, awq(32), (4, 32, 8, True)),
    "pack-int4": Stored(
        "compressed-tensors int4, groups of 32",
        compressed("pack-quantized", dict(INT, num_bits=4, strategy="group", group_size=32)),
        pack_quantized(4, 32, sym=True),
        (4, 32, 8, False),
    ),
    "pack-int4-zeros": Stored(
        "compressed-tensors int4, groups of 16",
        compressed("pack-quantized", dict(type="int", num_bits=4, strategy="group", group_size=16, symmetric=False)),
        pack_quantized(4, 16, sym=False),
        (4, 16, 8, True),
    ),
    "pack-int8-float32": Stored(
        "compressed-tensors int8, a scale a row",
        compressed("pack-quantized", dict(INT, num_bits=8, strategy="channel")),
        pack_quantized(8, None, sym=True, dtype=torch.float32),
        (8, 64, 128, False),
    ),
    "int-quantized": Stored(
        "compressed-tensors int8, a scale a row",
        compressed("int-quantized", dict(INT, num_bits=8, strategy="channel")),
        int_quantized(sym=True),
        (8, 64, 128, False),
    ),
    "int-quantized-zeros": Stored(
        "compressed-tensors int8, one scale",
        compressed("int-quantized", dict(type="int", symmetric=False, num_bits=8, strategy="tensor")),
        int_quantized(sym=False, single=True),
        (8, 64, 128, True),
    ),
    "float-quantized": Stored(
        "compressed-tensors float8, a scale a row",
        compressed("float-quantized", dict(type="float", symmetric=True, num_bits=8, strategy="channel")),
        float8("channel"),
        None,
    ),
    "float-quantized-dynamic": Stored(
        "compressed-tensors float8, a scale a row",
        with_activations(
            compressed("float-quantized", dict(type="float", symmetric=True, num_bits=8, strategy="channel")), PER_TOKEN
        ),
        float8("channel"),
        None,
    ),
    "fp8-blocks": Stored("FP8 float8, blocks of 32 x 16", BLOCKS, float8("block", name="weight_scale_inv"), None),
    "fp8-tensor": Stored("FP8 float8, one scale", PER_TENSOR, float8("tensor", static=True), None),
    "modelopt-fp8": Stored(
        "ModelOpt float8, one scale",
        None,
        float8("tensor", static=True),
        None,
        modelopt={"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]},
    ),
    "modelopt-int4": Stored(
        "ModelOpt int4, groups of 32",
        None,
        modelopt_int4(32),
        (4, 32, 8, False),
        modelopt={"quant_algo": "W4A16_AWQ", "group_size": 32, "has_zero_point": False, "exclude_modules": ["lm_head"]},
    ),
}


def save_quantized(
    model: PreTrainedModel, directory: Path, stored: Stored, *, tokenizer: bool = False
) -> tuple[Path, PreTrainedModel]:
    """Write `model` below `directory` as a checkpoint of that layout. Returns it, and the model that it stands for.

    Matrices but embeddings, lm_head and routers are quantized. The model comes from a checkpoint of the values stored.
    """
    plain = save_tiny(model, directory / "plain", tokenizer=False)
    path = save_tiny(model, directory / "quantized", tokenizer=tokenizer)
    given, values, parts = load_file(plain / "model.safetensors"), {}, {}
    for name, weight in given.items():
        if weight.ndim != 2 or any(word in name for word in ("embed", "lm_head", ".gate.weight")):
            values[name] = parts[name] = weight
            continue
        made, values[name] = stored.store(weight)
        parts |= {name.replace("weight", suffix): part.contiguous() for suffix, part in made.items()}
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(parts, path / "model.safetensors")
    describe(path, stored.config, stored.modelopt)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    return path, reference.eval()


def describe(directory: Path, config: dict[str, Any] | None, modelopt: dict[str, Any] | None = None) -> None:
    """Write `quantization_config` into config.json, and `hf_quant_config.json`."""
    file = directory / "config.json"
    raw = {key: value for key, value in json.loads(file.read_text()).items() if key != "quantization_config"}
    file.write_text(json.dumps(raw | ({} if config is None else {"quantization_config": config})))
    if modelopt is not None:
        text = json.dumps({"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": modelopt})
        (directory / "hf_quant_config.json").write_text(text)


def edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")
