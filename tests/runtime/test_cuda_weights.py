"""Weights on the GPU: every byte at its place whatever the chunks, and a file that is not the plan's is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.engine.launch_plan import LaunchPlan, Weight
from llmbuild.errors import EngineError
from llmbuild.runtime.executors.cuda.noise import from_bfloat16, noise, to_bfloat16
from llmbuild.runtime.executors.cuda.weights import (
    CHUNK,
    Stored,
    fill_with_noise,
    layout,
    pieces,
    stored_tensors,
    upload,
)
from support.cuda_engine import plan, write_weights
from support.fake_device import FakeDevice


def plan_of(tensors: dict[str, np.ndarray]) -> LaunchPlan:
    return plan(
        weights=tuple(Weight(name=name, dtype=array.dtype.name, shape=array.shape) for name, array in tensors.items())
    )


def tensors(sizes: list[int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(sizes))
    return {f"t{index}": rng.integers(-128, 128, size, np.int8) for index, size in enumerate(sizes)}


@pytest.mark.parametrize("chunk", [64, 1000, 4096, CHUNK])
def test_every_tensor_arrives_at_its_offset(tmp_path: Path, chunk: int) -> None:
    held = tensors([1, 255, 256, 257, 5000, 12, 3 * 1000])
    write_weights(tmp_path / "w", held)
    made, device = plan_of(held), FakeDevice()
    places = layout(made)
    target = device.allocate(places.num_bytes)
    seen: list[tuple[int, int]] = []
    stored = stored_tensors(tmp_path / "w", made)
    upload(device, tmp_path / "w", stored, target, chunk=chunk, progress=lambda *at: seen.append(at))  # type: ignore[arg-type]
    for name, array in held.items():
        assert places.offsets[name] % 256 == 0
        assert device.view(target + places.offsets[name], array.nbytes).tobytes() == array.tobytes()
    whole = sum(array.nbytes for array in held.values())
    assert seen[-1] == (whole, whole) and seen == sorted(seen)
    assert max(size for _, size in device.uploads) <= chunk
    assert not device.host and not device.open_handles


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 40))
def test_pieces_cover_each_byte_once(sizes: list[int], chunk: int) -> None:
    stored, at = [], 5
    for index, size in enumerate(sizes):
        stored.append(Stored(at, at + size, 1000 * index))
        at += size
    copied = {}
    for start in range(5, at, chunk):
        for begin, end, offset in pieces(stored, start, min(start + chunk, at)):
            assert start <= begin < end <= start + chunk
            for byte in range(end - begin):
                assert offset + byte not in copied
                copied[offset + byte] = begin + byte
    assert copied == {t.offset + byte: t.begin + byte for t in stored for byte in range(t.end - t.begin)}


def test_a_file_that_is_not_the_plan_s(tmp_path: Path) -> None:
    held = {"a": np.zeros((2, 3), np.float32)}
    write_weights(tmp_path / "w", held)
    with pytest.raises(EngineError, match="the weights lack the tensor b"):
        stored_tensors(tmp_path / "w", plan_of({**held, "b": np.zeros(1, np.int8)}))
    with pytest.raises(EngineError, match=r"a is float32 \[2, 3\], the launch plan wants float16 \[3, 2\]"):
        stored_tensors(tmp_path / "w", plan_of({"a": np.zeros((3, 2), np.float16)}))
    raw = (tmp_path / "w").read_bytes()
    (tmp_path / "w").write_bytes(raw[:-1])
    with pytest.raises(EngineError, match="the tensor a is truncated"):
        stored_tensors(tmp_path / "w", plan_of(held))
    (tmp_path / "w").write_bytes(b"nonsense" * 9)
    with pytest.raises(EngineError, match="cannot read the weights"):
        stored_tensors(tmp_path / "w", plan_of(held))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    held = tensors([5000])
    write_weights(tmp_path / "w", held)
    stored = stored_tensors(tmp_path / "w", plan_of(held))
    (tmp_path / "w").write_bytes((tmp_path / "w").read_bytes()[:2000])
    device = FakeDevice()
    with pytest.raises(EngineError, match="the weight file is truncated"):
        upload(device, tmp_path / "w", stored, device.allocate(5000), chunk=512)  # type: ignore[arg-type]
    assert not device.host


def test_noise_fills_weights_with_small_finite_numbers() -> None:
    dtypes = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32")
    made = plan(weights=tuple(Weight(name=dtype, dtype=dtype, shape=(700,)) for dtype in dtypes))
    device, places = FakeDevice(), layout(made)
    target = device.allocate(places.num_bytes)
    fill_with_noise(device, made, target, chunk=1024)  # type: ignore[arg-type]

    def found(dtype: str, kind: type) -> np.ndarray:
        weight = next(w for w in made.weights if w.name == dtype)
        return device.view(target + places.offsets[dtype], weight.num_bytes).view(kind)

    for values in (
        found("float32", np.float32),
        from_bfloat16(found("bfloat16", np.uint16)),
        found("float16", np.float16),
    ):
        assert 0.01 < values.astype(np.float32).std() < 0.03
    assert (found("float8_e4m3fn", np.uint8) & 0x40 == 0).all() and found("float8_e4m3fn", np.uint8).any()
    assert not found("int32", np.int32).any()


def test_bfloat16_rounds_to_the_nearest_even() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    bits = to_bfloat16(values)
    np.testing.assert_array_equal(bits, values.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(from_bfloat16(bits), values.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_noise_has_the_length_that_was_asked_for() -> None:
    for dtype in ("float32", "float8_e4m3fn", "int8"):
        assert len(noise(dtype, 4096, np.random.default_rng(0), 1.0)) <= 4096
