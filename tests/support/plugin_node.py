"""A PagedAttention node as TensorRT holds it: descriptions of its tensors, their addresses, and calls of enqueue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmbuild.plugins.tensorrt.descriptors import data_type
from llmbuild.plugins.tensorrt.form import PluginForm
from llmbuild.plugins.tensorrt.form import Tensor as NodeTensor
from support.plugin_steps import BLOCKS, Step, pools, torch_dtype

NAN = float("nan")


def description(trt: Any, tensor: NodeTensor, dims: tuple[int, ...]) -> Any:
    """A PluginTensorDesc."""
    made = trt.PluginTensorDesc()
    made.dims, made.type, made.format = trt.Dims(dims), data_type(trt, tensor.dtype), trt.TensorFormat.LINEAR
    return made


def dynamic(trt: Any, tensor: NodeTensor, sizes: dict[str, int]) -> Any:
    """A DynamicPluginTensorDesc whose dimensions are at most those of `sizes`."""
    most = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.dims)
    made = trt.DynamicPluginTensorDesc()
    made.desc = description(trt, tensor, tuple(-1 if isinstance(dim, str) else dim for dim in tensor.dims))
    made.min, made.max = trt.Dims([1] * len(most)), trt.Dims(most)
    return made


class Prepared(NamedTuple):
    """A step on the device, ready to be run: inputs in the node's order, the output, and descriptions of all."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    input_desc: list[Any]
    output_desc: list[Any]


class Node:
    """A node with a cache of its own.

    Args:
        place: Returns the address of a tensor on the device; called for each that the node sees.
        device: torch's name of where tensors lie.
        blocks: Of the cache.
    """

    def __init__(
        self,
        trt: Any,
        form: PluginForm,
        plugin: Any,
        place: Callable[[Tensor], int],
        *,
        device: str = "cpu",
        blocks: int = BLOCKS,
    ) -> None:
        self.trt, self.form, self.plugin, self.place, self.device = trt, form, plugin, place, device
        self.pools = {name: pool.to(device) for name, pool in pools(form, blocks).items()}

    def prepare(self, step: Step) -> Prepared:
        shape, arrays = self.form.shape, step.arrays | self.pools
        out = torch.empty(len(step.expected), shape.heads, shape.value_dim, dtype=torch_dtype(shape.dtype))
        inputs = [arrays[tensor.name].contiguous().to(self.device) for tensor in self.form.inputs]
        outputs = [out.fill_(NAN).to(self.device), *(self.pools[tensor.name] for tensor in self.form.outputs[1:])]
        described = [description(self.trt, t, tuple(x.shape)) for t, x in zip(self.form.inputs, inputs, strict=True)]
        results = [description(self.trt, t, tuple(x.shape)) for t, x in zip(self.form.outputs, outputs, strict=True)]
        return Prepared(inputs, outputs, described, results)

    def run(self, prepared: Prepared, workspace: Tensor, stream: int = 0) -> Tensor:
        """Enqueue; return the output, which is full of NaN until the kernels have run."""
        addresses = [self.place(x) for x in prepared.inputs]
        known = dict(zip(map(id, prepared.inputs), addresses, strict=True))
        targets = [known.get(id(x)) or self.place(x) for x in prepared.outputs]
        described = (prepared.input_desc, prepared.output_desc)
        self.plugin.enqueue(*described, addresses, targets, self.place(workspace), stream)
        self.kept = prepared  # as long as the device may read it
        return prepared.outputs[0]

    def enqueue(self, step: Step, workspace: Tensor, stream: int = 0) -> Tensor:
        return self.run(self.prepare(step), workspace, stream)

    def workspace_bytes(self, tokens: int, sequences: int) -> int:
        sizes = {"T": tokens, "B": sequences, "B1": sequences + 1, "S": len(self.pools["key_pool"])}
        inputs = [dynamic(self.trt, tensor, sizes) for tensor in self.form.inputs]
        outputs = [dynamic(self.trt, tensor, sizes) for tensor in self.form.outputs]
        return int(self.plugin.get_workspace_size(inputs, outputs))
