"""PagedStore and PagedAttend of one layer as TensorRT runs them: sizes from expressions, kernels interpreted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from llmbuild.builder.targets.tensorrt.stored_kernels import compile_stored, specs_of
from llmbuild.plugins.kernels.interpreter import interpret
from llmbuild.plugins.tensorrt.form import STORED, PluginForm
from support.plugin_steps import BLOCKS, Step, pools, torch_dtype

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "SUM": lambda a, b: a + b,
    "SUB": lambda a, b: a - b,
    "PROD": lambda a, b: a * b,
    "FLOOR_DIV": lambda a, b: a // b,
    "CEIL_DIV": lambda a, b: -(-a // b),
    "MIN": min,
    "MAX": max,
}


class Integers:
    """In the place of IExprBuilder, which TensorRT alone can make: an expression is its value."""

    @staticmethod
    def constant(value: int) -> int:
        return value

    @staticmethod
    def operation(kind: Any, a: int, b: int) -> int:
        return OPERATIONS[kind.name](a, b)


class Numbers(list[Any]):
    """In the place of ISymExprs."""

    @property
    def nbSymExprs(self) -> int:  # TensorRT's name
        return len(self)

    @nbSymExprs.setter
    def nbSymExprs(self, count: int) -> None:
        self[:] = [None] * count


def launch_of(plugin: Any, sizes: dict[str, int]) -> tuple[dict[str, int], list[int]]:
    """Return launch parameters and numbers that a plugin tells for a step of these sizes, by calling it."""
    dims = [[sizes[dim] if isinstance(dim, str) else dim for dim in tensor.dims] for tensor in plugin.form.inputs]
    launch, numbers = SimpleNamespace(), Numbers()
    plugin.get_launch_params(dims, [], len(dims), launch, numbers, Integers())
    return {name: each.expr for name, each in vars(launch).items()}, [each.expr for each in numbers]


class StoredLayer:
    """The two nodes with their cache, in the host's memory.

    Args:
        form: Of PagedAttention.
        make: Returns the plugin of a form and a kernel.
    """

    def __init__(self, form: PluginForm, make: Callable[..., Any], sm: int, blocks: int = BLOCKS) -> None:
        self.form = form
        self.pools = {name: self.place(pool) for name, pool in pools(form, blocks).items()}
        forms = [replace(form, role=role) for role in STORED]
        self.nodes = [make(each, compile_stored(each, sm)) for each in forms]
        self.specs = [next(specs_of(each, sm)) for each in forms]

    def run(self, step: Step) -> Tensor:
        """Return the output of a step; its keys and values are written."""
        shape = self.form.shape
        sizes = {"T": len(step.expected), "B": len(step.arrays["seq_lens"]), "S": len(self.pools["key_pool"])}
        sizes["B1"] = sizes["B"] + 1
        out = torch.full((sizes["T"], shape.heads, shape.value_dim), float("nan"), dtype=torch_dtype(shape.dtype))
        known = {name: self.place(tensor) for name, tensor in {**step.arrays, "out": out}.items()} | self.pools
        for at, plugin in enumerate(self.nodes):
            launch, numbers = launch_of(plugin, sizes)
            # Pointers of inputs, numbers, pointers of outputs.
            inputs = [known[tensor.name] for tensor in plugin.form.inputs]
            self.start(at, launch, [*inputs, *numbers, *(known[tensor.name] for tensor in plugin.form.outputs)])
        return known["out"]

    def place(self, tensor: Tensor) -> Tensor:
        """Return a tensor where kernels reach it."""
        return tensor

    def start(self, at: int, launch: dict[str, int], arguments: list[Any]) -> None:
        """Launch the kernel of a node."""
        plugin, spec = self.nodes[at], self.specs[at]
        assert plugin.kernel.grid == spec.grid and launch["shared_mem"] == plugin.kernel.shared
        named = dict(zip(spec.signature, arguments, strict=True))
        grid = (launch["grid_x"], launch["grid_y"], launch["grid_z"])
        interpret(spec.function)[grid](**named, **spec.constants)
