"""The ONNX graphs of the TensorRT targets in onnxruntime, in float32: what is parsed, executed on the CPU.

`SlotTwin` runs the graph of tensorrt-rtx, over slots; `PagedTwin` that of tensorrt, each plugin node replaced by a
function of standard operators (`builder/targets/tensorrt/reference.py`), over pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import onnx

    from llmbuild.builder.targets.onnx_graph.emitter import Emitter
    from llmbuild.runtime.executor import StepInput

CACHES = ("keys.", "values.")


class SlotTwin:
    """emitter: of a float32 program lowered for tensorrt-rtx. slots: sequences whose caches it keeps."""

    def __init__(self, emitter: Emitter, slots: int, *, prefill_batch: int = 2, threads: int = 1) -> None:
        import numpy as np

        from llmbuild.runtime.executors.tensorrt.slots import SlotRuns

        self.session = session_of(filled(emitter.model("twin"), emitter), threads)
        self.runs = SlotRuns(slots, emitter.limits.block_size, prefill_batch=prefill_batch)
        self.slots = {
            item.name: np.zeros([slots, *item.shape[1:]], np.float32)
            for item in self.session.get_inputs()
            if item.name.startswith(CACHES)
        }

    def run(self, step: StepInput) -> np.ndarray:
        """Return logits [L, V] of a step; its keys and values are written."""
        import numpy as np

        logits = np.zeros((len(step.logits_indices), self.session.get_outputs()[-1].shape[-1]), np.float32)
        names = [output.name for output in self.session.get_outputs()]
        for run in self.runs.split(step):
            part = slice(run.first, run.first + run.batch)
            cache = {name: pool[part] for name, pool in self.slots.items()}
            outputs = dict(zip(names, self.session.run(None, {**run.inputs, **cache}), strict=True))
            logits[run.rows] = outputs["logits"][: len(run.rows)]
            for name, pool in self.slots.items():
                pool[part] = outputs[f"{name}.out"]
        return logits


class PagedTwin:
    """model: with plugin nodes replaced, weights inside. blocks, block_size: of the pools. stride: of block tables."""

    def __init__(self, model: onnx.ModelProto, *, blocks: int, block_size: int, stride: int) -> None:
        import numpy as np

        self.session = session_of(model, 1)
        self.stride = stride
        self.pools = {
            item.name: np.zeros([blocks * block_size, *item.shape[1:]], np.float32)
            for item in self.session.get_inputs()
            if item.name.startswith(CACHES)
        }

    def run(self, step: StepInput) -> np.ndarray:
        """Return logits [L, V] of a step; its keys and values are written."""
        import numpy as np

        tables = np.zeros((len(step.seq_lens), self.stride), np.int32)
        tables[:, : step.block_tables.shape[1]] = step.block_tables
        given = step._asdict() | {"block_tables": tables} | self.pools
        wanted = [item.name for item in self.session.get_outputs()]
        feeds = {item.name: given[item.name] for item in self.session.get_inputs()}
        found = dict(zip(wanted, self.session.run(wanted, feeds), strict=True))
        self.pools = {name: found[f"{name}.out"] for name in self.pools}
        logits: np.ndarray = found["logits"]
        return logits


def session_of(model: onnx.ModelProto, threads: int) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model.SerializeToString(), options)


def filled(model: onnx.ModelProto, emitter: Emitter) -> onnx.ModelProto:
    """Return the model with its external weights inside: at most 2 GB."""
    import onnx

    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    for tensor in whole.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = b"".join(piece.tobytes() for piece in emitter.weights.entries[tensor.name].pieces())
    return whole
