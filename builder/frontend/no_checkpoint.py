"""A model without its weights: names and shapes come from the config alone, for a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmbuild.builder.frontend.bind import Binding
from llmbuild.builder.ir import WeightExpr
from llmbuild.builder.weights import piece_size
from llmbuild.quantization.blocks import BlockTensor


class NoCheckpoint:
    """The checkpoint of a directory that holds a config and no weights."""

    kind: str = "huggingface"
    files: tuple[Path, ...] = ()
    notices: tuple[str, ...] = ("no checkpoint here: names and shapes of tensors were not checked",)

    def names(self) -> tuple[str, ...]:
        return ()

    def weight(self, name: str) -> WeightExpr:
        raise KeyError(name)


@dataclass(frozen=True)
class Promised:
    """A weight that the model will need, of which only shape and dtype are known."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def block_format(self) -> None:
        return None

    def load(self) -> Tensor:
        raise TypeError(f"{self.name} has no data in a dry run")

    def load_blocks(self) -> BlockTensor:
        raise TypeError(f"{self.name} has no data in a dry run")

    def sources(self) -> frozenset[str]:
        return frozenset({self.name})

    def pieces(self, elements: int) -> Iterator[Tensor]:
        yield self.load()

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        return piece_size(self.shape, elements) * self.dtype.itemsize


def promised(model: PreTrainedModel, ties: dict[str, str]) -> Binding:
    """Bind every parameter of the model to a weight without data; tied names share one."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    aliases = {name: source for name, source in ties.items() if source in parameters}
    weights: dict[str, WeightExpr] = {
        name: Promised(name, tuple(value.shape), value.dtype)
        for name, value in parameters.items()
        if name not in aliases
    }
    return Binding(weights, aliases, NoCheckpoint.notices)
