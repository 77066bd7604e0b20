"""Launches the kernels of a GEMM as an engine would: NaN in the workspaces, rows of x and out inside of wider ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmbuild.engine.expressions import evaluate
from llmbuild.plugins.kernels.block_layout import BlockShape, pack_blocks
from llmbuild.plugins.kernels.gemm_shape import SmallKernel
from llmbuild.plugins.kernels.spec import KernelSpec
from llmbuild.plugins.ops import dequantize_blockwise
from support.kernels import run

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # relative to the largest result


def launch(spec: KernelSpec, given: dict[str, Any], sizes: dict[str, int]) -> None:
    """Run one kernel on the arguments that it takes; nothing where its grid is empty."""
    grid = [evaluate(text, sizes) for text in spec.grid]
    if min(grid) > 0:
        named = {name: given[name] for name in spec.signature} | dict(spec.constants)
        run(spec.function, grid, **named, num_warps=spec.num_warps, num_stages=spec.num_stages, **spec.options)


def compute(kernel: SmallKernel, x: Tensor, out_columns: int, dtype: torch.dtype, **weights: Tensor) -> Tensor:
    """Return out [rows, out_columns] for x [rows, K]. Memory after the rows and between them may not be touched."""
    rows, k = x.shape
    padding = 16 // x.element_size()
    x_stride = -(-k // padding) * padding + padding
    wide = torch.empty(rows * x_stride - x_stride + k, dtype=x.dtype)  # ends with the last number of the last row
    for row in range(rows):
        wide[row * x_stride :][:k] = x[row]
    out_stride = out_columns + 8 if out_columns % 2 == 0 else out_columns + 3
    out = torch.full((rows + 1, out_stride), 7.0, dtype=dtype)
    given: dict[str, Any] = {"x": wide, "out": out, "rows": rows, "x_stride": x_stride, "out_stride": out_stride}
    for name, (_, size) in kernel.workspaces.items():
        given[name] = torch.full((size // 4,), float("nan"))
    states = {name: torch.zeros(size // 4, dtype=torch.int32) for name, size in kernel.states.items()}
    for spec in kernel.specs:
        launch(spec, given | states | weights, {"T": rows})
    assert not any(state.any() for state in states.values())
    assert (out[rows] == 7.0).all() and (out[:, out_columns:] == 7.0).all()
    return out[:rows, :out_columns]


def block_weight(
    n: int, k: int, block: BlockShape, seed: int, factor: float = 1.0
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return what the kernels take of a weight, and the float32 weight itself. factor: of all numbers."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 2**block.bits, (n, k), generator=generator, dtype=torch.uint8)
    blocks, kind = -(-k // block.block_size), DTYPES[block.scale_dtype]
    scale = ((torch.rand(n, blocks, generator=generator) + 0.1) * factor).to(kind)
    offset = (torch.randn(n, blocks, generator=generator) * factor).to(kind) if block.has_offset else None
    arguments: dict[str, Any] = {"w": torch.from_numpy(pack_blocks(q.numpy(), block.bits)), "w_scale": scale}
    if offset is not None:
        arguments["w_offset"] = offset
    return arguments, dequantize_blockwise(q, scale, offset, block.block_size, block.zero)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, room: float = 0.0) -> None:
    """tolerance: relative to the largest result. room: absolute, for weights that are rounded and nearly cancel out."""
    allowed = tolerance * expected.abs().max().clamp(min=1e-6).item() + room
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= allowed, f"error {error}, allowed {allowed}"  # also when it is NaN
