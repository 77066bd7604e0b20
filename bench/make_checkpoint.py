"""Write a checkpoint of a published shape with random bfloat16 weights: config, index, sharded safetensors.

    python bench/make_checkpoint.py OUT --shape llama-3.1-8b [--layers N] [--shard-gb 5]

Tensors are made and written one at a time, so that 16 GB need little memory. The bytes depend on the shape alone.
"""

from __future__ import annotations

import argparse
import json
import struct
import zlib
from pathlib import Path

from shapes import SHAPES, make_config


def tensor_shapes(config: object) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's parameters, found on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}


def random_bytes(name: str, shape: tuple[int, ...]) -> bytes:
    """bfloat16 values of standard deviation 0.02 (norms: near 1), seeded by the tensor's name."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if len(shape) == 1:
        values = 1 + 0.1 * torch.randn(shape, generator=generator)
    else:
        values = torch.empty(shape, dtype=torch.bfloat16)
        block = torch.randn(1 << 20, generator=generator).mul_(0.02).to(torch.bfloat16)
        flat = values.view(-1)
        for begin in range(0, flat.numel(), block.numel()):
            part = flat[begin : begin + block.numel()]
            part.copy_(block[: part.numel()].roll(begin // block.numel()))
    return values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def shards_of(shapes: dict[str, tuple[int, ...]], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = byte_size(shape)
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def byte_size(shape: tuple[int, ...]) -> int:
    size = 2
    for extent in shape:
        size *= extent
    return size


def write_shard(path: Path, names: list[str], shapes: dict[str, tuple[int, ...]]) -> None:
    header, offset = {}, 0
    for name in names:
        size = byte_size(shapes[name])
        header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(random_bytes(name, shapes[name]))


def write_checkpoint(out: Path, shape: str, layers: int | None, shard_bytes: int) -> int:
    """Write the whole directory; return the bytes of weights."""
    config = make_config(shape)
    if layers is not None:
        config.num_hidden_layers = layers
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.dtype = "bfloat16"
    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(out)
    shapes = tensor_shapes(config)
    shards = shards_of(shapes, shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(out / file, names, shapes)
        weight_map.update(dict.fromkeys(names, file))
    total = sum(byte_size(extent) for extent in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))
    write_tokenizer(out)
    return total


def write_tokenizer(out: Path) -> None:
    """A byte-level tokenizer of 256 tokens: far smaller than the vocabulary, which is legal."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(out / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than published, for a quick run")
    parser.add_argument("--shard-gb", type=float, default=5.0)
    arguments = parser.parse_args()
    total = write_checkpoint(arguments.out, arguments.shape, arguments.layers, int(arguments.shard_gb * 1e9))
    print(json.dumps({"kind": "checkpoint", "shape": arguments.shape, "bytes": total}))


if __name__ == "__main__":
    main()
