"""Linears and embeddings: plain ones through Gemm, quantized ones through DequantizeLinear in front of it.

TensorRT keeps a weight small only where it knows the form: 4 bits in groups of 16 to 128 neighbouring columns, 8 bits
with one scale a row. Anything else is dequantized while the engine is built, and then it is stored in the computation
dtype from the start; `why_wide` says why. Scales are in the computation dtype, which is what the kernels
for 4 bits take (float32 scales make TensorRT store the weight wide).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import fx

from llmbuild.builder.ir import Program
from llmbuild.builder.passes.edit import arguments, dtype
from llmbuild.builder.targets.onnx_graph.blocks import Array, Blocks, blocks_of, dequantized
from llmbuild.builder.targets.onnx_graph.emitter import Emitter, numpy_dtype
from llmbuild.builder.targets.onnx_graph.products import matmul, on_rows, plain_factors
from llmbuild.builder.targets.onnx_graph.rule import Rule, operand
from llmbuild.builder.targets.weight_file import Entry

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild
GROUPS = (16, 32, 64, 128)


def gemm(e: Emitter, x: str, weight: str, bias: Any, want: torch.dtype) -> str:
    """x·Wᵀ + bias. The weight stays as torch has it, so that a tied embedding and lm_head are one tensor."""
    y = e.op("Gemm", x, weight, transB=1)
    return y if bias is None else e.op("Add", y, operand(e, bias, want))


def linear(e: Emitter, node: fx.Node) -> str:
    x, weight, bias = arguments(node)
    return on_rows(e, node, x, lambda rows: gemm(e, rows, e.tensor(weight), bias, dtype(node)))


def addmm(e: Emitter, node: fx.Node) -> str:
    bias, x, weight = node.args[:3]
    return e.op("Add", e.op("MatMul", e.tensor(x), e.tensor(weight)), operand(e, bias, dtype(node)))


# ------------------------------------------------------------------------------------------------------- blocks
def linear_blockwise(e: Emitter, node: fx.Node) -> str:
    x, q, scale, offset, bias, bits, block_size, zero = arguments(node)
    weight = blocks_of(e.program, q, scale, offset, bits, block_size, zero)
    table = block_weight(e, weight, dtype(node))
    return on_rows(e, node, x, lambda rows: gemm(e, rows, table, bias, dtype(node)))


def embedding(e: Emitter, node: fx.Node) -> str:
    table, ids = node.args[:2]
    return e.op("Gather", e.tensor(table), e.tensor(ids))


def embedding_blockwise(e: Emitter, node: fx.Node) -> str:
    ids, q, scale, offset, bits, block_size, zero, want = arguments(node)
    weight = blocks_of(e.program, q, scale, offset, bits, block_size, zero)
    return e.op("Gather", block_weight(e, weight, want), e.tensor(ids))


def block_weight(e: Emitter, weight: Blocks, want: torch.dtype, experts: int | None = None) -> str:
    """Declare a weight once, whoever reads it, and return its name in dtype `want`: [N, K].

    Args:
        experts: How many experts' rows lie below each other; the result is then [experts, N / experts, K].
    """
    rows = (weight.rows,) if experts is None else (experts, weight.rows // experts)
    named = str(want).removeprefix("torch.")
    if why_wide(weight) is not None:
        return e.external_once(f"{weight.name}.{named}", wide_entry(weight, (*rows, weight.columns), want))
    four = weight.bits == 4
    packed = (*rows, weight.columns // 2 if four else weight.columns)
    values = Entry(packed, np.dtype(np.uint8 if four else np.int8), lambda: signed(weight), weight.source)
    per_row = weight.blocks == 1 and experts is None
    of_scales = rows if per_row else (*rows, weight.blocks)
    scales = bits_entry(of_scales, want, lambda: (piece.load()[1] for piece in weight.pieces()), weight.source)
    kind, dims = (TensorProto.INT4, (*rows, weight.columns)) if four else (None, None)
    q = e.external_once(f"{weight.name}.q", values, kind, dims)
    s = e.external_once(f"{weight.name}.scale.{named}", scales)
    axis, block = (0, None) if per_row else (len(rows), weight.block_size)
    dequantize = lambda: e.op("DequantizeLinear", q, s, axis=axis, block_size=block)  # noqa: E731
    return e.shared((f"{weight.name}.{named}",), dequantize)


def quantized_weights(program: Program) -> Iterator[tuple[Any, ...]]:
    """Yield what `blocks_of` takes for each quantized weight that the graph reads."""
    for node in program.graph.nodes:
        args = arguments(node) if node.op == "call_function" else ()
        if node.target is llmbuild.linear_blockwise.default:
            yield (*args[1:4], *args[5:8])
        elif node.target is llmbuild.embedding_blockwise.default:
            yield args[1:7]
        elif node.target is llmbuild.moe_experts_blockwise.default:
            for at in (3, 7):
                yield (*args[at : at + 3], *args[at + 3][1:])


def why_wide(weight: Blocks) -> str | None:
    """Return why TensorRT cannot keep a weight in its bits, or None."""
    if weight.has_offset or weight.zero != 1 << (weight.bits - 1):
        return f"{weight.source}: not symmetric"
    if weight.bits == 8:
        return None if weight.blocks == 1 else f"8 bits in groups of {weight.block_size}, not one scale a row"
    if weight.bits != 4:
        return f"{weight.bits} bits"
    if weight.block_size not in GROUPS or weight.columns % weight.block_size:
        return f"4 bits in groups of {weight.block_size} of {weight.columns} columns"
    return None


def wide_entry(weight: Blocks, shape: tuple[int, ...], want: torch.dtype) -> Entry:
    """A weight that is stored in the computation dtype."""
    return bits_entry(shape, want, lambda: map(dequantized, weight.pieces()), str(want).removeprefix("torch."))


def bits_entry(shape: tuple[int, ...], want: torch.dtype, pieces: Callable[[], Iterable[Array]], storage: str) -> Entry:
    """An entry of float32 pieces that are rounded to `want`."""
    dtype = numpy_dtype(want)
    if want is not torch.bfloat16:
        return Entry(shape, dtype, lambda: (piece.astype(dtype) for piece in pieces()), storage)
    bits = lambda: (piece.astype(dtype).view(np.uint16) for piece in pieces())  # noqa: E731
    return Entry(shape, np.dtype(np.uint16), bits, storage, element="bfloat16")


def signed(weight: Blocks) -> Iterator[Array]:
    """q - zero of each piece, int8; of 4 bits two neighbours in a byte (uint8), the first in the low half."""
    for piece in weight.pieces():
        values = (piece.load()[0].astype(np.int16) - weight.zero).astype(np.int8)
        if weight.bits == 8:
            yield values
            continue
        low_bits = values.view(np.uint8) & 15
        yield low_bits[..., 0::2] | (low_bits[..., 1::2] << 4)


RULES: dict[Any, Rule] = {
    aten.linear.default: Rule(linear),
    aten.addmm.default: Rule(addmm, plain_factors),
    aten.mm.default: Rule(matmul),
    aten.bmm.default: Rule(matmul),
    aten.matmul.default: Rule(matmul),
    aten.embedding.default: Rule(embedding),
    llmbuild.linear_blockwise.default: Rule(linear_blockwise),
    llmbuild.embedding_blockwise.default: Rule(embedding_blockwise),
}
