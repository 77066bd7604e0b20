"""Each rule of the row-program generator: a few lines of torch, the kernel in the interpreter, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import llmbuild.plugins.ops  # noqa: F401
from llmbuild.builder.ir import Program
from llmbuild.builder.passes.cleanup import cleanup
from llmbuild.builder.targets.cuda.partition import Launch, partition
from llmbuild.errors import UnsupportedError
from support.simulated import simulated
from support.small_programs import CHANNELS, random, result, small_program

F = torch.nn.functional
OPS = torch.ops.llmbuild
WEIGHT, BIAS = random(CHANNELS, seed=1), random(CHANNELS, seed=2)


def router(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(torch.softmax(x, -1), 3, dim=-1)


def grouped(x: Tensor) -> Tensor:
    """DeepSeek's: the two best groups of four, each scored by its two best."""
    groups = x.reshape(-1, 4, 4)
    best = torch.topk(groups.topk(2, dim=-1)[0].sum(-1), 2, dim=-1)[1]
    mask = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0)
    kept = x.masked_fill(~mask.unsqueeze(-1).expand(-1, 4, 4).reshape(-1, 16).bool(), float("-inf"))
    values, places = kept.topk(3, dim=-1)
    return torch.cat((values, x.gather(1, places)), -1)


def filled(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 2:10:3] = x[:, :3]
    out[:, 15] = x[:, 0] * 2
    return out


def tables(position: Tensor) -> tuple[Tensor, Tensor]:
    angles = position.unsqueeze(-1).float() * torch.tensor([1.0, 0.3])
    return angles.cos(), angles.sin()


BODIES: dict[str, Any] = {
    "arithmetic": lambda x, p: (x * 2 - x.abs().sqrt() + 1) / (x.exp() + 3) - x.sub(x + 1, alpha=2),
    "powers": lambda x, p: x**2 + x.abs() ** 0.5 + x**3,
    "functions": lambda x, p: x.cos() + x.sin() * x.tanh() + torch.erf(x) + x.floor() + x.ceil() + x.exp().log(),
    "activations": lambda x, p: F.silu(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + F.relu(x) + F.softplus(x),
    "gated": lambda x, p: OPS.gated_activation(x, x * 3, "relu2") + OPS.gated_activation(x, x, "gelu_tanh"),
    "clamps": lambda x, p: x.clamp(-0.5, 0.7) + torch.maximum(x, -x) + x.clamp(max=0.1),
    "choices": lambda x, p: torch.where((x > 0.1) & (x < 1.0), x, -1.0) + (x >= 0).to(x.dtype),
    "positions": lambda x, p: x + p.unsqueeze(-1) * 2 + (p + 1).float().log().unsqueeze(-1),
    "constants": lambda x, p: torch.full_like(x, 2.5) * x + torch.ones_like(x) + torch.arange(16),
    "broadcast weights": lambda x, p, w: x.reshape(-1, 4, 4) * w.reshape(4, 4) + w[:4].reshape(4, 1),
    "softmax": lambda x, p: torch.softmax(x, -1),
    "softmax of an inner axis": lambda x, p: torch.softmax(x.reshape(-1, 4, 4), 1),
    "sums": lambda x, p: x.reshape(-1, 4, 4).sum(1) + x.reshape(-1, 2, 8).mean(-1).repeat(1, 2) + x.sum(-1, True),
    "largest": lambda x, p: x - x.reshape(-1, 4, 4).amax(-1).repeat_interleave(4, 1),
    "deviation": lambda x, p: (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + x.var(-1, keepdim=True)),
    "several axes": lambda x, p: x / x.reshape(-1, 2, 2, 4).mean((1, 3)).repeat(1, 8),
    "layer norm": lambda x, p, w: F.layer_norm(x, (16,), w, w * 2),
    "rms norm": lambda x, p, w: OPS.rms_norm(x, w, 1e-5),
    "norm of heads, read across heads": lambda x, p, w: OPS.rms_norm(x.reshape(-1, 4, 4), w[:4], 1e-5).reshape(-1, 16),
    "norm of a norm": lambda x, p, w: OPS.add_rms_norm(x, OPS.rms_norm(x, w, 1e-5), None, 1e-6)[0],
    "norm and sum": lambda x, p, w: sum(OPS.add_rms_norm(x, x * 2, w, 1e-6)),
    "norm of a width that is no power of two": lambda x, p, w: OPS.rms_norm(x[:, 2:13], w[:11], 1e-5),
    "rope": lambda x, p: OPS.rope(x.reshape(-1, 4, 4), *tables(p)),
    "partial rope": lambda x, p: OPS.rope(x.reshape(-1, 2, 8), *tables(p)),
    "interleaved rope": lambda x, p: OPS.rope(x.reshape(-1, 4, 4), *tables(p), True),
    "partial interleaved rope": lambda x, p: OPS.rope(x.reshape(-1, 2, 8), *tables(p), True),
    "rope of a norm": lambda x, p, w: OPS.rope(OPS.rms_norm(x.reshape(-1, 4, 4), w[:4], 1e-5), *tables(p)),
    "join": lambda x, p: torch.cat((x[:, 3:5], x * 2, x[:, :1].exp()), -1),
    "join of rotated and plain": lambda x, p: torch.cat(
        (x.reshape(-1, 2, 8)[..., 4:], OPS.rope(x.reshape(-1, 2, 8)[..., :4], *tables(p))), -1
    ).reshape(-1, 16),
    "join of heads": lambda x, p: torch.cat((x.reshape(-1, 4, 4), x.reshape(-1, 4, 4)[:, :1] + 1), 1),
    "stack": lambda x, p: torch.stack((-x[:, 1::2], x[:, 0::2]), -1).flatten(1),
    "filled by slices": lambda x, p: filled(x),
    "views of a value": lambda x, p: (x * 2).reshape(-1, 2, 8).transpose(1, 2).reshape(-1, 16).flip(1),
    "rows elsewhere": lambda x, p: (x.transpose(0, 1) * x[:, 0]).transpose(0, 1),
    "lookup": lambda x, p, w: w[p.long()].unsqueeze(-1) + F.embedding(p, w.reshape(4, 4).repeat(4, 1)),
    "lookup from the end": lambda x, p: x[:, torch.tensor([-1, 0, -3])],
    "best values": lambda x, p: router(x)[0] / router(x)[0].sum(-1, keepdim=True),
    "best places": lambda x, p: router(x)[1].to(x.dtype),
    "best of a row": lambda x, p: x.max(-1)[0].unsqueeze(-1) * x + x.max(-1)[1].unsqueeze(-1),
    "grouped router": lambda x, p: grouped(x),
    "scatter": lambda x, p: torch.zeros_like(x).scatter(1, router(x)[1], router(x)[0]),
    "product of values": lambda x, p: x.reshape(-1, 4, 4) @ x.reshape(-1, 4, 4).transpose(1, 2),
}


def program(name: str) -> Program:
    body = BODIES[name]
    weights = {"w": WEIGHT} if body.__code__.co_argcount == 3 else {}
    small = small_program(body, **weights)
    cleanup(small)
    return small


@pytest.mark.parametrize("name", BODIES)
def test_a_row_program_computes_what_torch_computes(name: str) -> None:
    small = program(name)
    expected = result(small)
    found = simulated(small)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


def test_rounding_happens_when_a_value_is_stored_and_not_before() -> None:
    third = torch.full((CHANNELS,), 1 / 3, dtype=torch.bfloat16)
    small = small_program(lambda x, p, w: (x * w) * 3, dtype=torch.bfloat16, w=third)
    table = small.weights[next(name for name in small.weights if "table" in name)].load()
    rows = table[torch.tensor([28, 3, 13])].float()  # of tokens 5, 0 and 2
    torch.testing.assert_close(simulated(small), (rows * third.float() * 3).bfloat16().float(), rtol=0, atol=0)


def test_only_weights_are_read_before_the_kernel_waits_for_those_before_it() -> None:
    small = small_program(lambda x, p, w: OPS.rms_norm(x, None, 1e-5) * (w + 1), w=WEIGHT)
    [kernel] = [part.kernel for part in partition(small).parts if isinstance(part, Launch)]
    early, late = kernel.source.split("tl.extra.cuda.gdc_wait()")
    assert "tl.load(w_ptr" in early
    assert "+ 1.0" in early
    assert early.count("tl.load(") == 1
    assert "tl.load(input_ids_ptr" in late or "tl.load(logits_indices_ptr" in late
    assert "tl.store(" not in early


def test_wide_rows_are_taken_apart_unless_their_channels_belong_together() -> None:
    wide = random(2500, seed=3)
    grids = {}
    for name, body in {
        "pointwise": lambda x, p, w: x[:, :1] * w,
        "norm": lambda x, p, w: OPS.rms_norm(x[:, :1] * w, None, 1e-5),
    }.items():
        small = small_program(body, w=wide)
        torch.testing.assert_close(simulated(small), result(small), rtol=2e-6, atol=2e-6)
        grids[name] = [part.kernel.grid for part in partition(small).parts if isinstance(part, Launch)]
    assert grids == {"pointwise": [("L", "3", "1")], "norm": [("L", "1", "1")]}


def test_every_op_without_a_rule_is_named_with_its_line() -> None:
    small = small_program(lambda x, p: torch.cumsum(x, -1) + torch.sort(x, -1)[0])
    with pytest.raises(UnsupportedError) as caught:
        partition(small)
    assert "cannot lower 2 node(s)" in caught.value.what
    assert "cumsum" in caught.value.what and "sort" in caught.value.what
    assert "small_programs.py" in caught.value.what


def test_forms_that_a_rule_cannot_write_are_named_too() -> None:
    small = small_program(lambda x, p: torch.topk(x, 3, largest=False)[0] + x.abs().pow(1.7)[:, :3])
    with pytest.raises(UnsupportedError, match=r"the smallest|the power 1\.7"):
        partition(small)


def test_sums_over_tokens_are_refused() -> None:
    small = small_program(lambda x, p: x + x.sum(0))
    with pytest.raises(UnsupportedError, match="it reduces over rows"):
        partition(small)


def test_a_row_that_is_too_wide_for_one_block_is_refused_by_its_width() -> None:
    small = small_program(lambda x, p, w: OPS.rms_norm(x[:, :1] * w, None, 1e-5), w=random(20000))
    with pytest.raises(UnsupportedError, match="it needs 20000 channels at once, more than 16384"):
        partition(small)
