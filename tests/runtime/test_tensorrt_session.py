"""What sessions ask of TensorRT and in which order, over a module that only writes it down."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmbuild.errors import EngineError, LLMBuildError
from llmbuild.runtime.executors.tensorrt.session import PluginSession, RtxSession
from llmbuild.runtime.executors.tensorrt.streaming import fit_weights
from support.fake_device import FakeDevice
from support.fake_tensorrt import FakeEngine, FakeTensorRT, write_weights

REGISTERED: list[str] = []


def opened(
    engine: FakeEngine | None, folder: Path, monkeypatch: pytest.MonkeyPatch, weights: Path | None = None, **named: bool
) -> tuple[PluginSession, FakeTensorRT, FakeDevice]:
    from llmbuild.plugins import tensorrt as plugin
    from llmbuild.plugins.tensorrt import bindings

    module, device = FakeTensorRT(engine), FakeDevice(sm=89)
    monkeypatch.setattr(bindings, "require_plugins", lambda: SimpleNamespace(module=module))
    REGISTERED.clear()
    monkeypatch.setattr(plugin, "register", lambda: REGISTERED.append("plugin"))
    (folder / "e").write_bytes(b"engine" * 1000)
    return PluginSession(folder / "e", device, 1, weights, **named), module, device  # type: ignore[arg-type]


def test_an_engine_is_read_from_a_mapping(tmp_path: Path, monkeypatch) -> None:
    _, module, _ = opened(FakeEngine(), tmp_path, monkeypatch)
    assert module.opened == [("mmap", True, 6000)]


def test_the_plugin_is_registered_where_the_engine_calls_it(tmp_path: Path, monkeypatch) -> None:
    opened(FakeEngine(), tmp_path, monkeypatch)
    assert REGISTERED == ["plugin"]
    opened(FakeEngine(), tmp_path, monkeypatch, plugin=False)
    assert REGISTERED == []


def test_an_engine_of_tensorrt_rtx_too_and_each_context_has_memory_of_its_own(tmp_path: Path, monkeypatch) -> None:
    engine = FakeEngine(streamable=5000, activations=1000)
    module = FakeTensorRT(engine)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", module)
    (tmp_path / "e").write_bytes(b"engine")
    session = RtxSession(tmp_path / "e", FakeDevice(sm=89), 1, tmp_path / "kernels")  # type: ignore[arg-type]
    assert session.prepare((0, 1), 6500) == 4500 + 2 * 1000
    assert module.opened == [("mmap", True, 6)]
    assert engine.strategies[0].cuda_graph_strategy == "WHOLE_GRAPH_CAPTURE"
    session.close()
    assert (tmp_path / "kernels").read_bytes() == b"kernels"


def test_weights_come_back_before_they_are_divided_and_before_there_are_contexts(tmp_path: Path, monkeypatch) -> None:
    engine = FakeEngine(asks={"w": ("HALF", 2)}, streamable=5000, activations=1024)
    write_weights(tmp_path / "w", {"w": ("F16", b"abcd")})
    session, _, device = opened(engine, tmp_path, monkeypatch, tmp_path / "w")
    assert engine.filled == {"w": b"abcd"}
    assert session.prepare([0, 1, 1], 4024) == 4024
    assert engine.events == ["refit", "budget 5000", "budget 3000", *["context"] * 3]
    # Contexts never run at the same time: one place for the activations of all of them.
    assert engine.strategies == ["USER_MANAGED"] * 3
    assert [context.profile for context in engine.contexts] == [0, 1, 1]
    assert {context.memory for context in engine.contexts} == {(next(iter(device.blocks)), 1024)}
    session.close()
    assert not device.blocks


def test_an_engine_whose_weights_stay_is_not_asked_for_a_budget(tmp_path: Path, monkeypatch) -> None:
    engine = FakeEngine()
    session, _, _ = opened(engine, tmp_path, monkeypatch)
    assert session.prepare([0, 1]) == 0 and engine.events == ["context", "context"]


def test_activations_that_do_not_fit(tmp_path: Path, monkeypatch) -> None:
    session, _, _ = opened(FakeEngine(activations=2 << 30), tmp_path, monkeypatch)
    with pytest.raises(EngineError, match=r"activations need 2.1 GB of GPU memory; 1.1 GB are free beside the engine"):
        session.prepare([0])


def test_a_step_that_tensorrt_refuses_is_explained_by_its_own_words(tmp_path: Path, monkeypatch) -> None:
    engine = FakeEngine()
    session, _, _ = opened(engine, tmp_path, monkeypatch)
    session.prepare([0, 1])
    log: Any = session._log
    log.log("error", "of another step")

    def fails() -> bool:
        log.log("warning", "slow")
        log.log("error", "too large")
        return False

    engine.contexts[1].does = fails
    with pytest.raises(LLMBuildError, match="TensorRT did not run the step: too large") as caught:
        session.run(1, {"input_ids": (1,)}, {"input_ids": 7})
    assert caught.value.where == "context 1" and session.reason() == "too large"
    session.run(0, {"input_ids": (1,)}, {"input_ids": 7})
    session.run_again(0)
    assert engine.contexts[0].runs == 2 and session.reason() == "it gives no reason"


# --------------------------------------------------------------------------------------------------- weight streaming
@pytest.mark.parametrize(
    ("room", "budget"),
    [
        (6000, 5000),  # all fit
        (5999, 4699),  # one byte less, and activations grow by what weights are streamed through
        (1300, 0),
    ],
)
def test_as_many_weights_as_fit_lie_on_the_gpu(room: int, budget: int) -> None:
    engine: Any = FakeEngine(streamable=5000, activations=1000, scratch=300)
    assert fit_weights(engine, room, activations=1) == budget == engine.weight_streaming_budget_v2


def test_less_than_the_least() -> None:
    engine: Any = FakeEngine(streamable=5000, activations=1000, scratch=300)
    with pytest.raises(EngineError, match=r"activations alone need 1.3 kB of GPU memory; 1.3 kB are") as caught:
        fit_weights(engine, 1299, activations=1)
    assert "fewer kv_cache_blocks" in str(caught.value.hint)


def test_a_budget_that_tensorrt_does_not_take() -> None:
    engine: Any = FakeEngine(streamable=5000, takes=False)
    with pytest.raises(EngineError, match=r"does not keep 1.0 kB of 5.0 kB of weights .* its budget is 5.0 kB"):
        fit_weights(engine, 2024, activations=1)
