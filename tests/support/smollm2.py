"""SmolLM2 with float32 weights, which recipes round: those of its GGUF are in blocks of 4 bits already."""

from __future__ import annotations

from pathlib import Path

from llmbuild.builder.frontend.load import open_source


def dequantize(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF of a Llama as a Hugging Face directory of float32 weights."""
    from safetensors.torch import save_file

    source = open_source(gguf)
    tensors = {name: source.checkpoint.weight(name).load().contiguous() for name in source.checkpoint.names()}
    folder.mkdir(parents=True)
    for name, content in source.tokenizer_files.items():
        (folder / name).write_bytes(content)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source.config.architectures = ["LlamaForCausalLM"]
    source.config.save_pretrained(folder)  # last: a folder with a config is whole
