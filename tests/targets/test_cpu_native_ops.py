"""Each native operator alone, against a plain reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from llmbuild.builder.targets.cpu import native_library
from llmbuild.builder.targets.cpu.layouts import native_records
from llmbuild.builder.targets.cpu.lower.linear import weight_attributes
from llmbuild.builder.targets.onnx_graph.blocks import Blocks
from llmbuild.builder.targets.onnx_graph.emitter import NATIVE
from llmbuild.errors import UnsupportedError
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.plugins.ops import activate, dequantize_blockwise

COMPILER = native_library.find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

TYPES = {np.dtype("f4"): TensorProto.FLOAT, np.dtype("u1"): TensorProto.UINT8, np.dtype("i4"): TensorProto.INT32}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    path = tmp_path_factory.mktemp("native") / "native.so"
    native_library.compile_library(COMPILER, path)
    return path


def run(library: Path, kind: str, inputs: dict[str, np.ndarray | None], **attributes: Any) -> np.ndarray:
    """Run one operator. Inputs in order; None leaves an optional one out. Arrays may be changed in place."""
    given = {name: array for name, array in inputs.items() if array is not None}
    names = [name if array is not None else "" for name, array in inputs.items()]
    node = helper.make_node(kind, names, ["y"], domain=NATIVE, **attributes)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(name, TYPES[array.dtype], array.shape) for name, array in given.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid(NATIVE, 1)], ir_version=10
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, array in given.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    binding.bind_output("y", "cpu")
    session.run_with_iobinding(binding)
    result: np.ndarray = binding.get_outputs()[0].numpy()
    return result


def random_weight(
    rows: int, columns: int, bits: int, block: int, zero: int, *, offset: bool, source: str, seed: int = 0
) -> tuple[Blocks, np.ndarray]:
    """A random weight in blocks and the float32 matrix it stands for. Scales are float16 values."""
    random = np.random.default_rng(seed)
    blocks = -(-columns // block)
    end = 64 if source == "Q6_K" else 1 << bits
    q = random.integers(0, end, (rows, columns)).astype(np.uint8)
    scale = random.uniform(0.01, 0.1, (rows, blocks)).astype(np.float16).astype(np.float32)
    minimum = random.uniform(-0.5, 0.5, (rows, blocks)).astype(np.float16).astype(np.float32) if offset else None
    weight = Blocks("w", rows, columns, bits, block, zero, offset, source, lambda: (q, scale, minimum))
    tensors = [None if array is None else torch.from_numpy(array) for array in (q, scale, minimum)]
    return weight, dequantize_blockwise(*tensors, block, zero).numpy()


LINEARS = {
    "Q4_1": dict(bits=4, block=32, zero=0, offset=True, source="Q4_1"),
    "Q4_0": dict(bits=4, block=32, zero=8, offset=False, source="Q4_0"),
    "Q8_0": dict(bits=8, block=32, zero=128, offset=False, source="Q8_0"),
    "Q4_K": dict(bits=4, block=32, zero=0, offset=True, source="Q4_K"),
    "Q6_K": dict(bits=8, block=16, zero=32, offset=False, source="Q6_K"),
    "int4 in groups of 128": dict(bits=4, block=128, zero=8, offset=False, source="int4"),
    "int4 in groups of 16": dict(bits=4, block=16, zero=8, offset=True, source="int4"),
}


@pytest.mark.parametrize("form", LINEARS)
@pytest.mark.parametrize(
    "rows, n, k", [(1, 16, 64), (2, 13, 96), (5, 40, 72), (37, 24, 256), (209, 40, 64), (1, 72, 96), (1, 8, 17000)]
)
def test_block_linear(library: Path, form: str, rows: int, n: int, k: int) -> None:
    weight, dense = random_weight(n, k, **LINEARS[form])
    x = np.random.default_rng(1).normal(size=(rows, k)).astype(np.float32)
    bias = np.random.default_rng(2).normal(size=n).astype(np.float32)
    got = run(
        library,
        "BlockLinear",
        {"x": x, "w": native_records(weight), "bias": bias},
        **weight_attributes(weight),
    )
    expected = x.astype(np.float64) @ dense.T.astype(np.float64) + bias
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(dense.T.astype(np.float64))
    assert (np.abs(got - expected) / magnitude).max() < 5e-7


@pytest.mark.parametrize("form", LINEARS)
def test_a_row_of_block_linear_does_not_depend_on_the_others(library: Path, form: str) -> None:
    """Among several rows a row's result is the same wherever it stands; a single row takes another way to it."""
    weight, _ = random_weight(56, 256, **LINEARS[form])
    x = np.random.default_rng(3).normal(size=(101, 256)).astype(np.float32)
    records = native_records(weight)

    def rows(begin: int, end: int) -> np.ndarray:
        return run(library, "BlockLinear", {"x": x[begin:end], "w": records}, **weight_attributes(weight))

    together = rows(0, 101)
    for begin, end in ((0, 2), (5, 8), (90, 101)):
        assert np.array_equal(rows(begin, end), together[begin:end])
    for m in (0, 5, 96, 100):
        np.testing.assert_allclose(rows(m, m + 1)[0], together[m], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", LINEARS)
def test_block_embedding(library: Path, form: str) -> None:
    weight, dense = random_weight(21, 256, **LINEARS[form])
    ids = np.array([0, 20, 7, 8, 7], np.int32)
    got = run(library, "BlockEmbedding", {"ids": ids, "w": native_records(weight)}, **weight_attributes(weight))
    assert np.abs(got - dense[ids]).max() < 1e-6


def test_a_zero_point_that_makes_signed_bytes_overflow_is_refused() -> None:
    weight, _ = random_weight(8, 64, bits=8, block=32, zero=32, offset=False, source="int8")
    with pytest.raises(UnsupportedError, match=r"w: q - zero reaches \d+, which no signed byte holds"):
        native_records(weight)


def test_block_embedding_refuses_ids_outside_the_table(library: Path) -> None:
    weight, _ = random_weight(21, 64, **LINEARS["Q8_0"])
    ids = np.array([3, 21], np.int32)
    with pytest.raises(Exception, match="a token id is outside the embedding table"):
        run(library, "BlockEmbedding", {"ids": ids, "w": native_records(weight)}, **weight_attributes(weight))


@pytest.mark.parametrize("code, name", [(0, "silu"), (1, "gelu_tanh")])
def test_gated_activation(library: Path, code: int, name: str) -> None:
    x = np.random.default_rng(5).normal(size=(5, 2 * 51)).astype(np.float32) * 8
    x[0, 0], x[0, 1] = 200, -200  # far outside the range of exp
    got = run(library, "GatedActivation", {"x": x}, activation=code)
    gate, up = torch.from_numpy(x).chunk(2, dim=-1)
    expected = (activate(gate.double(), name) * up).numpy()
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)


ATTENTION = {
    "plain": {},
    "window": dict(window=5),
    "window of one": dict(window=1),
    "softcap": dict(softcap=2.0),
    "sinks": dict(sinks=True),
    "alibi": dict(alibi=True),
    "half rope": dict(rotary=16),
    "partial rope": dict(rotary=8),
    "interleaved rope": dict(rotary=16, interleaved=1),
    "other value width": dict(value_width=24),
    "no groups": dict(kv_heads=6),
    "one kv head": dict(kv_heads=1),
    "group of 48": dict(kv_heads=1, q_heads=48),
    "everything": dict(window=70, softcap=3.0, sinks=True, alibi=True, rotary=16),
}


@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_paged_attention(library: Path, case: str, packed: bool) -> None:
    """Two steps over scattered blocks: a long and a short prefill, then decode of one beside more of the other."""
    settings: dict[str, Any] = {
        **dict(q_heads=6, kv_heads=2, value_width=16, window=None, softcap=None, rotary=0, interleaved=0),
        **ATTENTION[case],
    }
    q_heads, kv_heads, width, value_width = settings["q_heads"], settings["kv_heads"], 16, settings["value_width"]
    random = np.random.default_rng(6)
    block_size, num_blocks = 4, 80
    normal = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
    sinks = normal(q_heads) if settings.get("sinks") else None
    slopes = np.abs(normal(q_heads)) / 10 if settings.get("alibi") else None
    keys = np.zeros((num_blocks * block_size, kv_heads * width), np.float32)
    values = np.zeros((num_blocks * block_size, kv_heads * value_width), np.float32)
    state = PagedState(num_blocks, block_size)
    order = random.permutation(num_blocks).astype(np.int32)
    tables = np.stack([order[:36], order[36:72]])
    lengths = np.zeros(2, np.int32)
    for new in ([131, 3], [1, 6], [1, 1]):
        lengths += np.array(new, np.int32)
        positions = np.concatenate([np.arange(end - count, end) for end, count in zip(lengths, new, strict=True)])
        owner = np.repeat([0, 1], new)
        slots = (tables[owner, positions // block_size] * block_size + positions % block_size).astype(np.int32)
        starts = np.cumsum([0, *new]).astype(np.int32)
        tokens = len(positions)
        q, k, v = normal(tokens, q_heads, width), normal(tokens, kv_heads, width), normal(tokens, kv_heads, value_width)
        half = settings["rotary"] // 2
        angles = positions[:, None] * np.linspace(0.1, 0.7, half)
        cos, sin = (f(angles).astype(np.float32) if half else None for f in (np.cos, np.sin))
        flat = [x.reshape(tokens, -1) for x in (q, k, v)]
        inputs = {
            "q": np.concatenate(flat, axis=1) if packed else flat[0],
            "k": None if packed else flat[1],
            "v": None if packed else flat[2],
            "cos": cos,
            "sin": sin,
            "keys": keys,
            "values": values,
            "slots": slots,
            "tables": tables,
            "lengths": lengths,
            "starts": starts,
            "sinks": sinks,
            "slopes": slopes,
        }
        got = run(
            library,
            "PagedAttention",
            inputs,
            q_heads=q_heads,
            kv_heads=kv_heads,
            key_width=width,
            value_width=value_width,
            block_size=block_size,
            interleaved=settings["interleaved"],
            scale=0.3,
            window=settings["window"] or 0,
            softcap=settings["softcap"] or 0.0,
        )
        tensor = lambda x: None if x is None else torch.from_numpy(x)  # noqa: E731
        tq, tk, tv = (torch.from_numpy(x) for x in (q, k, v))
        if half:
            tables_of = (tensor(cos), tensor(sin), bool(settings["interleaved"]))
            tq, tk = (torch.ops.llmbuild.rope(x, *tables_of) for x in (tq, tk))
        state.set_step(*(torch.from_numpy(x) for x in (slots, tables, lengths, starts)))
        rest = dict(window=settings["window"], softcap=settings["softcap"])
        expected = state.attend(tq, tk, tv, 0, 0.3, **rest, sinks=tensor(sinks), alibi_slopes=tensor(slopes))
        assert np.abs(got.reshape(expected.shape) - expected.numpy()).max() < 1e-5
        assert np.array_equal(values, state.values[0].reshape(values.shape).numpy())
        assert np.abs(keys - state.keys[0].reshape(keys.shape).numpy()).max() < 1e-5
