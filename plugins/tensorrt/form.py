"""What one node of attention is: a layer, and which tensors go in and come out, in order. PagedAttention:

q k v  or  qkv [cos sin]   one row a token: packed, no padding
key_pool value_pool        the layer's cache; also outputs, in the same memory
slot_mapping block_tables seq_lens cu_q_lens
[sinks] [slopes]           one number a head
[k_scales v_scales]        of caches of bytes; per token: outputs too, like the pools
->  out key_pool value_pool [k_scales v_scales]

Where the engine stores the kernels, a node has one kernel alone, and a layer is two nodes (`plugins/kernels/
stored_attention.py`): PagedStore, which writes the pools, and PagedAttend, which takes them from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from llmbuild.errors import ConfigError
from llmbuild.plugins.kernels.attention_shape import AttentionShape

NAME, VERSION, NAMESPACE = "PagedAttention", "1", "llmbuild"
Layout = Literal["separate", "fused"]
Role = Literal["whole", "store", "attend"]
NAMES: dict[Role, str] = {"whole": NAME, "store": "PagedStore", "attend": "PagedAttend"}
STORED: tuple[Role, ...] = ("store", "attend")  # whose kernels an engine stores
STORE_INPUTS = ("k", "v", "key_pool", "value_pool", "slot_mapping")
ATTEND_LACKS = ("k", "v", "slot_mapping")
Dim = int | str  # T tokens, B sequences, B1 = B + 1, S slots; or a number that never changes
ALIGNMENT = 16  # bytes: of every pointer that a kernel is given


class Tensor(NamedTuple):
    """dtype: name of it ("bfloat16"). dims: see `Dim`."""

    name: str
    dtype: str
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class PluginForm:
    """See the module.

    shape: of the layer. layer: its index. table_stride: entries of a block table.
    layout: "separate": q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv]; "fused": qkv [T, Hq·D + Hkv·D + Hkv·Dv].
    rotary_dim: channels of each head that are rotated before, 0 for none; only where qkv is fused. cos and sin are then
    [T, rotary_dim / 2] in the dtype of qkv. interleaved: pairs (2i, 2i + 1), not (i, i + rotary_dim / 2).
    role: "whole": PagedAttention; or the part of it that a node with a stored kernel is.

    Raises:
        ConfigError: No kernel computes this.
    """

    shape: AttentionShape
    layer: int
    table_stride: int
    layout: Layout = "separate"
    rotary_dim: int = 0
    interleaved: bool = False
    role: Role = "whole"

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ConfigError(problem, where=self.where)

    def _problem(self) -> str | None:
        shape = self.shape
        if self.layer < 0 or self.table_stride < 1:
            return f"layer {self.layer} and table_stride {self.table_stride} cannot be"
        if self.layout not in ("separate", "fused"):
            return f"layout {self.layout!r} is none of separate, fused"
        if shape.kv_bytes == 1 and shape.kv_scales == "none":
            return f"a cache of {shape.kv_dtype} needs scales: kv_scales is none of layer, token"
        if shape.kv_bytes != 1 and shape.kv_scales != "none":
            return f"a cache of {shape.kv_dtype} takes no scales: kv_scales is {shape.kv_scales!r}"
        if self.role != "whole" and (self.layout != "separate" or shape.kv_scales != "none"):
            return f"{self.name} takes q, k and v apart, and a cache without scales"
        if self.layout == "separate":
            return "rotary embedding is part of the plugin only where q, k and v are fused" if self.rotary_dim else None
        if self.rotary_dim < 0 or self.rotary_dim % 2 or self.rotary_dim > shape.head_dim:
            return f"rotary_dim {self.rotary_dim} is no even number up to head_dim, {shape.head_dim}"
        if self.value_offset * self.item_bytes % ALIGNMENT:
            return f"values in the fused projection start at channel {self.value_offset}, not at a multiple of 16 bytes"
        return None

    @property
    def name(self) -> str:
        """What the plugin is called, which is the node's operator."""
        return NAMES[self.role]

    @property
    def where(self) -> str:
        """The node, for errors."""
        return f"{self.name} of layer {self.layer}"

    @property
    def item_bytes(self) -> int:
        """Bytes of a number of q, k and v."""
        return 4 if self.shape.dtype == "float32" else 2

    @property
    def value_offset(self) -> int:
        """Where the values start in a row of qkv."""
        return (self.shape.heads + self.shape.kv_heads) * self.shape.head_dim

    @property
    def width(self) -> int:
        """Numbers in a row of qkv."""
        return self.value_offset + self.shape.kv_heads * self.shape.value_dim

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        shape, dtype = self.shape, self.shape.dtype
        heads, kv_heads = shape.heads, shape.kv_heads
        if self.layout == "separate":
            found = [
                Tensor("q", dtype, ("T", heads, shape.head_dim)),
                Tensor("k", dtype, ("T", kv_heads, shape.head_dim)),
                Tensor("v", dtype, ("T", kv_heads, shape.value_dim)),
            ]
        else:
            found = [Tensor("qkv", dtype, ("T", self.width))]
            if self.rotary_dim:
                found += [Tensor(name, dtype, ("T", self.rotary_dim // 2)) for name in ("cos", "sin")]
        found += [
            Tensor("key_pool", shape.kv_dtype, ("S", kv_heads, shape.head_dim)),
            Tensor("value_pool", shape.kv_dtype, ("S", kv_heads, shape.value_dim)),
            Tensor("slot_mapping", "int32", ("T",)),
            Tensor("block_tables", "int32", ("B", self.table_stride)),
            Tensor("seq_lens", "int32", ("B",)),
            Tensor("cu_q_lens", "int32", ("B1",)),
        ]
        found += [Tensor("sinks", "float32", (heads,))] if shape.sinks else []
        found += [Tensor("slopes", "float32", (heads,))] if shape.alibi else []
        scales: dict[str, tuple[Dim, ...]] = {"none": (), "layer": (1,), "token": ("S", kv_heads)}
        if shape.kv_scales != "none":
            found += [Tensor(name, "float32", scales[shape.kv_scales]) for name in ("k_scales", "v_scales")]
        if self.role == "store":
            return tuple(tensor for tensor in found if tensor.name in STORE_INPUTS)
        if self.role == "attend":
            return tuple(tensor for tensor in found if tensor.name not in ATTEND_LACKS)
        return tuple(found)

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        shape = self.shape
        by_name = {tensor.name: tensor for tensor in self.inputs}
        aliased = ["key_pool", "value_pool"] + (["k_scales", "v_scales"] if shape.kv_scales == "token" else [])
        out = Tensor("out", shape.dtype, ("T", shape.heads, shape.value_dim))
        pools = tuple(by_name[name] for name in aliased)
        return {"whole": (out, *pools), "store": pools, "attend": (out,)}[self.role]

    def input_index(self, name: str) -> int:
        return next(index for index, tensor in enumerate(self.inputs) if tensor.name == name)

    def aliased_input(self, output: int) -> int:
        """Return which input an output shares its memory with, -1 for none."""
        name = self.outputs[output].name
        return -1 if name == "out" else self.input_index(name)
