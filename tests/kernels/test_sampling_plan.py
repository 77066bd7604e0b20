"""The sampling kernels as they are compiled, and what a plan refuses."""

from __future__ import annotations

import pytest

from llmbuild.builder.targets.cuda.aot import compile_spec
from llmbuild.engine.expressions import evaluate
from llmbuild.plugins.kernels.attention_shape import SHARED_BYTES
from llmbuild.plugins.kernels.sampling_plan import sampling_plan


def compile_and_check(dtype: str, columns: int, sm: int, *, all_lists: bool = True) -> None:
    plan = sampling_plan(columns, columns - 8, dtype, 256, sm, pdl=True)
    for spec in plan.specs if all_lists else [launch.spec for launch in (*plan.greedy, *plan.full)]:
        launch = compile_spec(spec, sm).launch
        assert launch.pdl == (sm >= 90)
        assert launch.shared <= SHARED_BYTES[sm] * 1024
        assert launch.global_scratch == 0


@pytest.mark.parametrize(("sm", "all_lists"), [(80, False), (90, True)])
def test_compiles(sm: int, all_lists: bool) -> None:
    compile_and_check("bfloat16", 128_256, sm, all_lists=all_lists)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize(("dtype", "columns"), [("float32", 262_144), ("float16", 50_304), ("bfloat16", 512)])
def test_every_dtype_compiles(dtype: str, columns: int, sm: int) -> None:
    compile_and_check(dtype, columns, sm)


def test_names_and_arrays_are_told_apart_by_the_prefix() -> None:
    plan = sampling_plan(512, 500, "float16", 8, 90, name_prefix="draft")
    names = [spec.name for spec in plan.specs]
    assert len(set(names)) == len(names)
    arrays = [array.name for array in (*plan.workspaces, *plan.inputs, *plan.state)]
    assert len(set(arrays)) == len(arrays)
    assert all(name.startswith("draft_") for name in (*names, *arrays))
    used = {name for launch in plan.launches for name in launch.arrays.values()}
    assert used == {*arrays, "logits", "input_ids"}


def test_grids_are_empty_without_rows() -> None:
    plan = sampling_plan(512, 500, "float16", 8, 90)
    for launch in (*plan.greedy, *plan.adjusted, *plan.logprobs, *plan.count):
        assert 0 in [evaluate(text, {"L": 0, "T": 0}) for text in launch.spec.grid]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits_dtype": "int8"}, "logits of int8 are not sampled; float32, float16, bfloat16 are"),
        ({"num_tokens": 0}, "0 tokens in 512 columns; 1 to 512 can be sampled"),
        ({"num_tokens": 513}, "513 tokens in 512 columns"),
        ({"columns": 2**19, "num_tokens": 2**18 + 1}, "1 to 262144 can be sampled"),
    ],
)
def test_refused(change: dict, message: str) -> None:
    arguments = {"columns": 512, "num_tokens": 500, "logits_dtype": "bfloat16", "max_rows": 8, "sm": 90}
    with pytest.raises(ValueError, match=message):
        sampling_plan(**(arguments | change))  # type: ignore[arg-type]
