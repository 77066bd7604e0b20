"""Products as every ONNX target writes them: rows of any rank, and those of two tensors of the graph."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from llmbuild.builder.passes.edit import rank, size
from llmbuild.builder.targets.onnx_graph.emitter import Emitter
from llmbuild.builder.targets.onnx_graph.rule import onnx_shape, reshape


def on_rows(e: Emitter, node: fx.Node, x: fx.Node, compute: Callable[[str], str]) -> str:
    """Apply `compute`, which takes and gives two axes, to an x of any rank."""
    if rank(x) == 2:
        return compute(e.tensor(x))
    flat = compute(reshape(e, e.tensor(x), -1, int(size(x)[-1])))
    dims = onnx_shape(size(node))
    assert dims is not None
    return reshape(e, flat, *dims)


def plain_factors(node: fx.Node) -> str | None:
    """Return why an addmm is refused: it scales its operands. None if it does not."""
    factors = (node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1))
    return None if factors == (1, 1) else f"alpha, beta = {factors}"


def matmul(e: Emitter, node: fx.Node) -> str:
    return e.op("MatMul", e.tensor(node.args[0]), e.tensor(node.args[1]))
