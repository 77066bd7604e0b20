"""Embeddings. A table in blocks is read from the same initializer as a tied lm_head."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, dtype, rank, size
from llmbuild.builder.targets.cpu.layouts import NBits
from llmbuild.builder.targets.cpu.lower.linear import (
    block_form,
    external,
    has_nbits_kernel,
    nbits_weights,
    records,
    weight_attributes,
)
from llmbuild.builder.targets.onnx_graph.blocks import Blocks, blocks_of, dequantized
from llmbuild.builder.targets.onnx_graph.emitter import NATIVE, Emitter
from llmbuild.builder.targets.onnx_graph.rule import Rule, cast, onnx_shape, reshape

aten = torch.ops.aten


def embedding(e: Emitter, node: fx.Node) -> str:
    table, ids = node.args[:2]
    return e.op("Gather", e.tensor(table), e.tensor(ids))


def embedding_blockwise(e: Emitter, node: fx.Node) -> str:
    ids, q, scale, offset, bits, block_size, zero, want = arguments(node)
    weight = blocks_of(e.program, q, scale, offset, bits, block_size, zero)
    name = e.tensor(ids)
    if e.native:
        flat = name if rank(ids) == 1 else reshape(e, name, -1)
        flat = cast(e, flat, dtype(ids), torch.int32)
        rows = e.op("BlockEmbedding", flat, records(e, weight), domain=NATIVE, **weight_attributes(weight))
    elif bits == 8 and not weight.has_offset and has_nbits_kernel(block_size):
        rows = gathered(e, name, weight)
    else:
        table = external(e, weight, "float32", (weight.rows, weight.columns), dequantized, storage="float32")
        return cast(e, e.op("Gather", table, name), torch.float32, want)
    dims = onnx_shape(size(node))
    assert dims is not None
    return cast(e, rows if rank(node) == 2 and e.native else reshape(e, rows, *dims), torch.float32, want)


def gathered(e: Emitter, ids: str, weight: Blocks) -> str:
    """Rows of MatMulNBits' 8-bit values: scale·(value - 128)."""
    values, scales = nbits_weights(e, weight)
    middle = np.float32(weight.zero + NBits.of(weight).shift)
    taken = e.op("Cast", e.op("Gather", values, ids), to=1)
    taken = e.op("Sub", taken, e.constant(middle))
    return e.op("Mul", taken, e.op("Unsqueeze", e.op("Gather", scales, ids), e.ints(-1)))


def whole_blocks(node: fx.Node) -> str | None:
    bits, block_size = arguments(node)[4:6]
    columns = size(node)[-1]
    assert isinstance(columns, int)
    return block_form(bits, block_size, columns) or (
        None if columns % block_size == 0 else f"{columns} columns are not whole blocks of {block_size}"
    )


RULES: dict[Any, Rule] = {
    aten.embedding.default: Rule(embedding),
    torch.ops.llmbuild.embedding_blockwise.default: Rule(embedding_blockwise, whole_blocks),
}
