"""What the kernels of a mixture of experts are built for, and what building them gives. Imports no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmbuild.plugins.kernels.gemm_shape import FLOATS
from llmbuild.plugins.kernels.spec import POINTER_TYPES, KernelSpec

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")  # as plugins/ops.py; that file imports torch
INTEGERS = ("int32", "int64")


@dataclass(frozen=True)
class ExpertsShape:
    """`llmbuild::moe_experts` of one layer; the words are those of `plugins/moe_reference.py`.

    hidden, intermediate, experts, top_k: H, I, E, K. dtype: of x, weights, biases and out.
    ids_dtype, scores_dtype: of the router's results.

    Raises:
        ValueError: A size, an activation or a dtype is not legal.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    dtype: str = "bfloat16"
    activation: str = "silu"
    gated: bool = True
    slope: float = 1.0
    limit: float | None = None
    shift: float = 0.0
    up_bias: bool = False
    down_bias: bool = False
    ids_dtype: str = "int64"
    scores_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if min(self.hidden, self.intermediate, self.experts, self.top_k) < 1:
            raise ValueError(f"a size of {self} is not positive")
        if self.top_k > self.experts:
            raise ValueError(f"a token cannot visit {self.top_k} of {self.experts} experts")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {self.activation!r}; known: {', '.join(ACTIVATIONS)}")
        for dtype, known in ((self.dtype, FLOATS), (self.scores_dtype, FLOATS), (self.ids_dtype, INTEGERS)):
            if dtype not in known:
                raise ValueError(f"dtype {dtype!r} is none of {', '.join(known)}")

    @property
    def halves(self) -> int:
        """Gate and up, or up alone."""
        return 2 if self.gated else 1

    def types(self) -> dict[str, str]:
        """Triton types of the arguments, absent ones left out."""
        plain = POINTER_TYPES[self.dtype]
        types = dict.fromkeys(("x", "up", "down", "out", "hidden", "results"), plain)
        types |= {"ids": POINTER_TYPES[self.ids_dtype], "scores": POINTER_TYPES[self.scores_dtype]}
        types |= {"order": "*i32", "block_experts": "*i32", "tokens": "i32"}
        if self.up_bias:
            types["up_bias"] = plain
        if self.down_bias:
            types["down_bias"] = plain
        return types


@dataclass(frozen=True)
class ExpertsPlan:
    """The kernels of one layer's experts, in the order of their launches; those with an empty grid are left out.

    specs: their grids are expressions in T, the number of tokens.
    workspaces: {name: (dtype, bytes, an expression in T)} of the buffers between them; they need not be cleared.
    arguments: {kernel: {its argument: name}} where the name is one of x, ids, scores, up, down, up_bias, down_bias,
        out (tensors, contiguous), "tokens" (the number T) or a workspace.
    """

    specs: tuple[KernelSpec, ...]
    workspaces: Mapping[str, tuple[str, str]]
    arguments: Mapping[str, Mapping[str, str]]
