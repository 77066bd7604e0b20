"""cleanup, cse, drop_batch_axis and gather_rows."""

from __future__ import annotations

import pytest
import torch

from llmbuild.builder.passes.cleanup import cleanup
from llmbuild.builder.passes.cse import cse
from llmbuild.builder.passes.drop_batch_axis import drop_batch_axis
from llmbuild.builder.passes.fold_weights import fold_weights
from llmbuild.builder.passes.gather_rows import gather_rows
from support.small_programs import CHANNELS, count, random, result, small_program, targets

linear = torch.nn.functional.linear
W = random(16, 16, seed=3)


def run(program, *passes):
    before = result(program)
    logs = [each(program) for each in passes]
    torch.testing.assert_close(result(program), before, atol=1e-5, rtol=1e-5)
    return logs


NOTHING = {
    "same dtype": lambda x: x.to(torch.float32),
    "contiguous": lambda x: x.contiguous(),
    "clone and detach": lambda x: x.clone().detach(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
    "times one": lambda x: (x * 1.0) / 1,
    "plus zero": lambda x: (x + 0) - 0.0,
    "first power": lambda x: x.pow(1),
    "whole slice": lambda x: x[:, :CHANNELS],
    "expand": lambda x: x.expand(-1, CHANNELS),
    "reshapes": lambda x: x.reshape(-1, 4, 4).reshape(-1).view(-1, CHANNELS),
    "new axes": lambda x: x[None].unsqueeze(2).squeeze(0).squeeze(1),
    "selected axis": lambda x: x[None][0],
    "transposes": lambda x: x.reshape(-1, 4, 4).transpose(0, 1).transpose(1, 0).reshape(-1, CHANNELS),
    "other names of transposes": lambda x: x.T.mT.swapaxes(0, 1).T,
    "moved axes": lambda x: x.reshape(-1, 4, 4).movedim(0, 2).moveaxis((2, 0), (0, 1)).reshape(-1, CHANNELS),
    "other names of reshapes": lambda x: x.ravel().view_as(x).reshape_as(x),
    "permutes": lambda x: x.reshape(-1, 4, 4).permute(2, 0, 1).permute(1, 2, 0).reshape(-1, CHANNELS),
    "narrow": lambda x: x.narrow(-1, 0, CHANNELS),
    "one part": lambda x: x.split(CHANNELS, dim=-1)[0],
    "empty part": lambda x: torch.cat((x, x[:, CHANNELS:]), dim=-1),
}


@pytest.mark.parametrize("body", NOTHING.values(), ids=NOTHING)
def test_what_does_nothing_goes(body) -> None:
    program = small_program(lambda x, p: body(x))
    run(program, cleanup)
    assert targets(program) == ["aten.embedding.default", "aten.index.Tensor"]


SOMETHING = {
    "times two": lambda x: x * 2.0,
    "plus one": lambda x: x + 1,
    "scaled addend": lambda x: torch.add(x, x, alpha=0),
    "another dtype": lambda x: x.to(torch.float64),
    "square transpose": lambda x: x.reshape(-1, 4, 4).transpose(1, 2).reshape(-1, CHANNELS),
    "backwards": lambda x: x.flip(-1),
    "rotated axes": lambda x: x.reshape(-1, 4, 4).permute(2, 0, 1).permute(1, 0, 2),
}


@pytest.mark.parametrize("body", SOMETHING.values(), ids=SOMETHING)
def test_what_does_something_stays(body) -> None:
    program = small_program(lambda x, p: body(x))
    run(program, cleanup)
    assert len(targets(program)) > 2


def test_one_spelling_for_reshapes_and_splits() -> None:
    def body(x, p):
        a, b = x.unflatten(-1, (2, 8)).view(x.shape[0], CHANNELS).chunk(2, dim=1)
        return torch.cat((b, a), dim=1).flatten(0).view(-1, 2, 8)

    program = small_program(body)
    run(program, cleanup)
    assert [name.split(".")[1] for name in targets(program)] == [
        "embedding", "split_with_sizes", "cat", "reshape", "index",
    ]  # fmt: skip
    split, reshape = (next(n for n in program.graph.nodes if key in str(n.target)) for key in ("split", "reshape"))
    assert split.args[1:] == ([8, 8], -1) and reshape.args[1] == [-1, 2, 8]


def test_cse_merges_equal_calls_but_not_equal_looking_numbers() -> None:
    program = small_program(lambda x, p: (x * 2).sin() + (x * 2).sin() + (p * 1)[:, None] + (p * 1.0)[:, None])
    (log,) = run(program, cse)
    assert log.count == 2 and count(program, "sin") == 1
    assert count(program, "mul") == 3  # x * 2 once; p * 1 stays int, p * 1.0 is float


def test_cse_merges_equal_constants() -> None:
    program = small_program(lambda x, p, a, b: x * a + x * b, a=W[0], b=W[0].clone())
    (log,) = run(program, cse)
    assert log.count == 2 and set(program.weights) == {"table", "a"}


def batched(x, p, w):
    """As models are traced: [1, T, C], heads transposed, a last gather and a select."""
    h = x[None]
    q = linear(h, w).view(1, x.shape[0], -1, 8).transpose(1, 2)
    angle = p[None][:, :, None].float() @ torch.ones(1, 1, 8)
    q = q * angle.cos().unsqueeze(1)
    h = h + q.transpose(1, 2).reshape(1, x.shape[0], -1)
    return torch.cat((h.softmax(-1), h), dim=2)[0]


def test_the_batch_axis_of_tracing_goes() -> None:
    program = small_program(batched, w=W)
    _, log, _, _ = run(program, cleanup, drop_batch_axis, cleanup, fold_weights)
    assert log.declined == [] and log.count > 5
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert not any(node.meta["val"].ndim > 3 for node in calls if isinstance(node.meta["val"], torch.Tensor))
    assert count(program, "select") == 0


def test_the_batch_axis_stays_where_an_op_is_not_known_to_be_row_wise() -> None:
    program = small_program(lambda x, p: (x[None] * 2).cumsum(0)[0] + 1)
    _, log = run(program, cleanup, drop_batch_axis)
    assert "axis 0 reaches cumsum" in log.declined[0] and "aten.cumsum" in log.declined[0]
    assert count(program, "cumsum") == 1


def test_a_single_head_keeps_its_axis() -> None:
    def body(x, p):
        keys = x[None].view(1, x.shape[0], 1, 16).transpose(1, 2)  # [1, 1, T, 16]: batch and head
        return (keys * p[None][:, None, :, None])[0].transpose(0, 1)

    program = small_program(body)
    _, log, _ = run(program, cleanup, drop_batch_axis, cleanup)
    product = next(node for node in program.graph.nodes if "mul" in str(node.target))
    assert log.declined == [] and [str(size) for size in product.meta["val"].shape[::2]] == ["1", "16"]


def test_the_gather_moves_before_the_last_linears() -> None:
    program = small_program(lambda x, p, w: linear(linear(x, w).relu() + x, w).tanh(), w=W)
    (log,) = run(program, gather_rows)
    assert log.count >= 4 and log.declined == []
    rows = str(program.placeholder("logits_indices").meta["val"].shape[0])
    linears = [node for node in program.graph.nodes if "linear" in str(node.target)]
    assert {str(node.meta["val"].shape[0]) for node in linears} == {rows}


def test_a_gather_stays_behind_what_mixes_tokens_and_says_so() -> None:
    program = small_program(lambda x, p, w: linear(x, w).cumsum(0) * 2, w=W)
    (log,) = run(program, gather_rows)
    assert log.count == 1  # the product; not the sum over tokens
    assert "not row-wise" in log.declined[0] and "cumsum" in log.declined[0]


def test_values_that_other_rows_need_are_not_gathered() -> None:
    program = small_program(lambda x, p, w: linear(x, w).relu() + linear(x, w).sum(0), w=W)
    cse(program)
    (log,) = run(program, gather_rows)
    assert any("computed for all tokens" in line or "not row-wise" in line for line in log.declined)
