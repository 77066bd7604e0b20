"""SmolLM2 as a complete engine directory of tensorrt-rtx, and the very graph in it, served by onnxruntime.

The engine itself runs on RTX GPUs alone. Its graph is served here in float32, through scheduler, slots and sampler, and
gives the tokens that the oracle gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
import torch

from llmbuild import BuildConfig, build
from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.pipeline import optimize
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.tensorrt.graph import lower
from llmbuild.engine.reader import open_engine
from llmbuild.engine.verify import verify
from llmbuild.errors import EngineError
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.quantization.recipes import find_recipe
from llmbuild.runtime.core import EngineCore
from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.loading import load_engine
from llmbuild.runtime.request import make_request
from llmbuild.runtime.sampler import SampledTokens, sample
from llmbuild.runtime.sampling_batch import SamplingBatch
from llmbuild.runtime.sampling_params import SamplingParams
from llmbuild.runtime.tokenizer import Tokenizer
from llmbuild.selftest.twins import SlotTwin

pytestmark = pytest.mark.timeout(900)

SLOTS, CHUNK, CAPACITY, MAX_TOKENS, LAYERS = 3, 8, 128, 24, 30
PROMPTS = (
    "What is the capital of France?",
    "Water boils at",
    "Explain why the sky is blue to a child, in three sentences.",
    "def fibonacci(n):",
    "Once upon a time, in a small village,",
)


@pytest.fixture(scope="module")
def engine(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    path = tmp_path_factory.mktemp("rtx") / "engine"
    build(
        BuildConfig(
            model=smollm2_gguf,
            output=path,
            target="tensorrt-rtx",
            quant="none",
            max_batch_size=SLOTS,
            max_num_tokens=CHUNK,
            max_seq_len=CAPACITY,
        )
    )
    return path


def test_directory_is_complete(engine: Path) -> None:
    assert verify(engine) == []
    manifest = open_engine(engine).manifest
    section = manifest.target.section
    assert (manifest.target.name, section["sms"], section["slots"]) == ("tensorrt-rtx", [86, 89, 120], SLOTS)
    assert (manifest.precision.dtype, manifest.kv_cache.block_size) == ("bfloat16", CAPACITY)
    assert len(manifest.kv_cache.layers) == LAYERS
    assert manifest.target.requires["tensorrt-rtx"].startswith("==1.7.")
    weights = 2 * 134_515_008  # bfloat16; embedding and lm_head are one tensor
    assert weights < (engine / section["engine"]).stat().st_size < 1.3 * weights
    tokenizer = Tokenizer.load(engine / "tokenizer")
    assert tokenizer.encode("Paris") and tokenizer.generation_config is not None
    assert json.loads((engine / "report.json").read_text())


def test_every_layer_is_in_both_profiles(engine: Path) -> None:
    found = json.loads((engine / "plan" / "layers.json").read_text())
    for profile in (0, 1):
        reached = {name for layer in found["layers"] if layer["profile"] == profile for name in layer["nodes"]}
        assert sum("paged_attention" in name for name in reached) == LAYERS
    assert found["memory"]["weights"] > 2 * 134_000_000


def test_a_machine_without_its_gpu_is_told_so(engine: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(EngineError, match="driver"):
        load_engine(engine)


class Served(NamedTuple):
    tokens: list[list[int]]
    logits: list[np.ndarray]


class Steps:
    """An executor over a function from steps to logits, which it keeps."""

    num_blocks, block_size = SLOTS, CAPACITY

    def __init__(self, forward: Callable[[StepInput], np.ndarray]) -> None:
        self._forward = forward
        self.logits: list[np.ndarray] = []

    def forward(self, step: StepInput) -> np.ndarray:
        self.logits.append(self._forward(step))
        return self.logits[-1]

    def execute(self, step: StepInput, sampling: SamplingBatch) -> SampledTokens:
        return sample(self.forward(step), sampling)

    def close(self) -> None:
        """Nothing is held."""


def serve(forward: Callable[[StepInput], np.ndarray], engine: Path) -> Served:
    """All prompts at once, greedily: five sequences for three slots, prompts in chunks of 8."""
    executor = Steps(forward)
    limits = ServingLimits.of(open_engine(engine).manifest)
    tokenizer = Tokenizer.load(engine / "tokenizer")
    core = EngineCore(executor, limits, None)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for number, text in enumerate(PROMPTS):
        prompt = tokenizer.encode(text)
        core.add(make_request(str(number), prompt, params, limits, pool_tokens=SLOTS * CAPACITY))
    found: dict[int, list[int]] = {}
    while core.has_work:
        for output in core.step():
            found[int(output.request_id)] = list(output.outputs[0].token_ids)
        core.check_invariants()
    return Served([found[number] for number in range(len(PROMPTS))], executor.logits)


@pytest.mark.slow
def test_graph_gives_the_oracles_tokens(engine: Path, smollm2_gguf: Path) -> None:
    program = load_program(smollm2_gguf, dtype=torch.float32, max_seq_len=CAPACITY)
    optimize(program, find_recipe("none"))
    limits = Limits(SLOTS, CHUNK, CAPACITY, block_size=CAPACITY)
    emitter = lower(program, limits, target="tensorrt-rtx", paged=False)
    built = onnx.load(engine / "plan" / "model.onnx", load_external_data=False)
    assert operators(emitter.model("")) == operators(built)

    state, oracle = PagedState(SLOTS, CAPACITY), Oracle(program)
    expected = serve(lambda step: oracle.run(step, state).numpy(), engine)
    found = serve(SlotTwin(emitter, SLOTS, threads=2).run, engine)
    assert found.tokens == expected.tokens
    assert all(len(set(tokens)) > 5 for tokens in found.tokens)
    pairs = list(zip(found.logits, expected.logits, strict=True))
    worst = max(float(np.abs(one - other).max(initial=0)) for one, other in pairs)
    largest = max(float(np.abs(other).max(initial=0)) for _, other in pairs)
    print(f"max |Δlogit| {worst:.2e} of logits up to {largest:.1f}, {len(pairs)} steps")
    assert worst < 1e-4 * largest


def operators(model: onnx.ModelProto) -> list[tuple[str, str]]:
    """(node of the traced graph, operator) of all but casts, which depend on the dtype."""
    return [(node.name.split(".")[0], node.op_type) for node in model.graph.node if node.op_type != "Cast"]
