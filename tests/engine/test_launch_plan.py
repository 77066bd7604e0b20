from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmbuild.engine.launch_plan import (
    PLAN_VERSION,
    Buffer,
    Counter,
    GemmOp,
    Input,
    KernelOp,
    LaunchPlan,
    Limits,
    Number,
    Place,
    Pool,
    SmallGemm,
    Weight,
    most_bytes,
)
from llmbuild.errors import EngineError

LIMITS = Limits(max_num_tokens=32, max_batch_size=4, table_stride=8, block_size=16)


def buffer(name: str, offset: int, first: int, last: int, size: str = "T * 64") -> Buffer:
    return Buffer(name=name, dtype="float32", size=size, offset=offset, first=first, last=last)


def at(name: str, kind: Any = "buffer", offset: int = 0) -> Place:
    return Place(kind=kind, name=name, offset=offset)


def product(**changes: Any) -> GemmOp:
    fields: dict[str, Any] = {
        "x": at("hidden"),
        "weight": at("w", "weight"),
        "bias": None,
        "out": at("logits"),
        "rows": "T",
        "n": 8,
        "k": 16,
        "batch": 1,
        "dtype": "float32",
        "x_stride": 16,
        "x_batch": 0,
        "weight_layout": "nk",
        "weight_stride": 16,
        "weight_batch": 0,
        "out_stride": 8,
        "out_batch": 0,
    }
    return GemmOp(**{**fields, **changes})


def plan(**changes: Any) -> LaunchPlan:
    """Tokens become hidden states, which a product makes logits of."""
    fields: dict[str, Any] = {
        "version": PLAN_VERSION,
        "limits": LIMITS,
        "inputs": (Input(name="input_ids", dtype="int32", size="T"),),
        "weights": (Weight(name="w", dtype="float32", shape=(8, 16)),),
        "pools": (Pool(name="keys_0", dtype="float32", width=16),),
        "buffers": (buffer("hidden", 0, 0, 1), buffer("logits", 2048, 1, 2, "T * 32")),
        "arena_bytes": 3072,
        "counters": (Counter(name="tiles", num_bytes=40), Counter(name="splits", num_bytes=300)),
        "ops": (
            KernelOp(
                kernel="embed",
                arguments=(at("hidden"), at("input_ids", "input"), at("keys_0", "pool"), Number(value="T")),
            ),
            product(),
        ),
        "logits": at("logits"),
        "logits_dtype": "float32",
        "logits_columns": 8,
    }
    return LaunchPlan(**{**fields, **changes})


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(plan().to_json())
    assert LaunchPlan.read(path) == plan()
    assert LaunchPlan.read(path).to_json() == path.read_bytes()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"arena_bytes": 2048}, "buffer logits does not lie in the arena"),
        (
            {"buffers": (buffer("hidden", 0, 0, 1), buffer("logits", 256, 1, 2, "T * 32"))},
            "logits and hidden|hidden and",
        ),
        ({"buffers": (buffer("hidden", 0, 0, 0), buffer("logits", 2048, 1, 2, "T * 32"))}, "outside its lifetime"),
        ({"buffers": (buffer("hidden", 0, 0, 1), buffer("logits", 2048, 1, 1, "T * 32"))}, "do not live to the end"),
        ({"buffers": (buffer("hidden", 0, 0, 1), buffer("logits", 2100, 1, 2, "T * 8"))}, "does not lie in the arena"),
        ({"weights": ()}, "op 1 reads the weight 'w', which is not there"),
        ({"pools": ()}, "op 0 reads the pool 'keys_0', which is not there"),
        (
            {"ops": (KernelOp(kernel="k", arguments=(at("hidden"), at("tiles", "counter", 40))), product())},
            "op 0 reads past the end of tiles",
        ),
        (
            {"ops": (KernelOp(kernel="k", arguments=(at("hidden"), at("tiles", "counter", 6))), product())},
            "op 0 reads tiles at 6 bytes, between two numbers",
        ),
        ({"counters": (*plan().counters, Counter(name="odd", num_bytes=30))}, "odd of 30 bytes is no array of int32"),
        ({"counters": (*plan().counters, plan().counters[0])}, "there are several counters tiles"),
        ({"logits": at("w", "weight")}, "the logits are in no buffer"),
        (
            {"ops": (plan().ops[0], product(weight=at("w", "weight", 512)))},
            "op 1 reads past the end of w",
        ),
    ],
)
def test_what_does_not_fit_together_is_found(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(plan(**changes).to_json())
    with pytest.raises(EngineError, match=problem) as error:
        LaunchPlan.read(path)
    assert error.value.where == str(path) and "convert the model again" in str(error.value.hint)


def test_counters_lie_apart_in_one_allocation() -> None:
    assert plan().counter_offsets == {"tiles": 0, "splits": 256}
    assert plan().counter_bytes == 256 + 512
    assert plan(counters=()).counter_bytes == 0


def test_buffers_of_different_times_may_share_memory() -> None:
    ops = (*plan().ops, KernelOp(kernel="after", arguments=(at("logits"), at("late"))))
    late = buffer("late", 0, 2, 2)
    logits = buffer("logits", 2048, 1, 3, "T * 32")
    assert plan(ops=ops, buffers=(buffer("hidden", 0, 0, 1), logits, late)).problem() is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not a launch plan"),
        ("[]", "not a launch plan"),
        ('{"version": 1}', "a launch plan of version 1; this llmbuild reads version 2"),
        ('{"version": 2}', "damaged launch plan: limits"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(EngineError, match=problem):
        LaunchPlan.read(path)
    with pytest.raises(EngineError, match="cannot read the launch plan"):
        LaunchPlan.read(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("ops", 1, "rows"), "T ** 2", "which no size may"),
        (("ops", 1, "dtype"), "float12", "no dtype"),
        (("ops", 1, "surprise"), 1, "Extra inputs"),
        (("buffers", 0, "size"), "open('x')", "which no size may"),
        (("weights", 0, "shape"), [0], "greater than or equal to 1"),
    ],
)
def test_fields_are_checked(tmp_path: Path, place: tuple[Any, ...], value: Any, problem: str) -> None:
    content = json.loads(plan().to_json())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(EngineError, match=problem):
        LaunchPlan.read(path)


def test_kernels_take_the_place_of_the_library_up_to_their_rows() -> None:
    few, more = (KernelOp(kernel=name, arguments=()) for name in ("few", "more"))
    op = product(kernels=(SmallGemm(most_rows=1, launches=(few,)), SmallGemm(most_rows=16, launches=(more,))))
    assert [op.kernels_for(rows) for rows in (1, 2, 16, 17)] == [(few,), (more,), (more,), None]
    whole = product(kernels=(SmallGemm(most_rows=None, launches=(more,)),))
    assert whole.kernels_for(10**6) == (more,)


def test_the_most_that_a_size_can_be_is_found_where_it_does_not_grow() -> None:
    assert most_bytes("B * cdiv(7, B)", LIMITS) == 9  # 7, 8, 9, 8
    assert most_bytes("T * 4 + B", LIMITS) == 132
    assert most_bytes("128", LIMITS) == 128
