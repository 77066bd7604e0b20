"""Runs a kernel wherever the test runs: on a GPU when there is one, else through the interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from llmbuild.plugins.kernels.interpreter import interpret


def run(function: Any, grid: Sequence[int], *arguments: Any, **named: Any) -> None:
    """Launch a `@triton.jit` function on CPU tensors or descriptors of them; they are written in place.

    Tensors that share memory (slices of one tensor) still do on the GPU. num_warps and the like are for the GPU.
    """
    if not torch.cuda.is_available():
        interpret(function)[grid](*arguments, **named)
        return
    storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def to_device(value: Any) -> Any:
        if isinstance(value, TensorDescriptor):
            return dataclasses.replace(value, base=to_device(value.base))
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        _, copy = storages.setdefault(storage.data_ptr(), (storage, storage.cuda()))
        empty = torch.empty(0, dtype=value.dtype, device="cuda")
        return empty.set_(copy, value.storage_offset(), value.shape, value.stride())

    function[tuple(grid)](*map(to_device, arguments), **{name: to_device(value) for name, value in named.items()})
    torch.cuda.synchronize()
    for storage, copy in storages.values():
        storage.copy_(copy)
