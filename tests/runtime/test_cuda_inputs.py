"""Input layout, padding and copies; batch buckets; how memory is shared out."""

from __future__ import annotations

import numpy as np
import pytest

from llmbuild.engine.launch_plan import Limits, Pool
from llmbuild.errors import ConfigError, EngineError
from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.executors.cuda import inputs as inputs_module
from llmbuild.runtime.executors.cuda.buckets import batch_buckets, bucket_of
from llmbuild.runtime.executors.cuda.inputs import InputArea, input_layout
from llmbuild.runtime.executors.cuda.memory import INT32_END, MARGIN, Needs, block_bytes, choose_blocks
from support.cuda_engine import BATCH, BLOCK, INPUTS, STRIDE, TOKENS, plan
from support.fake_device import FakeDevice

DUMMY = 30


def decode(batch: int, width: int) -> StepInput:
    def numbers(start: int, count: int = batch) -> np.ndarray:
        return np.arange(start, start + count, dtype=np.int32)

    tables = (1 + np.arange(batch * width, dtype=np.int32)).reshape(batch, width)
    return StepInput(numbers(10), numbers(20), numbers(30), tables, numbers(40), numbers(0, batch + 1), numbers(0))


def on_gpu(device: FakeDevice, area: InputArea, name: str) -> np.ndarray:
    sizes = {"T": TOKENS, "B": BATCH, "B + 1": BATCH + 1, f"B * {STRIDE}": BATCH * STRIDE, "L": BATCH}
    return device.view(area.addresses[name], 4 * sizes[INPUTS[name]]).view(np.int32)


def test_the_layout_is_aligned_and_ends_with_the_tables() -> None:
    offsets, size = input_layout(plan())
    assert set(offsets) == set(INPUTS)
    assert all(offset % 256 == 0 for offset in offsets.values())
    assert max(offsets, key=lambda name: offsets[name]) == "block_tables"
    assert size == offsets["block_tables"] + 512  # 6 * 12 * 4 bytes, rounded up


def test_a_padded_step_on_the_gpu() -> None:
    device = FakeDevice()
    area = InputArea(plan(), device, dummy_block=DUMMY)  # type: ignore[arg-type]
    step = decode(2, 3)
    area.write(step, 4)
    area.send(0)
    assert len(device.uploads) == 1, "one copy"
    np.testing.assert_array_equal(on_gpu(device, area, "input_ids")[:4], [10, 11, 0, 0])
    np.testing.assert_array_equal(on_gpu(device, area, "position_ids")[:4], [20, 21, 0, 0])
    np.testing.assert_array_equal(on_gpu(device, area, "slot_mapping")[:4], [30, 31, DUMMY * BLOCK, DUMMY * BLOCK])
    np.testing.assert_array_equal(on_gpu(device, area, "seq_lens")[:4], [40, 41, 1, 1])
    np.testing.assert_array_equal(on_gpu(device, area, "cu_q_lens")[:5], range(5))
    np.testing.assert_array_equal(on_gpu(device, area, "logits_indices")[:4], range(4))
    tables = on_gpu(device, area, "block_tables").reshape(BATCH, STRIDE)
    np.testing.assert_array_equal(tables[:2, :3], step.block_tables)
    np.testing.assert_array_equal(tables[2:4, 0], [DUMMY, DUMMY])
    area.close()
    assert not device.blocks and not device.host and not device.open_handles


def test_long_tables_are_copied_by_the_columns_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs_module, "WHOLE_ROWS", 0)
    device = FakeDevice()
    area = InputArea(plan(), device, dummy_block=DUMMY)  # type: ignore[arg-type]
    area.write(decode(2, 3), 4)
    area.send(0)
    assert [size for _, size in device.uploads[1:]] == [12] * 4
    tables = on_gpu(device, area, "block_tables").reshape(BATCH, STRIDE)
    np.testing.assert_array_equal(tables[:4, 0], [1, 4, DUMMY, DUMMY])
    np.testing.assert_array_equal(tables[:2, 1:3], [[2, 3], [5, 6]])


def test_the_next_step_is_written_beside_the_last_one() -> None:
    device = FakeDevice()
    area = InputArea(plan(), device, dummy_block=DUMMY)  # type: ignore[arg-type]
    area.write(decode(1, 1))
    first = area.arrays["input_ids"]
    area.send(0)
    area.write(decode(3, 2))
    assert first[0] == 10 and area.arrays["input_ids"] is not first
    area.send(0)
    np.testing.assert_array_equal(on_gpu(device, area, "input_ids")[:3], [10, 11, 12])


def test_buckets() -> None:
    assert batch_buckets(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert batch_buckets(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert batch_buckets(1) == (1,) and batch_buckets(3) == (1, 2, 3)
    for most in (1, 5, 70, 256):
        buckets = batch_buckets(most)
        assert [bucket_of(size, buckets) for size in buckets] == list(buckets)
        assert all(size <= bucket_of(size, buckets) <= max(2 * size, 8) for size in range(1, most + 1))


GIB = 1 << 30
NEEDS = Needs(
    weights=4 * GIB, arena=GIB // 4, counters=0, inputs=1 << 20, sampling=0, workspace=32 << 20, graphs=1 << 20
)
BIG = plan(
    limits=Limits(max_num_tokens=64, max_batch_size=8, table_stride=64, block_size=16),
    pools=tuple(Pool(name=f"{kind}.{layer}", dtype="bfloat16", width=64) for kind in "kv" for layer in range(4)),
)


def blocks(free: int, *, needs: Needs = NEEDS, fraction: float = 0.5, num_blocks: int | None = None) -> int:
    return choose_blocks(
        BIG, needs, free=free, fraction=fraction, max_seq_len=1024, num_blocks=num_blocks, gpu="GPU 0, Fake H1"
    )


def test_blocks_fill_the_fraction_of_what_is_left() -> None:
    size = block_bytes(BIG)
    assert size == 8 * 64 * 2 * 16
    assert NEEDS.total == sum(NEEDS) + MARGIN
    # One block beside those counted is the padding rows'.
    assert blocks(NEEDS.total + 201 * size) == 100
    assert blocks(NEEDS.total + 201 * size, fraction=1.0) == 200
    assert blocks(NEEDS.total + 100_000 * size) == 8 * 64, "more than the limits need is not taken"
    assert blocks(NEEDS.total + 11 * size, num_blocks=10) == 10


def test_slots_stay_int32() -> None:
    tiny = plan(
        limits=Limits(max_num_tokens=64, max_batch_size=1 << 20, table_stride=1 << 20, block_size=16),
        pools=(Pool(name="k", dtype="int8", width=1),),
    )
    found = choose_blocks(
        tiny, NEEDS, free=1 << 50, fraction=1.0, max_seq_len=16 << 20, num_blocks=None, gpu="GPU 0, Fake H1"
    )
    assert (found + 1) * 16 <= INT32_END


@pytest.mark.parametrize(
    ("free", "needs", "hint"),
    [
        (NEEDS.total - GIB, NEEDS, "--quant"),
        (3 * GIB, NEEDS._replace(weights=GIB, arena=2 * GIB), "a lower --max-num-tokens"),
        (NEEDS.total - 4 * GIB + 1000, NEEDS._replace(weights=10, arena=10), "a lower --max-seq-len"),
    ],
)
def test_too_little_memory_says_how_much_and_what_to_lower(free: int, needs: Needs, hint: str) -> None:
    if hint.endswith("seq-len"):
        free = needs.total + block_bytes(BIG) * 30
    with pytest.raises(EngineError, match=r"the GPU has too little free memory: .* are needed, .* are free") as caught:
        blocks(free, needs=needs)
    assert caught.value.hint is not None and hint in caught.value.hint
    assert caught.value.where is not None and "the KV cache of one sequence of 1024 tokens" in caught.value.where


def test_too_many_blocks_asked_for() -> None:
    with pytest.raises(EngineError, match="too little free memory") as caught:
        blocks(NEEDS.total + 5 * block_bytes(BIG), num_blocks=5)
    assert caught.value.where is not None and "5 KV blocks" in caught.value.where
    assert caught.value.hint is not None and "fewer kv_cache_blocks" in caught.value.hint


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01])
def test_a_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(ConfigError, match="kv_memory_fraction is"):
        blocks(64 * GIB, fraction=fraction)
