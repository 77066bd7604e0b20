"""Reading safetensors: exact bytes, lazily; and what damaged or contradictory files say."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from llmbuild.builder.frontend.safetensors_checkpoint import SafetensorsCheckpoint
from llmbuild.errors import ModelError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.arange(5, dtype=torch.int64),
    "d": torch.tensor([True, False, True]),
    "e": torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).half(),
    "empty": torch.empty(0, 4),
}


def sharded(directory, shards):
    weight_map = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, directory / f"model-{number}.safetensors")
        weight_map.update(dict.fromkeys(tensors, f"model-{number}.safetensors"))
    write_index(directory, weight_map)
    return weight_map


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_every_dtype_is_read_bit_exactly(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.names() == tuple(sorted(TENSORS))
    for name, tensor in TENSORS.items():
        expr = checkpoint.weight(name)
        assert (expr.shape, expr.dtype, expr.sources()) == (tuple(tensor.shape), tensor.dtype, {name})
        assert torch.equal(expr.load(), tensor)


def test_writing_into_a_loaded_tensor_leaves_the_file_alone(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    expr = SafetensorsCheckpoint(tmp_path).weight("a")
    expr.load().zero_()
    assert torch.equal(expr.load(), TENSORS["a"])


def test_shards_are_found_through_the_index(tmp_path):
    sharded(tmp_path, [{"a": TENSORS["a"]}, {"b": TENSORS["b"]}])
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.names() == ("a", "b") and torch.equal(checkpoint.weight("b").load(), TENSORS["b"])
    assert [file.name for file in checkpoint.files] == [
        "model.safetensors.index.json",
        "model-0.safetensors",
        "model-1.safetensors",
    ]


def test_duplicate_layouts_are_ignored_with_a_notice(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    (tmp_path / "original").mkdir()
    for name in ("original/consolidated.00.pth", "pytorch_model.bin", "consolidated.00.pth", "m.Q4_0.gguf"):
        (tmp_path / name).write_bytes(b"never read")
    write_index(tmp_path, {"a": "gone.safetensors"})  # one file is the checkpoint: the index is left over
    assert SafetensorsCheckpoint(tmp_path).notices == tuple(
        f"ignored {name}: not part of the checkpoint"
        for name in (
            "consolidated.00.pth",
            "consolidated.safetensors",
            "m.Q4_0.gguf",
            "model.safetensors.index.json",
            "original/",
            "pytorch_model.bin",
        )
    )


def test_missing_shard_is_named(tmp_path):
    sharded(tmp_path, [{"a": TENSORS["a"]}, {"b": TENSORS["b"]}])
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"missing shard: model-1\.safetensors") as caught:
        SafetensorsCheckpoint(tmp_path)
    assert "the index lists 2 files" in str(caught.value)


@pytest.mark.parametrize("keep", [3, 40, -1])
def test_truncated_file_is_named(keep, tmp_path):
    sharded(tmp_path, [{"a": TENSORS["a"]}, {"c": TENSORS["c"]}])
    file = tmp_path / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model-1\.safetensors is truncated") as caught:
        SafetensorsCheckpoint(tmp_path)
    assert caught.value.where == str(file) and "download the file again" in str(caught.value)


def test_trailing_bytes_are_refused(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    with (tmp_path / "model.safetensors").open("ab") as stream:
        stream.write(b"12345")
    with pytest.raises(ModelError, match="holds 5 bytes that no tensor describes"):
        SafetensorsCheckpoint(tmp_path)


def raw_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "no valid safetensors header"),
        ({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, "'x' has dtype F4, which llmbuild cannot read"),
        ({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, r"shape \[3\].* cannot occupy 8 bytes"),
    ],
)
def test_malformed_header(header, message, tmp_path):
    raw_file(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ModelError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_index_that_places_a_tensor_wrongly(tmp_path):
    weight_map = sharded(tmp_path, [{"a": TENSORS["a"]}, {"b": TENSORS["b"]}])
    write_index(tmp_path, {**weight_map, "ghost": "model-0.safetensors"})
    with pytest.raises(ModelError, match=r"says that 'ghost' is in model-0\.safetensors, but it is not"):
        SafetensorsCheckpoint(tmp_path)
    save_file({"b": TENSORS["b"], "extra": TENSORS["b"].clone()}, tmp_path / "model-1.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(ModelError, match=r"model-1\.safetensors holds 'extra', which .* does not place there"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("[]", "not a JSON object"), ("{", "not valid JSON"), ("{}", "no weight_map")]
)
def test_unreadable_index(text, message, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("pytorch_model.bin", "only pickled weights found"),
        ("adapter_config.json", r"this is an adapter \(LoRA\)"),
        ("model.Q4_0.gguf", r"there are \.gguf files here"),
        ("readme.txt", r"expected model\.safetensors"),
    ],
)
def test_directory_without_weights_says_what_it_holds(file, hint, tmp_path):
    (tmp_path / file).write_text("")
    with pytest.raises(ModelError, match="no weights in") as caught:
        SafetensorsCheckpoint(tmp_path)
    assert caught.match(hint)
