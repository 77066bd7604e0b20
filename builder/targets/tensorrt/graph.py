"""FX graph → the ONNX graph that TensorRT parses, weights beside it.

Everything but attention works on rows of tokens [T, ..], so that padded batches [B, T] of tensorrt-rtx are flattened
at the inputs and get their two axes back only where a sequence looks at its cache.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import onnx
import onnx.numpy_helper
from onnx import TensorProto

from llmbuild.builder.ir import INPUT_NAMES, Program, raise_unsupported
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.onnx_graph.emitter import Dialect, Emitter
from llmbuild.builder.targets.onnx_graph.rule import is_size
from llmbuild.builder.targets.tensorrt.lower.attention_paged import DOMAIN
from llmbuild.builder.targets.tensorrt.lower.table import rules, unsupported
from llmbuild.builder.targets.weight_file import CARRIERS, Entry, WeightFile

MODEL, WEIGHTS = "plan/model.onnx", "weights/tensorrt.safetensors"
LOGITS = "logits"


def lower(program: Program, limits: Limits, *, target: str, paged: bool) -> Emitter:
    """Lower all nodes in order and return the emitter that holds the graph.

    Args:
        limits: block_size is the number of tokens of a slot, where attention is not paged.
        target: Name for messages.
        paged: Whether attention becomes the node of `attention_paged`; else operators over slots.

    Raises:
        UnsupportedError: Names all nodes that cannot be lowered.
    """
    table = rules(paged=paged)
    raise_unsupported(target, unsupported(program.graph, table))
    domains = (DOMAIN,) if paged else ()
    e = Emitter(program, limits, Dialect(24, 11, domains, Path(WEIGHTS).name))
    for node in program.graph.nodes:
        e.scope = node.name
        if node.op == "placeholder" and node.name in INPUT_NAMES:
            per_token = node.name != "logits_indices"
            shape = ["L"] if not per_token else ["T"] if paged else ["B", "T"]
            name = e.add_input(node.name, TensorProto.INT32, shape)
            e.scope = f"{node.name}.flat"
            e.values[node] = e.op("Reshape", name, e.ints(-1)) if per_token and not paged else name
        elif node.op == "call_function" and not is_size(node) and node not in e.values:
            e.values[node] = table[node.target].emit(e, node)
        elif node.op == "output":
            logits = node.args[0]
            e.scope = LOGITS
            e.rename(e.op("Cast", e.tensor(logits), to=TensorProto.FLOAT), LOGITS)
            e.add_output(LOGITS, TensorProto.FLOAT, ["L", int(logits.meta["val"].shape[-1])])
    return e


def write_model(model: onnx.ModelProto, path: Path) -> None:
    """Write a graph without weights, always the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def add_constants(weights: WeightFile, model: onnx.ModelProto) -> None:
    """Add the small constants of a graph to its weights: TensorRT takes them out of an engine like any other."""
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            continue
        array = onnx.numpy_helper.to_array(tensor)
        bits = array.view(CARRIERS.get(array.dtype.name, array.dtype))
        weights.add(tensor.name, Entry(array.shape, bits.dtype, partial(list, [bits]), "constant", array.dtype.name))
