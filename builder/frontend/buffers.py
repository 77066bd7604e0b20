"""Real values of buffers that no checkpoint holds (`inv_freq`, embedding scales, position tables)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmbuild.errors import UnsupportedError

_UNSET = -(2**30) + 1  # marks integers that nothing has written


def recompute_buffer(model: PreTrainedModel, name: str) -> Tensor:
    """Return the value that `model._init_weights` gives to the non-persistent buffer `name`.

    transformers itself restores such buffers this way when it loads a checkpoint, with the method of the innermost
    model around the module. The module is copied with real buffers and without its parameters, so that nothing large
    is allocated.

    Raises:
        UnsupportedError: the model's code does not initialise the buffer.
    """
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    twin = copy.copy(module)
    twin._parameters = {
        key: None if value is None else nn.Parameter(torch.empty(value.shape, dtype=value.dtype, device="meta"))
        for key, value in module._parameters.items()
    }
    twin._buffers = {key: None if value is None else _unset(value) for key, value in module._buffers.items()}
    with torch.no_grad():
        innermost_model(model, path)._init_weights(twin)
    value = twin._buffers[attribute]
    assert value is not None
    missing = value.isnan() if value.is_floating_point() else value == _UNSET
    if value.dtype is not torch.bool and bool(missing.any()):
        raise UnsupportedError(
            f"buffer {name!r} is neither in the checkpoint nor set by the model's _init_weights",
            where=type(module).__name__,
        )
    return value


def innermost_model(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The deepest transformers model on the way to the module at `path`, itself included."""
    names = path.split(".") if path else []
    on_the_way = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]
    return next(module for module in reversed(on_the_way) if isinstance(module, PreTrainedModel))


def _unset(like: Tensor) -> Tensor:
    """A real tensor like the fake `like`, filled with a value that shows if it stays."""
    if like.is_floating_point():
        return torch.full(like.shape, float("nan"), dtype=like.dtype)
    return torch.full(like.shape, 0 if like.dtype in (torch.bool, torch.uint8) else _UNSET, dtype=like.dtype)
