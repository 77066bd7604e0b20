"""The plugin's enqueue on a GPU, without TensorRT around it: descriptors of its bindings, real addresses, a stream.

Each step of the conversation is enqueued, and then captured in a CUDA graph that runs over spoiled results.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from llmbuild.selftest.conversation import MAX_BATCH, MAX_SEQ_LEN, MAX_TOKENS, steps

if TYPE_CHECKING:
    import numpy as np

    from llmbuild.plugins.tensorrt.form import PluginForm
    from llmbuild.runtime.executor import StepInput

BLOCKS, BLOCK_SIZE = 16, 16
SPOILED = 0xFF  # bytes of it are a NaN in float16


def tiny_form() -> PluginForm:
    from llmbuild.plugins.kernels.attention_shape import AttentionShape
    from llmbuild.plugins.tensorrt.form import PluginForm

    half = "float16"
    shape = AttentionShape(4, 2, 16, 16, scale=0.25, dtype=half, kv_dtype=half, page=BLOCK_SIZE)
    return PluginForm(shape, layer=0, table_stride=MAX_SEQ_LEN // BLOCK_SIZE)


class Node:
    """A node of the plugin with a cache of its own.

    Args:
        device: `runtime.executors.cuda.driver.Device`, current in this thread; kernels are loaded by it too.
        plugin: `PagedAttention`, whose loader is the device.
    """

    def __init__(self, device: Any, plugin: Any) -> None:
        self._device, self._plugin, self._form = device, plugin, plugin.form
        self._stream = device.stream()
        self._allocated: list[int] = []
        program = plugin.opened.program
        self._scratch = program.most_scratch(MAX_TOKENS, MAX_BATCH)
        self._workspace = self._space(self._scratch)
        slots = BLOCKS * BLOCK_SIZE
        self._pool_dims = {t.name: (slots, *t.dims[1:]) for t in self._form.outputs[1:]}
        self._pools = {name: self._space(math.prod(dims) * 2) for name, dims in self._pool_dims.items()}

    def run(self, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Run a step and return what enqueue gives, and what it gives when it was captured: float16 [T, Hq, D]."""
        import numpy as np

        from llmbuild.runtime.executors.cuda.driver import capture

        device, stream, form = self._device, self._stream, self._form
        mark = len(self._allocated)
        addresses = [self._pools.get(t.name) or self._upload(arrays[t.name]) for t in form.inputs]
        dims = [self._pool_dims.get(t.name) or arrays[t.name].shape for t in form.inputs]
        of_out = (len(arrays["slot_mapping"]), *form.outputs[0].dims[1:])
        size = math.prod(of_out) * 2
        out, host = self._space(size), device.allocate_host(size)
        targets = [out, *self._pools.values()]
        described = [self._describe(t, each) for t, each in zip(form.inputs, dims, strict=True)]
        of_results = (of_out, *self._pool_dims.values())
        results = [self._describe(t, each) for t, each in zip(form.outputs, of_results, strict=True)]

        def enqueue() -> None:
            self._plugin.enqueue(described, results, addresses, targets, self._workspace, int(stream))

        def download() -> np.ndarray:
            device.download(host.address, out, size, stream)
            device.synchronize(stream)
            return np.array(host.bytes[:size].view(np.float16).reshape(of_out))

        try:
            enqueue()
            plain = download()
            graph = capture(device, stream, enqueue)
            device.fill(out, SPOILED, size, stream)
            device.fill(self._workspace, SPOILED, self._scratch, stream)
            device.launch_graph(graph, stream)
            captured = download()
            device.free_graph(graph)
        finally:
            device.free_host(host)
            for address in self._allocated[mark:]:
                device.free(address)
            del self._allocated[mark:]
        return plain, captured

    def _space(self, size: int) -> int:
        address: int = self._device.allocate(size)
        self._allocated.append(address)
        self._device.fill(address, SPOILED, size, self._stream)
        return address

    def _upload(self, array: np.ndarray) -> int:
        import numpy as np

        device, data = self._device, np.ascontiguousarray(array)
        address, host = self._space(data.nbytes), device.allocate_host(data.nbytes)
        host.bytes[: data.nbytes] = data.reshape(-1).view(np.uint8)
        device.upload(address, host.address, data.nbytes, self._stream)
        device.synchronize(self._stream)
        device.free_host(host)
        return address

    def _describe(self, tensor: Any, dims: tuple[int, ...]) -> Any:
        from llmbuild.plugins.tensorrt.bindings import bindings
        from llmbuild.plugins.tensorrt.descriptors import data_type

        trt = bindings().module
        made = trt.PluginTensorDesc()
        made.dims, made.type, made.format = trt.Dims(dims), data_type(trt, tensor.dtype), trt.TensorFormat.LINEAR
        return made

    def close(self) -> None:
        for address in self._allocated:
            self._device.free(address)
        self._device.free_stream(self._stream)


def all_steps(device: Any, plugin: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return what enqueue gives in all steps, each as it is and captured, and what the reference gives for both.

    plugin: of `tiny_form`, its loader the device.
    """
    import numpy as np

    from llmbuild.plugins.attention_reference import PagedState

    node = Node(device, plugin)
    state, random = PagedState(BLOCKS, BLOCK_SIZE), np.random.default_rng(3)
    found: list[np.ndarray] = []
    wanted: list[np.ndarray] = []
    try:
        for _, step in steps(BLOCKS, BLOCK_SIZE):
            arrays = arrays_of(step, plugin.form, random)
            found += node.run(arrays)
            wanted += [reference(state, arrays, plugin.form.shape.scale)] * 2
    finally:
        node.close()
    return np.concatenate(found).astype(np.float32), np.concatenate(wanted)


def arrays_of(step: StepInput, form: PluginForm, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Random q, k and v for the tokens of a step, and its paging."""
    import numpy as np

    tables = np.zeros((len(step.seq_lens), form.table_stride), np.int32)
    tables[:, : step.block_tables.shape[1]] = step.block_tables
    tokens = len(step.input_ids)
    sizes = {t.name: [tokens, *map(int, t.dims[1:])] for t in form.inputs[:3]}
    drawn = {name: random.standard_normal(size).astype(np.float16) for name, size in sizes.items()}
    return drawn | step._asdict() | {"block_tables": tables}


def reference(state: Any, arrays: dict[str, np.ndarray], scale: float) -> np.ndarray:
    import torch

    paging = ("slot_mapping", "block_tables", "seq_lens", "cu_q_lens")
    state.set_step(*(torch.from_numpy(arrays[name]) for name in paging))
    q, k, v = (torch.from_numpy(arrays[name]).float() for name in ("q", "k", "v"))
    result: np.ndarray = state.attend(q, k, v, 0, scale).numpy()
    return result
