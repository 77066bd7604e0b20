"""Weights put back into a stripped engine: which bytes TensorRT is shown, and what stops it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmbuild.engine.mapped import MappedWeights, mapped_file
from llmbuild.errors import EngineError
from llmbuild.plugins.tensorrt.refit import refit
from support.fake_tensorrt import FakeEngine, FakeTensorRT, write_weights

LOG = SimpleNamespace(reason=lambda: "out of memory")
HELD = {"w": ("BF16", b"abcdefgh"), "four": ("U8", b"xyz"), "eight": ("F8_E4M3", b"12")}
ASKS = {"four": ("INT4", 6), "w": ("BF16", 4), "eight": ("FP8", 2)}


def filled(tmp_path: Path, engine: FakeEngine) -> int:
    write_weights(tmp_path / "w.safetensors", HELD)
    return refit(FakeTensorRT(engine), engine, LOG, MappedWeights(tmp_path / "w.safetensors"))  # type: ignore[arg-type]


def test_every_weight_comes_from_its_place_in_the_file(tmp_path: Path) -> None:
    engine = FakeEngine(asks=ASKS)
    assert filled(tmp_path, engine) == 3
    assert engine.filled == {name: content for name, (_, content) in HELD.items()}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            FakeEngine(asks={**ASKS, "b": ("BF16", 4), "c": ("HALF", 1)}),
            r"2 weight\(s\) that the file does not hold: b, c",
        ),
        (FakeEngine(asks={"w": ("HALF", 4)}), r"does not take 1 weight.*: w \(8 bytes of BF16 for 4 of HALF\)"),
        (FakeEngine(asks={"four": ("INT4", 8)}), r"four \(3 bytes of U8 for 8 of INT4\)"),
        (FakeEngine(asks=ASKS, folded=["", "w.1"]), r"misses 2 weight\(s\) besides: one without a name, w.1"),
        (FakeEngine(asks=ASKS, takes=False), "did not put the weights into the engine: out of memory"),
        (FakeEngine(asks={f"n{at}": ("HALF", 1) for at in range(10)}), "n0, .*, n7 and 2 more"),
    ],
)
def test_what_does_not_fit_is_named(engine: FakeEngine, message: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        filled(tmp_path, engine)
    assert "convert the model again" in str(caught.value.hint)


@pytest.mark.skipif("LLMBUILD_TENSORRT_BINDINGS" in os.environ, reason="libraries that do nothing hide TensorRT's")
def test_real_bindings_take_an_engine_and_weights_from_a_mapping(tmp_path: Path) -> None:
    """Nothing of them is copied: the reason is that the file is no engine, not that the argument is of a wrong type."""
    trt = pytest.importorskip("tensorrt_rtx")
    (tmp_path / "e").write_bytes(b"no engine" * 100)
    runtime = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR))
    with mapped_file(tmp_path / "e") as content:
        assert memoryview(content).readonly
        assert runtime.deserialize_cuda_engine(content) is None
    write_weights(tmp_path / "w", HELD)
    weights = MappedWeights(tmp_path / "w")
    place = weights.place("eight")
    shown = trt.Weights(trt.DataType.INT8, place.address, 2).numpy()
    assert bytes(shown) == b"12" and shown.ctypes.data == place.address
