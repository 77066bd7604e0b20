"""Plugin nodes as ONNX functions of standard operators: what onnxruntime runs where TensorRT has the plugin.

Written for clarity: every token gathers all positions of its sequence's table, and a mask says which it sees. Float32.
"""

from __future__ import annotations

import onnx
from onnx import helper, parser

from llmbuild.plugins.tensorrt.form import PluginForm

DOMAIN = "llmbuild"
OUT = {"key_pool": "key_out", "value_pool": "value_out"}
STORE = [  # the step's keys and values into the pools
    "slots = Cast <to = 7> (slot_mapping)",
    "places = Unsqueeze (slots, axis1)",
    "key_out = ScatterND (key_pool, places, k)",
    "value_out = ScatterND (value_pool, places, v)",
]


def with_reference(model: onnx.ModelProto, forms: dict[str, PluginForm]) -> onnx.ModelProto:
    """Return a copy of a model with plugin nodes that onnxruntime can run: each form of node has its function.

    forms: of the plugin nodes, by name.
    """
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    opset = next(each.version for each in twin.opset_import if each.domain == "")
    names: dict[str, str] = {}
    for node in twin.graph.node:
        if node.name not in forms:
            continue
        body = function_body(forms[node.name])
        if body not in names:
            names[body] = f"{node.op_type}_{len(names)}"
            head = f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>\n{names[body]} '
            twin.functions.append(parser.parse_function(head + body))
        node.op_type, node.domain = names[body], DOMAIN
        del node.attribute[:]
    if not any(each.domain == DOMAIN for each in twin.opset_import):
        twin.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return twin


def function_body(form: PluginForm) -> str:
    """Return the function of a node whose q, k and v are apart, in ONNX's text form, without its name."""
    lines = ["axis0 = Constant <value_ints = [0]> ()", "axis1 = Constant <value_ints = [1]> ()"]
    pools = ("key_pool", "value_pool")
    if form.role != "attend":
        lines += STORE
        pools = ("key_out", "value_out")
    if form.role != "store":
        lines += attend_lines(form, *pools)
    inputs = ", ".join(tensor.name for tensor in form.inputs)
    outputs = ", ".join("out" if tensor.name == "out" else OUT[tensor.name] for tensor in form.outputs)
    body = "\n".join(f"    {line}" for line in lines)
    return f"({inputs}) => ({outputs})\n{{\n{body}\n}}"


def attend_lines(form: PluginForm, key_pool: str, value_pool: str) -> list[str]:
    """Return what attends over pools that hold the step's keys and values already."""
    shape = form.shape
    heads, kv_heads, length = shape.heads, shape.kv_heads, form.table_stride * shape.page
    group = heads // kv_heads
    lines = [
        "axis2 = Constant <value_ints = [2]> ()",
        # Of which sequence token t is, and where it stands in it.
        "zero = Constant <value_int = 0> ()",
        "one = Constant <value_int = 1> ()",
        "all_tokens = Shape <start = 0, end = 1> (q)",
        "tokens = Squeeze (all_tokens)",
        "t = Range (zero, tokens, one)",
        "bounds = Cast <to = 7> (cu_q_lens)",
        f"last = Constant <value_ints = [{2**31}]> ()",
        "ends = Slice (bounds, axis1, last, axis0)",
        "t_row = Unsqueeze (t, axis0)",
        "ends_column = Unsqueeze (ends, axis1)",
        "before = LessOrEqual (ends_column, t_row)",
        "counted = Cast <to = 7> (before)",
        "sequence = ReduceSum <keepdims = 0> (counted, axis0)",
        "lengths = Cast <to = 7> (seq_lens)",
        "its_length = Gather (lengths, sequence)",
        "its_end = Gather (ends, sequence)",
        "left = Sub (its_end, t)",
        "position = Sub (its_length, left)",
        # Its keys and values, one row a position: [T, L, Hkv, D].
        f"page = Constant <value_int = {shape.page}> ()",
        "tables = Cast <to = 7> (block_tables)",
        "first = Mul (tables, page)",
        "first_column = Unsqueeze (first, axis2)",
        "in_page = Range (zero, page, one)",
        "every = Add (first_column, in_page)",
        f"flat = Constant <value_ints = [-1, {length}]> ()",
        "table_slots = Reshape (every, flat)",
        "its_slots = Gather (table_slots, sequence)",
        f"keys = Gather ({key_pool}, its_slots)",
        f"values = Gather ({value_pool}, its_slots)",
        "keys_last = Transpose <perm = [0, 2, 3, 1]> (keys)",
        "values_last = Transpose <perm = [0, 2, 1, 3]> (values)",
        f"grouped = Constant <value_ints = [0, {kv_heads}, {group}, -1]> ()",
        "queries = Reshape (q, grouped)",
        "products = MatMul (queries, keys_last)",
        f"factor = Constant <value_float = {shape.scale!r}> ()",
        "scores0 = Mul (products, factor)",
        # What it sees.
        f"length = Constant <value_int = {length}> ()",
        "l = Range (zero, length, one)",
        "position_column = Unsqueeze (position, axis1)",
        "distance = Sub (l, position_column)",
    ]
    scores = "scores0"
    if shape.softcap is not None:
        lines += [
            f"cap = Constant <value_float = {shape.softcap!r}> ()",
            f"shrunk = Div ({scores}, cap)",
            "bent = Tanh (shrunk)",
            "scores1 = Mul (bent, cap)",
        ]
        scores = "scores1"
    lines += [
        "middle = Constant <value_ints = [1, 2]> ()",
        "distance4 = Unsqueeze (distance, middle)",
    ]
    if shape.alibi:
        lines += [
            f"by_head = Constant <value_ints = [1, {kv_heads}, {group}, 1]> ()",
            "slope = Reshape (slopes, by_head)",
            "distance_float = Cast <to = 1> (distance4)",
            "bias = Mul (slope, distance_float)",
            f"scores2 = Add ({scores}, bias)",
        ]
        scores = "scores2"
    lines += ["seen0 = LessOrEqual (distance4, zero)"]
    seen = "seen0"
    if shape.window is not None:
        lines += [
            f"edge = Constant <value_int = {-shape.window}> ()",
            "near = Greater (distance4, edge)",
            "seen1 = And (seen0, near)",
        ]
        seen = "seen1"
    lines += [
        "huge = Constant <value_float = -3e38> ()",
        f"masked = Where ({seen}, {scores}, huge)",
    ]
    if shape.sinks:
        lines += [
            f"sink_shape = Constant <value_ints = [1, {kv_heads}, {group}, 1]> ()",
            "sink = Reshape (sinks, sink_shape)",
            f"one_key = Constant <value_ints = [{length - 1}]> ()",
            f"sink_end = Constant <value_ints = [{length}]> ()",
            "axis3 = Constant <value_ints = [3]> ()",
            "like = Slice (masked, one_key, sink_end, axis3)",
            "nothing = Mul (like, like_zero)",
            "column = Add (nothing, sink)",
            "more = Concat <axis = 3> (masked, column)",
            "all_weights = Softmax <axis = -1> (more)",
            "weights = Slice (all_weights, axis0, sink_end, axis3)",
        ]
        lines.insert(0, "like_zero = Constant <value_float = 0.0> ()")
    else:
        lines += ["weights = Softmax <axis = -1> (masked)"]
    lines += [
        "result = MatMul (weights, values_last)",
        f"out_shape = Constant <value_ints = [0, {heads}, {shape.value_dim}]> ()",
        "out = Reshape (result, out_shape)",
    ]
    return lines
