"""What an attention kernel is built for: sizes, dtypes and features of a layer. Imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmbuild.plugins.kernels.spec import POINTER_TYPES, Constant

KvScales = Literal["none", "layer", "token"]
SHARED_BYTES = {
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    120: 99,
    121: 99,
}  # KiB a program may use
PROCESSORS = {80: 108, 86: 84, 87: 16, 89: 128, 90: 132, 100: 148, 103: 160, 120: 170, 121: 48}  # of the usual card


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention, in the terms of `llmbuild::paged_attention`.

    dtype: of queries and output. kv_dtype: of the pools. Both are names of numpy/torch dtypes ("bfloat16"). "uint8" are
    the bits of float8_e4m3fn, for SMs before 89, which do not have it.
    kv_scales: what the pools' numbers are multiplied with. "none"; "layer": one float32 for keys, one for values;
    "token": float32 [slots, kv_heads] for each.
    window: positions a query sees, its own included. sinks, alibi: whether the layer has them.

    Raises:
        ValueError: kv_heads does not divide heads, or a size, scale or dtype is not legal.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    kv_scales: KvScales = "none"
    page: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_dim, self.value_dim, self.page) < 1:
            raise ValueError(f"a size of {self} is not positive")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.scale <= 0:
            raise ValueError(f"scale {self.scale} is not positive: the largest score would not be the largest product")
        for limit in (self.window, self.softcap):
            if limit is not None and limit <= 0:
                raise ValueError(f"window {self.window} or softcap {self.softcap} is not positive")
        if self.kv_scales not in ("none", "layer", "token"):
            raise ValueError(f"kv_scales {self.kv_scales!r} is none of none, layer, token")
        for name in (self.dtype, self.kv_dtype):
            if name not in POINTER_TYPES:
                raise ValueError(f"dtype {name!r} is none of {', '.join(POINTER_TYPES)}")
        if self.kv_dtype != self.dtype and self.kv_bytes != 1:
            raise ValueError(f"a {self.kv_dtype} cache cannot serve {self.dtype} queries: same dtype or one of a byte")

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of one number in the pools."""
        return {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}[
            self.kv_dtype
        ]

    @property
    def query_bytes(self) -> int:
        """Bytes of one padded query head, as it lies in shared memory."""
        return sum(split_width(self.head_dim)) * (4 if self.dtype == "float32" else 2)

    def types(self) -> dict[str, str]:
        """Triton types of the arguments that both kernels share, absent ones left out; in no particular order."""
        pool = POINTER_TYPES[self.kv_dtype]
        types = {"q": POINTER_TYPES[self.dtype], "keys": pool, "values": pool, "out": POINTER_TYPES[self.dtype]}
        types |= dict.fromkeys(("block_tables", "seq_lens", "cu_q_lens"), "*i32") | {"table_stride": "i32"}
        if self.kv_scales != "none":
            types |= {"k_scales": "*fp32", "v_scales": "*fp32"}
        if self.sinks:
            types["sinks"] = "*fp32"
        if self.alibi:
            types["slopes"] = "*fp32"
        return types

    def constants(self) -> dict[str, Constant]:
        """Constants that both kernels share; see `attention_tile.attend_range`."""
        head_block, rest_block = split_width(self.head_dim)
        return {
            "SCALE": self.scale,
            "SOFTCAP": self.softcap,
            "WINDOW": self.window,
            "KV_SCALES": self.kv_scales,
            "PAGE": self.page,
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "HEAD_BLOCK": head_block,
            "REST_BLOCK": rest_block,
            "VALUE_BLOCK": self.value_block,
        }

    @property
    def value_block(self) -> int:
        """Channels of a tile of values, padding included.

        Not 16 beside wider keys where both are widened from 8 bits: Triton 3.6 then makes matrix units of SM 90 read
        shared memory where there is none (seen on an H200; 32 columns are right).
        """
        width = power_of_2(self.value_dim)
        return max(width, 32) if self.kv_scales != "none" and self.head_dim > 16 else width

    def cached_bytes(self, tokens: int) -> int:
        """Bytes of the padded keys and values of `tokens` tokens of one KV head, as they lie in shared memory."""
        return tokens * self.kv_bytes * (sum(split_width(self.head_dim)) + self.value_block)


def steps_in_flight(num_stages: int) -> int:
    """Steps of the loop whose keys lie in shared memory: every second stage is that of their table entries."""
    return max(1, (num_stages - 1) // 2)


def power_of_2(size: int) -> int:
    """The smallest power of 2 that is at least `size` and 16, the narrowest that matrix units take."""
    return max(16, 1 << (size - 1).bit_length())


def split_width(size: int) -> tuple[int, int]:
    """Powers of 2 that cover `size` channels: one alone, or a first and a rest where that is narrower.

    128 -> (128, 0); 192 -> (128, 64); 576 -> (512, 64); 80 -> (64, 16); 112 -> (128, 0).
    """
    whole = power_of_2(size)
    first = whole // 2
    if size <= 16 or first < 16:
        return whole, 0
    rest = power_of_2(size - first)
    return (first, rest) if first + rest < whole else (whole, 0)
