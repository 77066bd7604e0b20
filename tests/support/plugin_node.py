"""A PagedAttention node as TensorRT holds it: descriptions of its tensors, their addresses, and calls of enqueue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmbuild.plugins.tensorrt.descriptors import data_type
from llmbuild.plugins.tensorrt.form import PluginForm
from llmbuild.plugins.tensorrt.form import Tensor as NodeTensor
from support.plugin_steps import Step, pools, torch_dtype

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


class Node:
    """A node with a cache of its own.

    Args:
        place: Returns the address of a tensor on the device; called for each that the node sees.
    """

    def __init__(self, trt: Any, form: PluginForm, plugin: Any, place: Callable[[Tensor], int]) -> None:
        self.trt, self.form, self.plugin, self.place = trt, form, plugin, place
        self.pools = pools(form)

    def enqueue(self, step: Step, workspace: Tensor, stream: int = 0) -> Tensor:
        """Run a step; return the output, full of NaN before."""
        shape, arrays = self.form.shape, step.arrays | self.pools
        tokens = len(step.expected)
        out = torch.full((tokens, shape.heads, shape.value_dim), NAN, dtype=torch_dtype(shape.dtype))
        inputs = [arrays[tensor.name].contiguous() for tensor in self.form.inputs]
        outputs = [out, *(self.pools[tensor.name] for tensor in self.form.outputs[1:])]
        described = [description(self.trt, t, tuple(x.shape)) for t, x in zip(self.form.inputs, inputs, strict=True)]
        results = [description(self.trt, t, tuple(x.shape)) for t, x in zip(self.form.outputs, outputs, strict=True)]
        self.kept = inputs  # as long as the device may read them
        addresses = [self.place(x) for x in inputs]
        by_tensor = {id(x): address for x, address in zip(inputs, addresses, strict=True)}
        targets = [by_tensor.get(id(x)) or self.place(x) for x in outputs]
        self.plugin.enqueue(described, results, addresses, targets, self.place(workspace), stream)
        return out

    def workspace_bytes(self, tokens: int, sequences: int) -> int:
        sizes = {"T": tokens, "B": sequences, "B1": sequences + 1, "S": len(self.pools["key_pool"])}
        inputs = [dynamic(self.trt, tensor, sizes) for tensor in self.form.inputs]
        outputs = [dynamic(self.trt, tensor, sizes) for tensor in self.form.outputs]
        return int(self.plugin.get_workspace_size(inputs, outputs))
