"""The executor of tensorrt over a GPU made of numpy and a session that runs the graph's twin in onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmbuild.builder.oracle import Oracle
from llmbuild.builder.sections import kv_cache
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.tensorrt.graph import lower
from llmbuild.builder.targets.tensorrt.reference import with_reference
from llmbuild.builder.targets.tensorrt.surgery import add_plugins, table_stride
from llmbuild.errors import ConfigError, EngineError, RequestError
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.plugins.tensorrt import fields, program
from llmbuild.runtime.core import EngineCore
from llmbuild.runtime.executors.tensorrt.paged import DECODE, MIXED, TensorRTExecutor
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.request import make_request
from llmbuild.runtime.sampling_params import SamplingParams
from llmbuild.selftest.twins import PagedTwin, filled
from support.cpu_engines import Conversation, scenario
from support.fake_device import FakeDevice
from support.tensorrt_graphs import optimized

pytest.importorskip("onnx_graphsurgeon")
LIMITS = Limits(max_batch_size=4, max_num_tokens=32, max_seq_len=48, block_size=8)
SERVING = ServingLimits(LIMITS.max_batch_size, LIMITS.max_num_tokens, LIMITS.max_seq_len, 288, ())
KINDS = {"tensor(int32)": np.int32, "tensor(float)": np.float32}


class TwinSession:
    """What `PluginSession` does, by the twin: reads from the fake GPU's memory and writes there."""

    def __init__(self, twin: PagedTwin, device: FakeDevice) -> None:
        self._session, self._device = twin.session, device
        self.vocab_size = next(each.shape[-1] for each in twin.session.get_outputs() if each.name == "logits")
        self.ran: list[tuple[int, int]] = []
        self.closed = False

    def run(self, profile: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        self.ran.append((profile, shapes["input_ids"][0]))
        arrays = {}
        for item in self._session.get_inputs():
            kind, shape = np.dtype(KINDS[item.type]), shapes[item.name]
            raw = self._device.view(addresses[item.name], int(np.prod(shape)) * kind.itemsize)
            arrays[item.name] = raw.view(kind).reshape(shape).copy()
        names = [output.name for output in self._session.get_outputs()]
        for name, value in zip(names, self._session.run(None, arrays), strict=True):
            if name != "logits":  # a pool comes out where it went in
                assert addresses[name] == addresses[name.removesuffix(".out")]
            self._device.view(addresses[name], value.nbytes)[:] = np.frombuffer(value.tobytes(), np.uint8)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """(program, twin, engine)"""
    folder = tmp_path_factory.mktemp("tensorrt")
    traced = optimized(folder, "mistral")
    (folder / "plan").mkdir()
    (folder / "plan" / "e.engine").write_bytes(b"engine")
    emitter = lower(traced, LIMITS, target="tensorrt", paged=True)
    model, forms = add_plugins(emitter.model("twin"), LIMITS, lambda form: "none")
    twin = PagedTwin(filled(with_reference(model, forms), emitter), blocks=1, block_size=8, stride=table_stride(LIMITS))
    section = {
        "sm": 89,
        "gpu": "Ada",
        "plugin": {"fields": fields.VERSION, "program": program.VERSION},
        "engine": "plan/e.engine",
        "table_stride": table_stride(LIMITS),
        "most_slots": 1 << 20,
    }
    manifest = SimpleNamespace(
        target=SimpleNamespace(section=section),
        kv_cache=kv_cache(traced, "float32", LIMITS, None),
        limits=SimpleNamespace(max_num_tokens=LIMITS.max_num_tokens, max_batch_size=LIMITS.max_batch_size),
    )
    return traced, twin, SimpleNamespace(manifest=manifest, path=folder, file=lambda name: folder / name)


def load(lowered: tuple, gpu: FakeDevice | None = None, **options: Any) -> tuple[TensorRTExecutor, TwinSession, Any]:
    _, twin, engine = lowered
    device = gpu or FakeDevice(sm=89)
    session = TwinSession(twin, device)
    made: dict[str, Any] = {"make_device": lambda ordinal: device, "make_session": lambda *_: session}
    return TensorRTExecutor(engine, **made, **options), session, device


def test_steps_give_the_oracles_logits(lowered: tuple) -> None:
    """Prompts in chunks, mixed steps and decode over blocks that earlier steps wrote, at addresses that stay."""
    executor, session, device = load(lowered)
    assert (executor.num_blocks, executor.block_size) == (24, 8)
    conversation = Conversation(num_blocks=24, block_size=8)
    oracle, state = Oracle(lowered[0]), PagedState(24, 8)
    for chunks in scenario():
        step = conversation.step(chunks)
        np.testing.assert_allclose(executor.forward(step), oracle.run(step, state).numpy(), atol=2e-4)
    assert {profile for profile, tokens in session.ran if tokens > 4} == {MIXED}
    assert {profile for profile, tokens in session.ran} == {MIXED, DECODE}
    executor.close()
    assert session.closed and device.closed


def test_a_step_whose_logits_nobody_wants(lowered: tuple) -> None:
    executor, _, _ = load(lowered)
    step = Conversation(num_blocks=24, block_size=8).step({"a": [1, 2, 3]})
    assert executor.forward(step._replace(logits_indices=np.zeros(0, np.int32))).shape == (0, executor._vocab_size)


def test_requests_are_served_through_scheduler_and_sampler(lowered: tuple) -> None:
    """Few blocks, so that sequences wait and are computed again; tokens are those of one pass over each sequence."""
    executor, _, _ = load(lowered, num_blocks=9)
    core = EngineCore(executor, SERVING)
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 256, length).tolist() for length in (1, 37, 6, 12, 3, 20, 9)]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=6)
        core.add(make_request(str(number), prompt, params, SERVING, pool_tokens=72))
    finished = {}
    while core.has_work:
        for output in core.step():
            finished[int(output.request_id)] = list(output.outputs[0].token_ids)
        core.check_invariants()
    assert core.num_free_blocks == 9
    for number, prompt in enumerate(prompts):
        step = Conversation(num_blocks=1, block_size=48).step({"a": prompt + finished[number][:-1]})
        logits = Oracle(lowered[0]).run(step, PagedState(1, 48)).numpy()
        assert finished[number] == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_requests_beyond_the_profiles_are_refused_at_admission() -> None:
    with pytest.raises(RequestError, match="48"):
        make_request("r", [1] * 49, SamplingParams(max_tokens=1), SERVING, pool_tokens=192)


# ------------------------------------------------------------------------------------------------- what is refused
def test_another_gpu_than_it_was_built_on(lowered: tuple) -> None:
    with pytest.raises(EngineError, match=r"built on a GPU of SM 89 \(Ada\); this one is SM 90") as caught:
        load(lowered, FakeDevice(sm=90))
    assert "convert the model again on this machine" in str(caught.value.hint)


def test_a_plugin_of_another_version(lowered: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "VERSION", program.VERSION + 1)
    with pytest.raises(EngineError, match="the engine's plugin PagedAttention has version") as caught:
        load(lowered)
    assert caught.value.hint == "convert the model again with this version of llmbuild"


def test_memory(lowered: tuple, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"6 KV blocks need .* of GPU memory; .* are free"):
        load(lowered, FakeDevice(sm=89, total=1 << 14))
    with pytest.raises(EngineError, match="the engine needs 6 bytes of GPU memory for itself; 2 bytes are free"):
        load(lowered, FakeDevice(sm=89, total=2))
    with pytest.raises(ConfigError, match="25 KV blocks are asked for, and the engine takes 24"):
        load(lowered, num_blocks=25)
    with pytest.raises(ConfigError, match="kv_memory_fraction is 1"):
        load(lowered, kv_memory_fraction=1.5)
    assert 6 <= load(lowered, FakeDevice(sm=89, total=1 << 17), kv_memory_fraction=0.5)[0].num_blocks < 24


def test_without_the_package(lowered: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session says what to install; tensorrt-rtx, which takes no plugins, does not do."""
    from llmbuild.plugins.tensorrt import bindings
    from llmbuild.runtime.executors.tensorrt.session import PluginSession

    def missing() -> Any:
        raise ConfigError("TensorRT is missing", hint=bindings.INSTALL)

    monkeypatch.setattr(bindings, "bindings", missing)
    with pytest.raises(ConfigError) as caught:
        PluginSession(Path("e"), FakeDevice(sm=89), 0)  # type: ignore[arg-type]
    assert caught.value.hint == "pip install 'llmbuild[tensorrt]'"
