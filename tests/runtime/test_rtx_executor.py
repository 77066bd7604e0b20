"""The executor of tensorrt-rtx over a GPU made of numpy and a session that runs the graph's twin in onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmbuild.builder.oracle import Oracle
from llmbuild.builder.sections import kv_cache
from llmbuild.builder.targets.tensorrt.capabilities import RTX
from llmbuild.builder.targets.tensorrt.graph import lower
from llmbuild.errors import ConfigError, EngineError, RequestError
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.runtime.core import EngineCore
from llmbuild.runtime.executors.tensorrt import executor as module
from llmbuild.runtime.executors.tensorrt.checks import block_bytes
from llmbuild.runtime.executors.tensorrt.executor import DECODE, RtxExecutor
from llmbuild.runtime.executors.tensorrt.streaming import HEADROOM
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.request import make_request
from llmbuild.runtime.sampling_params import SamplingParams
from support.cpu_engines import Conversation
from support.fake_device import FakeDevice
from support.tensorrt_graphs import CAPACITY, LIMITS, SLOTS, Twin, scenario
from support.traced import optimized

SERVING = ServingLimits(SLOTS, LIMITS.max_num_tokens, CAPACITY, 288, ())


class TwinSession:
    """What `RtxSession` does, by the twin: reads inputs from the fake GPU's memory and writes outputs there."""

    def __init__(self, twin: Twin, device: FakeDevice) -> None:
        self._session, self._device = twin.session, device
        self.vocab_size = self._session.get_outputs()[-1].shape[-1]
        self.ran: list[tuple[int, tuple[int, ...]]] = []
        self.closed = False
        self.room: int | None = None

    def prepare(self, profiles: Sequence[int], room: int | None) -> int:
        assert list(profiles) == [0, 1]
        self.room = room
        return 0

    def run(self, profile: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        self.ran.append((profile, shapes["input_ids"]))
        kinds = {"tensor(int32)": np.int32, "tensor(int64)": np.int64, "tensor(float)": np.float32}
        arrays = {}
        for item in self._session.get_inputs():
            kind, shape = np.dtype(kinds[item.type]), shapes[item.name]
            raw = self._device.view(addresses[item.name], int(np.prod(shape)) * kind.itemsize)
            arrays[item.name] = raw.view(kind).reshape(shape).copy()
        names = [output.name for output in self._session.get_outputs()]
        for name, value in zip(names, self._session.run(None, arrays), strict=True):
            self._device.view(addresses[name], value.nbytes)[:] = np.frombuffer(value.tobytes(), np.uint8)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """(program, twin, engine)"""
    folder = tmp_path_factory.mktemp("rtx")
    program = optimized("mistral")
    (folder / "plan").mkdir()
    (folder / "plan" / "e.engine").write_bytes(b"engine")
    section = {
        "sms": [86, 89],
        "known_sms": list(RTX.sms),
        "engine": "plan/e.engine",
        "slots": SLOTS,
        "prefill_batch": 2,
        "options": {"weight_streaming": False},
    }
    manifest = SimpleNamespace(
        target=SimpleNamespace(section=section),
        kv_cache=kv_cache(program, "float32", LIMITS, None),
        limits=SimpleNamespace(max_num_tokens=LIMITS.max_num_tokens),
        files=[SimpleNamespace(path="plan/e.engine", sha256="ab" * 32)],
    )
    engine = SimpleNamespace(manifest=manifest, path=folder, file=lambda name: folder / name)
    return program, Twin(lower(program, LIMITS, target="tensorrt-rtx", paged=False)), engine


def load(lowered: tuple, gpu: FakeDevice | None = None, **options: Any) -> tuple[RtxExecutor, TwinSession, FakeDevice]:
    _, twin, engine = lowered
    device = gpu or FakeDevice(sm=89)
    session = TwinSession(twin, device)
    made: dict[str, Any] = {"make_device": lambda ordinal: device, "make_session": lambda *_: session}
    return RtxExecutor(engine, **made, **options), session, device


def test_steps_give_the_oracles_logits(lowered: tuple) -> None:
    executor, session, device = load(lowered)
    conversation = Conversation(num_blocks=SLOTS, block_size=CAPACITY)
    oracle, state = Oracle(lowered[0]), PagedState(SLOTS, CAPACITY)
    for chunks in scenario():
        step = conversation.step(chunks)
        np.testing.assert_allclose(executor.forward(step), oracle.run(step, state).numpy(), atol=2e-4)
    assert {profile for profile, shape in session.ran if shape[1] == 1} == {DECODE}
    assert DECODE not in {profile for profile, shape in session.ran if shape[1] > 1}
    assert max(shape[0] for _, shape in session.ran) == SLOTS
    executor.close()
    assert session.closed and device.closed


def test_requests_are_served_through_scheduler_and_sampler(lowered: tuple) -> None:
    """More requests than slots, prompts longer than a step; tokens are those of a plain pass over each sequence."""
    executor, _, _ = load(lowered)
    core = EngineCore(executor, SERVING)
    random = np.random.default_rng(3)
    lengths = [1, 37, 6, 12, 3, 20, 9]
    prompts = [random.integers(0, 256, length).tolist() for length in lengths]
    pool = executor.num_blocks * executor.block_size
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=6)
        core.add(make_request(str(number), prompt, params, SERVING, pool_tokens=pool))
    finished = {}
    while core.has_work:
        for output in core.step():
            finished[int(output.request_id)] = list(output.outputs[0].token_ids)
        core.check_invariants()
    assert core.num_free_blocks == SLOTS
    for number, prompt in enumerate(prompts):
        assert finished[number] == greedy(lowered[0], prompt, finished[number])


def greedy(program, prompt: list[int], output: list[int]) -> list[int]:
    """What the oracle's largest logits are behind each prefix of prompt and output."""
    step = Conversation(num_blocks=1, block_size=CAPACITY).step({"a": prompt + output[:-1]})
    logits = Oracle(program).run(step, PagedState(1, CAPACITY)).numpy()
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_requests_beyond_the_profiles_are_refused_at_admission(lowered: tuple) -> None:
    executor, _, _ = load(lowered)
    with pytest.raises(RequestError, match=str(CAPACITY)):
        pool = executor.num_blocks * executor.block_size
        make_request("r", [1] * (CAPACITY + 1), SamplingParams(max_tokens=1), SERVING, pool_tokens=pool)


# ------------------------------------------------------------------------------------------------- what is refused
def test_a_gpu_that_tensorrt_rtx_never_runs_on(lowered: tuple) -> None:
    with pytest.raises(
        EngineError, match="TensorRT-RTX does not run on GPUs of SM 90; the engine was built for SM 86"
    ) as e:
        load(lowered, FakeDevice(sm=90))
    assert e.value.hint == "convert the model again with --target cuda --sm 90"
    assert "Fake H1" in str(e.value.where)


def test_a_gpu_that_the_engine_holds_no_code_for(lowered: tuple) -> None:
    with pytest.raises(EngineError, match=r"holds no code for this GPU \(SM 120\)") as caught:
        load(lowered, FakeDevice(sm=120))
    assert caught.value.hint == "convert the model again with --sm 86,89,120"


def test_too_little_memory(lowered: tuple) -> None:
    with pytest.raises(EngineError, match=r"needs .* of GPU memory: .* for each of 4 sequences; .* are free"):
        load(lowered, FakeDevice(sm=89, total=1 << 15))


def test_weights_get_what_the_slots_leave(lowered: tuple) -> None:
    """Of an engine that may leave them in host memory: fewer slots, more weights."""
    _, twin, engine = lowered
    section = {**engine.manifest.target.section, "options": {"weight_streaming": True}}
    manifest = SimpleNamespace(**{**vars(engine.manifest), "target": SimpleNamespace(section=section)})
    streams = SimpleNamespace(manifest=manifest, path=engine.path, file=engine.file)
    _, all_slots, _ = load((None, twin, streams))
    _, one_slot, _ = load((None, twin, streams), num_blocks=1)
    a_slot = block_bytes(manifest.kv_cache)
    assert all_slots.room is not None and one_slot.room is not None
    assert one_slot.room - all_slots.room >= (SLOTS - 1) * a_slot
    assert all_slots.room + SLOTS * a_slot < (1 << 30) - HEADROOM
    assert load(lowered)[1].room is None


def test_more_slots_than_sequences(lowered: tuple) -> None:
    with pytest.raises(ConfigError, match="5 KV blocks are asked for, but a block of this engine is a whole sequence"):
        load(lowered, num_blocks=5)
    assert load(lowered, num_blocks=2)[0].num_blocks == 2


def test_compiled_kernels_are_kept_by_engine_and_gpu(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.cache_file("ab" * 32, 89) == tmp_path / "llmbuild" / ("rtx-" + "ab" * 16 + "-sm89.cache")


# ------------------------------------------------------------------------------- the calls, against the real bindings
def test_the_session_asks_the_bindings_for_what_they_have() -> None:
    """Names and arguments only: no GPU that TensorRT-RTX runs on is here."""
    trt = pytest.importorskip("tensorrt_rtx")
    used = {
        trt.Runtime: ["deserialize_cuda_engine"],
        trt.ICudaEngine: ["create_runtime_config", "create_execution_context", "get_tensor_shape"],
        trt.IRuntimeConfig: ["cuda_graph_strategy", "create_runtime_cache", "set_runtime_cache"],
        trt.IRuntimeCache: ["deserialize", "serialize"],
        trt.IExecutionContext: [
            "set_optimization_profile_async",
            "set_input_shape",
            "set_tensor_address",
            "execute_async_v3",
        ],
    }
    for cls, names in used.items():
        assert not [name for name in names if not hasattr(cls, name)], cls
    assert trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE is not None
    text = Path(module.__file__).with_name("session.py").read_text()
    assert all(name in text for names in used.values() for name in names)


def test_an_engine_that_tensorrt_rtx_does_not_open(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    from llmbuild.runtime.executors.tensorrt.session import RtxSession

    (tmp_path / "e").write_bytes(b"no engine")
    with pytest.raises(EngineError, match="does not open the engine: ") as caught:
        RtxSession(tmp_path / "e", FakeDevice(sm=89), 0, None)  # type: ignore[arg-type]
    assert "convert the model again" in str(caught.value.hint)
