"""Linears: plain ones through Gemm, block-quantized ones through BlockLinear (native/) or MatMulNBits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, size
from llmbuild.builder.targets.cpu.layouts import (
    NBits,
    half_scales,
    native_block,
    native_records,
    nbits_remainder,
    nbits_values,
    record_bytes,
)
from llmbuild.builder.targets.onnx_graph.blocks import Array, Blocks, blocks_of, dequantized
from llmbuild.builder.targets.onnx_graph.emitter import CONTRIB, NATIVE, Emitter
from llmbuild.builder.targets.onnx_graph.products import matmul, on_rows, plain_factors
from llmbuild.builder.targets.onnx_graph.rule import Rule
from llmbuild.builder.targets.weight_file import Entry, Origin

aten = torch.ops.aten


def linear(e: Emitter, node: fx.Node) -> str:
    """Gemm with transB: the weight stays as torch has it, so a tied embedding and lm_head are one tensor."""
    x, weight, bias = arguments(node)
    names = [e.tensor(weight)] + ([] if bias is None else [e.tensor(bias)])
    return on_rows(e, node, x, lambda rows: e.op("Gemm", rows, *names, transB=1))


def addmm(e: Emitter, node: fx.Node) -> str:
    bias, x, weight = node.args[:3]
    return e.op("Gemm", e.tensor(x), e.tensor(weight), e.tensor(bias))


def linear_blockwise(e: Emitter, node: fx.Node) -> str:
    x, q, scale, offset, bias, bits, block_size, zero = arguments(node)
    weight = blocks_of(e.program, q, scale, offset, bits, block_size, zero)
    bias_name = "" if bias is None else e.tensor(bias)
    if e.native:
        return on_rows(e, node, x, lambda rows: block_linear(e, rows, weight, bias_name))
    if not has_nbits_kernel(weight.block_size):
        return on_rows(e, node, x, lambda rows: dequantized_linear(e, rows, weight, bias_name))
    return on_rows(e, node, x, lambda rows: matmul_nbits(e, rows, weight, bias_name))


def has_nbits_kernel(block_size: int) -> bool:
    """Whether MatMulNBits multiplies such blocks fast; it does so for powers of two from 32 to 256."""
    return block_size in (32, 64, 128, 256)


def linear_form(node: fx.Node) -> str | None:
    bits, block_size, _ = arguments(node)[-3:]
    return block_form(bits, block_size, size(node.args[1])[-1])  # type: ignore[arg-type]


def block_form(bits: int, block_size: int, columns: int | Any) -> str | None:
    """Return why blocks of a weight of so many columns cannot be held, or None.

    Records hold 32 columns, or 16: a scale must cover whole records, or all that there are of a row.
    """
    if bits not in (4, 8):
        return f"{bits}-bit blocks (4 and 8 are known)"
    if block_size != 16 and block_size % 32 and block_size < columns:
        return f"blocks of {block_size} columns (16, multiples of 32 and whole rows are known)"
    return None


def block_linear(e: Emitter, x: str, weight: Blocks, bias: str) -> str:
    names = [x, records(e, weight)] + ([bias] if bias else [])
    return e.op("BlockLinear", *names, domain=NATIVE, **weight_attributes(weight))


def records(e: Emitter, weight: Blocks) -> str:
    """Declare a weight in the layout of native/, once, whoever reads it."""
    shape = (-(-weight.rows // 8), -(-weight.columns // native_block(weight)), record_bytes(weight))
    entry = Entry(shape, np.dtype(np.uint8), lambda: map(native_records, weight.pieces()), weight.source)
    return e.external_once(f"{weight.name}.records", entry)


def weight_attributes(weight: Blocks) -> dict[str, Any]:
    return {
        "N": weight.rows,
        "K": weight.columns,
        "bits": weight.bits,
        "block": native_block(weight),
        "zero": weight.zero,
        "wide": int(not half_scales(weight)),
        "offset": int(weight.has_offset),
    }


def matmul_nbits(e: Emitter, x: str, weight: Blocks, bias: str) -> str:
    """x·Wᵀ = MatMulNBits(x) + sums of x over blocks · what MatMulNBits' symmetric form cannot hold.

    accuracy_level 4 quantizes x to int8 by blocks; without it onnxruntime is 40 times slower.
    """
    values, scales = nbits_weights(e, weight)
    y = e.op(
        "MatMulNBits",
        x,
        values,
        scales,
        domain=CONTRIB,
        N=weight.rows,
        K=weight.columns,
        bits=weight.bits,
        block_size=weight.block_size,
        accuracy_level=4,
    )
    if NBits.of(weight).remainder:
        sums = e.shared(("block_sums", x, weight.block_size), lambda: block_sums(e, x, weight))
        entry = Entry((weight.blocks, weight.rows), np.dtype(np.float32), lambda: [remainder(weight)], weight.source)
        y = e.op("Gemm", sums, e.external_once(f"{weight.name}.remainder", entry), y)
    return e.op("Add", y, bias) if bias else y


def nbits_weights(e: Emitter, weight: Blocks) -> tuple[str, str]:
    """Declare values and scales for MatMulNBits, once, whoever reads them."""
    packed = (weight.rows, weight.blocks, weight.block_size * weight.bits // 8)
    values = external(e, weight, "values", packed, lambda w: nbits_values(w, w.load()[0]), np.uint8)
    return values, external(e, weight, "scales", (weight.rows, weight.blocks), lambda w: w.load()[1])


def remainder(weight: Blocks) -> Array:
    """Return float32 [blocks, N]; its columns come from the weight's pieces."""
    pieces = ((piece, *piece.load()[1:]) for piece in weight.pieces())
    return np.concatenate([nbits_remainder(*piece) for piece in pieces], axis=1)


def block_sums(e: Emitter, x: str, weight: Blocks) -> str:
    """Sums over blocks as a product with a 0/1 matrix: one operator, where reshaping and reducing are two."""
    ones = np.kron(np.eye(weight.blocks), np.ones((weight.block_size, 1)))[: weight.columns].astype(np.float32)
    name = f"block_sums.{weight.columns}.{weight.block_size}"
    return e.op("MatMul", x, e.external_once(name, Entry(ones.shape, ones.dtype, lambda: [ones], "float32")))


def dequantized_linear(e: Emitter, x: str, weight: Blocks, bias: str) -> str:
    """Blocks that MatMulNBits has no fast kernel for: the same values, stored as float32."""
    table = external(e, weight, "float32", (weight.rows, weight.columns), dequantized, storage="float32")
    return e.op("Gemm", x, table, *([bias] if bias else []), transB=1)


def external(
    e: Emitter,
    weight: Blocks,
    part: str,
    shape: tuple[int, ...],
    load: Callable[[Blocks], Array],
    dtype: Any = np.float32,
    storage: str | None = None,
) -> str:
    """Declare an initializer made of a weight's pieces; `load` gives the bytes of one, in order."""
    origin = Origin(("blocks", weight.name), weight.pieces, load)
    pieces = lambda: map(load, weight.pieces())  # noqa: E731
    entry = Entry(shape, np.dtype(dtype), pieces, storage or weight.source, origin=origin)
    return e.external_once(f"{weight.name}.{part}", entry)


RULES: dict[Any, Rule] = {
    aten.linear.default: Rule(linear),
    aten.addmm.default: Rule(addmm, plain_factors),
    aten.mm.default: Rule(matmul),
    aten.bmm.default: Rule(matmul),
    aten.matmul.default: Rule(matmul),
    torch.ops.llmbuild.linear_blockwise.default: Rule(linear_blockwise, linear_form),
}
