"""Opens an engine's ONNX graph: weights mapped from the file, KV pools bound once, small arrays bound every run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from llmbuild.engine.mapped import read_header
from llmbuild.errors import EngineError

Array = npt.NDArray[Any]
LOGITS = "logits"
POOLS = ("keys", "values", "key_scales", "value_scales")  # before the layer's number
DTYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1", "I8": "i1", "BOOL": "?"}


class CpuSession:
    """One onnxruntime session with its KV pools. Not for concurrent use.

    Args:
        model: `plan/model.onnx`.
        weights: The safetensors file that holds its initializers.
        library: Shared library with our operators, or None.
        slots: Tokens that each KV pool can hold.
        threads: Threads of onnxruntime.
    """

    def __init__(self, model: Path, weights: Path, library: Path | None, *, slots: int, threads: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Workers spin while a run is in flight and sleep between runs: an idle server uses no CPU.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if library is not None:
            options.register_custom_ops_library(str(library))
        self._weights = map_safetensors(weights)  # kept: onnxruntime reads from the mapping
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in self._weights.items()}
        options.add_external_initializers(list(values), list(values.values()))
        self._session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])

        self._binding = self._session.io_binding()
        self.inputs: list[str] = []
        self.pools: dict[str, Array] = {}
        outputs = {output.name: output for output in self._session.get_outputs()}
        for item in self._session.get_inputs():
            if item.name.partition(".")[0] in POOLS:
                shape = [slots if dim == "slots" else dim for dim in item.shape]
                pool = np.zeros(shape, np.int8 if item.type == "tensor(int8)" else np.float32)
                self.pools[item.name] = pool
                value = ort.OrtValue.ortvalue_from_numpy(pool)
                self._binding.bind_ortvalue_input(item.name, value)
                if f"{item.name}.out" in outputs:  # the updated pool is the pool: no copy
                    self._binding.bind_ortvalue_output(f"{item.name}.out", value)
            else:
                self.inputs.append(item.name)
        self.vocab_size = int(outputs[LOGITS].shape[-1])
        self._logits: dict[int, ort.OrtValue] = {}

    def run(self, arrays: Mapping[str, Array]) -> Array:
        """Run the graph and return float32 logits [L, V]. The next run with the same L overwrites them.

        Args:
            arrays: Contiguous arrays by input name; those that the graph does not have are ignored.
        """
        for name in self.inputs:
            self._binding.bind_cpu_input(name, arrays[name])
        rows = len(arrays["logits_indices"])
        if rows not in self._logits:
            empty = np.empty((rows, self.vocab_size), np.float32)
            self._logits[rows] = ort.OrtValue.ortvalue_from_numpy(empty)
        self._binding.bind_ortvalue_output(LOGITS, self._logits[rows])
        self._session.run_with_iobinding(self._binding)
        logits: Array = self._logits[rows].numpy()
        return logits


def map_safetensors(path: Path) -> dict[str, Array]:
    """Return the tensors of a safetensors file as read-only views of its mapping: nothing is read yet."""
    with path.open("rb") as file:
        header, start = read_header(file)
    data = np.memmap(path, np.uint8, mode="r", offset=0)[start:]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        tensors[name] = data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def check_machine(native: Mapping[str, Any], where: Path) -> None:
    """Raise EngineError when this processor cannot run the engine's native operators."""
    machine = os.uname().machine if hasattr(os, "uname") else "unknown"
    missing = sorted(set(native["features"]) - processor_features())
    hint = "convert the model again on this machine, or with LLMBUILD_CXX=none for an engine that runs anywhere"
    if machine != native["machine"]:
        raise EngineError(
            f"the engine is for {native['machine']}, this machine is {machine}", where=str(where), hint=hint
        )
    if missing:
        raise EngineError(f"this processor lacks {', '.join(missing)}", where=str(where), hint=hint)


def processor_features() -> frozenset[str]:
    """Return the feature flags that Linux reports for the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
