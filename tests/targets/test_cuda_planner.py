from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmbuild.builder.targets.cuda.planner import Need, lay_out
from llmbuild.engine.launch_plan import Limits, Place

LIMITS = Limits(max_num_tokens=8, max_batch_size=4, table_stride=4, block_size=16)


def plan(lives: list[tuple[int, int, int]], count: int):
    """Buffers of (first op, last op, bytes a token)."""
    touched: list[list[Place]] = [[] for _ in range(count)]
    for number, (first, last, _) in enumerate(lives):
        for op in (first, last):
            touched[op].append(Place(kind="buffer", name=f"b{number}"))
    needs = [Need(f"b{number}", "uint8", f"T * {width}") for number, (*_, width) in enumerate(lives)]
    return lay_out(needs, touched, LIMITS)


def test_what_lives_at_different_times_shares_memory() -> None:
    layout = plan([(0, 1, 256), (1, 2, 256), (2, 3, 256), (3, 3, 32)], 4)
    offsets = {buffer.name: buffer.offset for buffer in layout.buffers}
    assert offsets["b0"] == offsets["b2"] != offsets["b1"]
    assert layout.arena_bytes == layout.needed == 4096


@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 11), st.integers(1, 300)).map(
            lambda each: (min(each[:2]), max(each[:2]), each[2])
        ),
        min_size=1,
        max_size=30,
    )
)
def test_no_two_living_buffers_overlap(lives: list[tuple[int, int, int]]) -> None:
    layout = plan(lives, 12)
    assert layout.needed <= layout.arena_bytes
    for number, one in enumerate(layout.buffers):
        size = 8 * lives[int(one.name[1:])][2]
        assert one.offset % 256 == 0 and one.offset + size <= layout.arena_bytes
        for other in layout.buffers[:number]:
            other_size = 8 * lives[int(other.name[1:])][2]
            apart_in_time = one.first > other.last or other.first > one.last
            assert apart_in_time or one.offset >= other.offset + other_size or other.offset >= one.offset + size
