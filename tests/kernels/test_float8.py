"""e4m3 by integer arithmetic against torch's, over every byte and every float16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmbuild.plugins.kernels.float8 import e4m3_to_float32, float32_to_e4m3
from support.kernels import run


@triton.jit
def encode(x, y, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, float32_to_e4m3(tl.load(x + i)))


@triton.jit
def decode(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, e4m3_to_float32(tl.load(x + i)))


def test_every_float16() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    y = torch.zeros(x.numel(), dtype=torch.uint8)
    run(encode, (64,), x, y, BLOCK=1024)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    numbers = ~x.isnan()
    assert torch.equal(y[numbers], expected.view(torch.uint8)[numbers])
    assert torch.equal(y[~numbers] & 0x7F, torch.full_like(y[~numbers], 0x7F))


def test_ties_and_neighbours_in_float32() -> None:
    codes = torch.arange(0, 126, dtype=torch.uint8)
    values, above = (c.view(torch.float8_e4m3fn).float() for c in (codes, codes + 1))
    middle = (values + above) / 2
    infinity = torch.tensor(float("inf"))
    near = torch.cat((middle, torch.nextafter(middle, infinity), torch.nextafter(middle, -infinity)))
    x = torch.zeros(512)
    x[: near.numel()] = near
    x[near.numel() :] = -1e-12
    y = torch.zeros(512, dtype=torch.uint8)
    run(encode, (1,), x, y, BLOCK=512)
    assert torch.equal(y, x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_every_byte() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    y = torch.zeros(256)
    run(decode, (1,), codes, y, BLOCK=256)
    torch.testing.assert_close(y, codes.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)
