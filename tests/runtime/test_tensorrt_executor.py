"""The executor of tensorrt over a GPU made of numpy and a session that runs the graph's twin in onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from llmbuild.cuda.calls import CudaError
from llmbuild.errors import ConfigError, EngineError, LLMBuildError, RequestError
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.plugins.tensorrt import fields, program
from llmbuild.runtime.core import EngineCore
from llmbuild.runtime.executors.cuda.memory import GRAPH_BYTES
from llmbuild.runtime.executors.tensorrt.checks import block_bytes
from llmbuild.runtime.executors.tensorrt.paged import DECODE, MIXED, TensorRTExecutor
from llmbuild.runtime.executors.tensorrt.streaming import HEADROOM
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.request import make_request
from llmbuild.runtime.sampling_params import SamplingParams
from llmbuild.selftest.tensorrt_engines import captured, other_engine
from llmbuild.selftest.twins import PagedTwin, filled
from support.cpu_engines import Conversation, scenario
from support.fake_device import FakeDevice
from support.traced import optimized

pytest.importorskip("onnx_graphsurgeon")
LIMITS = Limits(max_batch_size=4, max_num_tokens=32, max_seq_len=48, block_size=8)
SERVING = ServingLimits(LIMITS.max_batch_size, LIMITS.max_num_tokens, LIMITS.max_seq_len, 288, ())
KINDS = {"tensor(int32)": np.int32, "tensor(float)": np.float32}


class TwinSession:
    """What `PluginSession` does, by the twin: reads from the fake GPU's memory and writes there."""

    def __init__(self, twin: PagedTwin, device: FakeDevice) -> None:
        self._session, self._device = twin.session, device
        self.vocab_size = next(each.shape[-1] for each in twin.session.get_outputs() if each.name == "logits")
        self.ran: list[tuple[int, int]] = []  # context, tokens
        self.bound: dict[int, tuple[Mapping[str, tuple[int, ...]], Mapping[str, int]]] = {}
        self.profiles: list[int] = []
        self.room: int | None = None
        self.closed = False

    def prepare(self, profiles: Sequence[int], room: int | None) -> int:
        self.profiles, self.room = list(profiles), room
        return 0

    def reason(self) -> str:
        return "it gives no reason"

    def run(self, context: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        self.ran.append((context, shapes["input_ids"][0]))
        self.bound[context] = shapes, addresses
        self.run_again(context)

    def run_again(self, context: int) -> None:
        """In the stream's order: at once, or when a graph is launched."""
        self._device._put(lambda: self._execute(*self.bound[context]))

    def _execute(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
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
    traced = optimized("mistral")
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
        "weights": None,
        "options": {"weight_streaming": False},
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
    made: dict[str, Any] = {"make_device": lambda ordinal: device, "make_session": lambda *_, **__: session}
    return TensorRTExecutor(engine, **made, **options), session, device


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_give_the_oracles_logits(graphs: bool, lowered: tuple) -> None:
    """Prompts in chunks, mixed steps and decode over blocks that earlier steps wrote, at addresses that stay."""
    executor, session, device = load(lowered, graphs=graphs)
    assert (executor.num_blocks, executor.block_size) == (24, 8)
    conversation = Conversation(num_blocks=24, block_size=8)
    oracle, state = Oracle(lowered[0]), PagedState(24, 8)
    for chunks in scenario():
        step = conversation.step(chunks)
        np.testing.assert_allclose(executor.forward(step), oracle.run(step, state).numpy(), atol=2e-4)
    assert {context for context, tokens in session.ran if tokens > 4} == {MIXED}
    assert {session.profiles[context] for context, _ in session.ran} == {MIXED, DECODE}
    assert bool(device.captures) == graphs
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


# ------------------------------------------------------------------------------------------------------- CUDA graphs
def decode_steps(executor: TensorRTExecutor, lowered: tuple, batches: Sequence[int]) -> None:
    """Decode steps of these sizes behind short prompts, each compared with the oracle."""
    conversation = Conversation(num_blocks=24, block_size=8)
    oracle, state = Oracle(lowered[0]), PagedState(24, 8)
    steps = [{name: [5, 6, at + 1] for at, name in enumerate("abcd")}]
    steps += [{name: [7 + at] for name in "abcd"[:batch]} for at, batch in enumerate(batches)]
    for chunks in steps:
        step = conversation.step(chunks)
        np.testing.assert_allclose(executor.forward(step), oracle.run(step, state).numpy(), atol=2e-4)


def test_a_graph_for_each_batch_size_replays_without_the_session(lowered: tuple) -> None:
    """Three sequences run in the graph of four; the padding row writes into the block that nobody owns."""
    executor, session, device = load(lowered)
    decode_steps(executor, lowered, [1, 3, 4, 2, 1, 3, 2, 4])
    assert executor.captured == (1, 2, 4) and device.captures == 3
    # The session ran the prompts (four rows of logits a time) and each batch size once: context 3 is that of four.
    assert session.ran == [*[(MIXED, 12)] * 3, (1, 1), (3, 4), (2, 2)] and len(device.graphs_launched) == 5
    assert session.profiles == [MIXED, DECODE, DECODE, DECODE]
    assert captured(SimpleNamespace(executor=executor)) == "captured for batches of 1, 2, 4"  # type: ignore[arg-type]
    executor.close()  # the fake complains of graphs that were not freed
    assert device.closed


def test_padding_rows_write_nowhere_else(lowered: tuple) -> None:
    executor, _, device = load(lowered)
    step = Conversation(num_blocks=24, block_size=8).step({name: [at] for at, name in enumerate("abc")})
    owned = {int(slot) for slot in step.slot_mapping}
    for _ in range(2):  # captured, replayed
        executor.forward(step)
    for name, (slots, heads, width) in executor._pools.shapes.items():
        place = executor._pools.addresses[name]
        assert slots == (24 + 1) * 8
        written = device.view(place, slots * heads * width * 4).view(np.float32).reshape(slots, -1).any(axis=1)
        assert set(np.flatnonzero(written).tolist()) == owned | {24 * 8}


def test_graphs_are_captured_before_the_first_request(lowered: tuple) -> None:
    executor, session, _ = load(lowered)
    executor.warm_up()
    assert executor.captured == (1, 2, 4)
    ran = len(session.ran)
    decode_steps(executor, lowered, [1, 3, 4])
    assert len(session.ran) == ran + 3  # the prompts, four rows of logits a time


def test_more_rows_than_sequences_are_not_captured(lowered: tuple) -> None:
    executor, session, _ = load(lowered)
    step = Conversation(num_blocks=24, block_size=8).step({"a": [5]})
    twice = executor.forward(step._replace(logits_indices=np.zeros(2, np.int32)))
    assert session.ran == [(MIXED, 1)] and (twice[0] == twice[1]).all()


@pytest.mark.parametrize("where", ["begin", "enqueue", "end"])
def test_what_cannot_be_captured_runs_without_and_says_why(where: str, lowered: tuple, monkeypatch) -> None:
    executor, session, device = load(lowered)
    plain = session.run_again

    def run_again(context: int) -> None:
        if device._capturing is not None and where == "enqueue":
            raise LLMBuildError("TensorRT did not run the step: Loop is not capturable")
        plain(context)

    def end_capture(stream: Any) -> Any:
        device._capturing = None
        raise CudaError("cuStreamEndCapture", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "")

    def begin_capture(stream: Any) -> None:
        raise CudaError("cuStreamBeginCapture", "CUDA_ERROR_NOT_SUPPORTED", "")

    monkeypatch.setattr(session, "run_again", run_again)
    monkeypatch.setattr(session, "reason", lambda: "Loop is not capturable")
    if where == "begin":
        monkeypatch.setattr(device, "begin_capture", begin_capture)
    if where == "end":
        monkeypatch.setattr(device, "end_capture", end_capture)
    with pytest.warns(RuntimeWarning, match=r"decode steps run without CUDA graphs.*Loop is not capturable") as said:
        decode_steps(executor, lowered, [1, 3, 4, 2, 1])
    assert len(said) == 1 and executor.captured == () and not device.graphs_launched
    with pytest.raises(LLMBuildError, match=r"no CUDA graphs: .*Loop is not capturable"):
        captured(SimpleNamespace(executor=executor))  # type: ignore[arg-type]
    executor.close()


def test_an_error_that_is_not_of_the_capture_is_raised(lowered: tuple, monkeypatch) -> None:
    executor, session, _ = load(lowered)

    def refuse(*arguments: Any) -> None:
        raise LLMBuildError("TensorRT did not run the step: out of memory")

    monkeypatch.setattr(session, "run_again", refuse)
    with pytest.raises(LLMBuildError, match="out of memory"):
        executor.forward(Conversation(num_blocks=24, block_size=8).step({"a": [5]}))


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
        load(lowered, FakeDevice(sm=89, total=1 << 14), graphs=False)
    with pytest.raises(EngineError, match="the engine needs 6 bytes of GPU memory for itself; 2 bytes are free"):
        load(lowered, FakeDevice(sm=89, total=2))
    with pytest.raises(ConfigError, match="25 KV blocks are asked for, and the engine takes 24"):
        load(lowered, num_blocks=25)
    with pytest.raises(ConfigError, match="kv_memory_fraction is 1"):
        load(lowered, kv_memory_fraction=1.5)
    few, _, _ = load(lowered, FakeDevice(sm=89, total=1 << 17), kv_memory_fraction=0.5, graphs=False)
    assert 6 <= few.num_blocks < 24
    # Graphs need memory of their own, and the block of padding rows.
    again = FakeDevice(sm=89, total=(1 << 17) + 3 * GRAPH_BYTES + block_bytes(lowered[2].manifest.kv_cache))
    assert load(lowered, again, kv_memory_fraction=0.5)[0].num_blocks == few.num_blocks


def with_section(lowered: tuple, **changes: Any) -> tuple:
    program, twin, engine = lowered
    section = {**engine.manifest.target.section, **changes}
    manifest = SimpleNamespace(**{**vars(engine.manifest), "target": SimpleNamespace(section=section)})
    return program, twin, SimpleNamespace(manifest=manifest, path=engine.path, file=engine.file)


def test_weights_beside_the_engine_count_and_reach_the_session(lowered: tuple, tmp_path: Path) -> None:
    (lowered[2].path / "plan" / "w").write_bytes(b"w" * 100)
    stripped = with_section(lowered, weights="plan/w")
    with pytest.raises(EngineError, match="the engine needs 106 bytes of GPU memory for itself; 50 bytes are free"):
        load(stripped, FakeDevice(sm=89, total=50))
    device, given = FakeDevice(sm=89), []
    session = TwinSession(lowered[1], device)
    made = lambda *arguments, **named: given.append((arguments, named)) or session  # noqa: E731
    TensorRTExecutor(stripped[2], make_device=lambda ordinal: device, make_session=made)
    (file, _, _, weights), named = given[0]
    assert (file.name, weights.name, named) == ("e.engine", "w", {"plugin": True})


def test_an_engine_that_stores_its_kernels_needs_no_plugin(lowered: tuple) -> None:
    """Neither of this version nor of any other."""
    stored, given = with_section(lowered, plugin=None), []
    device = FakeDevice(sm=89)
    session = TwinSession(lowered[1], device)
    made = lambda *_, **named: given.append(named) or session  # noqa: E731
    TensorRTExecutor(stored[2], make_device=lambda ordinal: device, make_session=made)
    assert given == [{"plugin": False}]


def test_a_selftest_runs_an_engine_of_another_form_and_closes_it(lowered: tuple) -> None:
    executor, session, _ = load(lowered)
    loaded: Any = SimpleNamespace(executor=executor)
    step = Conversation(num_blocks=24, block_size=8).step({"a": [5, 6]})
    said = other_engine(lambda: "built", lambda: loaded, lambda forward: f"{len(forward(step))} rows")
    assert said == "built; 2 rows" and session.closed


def test_weights_get_what_the_kv_cache_leaves(lowered: tuple) -> None:
    """Of an engine that may leave them in host memory: more blocks, fewer weights."""
    streams = with_section(lowered, options={"weight_streaming": True})
    block = block_bytes(lowered[2].manifest.kv_cache)
    _, few, _ = load(streams, num_blocks=6)
    _, many, _ = load(streams, num_blocks=24)
    _, unsaid, device = load(streams)
    assert few.room is not None and few.room - (many.room or 0) == 18 * block
    assert few.room - (unsaid.room or 0) == block  # 6 blocks of one sequence are 9 tenths of 7
    assert few.room < device.total - HEADROOM
    load(streams, FakeDevice(sm=89, total=1 << 26))  # smaller than an engine would have to be: TensorRT is asked
    assert load(lowered)[1].room is None


def test_weights_that_tensorrt_allocates_later_are_not_given_to_the_kv_cache(lowered: tuple, monkeypatch) -> None:
    later = 1 << 16
    monkeypatch.setattr(TwinSession, "prepare", lambda self, profiles, room: later)
    total = (1 << 17) + later
    few, _, _ = load(lowered, FakeDevice(sm=89, total=total), kv_memory_fraction=0.5, graphs=False)
    monkeypatch.undo()
    assert (
        few.num_blocks
        == load(lowered, FakeDevice(sm=89, total=1 << 17), kv_memory_fraction=0.5, graphs=False)[0].num_blocks
    )


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
