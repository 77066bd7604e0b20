"""The operations of Triton's interpreter with the number formats of a GPU, and with memory that is checked."""

from __future__ import annotations

from bisect import insort
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle, _get_np_dtype

from llmbuild.plugins.kernels.inline_ptx import run_ptx
from llmbuild.plugins.kernels.number_formats import (
    bfloat16_to_float32,
    float8_to_float32,
    float32_to_bfloat16,
    float32_to_float8,
)

MANTISSA = {tl.float8e4nv: 3, tl.float8e5: 2}


class Memory:
    """The address ranges that a launch may touch."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def allow(self, begin: int, end: int) -> None:
        if begin < end:
            insort(self._ranges, (begin, end))

    def check(self, addresses: np.ndarray, mask: np.ndarray, size: int, what: str) -> None:
        """Raise IndexError when an unmasked access of `size` bytes leaves every range."""
        wanted = np.unique(addresses[np.broadcast_to(mask, addresses.shape).astype(bool)])
        inside = np.zeros(wanted.shape, dtype=bool)
        for begin, end in self._ranges:
            inside |= (wanted >= np.uint64(begin)) & (wanted <= np.uint64(max(end - size, 0)))
        if not inside.all():
            address = int(wanted[~inside][0])
            near = min(self._ranges, key=lambda r: min(abs(address - r[0]), abs(address - r[1])), default=None)
            place = "no tensor was passed" if near is None else f"{address - near[0]} in one of {near[1] - near[0]}"
            raise IndexError(f"{what} of {size} bytes outside all tensors; nearest: byte {place}")


class InlineResults(NamedTuple):
    """What inline assembly gives: a tensor for each output."""

    handles: tuple[TensorHandle, ...]

    def get_result(self, index: int) -> TensorHandle:
        return self.handles[index]


class ExactBuilder(InterpreterBuilder):
    """One launch's builder."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory
        self.options = InterpreterOptions(sanitize_overflow=False)  # a quarter of the time, for nothing

    # ------------------------------------------------------------------------------------------------------- memory
    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *modifiers: Any, **named: Any) -> TensorHandle:
        self.memory.check(ptrs.data, mask.data, _get_np_dtype(ptrs.get_element_ty()).itemsize, "a load")
        return super().create_masked_load(ptrs, mask, other, *modifiers, **named)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *modifiers: Any, **named: Any) -> Any:
        self.memory.check(ptrs.data, mask.data, _get_np_dtype(ptrs.get_element_ty()).itemsize, "a store")
        return super().create_masked_store(ptrs, value, mask, *modifiers, **named)

    def create_atomic_rmw(self, operation: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> TensorHandle:
        _refuse_bfloat16(val)
        self.memory.check(ptr.data, mask.data, val.data.itemsize, "an atomic update")
        return super().create_atomic_rmw(operation, ptr, val, mask, sem, scope)

    def create_inline_asm(
        self, asm: str, constraints: str, values: Any, types: Any, pure: bool, pack: int
    ) -> InlineResults:
        if not asm.startswith("prefetch."):
            kinds = [kind.scalar for kind in types]
            sizes = [kind.primitive_bitwidth // 8 for kind in kinds]
            results = run_ptx(asm, [value.data for value in values], sizes, pack)
            pairs = zip(results, kinds, strict=True)
            return InlineResults(tuple(TensorHandle(r.view(_get_np_dtype(kind)), kind) for r, kind in pairs))
        (addresses,) = values
        self.memory.check(addresses.data, np.array(True), 1, "a prefetch")
        return InlineResults((TensorHandle(np.zeros(addresses.data.shape, dtype=np.int32), tl.int32),))

    # -------------------------------------------------------------------------------------------------------- casts
    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or tl.bfloat16 not in (source, target):
            return super().cast_impl(src, dst_type)
        values = bfloat16_to_float32(src.data) if source == tl.bfloat16 else src.data.astype(np.float32)
        if target == tl.bfloat16:
            return TensorHandle(float32_to_bfloat16(values), target)
        return TensorHandle(values.astype(_get_np_dtype(target)), target)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        target = dst_type.scalar
        values = to_float32(src)
        if target in MANTISSA:
            return TensorHandle(float32_to_float8(values, MANTISSA[target]), target)
        if target == tl.bfloat16:
            return TensorHandle(float32_to_bfloat16(values), target)
        if target not in (tl.float16, tl.float32, tl.float64):
            raise NotImplementedError(f"a cast from {src.dtype.scalar} to {target}")
        return TensorHandle(values.astype(_get_np_dtype(target)), target)

    def get_bf16(self, value: float) -> TensorHandle:
        return TensorHandle(float32_to_bfloat16(np.array([value], dtype=np.float32)), tl.bfloat16)

    # --------------------------------------------------------------------------------------------------- arithmetic
    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> TensorHandle:
        if tl.bfloat16 in (a.dtype.scalar, b.dtype.scalar) or {a.dtype.scalar, b.dtype.scalar} & MANTISSA.keys():
            a, b = (TensorHandle(to_float32(x), tl.float32) for x in (a, b))
        return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        _refuse_bfloat16(lhs, rhs)
        return super().binary_op(lhs, rhs, op)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        _refuse_bfloat16(x, y, z)
        return super().create_fma(x, y, z)

    def create_clampf(self, arg: TensorHandle, lo: TensorHandle, hi: TensorHandle, propagate_nans: Any) -> TensorHandle:
        _refuse_bfloat16(arg, lo, hi)
        return self.ternary_op(arg, lo, hi, np.clip)


def to_float32(handle: TensorHandle) -> np.ndarray:
    """The values of a float handle as float32 (float64 is rounded)."""
    kind = handle.dtype.scalar
    if kind == tl.bfloat16:
        return bfloat16_to_float32(handle.data)
    if kind in MANTISSA:
        return float8_to_float32(handle.data, MANTISSA[kind])
    if kind in (tl.float16, tl.float32, tl.float64):
        return handle.data.astype(np.float32)
    raise NotImplementedError(f"{kind} as a float")


def _refuse_bfloat16(*handles: TensorHandle) -> None:
    # Triton would compute with the bits. On a GPU the operation exists, rounded after each step: no kernel wants that.
    if any(handle.dtype.scalar == tl.bfloat16 for handle in handles):
        raise NotImplementedError("arithmetic on bfloat16: cast to float32 first")
