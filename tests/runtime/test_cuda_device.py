"""The driver and cuBLASLt as they are: on a GPU. What needs none: that the fake GPU of the other tests is like it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbuild.engine.launch_plan import Limits, Place
from llmbuild.runtime.executors.cuda.driver import Device
from llmbuild.runtime.executors.cuda.gemm_memory import GemmMemory
from llmbuild.runtime.executors.cuda.gemms import Gemms, open_library
from llmbuild.runtime.executors.cuda.noise import from_bfloat16, to_bfloat16
from support.cuda_engine import gemm, place
from support.fake_device import FakeDevice


def test_the_fake_gpu_has_the_methods_of_the_real_one() -> None:
    for name, method in inspect.getmembers(Device, inspect.isfunction):
        if not name.startswith("_"):
            fake = inspect.signature(getattr(FakeDevice, name))
            assert list(fake.parameters) == list(inspect.signature(method).parameters), name


@pytest.fixture
def device() -> Iterator[Device]:
    gpu = Device(0)
    yield gpu
    gpu.close()


@pytest.mark.gpu
def test_copies_events_and_graphs(device: Device) -> None:
    stream, size = device.stream(), 1 << 20
    host, back = device.allocate_host(size), device.allocate_host(size)
    a, b = device.allocate(size), device.allocate(size)
    host.bytes[:] = np.arange(size) % 251
    start, end = device.event(timing=True), device.event(timing=True)
    device.fill(a, 7, size, stream)
    device.record(start, stream)
    device.upload(a, host.address, size // 2, stream)
    device.upload_rows(a + size // 2, host.address + size // 2, 12, 64, 4096, stream)
    device.record(end, stream)
    device.begin_capture(stream)
    device.copy(b, a, size, stream)
    graph = device.end_capture(stream)
    device.launch_graph(graph, stream)
    device.download(back.address, b, size, stream)
    device.synchronize(stream)
    assert device.elapsed(start, end) > 0
    expected = np.full(size, 7, np.uint8)
    expected[: size // 2] = host.bytes[: size // 2]
    rows = (size // 2 + 4096 * np.arange(64)[:, None] + np.arange(12)).ravel()
    expected[rows] = host.bytes[rows]
    np.testing.assert_array_equal(back.bytes, expected)
    device.free_graph(graph)
    for each in (start, end):
        device.free_event(each)
    for memory in (host, back):
        device.free_host(memory)
    for address in (a, b):
        device.free(address)
    device.free_stream(stream)


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": place("weight", "bias")},
    "by column, padded": {"weight_layout": "kn", "weight_stride": 264, "out_stride": 272},
    "batched": {"batch": 3, "x_batch": 48 * 128, "weight_batch": 256 * 128, "out_batch": 48 * 256},
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", SHAPES)
def test_products_of_the_library(device: Device, case: str, dtype: str, tmp_path: Path) -> None:
    rows, n, k = 33, 256, 128
    sizes = {"n": n, "k": k, "x_stride": k, "weight_stride": k, "out_stride": n, "dtype": dtype}
    op = gemm(**{**sizes, **SHAPES[case]})
    counts = {"x": op.batch * 48 * k, "w": op.batch * 264 * k, "bias": n, "out": op.batch * 48 * 272}
    rng = np.random.default_rng(0)
    # Integers, small enough that every dtype holds the sums exactly but for the rounding of the result.
    values = {name: rng.integers(-2, 3, count).astype(np.float32) for name, count in counts.items()}
    encode = {"float32": lambda v: v, "bfloat16": to_bfloat16, "float16": lambda v: v.astype(np.float16)}[dtype]

    stream, at, host = device.stream(), {}, {}
    for name, array in values.items():
        stored = encode(array)
        at[name], host[name] = device.allocate(stored.nbytes), device.allocate_host(stored.nbytes)
        host[name].bytes[:] = stored.view(np.uint8)
        device.upload(at[name], host[name].address, stored.nbytes, stream)
    workspace = device.allocate(32 << 20)
    limits = Limits(max_num_tokens=48, max_batch_size=8, table_stride=4, block_size=16)
    memory = GemmMemory("test", (tmp_path / "memory.json",))
    gemms = Gemms(device, open_library(device), workspace, 32 << 20, limits=limits, tune=True, memory=memory)

    def address(where: Place) -> int:
        return at[where.name] + where.offset

    bound = gemms.add(op, address)
    gemms.prepare(bound, rows, stream)
    gemms.run(bound, rows, stream)
    device.download(host["out"].address, at["out"], len(host["out"].bytes), stream)
    device.synchronize(stream)
    kind = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}[dtype]
    raw = host["out"].bytes.view(kind)
    found = from_bfloat16(raw) if dtype == "bfloat16" else raw.astype(np.float32)
    for i in range(op.batch):
        x = values["x"][i * op.x_batch :][: rows * k].reshape(rows, k)
        lines = n if op.weight_layout == "nk" else k
        w = values["w"][i * op.weight_batch :][: lines * op.weight_stride].reshape(lines, op.weight_stride)
        w = w[:, :k] if op.weight_layout == "nk" else w[:, :n].T
        expected = x @ w.T + (values["bias"] if op.bias is not None else 0)
        out = found[i * op.out_batch :][: rows * op.out_stride].reshape(rows, op.out_stride)[:, :n]
        np.testing.assert_array_equal(out, expected)
    gemms.close()
    assert (tmp_path / "memory.json").exists()
    for name in values:
        device.free(at[name])
        device.free_host(host[name])
    device.free(workspace)
    device.free_stream(stream)
