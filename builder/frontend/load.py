"""Model directory or GGUF file → traced `Program`, under a strict contract and without reading weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from llmbuild.builder.frontend import attention_chunks, hf_model, hf_tokenizer, rope_policy
from llmbuild.builder.frontend.bind import Binding, bind
from llmbuild.builder.frontend.buffers import recompute_buffer
from llmbuild.builder.frontend.checkpoint import Checkpoint
from llmbuild.builder.frontend.config_keys import OPTION, check_keys
from llmbuild.builder.frontend.contract import is_attention, window_of
from llmbuild.builder.frontend.fake_model import build_fake_model
from llmbuild.builder.frontend.no_checkpoint import NoCheckpoint, promised
from llmbuild.builder.frontend.quantized_checkpoint import QuantizedCheckpoint
from llmbuild.builder.frontend.quantized_config import MODELOPT_CONFIG, find_format, stored_quantization
from llmbuild.builder.frontend.safetensors_checkpoint import SafetensorsCheckpoint
from llmbuild.builder.frontend.source import ModelSource
from llmbuild.builder.frontend.source_files import hash_files
from llmbuild.builder.frontend.trace import Trace, trace
from llmbuild.builder.ir import Constant, LayerKV, ModelInfo, Program, Rewrite, WeightExpr
from llmbuild.errors import ConfigError, ModelError

Progress = Callable[[int, int, str], None]


def load_program(
    path: Path,
    *,
    dtype: torch.dtype,
    max_seq_len: int | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    ignore_config_keys: Collection[str] = (),
    dry: bool = False,
) -> Program:
    """Trace the model at `path` and bind its weights lazily.

    Args:
        path: Hugging Face model directory, or a .gguf file.
        dtype: Computation dtype. Stored weights are cast when they are loaded, and only if they differ.
        max_seq_len: Longest sequence that the engine is for, where the model computes by it (`rope_policy`); None: what
            is exact.
        progress: Called as progress(done, total, label) between the stages.
        trust_remote_code: Run Python code found in the model directory.
        ignore_config_keys: Keys of config.json that transformers does not know and that change nothing (`config_keys`).
        dry: Read headers only and hash nothing; a directory with nothing but config.json will do.

    Raises:
        ModelError: the input is incomplete or contradicts itself.
        UnsupportedError: the model cannot be represented exactly.
    """
    report = progress or (lambda done, total, label: None)
    report(0, 4, "reading headers")
    source = open_source(path, trust_remote_code=trust_remote_code, ignore_config_keys=ignore_config_keys, dry=dry)
    rope, chunks = rope_policy.settle(source.config, max_seq_len), attention_chunks.settle(source.config)
    longest = min((limit for limit, _ in (rope, chunks) if limit is not None), default=None)
    report(1, 4, "binding weights")
    fake = build_fake_model(source.config, dtype, trust_remote_code=trust_remote_code)
    if isinstance(source.checkpoint, NoCheckpoint):
        binding = promised(fake.model, fake.ties)
    else:
        binding = bind(fake.model, source.checkpoint, fake.ties)
    report(2, 4, "tracing")
    traced = trace(fake)
    weights = _weights(fake.model, traced, binding, source)
    report(3, 4, "hashing files")
    program = Program(
        graph=traced.graph,
        weights=weights,
        info=_info(source, fake.model, traced, longest, () if dry else hash_files(source.files)),
        kv_layers=_kv_layers(traced),
        tokenizer_files=source.tokenizer_files,
        cache_scales=source.cache_scales,
        rewrites=[
            Rewrite("checkpoint tensors ⇒ weights", len(binding.weights), [*source.notices, *binding.notices]),
            Rewrite(
                "attention ⇒ paged_attention", source.config.num_hidden_layers, [*rope[1], *chunks[1], *traced.notices]
            ),
        ],
    )
    _merge_aliases(program, traced, binding)
    report(4, 4, "loaded")
    return program


def open_source(
    path: Path, *, trust_remote_code: bool = False, ignore_config_keys: Collection[str] = (), dry: bool = False
) -> ModelSource:
    """Read everything at `path` except the weights' data. Raises as `load_program`."""
    if path.suffix == ".gguf":
        if ignore_config_keys:
            raise ConfigError("a GGUF file has no config.json", where=OPTION, hint="leave the option out")
        from llmbuild.builder.frontend.gguf_source import open_gguf  # needs the gguf package

        return open_gguf(path)
    config = hf_model.load_config(path, trust_remote_code=trust_remote_code)
    notices = check_keys(hf_model.read_json(path / hf_model.CONFIG), config, ignore_config_keys)
    alone = dry and not any(path.glob("*.safetensors*")) and not any(path.glob("*.bin"))
    described = stored_quantization(path)
    form = None if described is None else find_format(described)
    if form is not None:
        hf_model.forget_quantization(config)
    checkpoint: Checkpoint = NoCheckpoint() if alone else SafetensorsCheckpoint(path)
    if form is not None and isinstance(checkpoint, SafetensorsCheckpoint):
        checkpoint = QuantizedCheckpoint(checkpoint, form)
    configs = (hf_model.CONFIG, hf_model.GENERATION_CONFIG, MODELOPT_CONFIG)
    named = [path / name for name in (*configs, *hf_tokenizer.FILES)]
    small = [file for file in named if file.is_file()] + (sorted(path.glob("*.py")) if trust_remote_code else [])
    return ModelSource(
        name=path.resolve().name,
        config=config,
        checkpoint=checkpoint,
        generation=hf_model.load_generation_config(path),
        tokenizer_files=hf_tokenizer.tokenizer_files(path, trust_remote_code=trust_remote_code),
        files=tuple(sorted({*checkpoint.files, *small})),
        notices=tuple(notices),
        quantized=None if form is None else form.label,
        scattered=checkpoint.scattered if isinstance(checkpoint, QuantizedCheckpoint) else (),
        cache_scales=checkpoint.cache_scales if isinstance(checkpoint, QuantizedCheckpoint) else (),
    )


def _weights(model: PreTrainedModel, traced: Trace, binding: Binding, source: ModelSource) -> dict[str, WeightExpr]:
    """Give every weight placeholder its expression. Tied names keep their own placeholder until they are merged."""
    weights: dict[str, WeightExpr] = {name: Constant(value) for name, value in traced.literals.items()}
    for placeholder, name in traced.names.items():
        bound = binding.aliases.get(name, name)
        if bound in binding.weights:
            weights[placeholder] = binding.weights[bound]
            continue
        value = recompute_buffer(model, name)
        if source.rope_factors is not None and name.endswith("inv_freq"):
            value = value / source.rope_factors
        weights[placeholder] = Constant(value)
    return weights


def _merge_aliases(program: Program, traced: Trace, binding: Binding) -> None:
    """Let tied names share one placeholder, so that their weight is held once."""
    placeholders = {name: placeholder for placeholder, name in traced.names.items()}
    for name, source in binding.aliases.items():
        if name in placeholders and source in placeholders:
            kept = program.placeholder(placeholders[source])
            program.placeholder(placeholders[name]).replace_all_uses_with(kept)
    program.drop_unused_weights()


def _info(
    source: ModelSource,
    model: PreTrainedModel,
    traced: Trace,
    longest: int | None,
    hashes: tuple[tuple[str, int, str], ...],
) -> ModelInfo:
    config = source.config
    output: Any = traced.graph.output_node().args[0]
    logits = output.meta["val"]
    ids = hf_model.special_ids(config, source.generation)
    limit = longest or hf_model.longest_sequence(config)
    if limit is None:
        raise ModelError(
            "the config does not say how long a sequence may be",
            where=source.name,
            hint="add max_position_embeddings to config.json",
        )
    return ModelInfo(
        name=source.name,
        architecture=type(model).__name__,
        vocab_size=int(logits.shape[1]),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_position_embeddings=limit,
        bos_token_id=ids.bos,
        eos_token_ids=ids.eos,
        pad_token_id=ids.pad,
        source_kind=source.checkpoint.kind,
        source_files=hashes,
        quantized=source.quantized,
        scattered=source.scattered,
    )


def _kv_layers(traced: Trace) -> tuple[LayerKV, ...]:
    layers: dict[int, LayerKV] = {}
    for node in traced.graph.nodes:
        if is_attention(node):
            key, value = node.args[1].meta["val"], node.args[2].meta["val"]
            layers[node.args[3]] = LayerKV(key.shape[1], key.shape[2], value.shape[2], window_of(node))
    return tuple(layers[index] for index in sorted(layers))
