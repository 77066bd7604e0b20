"""Device sampling for the fake GPU: kernels in Python that read the arrays of a plan and call the host's sampler.

Every kernel is given every array, so that a wrong address, a stale value or a row too few shows in the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from llmbuild.cuda.kernels import Grid
from llmbuild.engine.cubin import Launch
from llmbuild.engine.launch_plan import ITEM_BYTES, Buffer, Input, KernelOp, LaunchPlan, Place, Sampling
from llmbuild.runtime.sampler import largest, sample
from llmbuild.runtime.sampling_batch import RowExtras, SamplingBatch
from support.cuda_engine import BATCH, KERNELS, VOCAB, kernel, launch, number, place, plan
from support.fake_device import FakeDevice

ENTRIES = 200
MOST_LOGPROBS = 5
FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INTEGERS = ("top_k", "streams", "token_indices", "count_rows", "logprob_counts")
LISTS = ("allowed", "banned", "bias")
INPUTS = {
    **{name: ("float32", "L") for name in FLOATS},
    **{name: ("int32", "L") for name in INTEGERS},
    "seeds": ("int32", "2 * L"),
    "feed_sources": ("int32", "T"),
    **{f"{name}_ids": ("int32", str(ENTRIES)) for name in LISTS},
    **{f"{name}_offsets": ("int32", "L + 1") for name in LISTS},
    "bias_values": ("float32", str(ENTRIES)),
    "entering": ("int32", "4"),
    "entering_ids": ("int32", "7"),  # few: long prompts enter in pieces
}
STATE = {
    "counts": ("int32", str(BATCH * VOCAB)),
    "logprob_ids": ("int32", f"L * {1 + MOST_LOGPROBS}"),
    "token_ids": ("int32", "L"),
    "status": ("int32", "L"),
    "ranks": ("int32", "L"),
    "logprobs": ("float32", f"L * {1 + MOST_LOGPROBS}"),
}
LOGITS_AND_IDS = ("logits", "input_ids")
NAMES = (*LOGITS_AND_IDS, *INPUTS, *STATE)
LIST_NAMES = ("greedy", "full", "adjusted", "logprobs", "count", "enter", "feed")


def sampling_plan() -> LaunchPlan:
    """Return the fake model's plan with device sampling."""
    places: dict[str, Place] = {"logits": place("buffer", "logits"), "input_ids": place("input", "input_ids")}
    places |= {name: place("input", f"s_{name}") for name in INPUTS}
    places |= {name: place("state", f"s_{name}") for name in STATE}

    def ops(name: str) -> tuple[KernelOp, ...]:
        return (kernel(f"s_{name}", *(places[each] for each in NAMES), number("L"), number("T")),)

    def arrays(table: dict[str, tuple[str, str]]) -> tuple[Input, ...]:
        return tuple(Input(name=f"s_{name}", dtype=dtype, size=size) for name, (dtype, size) in table.items())

    section = Sampling(
        **{name: ops(name) for name in LIST_NAMES},
        inputs=arrays(INPUTS),
        state=arrays(STATE),
        num_tokens=VOCAB,
        token_ids=places["token_ids"],
        status=places["status"],
        logprob_ids=places["logprob_ids"],
        logprob_values=places["logprobs"],
        ranks=places["ranks"],
    )
    (logits,) = plan().buffers
    buffers: tuple[Buffer, ...] = (logits,)
    return plan(sampling=section, buffers=buffers)


def sampling_launches() -> dict[str, Launch]:
    kinds = tuple("*fp32" if name == "logits" or _dtype(name) == "float32" else "*i32" for name in NAMES)
    made = {name: launch(name, *parameters) for name, (parameters, _) in KERNELS.items()}
    return made | {f"s_{name}": launch(f"s_{name}", *kinds, "i32", "i32") for name in LIST_NAMES}


def sampling_kernels() -> dict[str, Callable[[FakeDevice, Grid, bytes], None]]:
    bodies = {
        "greedy": greedy,
        "full": full,
        "adjusted": full,
        "logprobs": logprobs,
        "count": count,
        "enter": enter,
        "feed": feed,
    }
    return {f"s_{name}": _with_arrays(body, name) for name, body in bodies.items()}


class Arrays:
    """The arrays that a kernel is given; reading one gives a view of the GPU's memory."""

    def __init__(self, device: FakeDevice, given: bytes) -> None:
        addresses = struct.unpack_from(f"<{len(NAMES)}Q", given)
        self._addresses = dict(zip(NAMES, addresses, strict=True))
        self._device = device
        self.rows, self.tokens = struct.unpack_from("<ii", given, 8 * len(NAMES))

    def __call__(self, name: str, size: int) -> np.ndarray:
        dtype = np.float32 if name == "logits" else np.dtype(_dtype(name))
        return self._device.view(self._addresses[name], 4 * size).view(dtype)


def _dtype(name: str) -> str:
    dtype = (INPUTS | STATE)[name][0] if name not in LOGITS_AND_IDS else "int32"
    assert ITEM_BYTES[dtype] == 4
    return dtype


def _with_arrays(body: Any, name: str) -> Callable[[FakeDevice, Grid, bytes], None]:
    def run(device: FakeDevice, grid: Grid, given: bytes) -> None:
        if name == "adjusted":
            full(Arrays(device, given), adjusted=True)
        else:
            body(Arrays(device, given))

    return run


def greedy(arrays: Arrays) -> None:
    logits = arrays("logits", arrays.rows * VOCAB).reshape(-1, VOCAB)
    arrays("token_ids", arrays.rows)[:] = logits.argmax(axis=1)
    arrays("status", arrays.rows)[:] = ~np.isfinite(logits.max(axis=1, initial=-np.inf))


def full(arrays: Arrays, *, adjusted: bool = False) -> None:
    rows = arrays.rows
    values = {name: arrays(name, rows).copy() for name in (*FLOATS, "top_k", "streams", "token_indices")}
    extras = tuple(_extras(arrays, row) for row in range(rows)) if adjusted else None
    batch = SamplingBatch(
        **values, seeds=arrays("seeds", 2 * rows).view(np.uint64).copy(), all_greedy=False, extras=extras
    )
    logits = arrays("logits", rows * VOCAB).reshape(-1, VOCAB)
    arrays("token_ids", rows)[:] = sample(logits, batch).token_ids
    arrays("status", rows)[:] = 0


def _extras(arrays: Arrays, row: int) -> RowExtras:
    lists = {}
    for name in LISTS:
        first, last = arrays(f"{name}_offsets", arrays.rows + 1)[row : row + 2]
        lists[name] = (first, last, arrays(f"{name}_ids", ENTRIES)[first:last].astype(np.int64))
    first, last, biased = lists["bias"]
    owner = arrays("count_rows", arrays.rows)[row]
    prompt = output = None
    if owner >= 0:
        counts = arrays("counts", BATCH * VOCAB).reshape(BATCH, VOCAB)[owner]
        prompt, output = np.flatnonzero(counts & 1), np.repeat(np.arange(VOCAB), counts >> 1)
    return RowExtras(
        prompt,
        output,
        banned=lists["banned"][2],
        bias=(biased, arrays("bias_values", ENTRIES)[first:last].copy()),
        allowed=lists["allowed"][2] if len(lists["allowed"][2]) else None,
    )


def logprobs(arrays: Arrays) -> None:
    width = 1 + MOST_LOGPROBS
    for row in range(arrays.rows):
        wanted = int(arrays("logprob_counts", arrays.rows)[row])
        if wanted < 0:
            continue
        logits = arrays("logits", arrays.rows * VOCAB).reshape(-1, VOCAB)[row]
        token = int(arrays("token_ids", arrays.rows)[row])
        ids = np.array([token, *(largest(logits, wanted) if wanted else ())])
        shifted = logits - logits.max()
        norm = np.log(np.sum(np.exp(shifted), dtype=np.float64))
        place = slice(row * width, row * width + 1 + wanted)
        arrays("logprob_ids", arrays.rows * width)[place] = ids
        arrays("logprobs", arrays.rows * width)[place] = shifted[ids] - norm
        arrays("ranks", arrays.rows)[row] = np.count_nonzero(logits > logits[token]) + 1


def count(arrays: Arrays) -> None:
    counts = arrays("counts", BATCH * VOCAB).reshape(BATCH, VOCAB)
    for row, owner in enumerate(arrays("count_rows", arrays.rows).tolist()):
        if owner >= 0:
            counts[owner, arrays("token_ids", arrays.rows)[row]] += 2


def feed(arrays: Arrays) -> None:
    sources = arrays("feed_sources", arrays.tokens)
    input_ids, fed = arrays("input_ids", arrays.tokens), sources >= 0
    if fed.any():
        input_ids[fed] = arrays("token_ids", int(sources.max()) + 1)[sources[fed]]


def enter(arrays: Arrays) -> None:
    row, length, of_prompt, begins = arrays("entering", 4).tolist()
    counts = arrays("counts", BATCH * VOCAB).reshape(BATCH, VOCAB)[row]
    if begins:
        counts[:] = 0
    ids = arrays("entering_ids", 7)[:length]
    counts[ids[:of_prompt]] |= 1
    np.add.at(counts, ids[of_prompt:], 2)
