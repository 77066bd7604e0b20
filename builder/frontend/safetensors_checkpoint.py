"""The weights of a Hugging Face directory: one safetensors file, or shards with an index."""

from __future__ import annotations

from pathlib import Path

from llmbuild.builder.frontend.hf_model import read_json
from llmbuild.builder.frontend.safetensors_file import StoredTensor, read_header
from llmbuild.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The same weights once more, in other forms that repositories carry beside the one that is read.
OTHER_LAYOUTS = ("*.safetensors", INDEX, "original", "*.pth", "*.pt", "*.bin", "*.h5", "*.msgpack", "*.gguf")


class SafetensorsCheckpoint:
    """A `Checkpoint`. The index is checked against the files and their headers before anything else happens.

    Args:
        directory: Model directory.

    Raises:
        ModelError: no weights, a missing or truncated file, or an index that contradicts the files.
    """

    kind = "huggingface"

    def __init__(self, directory: Path) -> None:
        single, index = directory / SINGLE, directory / INDEX
        if single.is_file():
            self._tensors = read_header(single)
            self.files: tuple[Path, ...] = (single,)
        elif index.is_file():
            self._tensors = _read_shards(index)
            self.files = (index, *sorted({tensor.file for tensor in self._tensors.values()}))
        else:
            raise _no_weights(directory)
        ignored = sorted({file for pattern in OTHER_LAYOUTS for file in directory.glob(pattern)} - set(self.files))
        names = [file.name + "/" * file.is_dir() for file in ignored]
        self.notices: tuple[str, ...] = tuple(f"ignored {name}: not part of the checkpoint" for name in names)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tensors))

    def weight(self, name: str) -> StoredTensor:
        return self._tensors[name]


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    claimed = read_json(index).get("weight_map")
    if not isinstance(claimed, dict):
        raise ModelError(f"{index.name} has no weight_map", where=str(index))
    shards = sorted(set(claimed.values()))
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise ModelError(
            f"missing shard: {', '.join(missing)}",
            where=str(index),
            hint=f"the index lists {len(shards)} files; download the missing ones into the same directory",
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        header = read_header(index.parent / shard)
        for name in sorted(name for name, file in claimed.items() if file == shard and name not in header):
            raise ModelError(f"{index.name} says that {name!r} is in {shard}, but it is not", where=str(index))
        for name in sorted(header):
            if claimed.get(name) != shard:
                raise ModelError(f"{shard} holds {name!r}, which {index.name} does not place there", where=str(index))
        tensors.update(header)
    return tensors


def _no_weights(directory: Path) -> ModelError:
    hint = "expected model.safetensors, or shards with model.safetensors.index.json"
    if (directory / "adapter_config.json").is_file():
        hint = "this is an adapter (LoRA): merge it into its base model and save that"
    elif any(directory.glob("pytorch_model*.bin")) or any(directory.glob("*.pth")):
        hint = "only pickled weights found: load and save the model once with transformers to get safetensors"
    elif any(directory.glob("*.gguf")):
        hint = "there are .gguf files here: give the path of one of them"
    return ModelError(f"no weights in {directory.name!r}", where=str(directory), hint=hint)
