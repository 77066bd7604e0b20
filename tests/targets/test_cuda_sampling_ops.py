"""The sampling section of a launch plan: complete, and checked when a plan is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmbuild.builder.targets.cuda.sampling_ops import sampling_ops
from llmbuild.engine.expressions import evaluate
from llmbuild.engine.launch_plan import (
    PLAN_VERSION,
    Buffer,
    Input,
    LaunchPlan,
    Limits,
    Number,
    Place,
    Sampling,
    most_bytes,
)
from llmbuild.errors import EngineError
from llmbuild.plugins.kernels.sampling_plan import sampling_plan

LIMITS = Limits(max_num_tokens=64, max_batch_size=4, table_stride=2, block_size=16)
COLUMNS = 320
PLAN = sampling_plan(COLUMNS, 300, "bfloat16", LIMITS.max_batch_size, 90)


def launch_plan(sampling: Sampling, sizes: tuple[tuple[str, str, str], ...]) -> LaunchPlan:
    """A plan of no ops but sampling."""
    buffers, end = [], 0
    for name, dtype, size in (("logits", "bfloat16", f"L * {COLUMNS * 2}"), *sizes):
        buffers.append(Buffer(name=name, dtype=dtype, size=size, offset=end, first=0, last=0))
        end += -(-most_bytes(size, LIMITS) // 256) * 256
    return LaunchPlan(
        version=PLAN_VERSION,
        limits=LIMITS,
        inputs=(Input(name="input_ids", dtype="int32", size="T"),),
        weights=(),
        pools=(),
        buffers=tuple(buffers),
        arena_bytes=end,
        counters=(),
        ops=(),
        logits=Place(kind="buffer", name="logits"),
        logits_dtype="bfloat16",
        logits_columns=COLUMNS,
        sampling=sampling,
    )


def test_every_argument_has_its_place(tmp_path: Path) -> None:
    section, buffers = sampling_ops(PLAN, Place(kind="buffer", name="logits"))
    plan = launch_plan(section, buffers)
    assert plan.problem() is None
    (tmp_path / "plan.json").write_bytes(plan.to_json())
    assert LaunchPlan.read(tmp_path / "plan.json") == plan
    specs = {spec.name: spec for spec in PLAN.specs}
    assert {op.kernel for op in section.ops()} == specs.keys()
    for op in section.ops():
        kinds = specs[op.kernel].signature.values()
        assert [isinstance(argument, Number) for argument in op.arguments] == [kind == "i32" for kind in kinds]
    adjusted = {op.kernel: op for op in section.adjusted}
    assert adjusted["sample_adjust"].arguments[:2] == (
        section.full[0].arguments[0],
        Place(kind="buffer", name="sample_values"),
    )
    assert adjusted["sample_adjusted_peaks"].arguments[0].name == "sample_values"  # type: ignore[union-attr]
    assert section.feed[0].arguments == (
        section.token_ids,
        Place(kind="input", name="sample_feed_sources"),
        Place(kind="input", name="input_ids"),
        Number(value="T"),
    )


def test_buffers_and_state_hold_what_the_kernels_touch() -> None:
    section, buffers = sampling_ops(PLAN, Place(kind="buffer", name="logits"))
    sizes = {name: evaluate(size, {"L": 3}) for name, _, size in buffers}
    assert sizes["sample_values"] == 3 * COLUMNS * 4
    assert sizes["sample_bin_weights"] == 3 * 1024 * 8
    state = {array.name: evaluate(array.size, {"L": 3}) for array in section.state}
    assert state["sample_counts"] == LIMITS.max_batch_size * COLUMNS
    assert state["sample_token_ids"] == 3


@pytest.mark.parametrize("lost", ["sample_values", "sample_counts", "sample_temperature"])
def test_a_plan_without_an_array_is_damaged(lost: str, tmp_path: Path) -> None:
    section, buffers = sampling_ops(PLAN, Place(kind="buffer", name="logits"))
    section = section.model_copy(
        update={
            kind: tuple(each for each in getattr(section, kind) if each.name != lost) for kind in ("inputs", "state")
        }
    )
    plan = launch_plan(section, tuple(buffer for buffer in buffers if buffer[0] != lost))
    (tmp_path / "plan.json").write_bytes(plan.to_json())
    with pytest.raises(EngineError, match=f"{lost}.*not there"):
        LaunchPlan.read(tmp_path / "plan.json")
