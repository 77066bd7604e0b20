"""An engine of the cuda target whose kernels are Python: the fake model of `fake_executor.py` as a launch plan.

Its kernels read their arguments from the parameter bytes that they are launched with, and everything else from the
fake GPU's memory, so that the tokens are right only if packing, inputs, pools, padding and graphs are.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from llmbuild.cuda.kernels import Grid
from llmbuild.engine.cubin import Cubin, Launch, Parameter
from llmbuild.engine.kernel_pack import CompiledKernel, write_pack
from llmbuild.engine.launch_plan import (
    PLAN_VERSION,
    Buffer,
    GemmOp,
    Input,
    KernelOp,
    LaunchPlan,
    Limits,
    Number,
    Place,
    Pool,
    SmallGemm,
    Weight,
)
from llmbuild.engine.manifest import KVCacheSection, LayerKVSection, LimitsSection, TargetSection
from llmbuild.runtime.executor import StepInput
from support.fake_device import FakeDevice
from support.fake_engine import PAYLOAD, sections, write_engine
from support.fake_executor import hash_terms, logits_of_hash

VOCAB = 64
BLOCK = 4
MAX_SEQ = 48
STRIDE = 12
BATCH = 6
TOKENS = 24
SECTION = {
    "sms": [90],
    "plans": {"90": "plan/sm90/plan.json"},
    "kernels": {"90": "plan/sm90/kernels.bin"},
    "weights": "weights/cuda.safetensors",
}
INPUTS = {
    "input_ids": "T",
    "position_ids": "T",
    "slot_mapping": "T",
    "seq_lens": "B",
    "cu_q_lens": "B + 1",
    "block_tables": f"B * {STRIDE}",
    "logits_indices": "L",
}


def parameters(*kinds: str) -> tuple[Parameter, ...]:
    """Lay out parameters as the compiler does: each at a multiple of its size; two scratch pointers last."""
    sizes = {"i32": 4, "i64": 8, "fp32": 4, "i8": 1}
    made, end = [], 0
    for index, kind in enumerate((*kinds, "scratch", "scratch")):
        size = sizes.get(kind, 8)
        end = -(-end // size) * size
        made.append(Parameter(name=f"p{index}", kind=kind, offset=end, size=size))
        end += size
    return tuple(made)


def launch(symbol: str, *kinds: str, sm: int = 90, **changes: Any) -> Launch:
    values: dict[str, Any] = {
        "sm": sm,
        "symbol": symbol,
        "shared": 0,
        "num_warps": 4,
        "num_ctas": 1,
        "global_scratch": 0,
        "global_scratch_align": 1,
        "pdl": False,
        "cooperative": False,
        "parameters": parameters(*kinds),
        "tensor_maps": (),
    }
    return Launch(**{**values, **changes})


STORE = ("*i32", "*i32", "*i32", "*u64", "i32")
HASH = ("*i32", "*i32", "*i32", "*i32", "*u64", "*fp32", "*fp32", "i32", "i32", "i32")
KERNELS = {"store": (STORE, ("cdiv(T, 4)", "1", "1")), "hash": (HASH, ("L", "1", "1"))}


def place(kind: str, name: str, offset: int = 0) -> Place:
    return Place(kind=kind, name=name, offset=offset)  # type: ignore[arg-type]


def number(text: object) -> Number:
    return Number(value=str(text))


def kernel(name: str, *arguments: Place | Number, when: str = "always") -> KernelOp:
    return KernelOp(kernel=name, arguments=arguments, when=when, label="logits")  # type: ignore[arg-type]


def plan(**changes: Any) -> LaunchPlan:
    """Return the plan of the fake model: tokens to hashes in a pool, hashes to logits times a weight of ones."""
    inputs = {name: place("input", name) for name in INPUTS}
    store = [inputs["input_ids"], inputs["position_ids"], inputs["slot_mapping"], place("pool", "keys.0"), number("T")]
    read = [inputs["seq_lens"], inputs["cu_q_lens"], inputs["block_tables"], inputs["logits_indices"]]
    read += [place("pool", "keys.0"), place("weight", "ones"), place("buffer", "logits")]
    read += [number("B"), number(STRIDE), number("S")]
    values: dict[str, Any] = {
        "version": PLAN_VERSION,
        "limits": Limits(max_num_tokens=TOKENS, max_batch_size=BATCH, table_stride=STRIDE, block_size=BLOCK),
        "inputs": tuple(Input(name=name, dtype="int32", size=size) for name, size in INPUTS.items()),
        "weights": (
            Weight(name="odd", dtype="int8", shape=(13,)),
            Weight(name="ones", dtype="float32", shape=(VOCAB,)),
        ),
        "pools": (Pool(name="keys.0", dtype="uint64", width=1),),
        "buffers": (Buffer(name="logits", dtype="float32", size=f"L * {VOCAB * 4}", offset=256, first=0, last=3),),
        "arena_bytes": 256 + 4 * VOCAB * BATCH,
        "counters": (),
        "ops": (
            kernel("store", *store),
            kernel("hash", *read, when="decode"),
            kernel("hash", *read, when="mixed"),
        ),
        "logits": place("buffer", "logits"),
        "logits_dtype": "float32",
        "logits_columns": VOCAB,
    }
    return LaunchPlan(**{**values, **changes})


def gemm(**changes: Any) -> GemmOp:
    values: dict[str, Any] = {
        "x": place("buffer", "x"),
        "weight": place("weight", "w"),
        "bias": None,
        "out": place("buffer", "out"),
        "rows": "T",
        "n": 5,
        "k": 8,
        "batch": 1,
        "dtype": "float32",
        "x_stride": 8,
        "x_batch": 0,
        "weight_layout": "nk",
        "weight_stride": 8,
        "weight_batch": 0,
        "out_stride": 5,
        "out_batch": 0,
    }
    return GemmOp(**{**values, **changes})


def small(most_rows: int | None, *launches: KernelOp) -> SmallGemm:
    return SmallGemm(most_rows=most_rows, launches=launches)


def weight_values() -> dict[str, np.ndarray]:
    return {"ones": np.ones(VOCAB, np.float32), "odd": np.arange(13, dtype=np.int8)}


def write_weights(path: Path, tensors: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def write_cuda_engine(
    out: Path,
    *,
    launch_plan: LaunchPlan | None = None,
    kernels: dict[str, Launch] | None = None,
    weights: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a whole engine directory and return its path."""
    made = {name: launch(name, *kinds) for name, (kinds, _) in KERNELS.items()} if kernels is None else kernels
    work = out.with_name(f"{out.name}.work")
    write_weights(work / "weights", weights or weight_values())
    grids = {name: grid for name, (_, grid) in KERNELS.items()}
    compiled = [
        CompiledKernel(name, grids.get(name, ("1", "1", "1")), {one.sm: Cubin(one, name.encode())})
        for name, one in made.items()
    ]
    write_pack(work / "kernels", compiled, compiler="none")
    payload = {
        "plan/sm90/plan.json": (launch_plan or plan()).to_json(),
        "plan/sm90/kernels.bin": (work / "kernels").read_bytes(),
        "weights/cuda.safetensors": (work / "weights").read_bytes(),
        "report.json": PAYLOAD["report.json"],
    }
    changes = {
        "model": sections()["model"].model_copy(update={"vocab_size": VOCAB}),
        "target": TargetSection(name="cuda", requires={}, toolchain={"triton": "3.6.0"}, section=SECTION),
        "limits": LimitsSection(max_batch_size=BATCH, max_num_tokens=TOKENS, max_seq_len=MAX_SEQ),
        "kv_cache": KVCacheSection(
            dtype="float32",
            block_size=BLOCK,
            layers=[LayerKVSection(num_kv_heads=1, head_dim=1, v_head_dim=1, window=None)],
        ),
    }
    write_engine(out, payload=payload, **changes)
    return out


def fake_gpu(**options: Any) -> FakeDevice:
    """Return a GPU that knows the model's kernels."""
    return FakeDevice(kernels={"store": store_kernel, "hash": hash_kernel}, **options)


def store_kernel(device: FakeDevice, grid: Grid, given: bytes) -> None:
    ids, positions, slots, pool, tokens = struct.unpack_from("<QQQQi", given)
    assert grid == (-(-tokens // 4), 1, 1)
    at = device.view(slots, 4 * tokens).view(np.int32)
    for slot, term in zip(at, hash_terms(ints(device, ids, tokens), ints(device, positions, tokens)), strict=True):
        device.view(pool + 8 * int(slot), 8).view(np.uint64)[0] = term


def hash_kernel(device: FakeDevice, grid: Grid, given: bytes) -> None:
    lens, cu, tables, rows, pool, ones, logits, batch, stride, longest = struct.unpack_from("<QQQQQQQiii", given)
    cu_q_lens, seq_lens = ints(device, cu, batch + 1), ints(device, lens, batch)
    assert seq_lens.max() <= longest
    for row, token in enumerate(ints(device, rows, grid.x).tolist()):
        owner = int(np.searchsorted(cu_q_lens, token, side="right")) - 1
        after = int(cu_q_lens[owner + 1]) - 1 - token
        positions = np.arange(int(seq_lens[owner]) - after)
        table = ints(device, tables + 4 * stride * owner, stride)
        slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
        terms = [device.view(pool + 8 * int(slot), 8).view(np.uint64)[0] for slot in slots]
        values = logits_of_hash(np.array([np.sum(terms, dtype=np.uint64)]), VOCAB)[0]
        scaled = values * device.view(ones, 4 * VOCAB).view(np.float32)
        device.view(logits + 4 * VOCAB * row, 4 * VOCAB).view(np.float32)[:] = scaled


def ints(device: FakeDevice, address: int, count: int) -> np.ndarray:
    return device.view(address, 4 * count).view(np.int32)


def step(*sequences: tuple[list[int], int, list[int]], wanted: list[int] | None = None) -> StepInput:
    """Return a step of sequences (tokens of the whole cache, tokens that are new, blocks)."""
    ids, positions, slots, lens, cu = [], [], [], [], [0]
    width = max(len(blocks) for _, _, blocks in sequences)
    tables = np.zeros((len(sequences), width), np.int32)
    for row, (tokens, new, blocks) in enumerate(sequences):
        where = np.arange(len(tokens) - new, len(tokens))
        ids += tokens[-new:]
        positions += where.tolist()
        slots += (np.array(blocks)[where // BLOCK] * BLOCK + where % BLOCK).tolist()
        lens.append(len(tokens))
        cu.append(cu[-1] + new)
        tables[row, : len(blocks)] = blocks
    rows = [end - 1 for end in cu[1:]] if wanted is None else wanted
    arrays = [np.array(values, np.int32) for values in (ids, positions, slots)]
    return StepInput(*arrays, tables, *(np.array(values, np.int32) for values in (lens, cu, rows)))
