"""Runs the inline assembly of kernels in the interpreter: straight PTX on 32-bit registers, which are numpy arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from llmbuild.plugins.kernels.number_formats import bfloat16_to_float32, float32_to_bfloat16

Words = np.ndarray  # uint32


def run_ptx(text: str, inputs: Sequence[np.ndarray], output_sizes: Sequence[int], pack: int) -> list[np.ndarray]:
    """Return the outputs of `inline_asm_elementwise` with constraints of 32-bit registers alone.

    inputs: arrays of one shape, their elements 1, 2 or 4 bytes. `pack` neighbours of each fill its registers; outputs
    come first in the numbering. output_sizes: bytes of an element of each. Returns unsigned integers of these sizes.

    Raises:
        NotImplementedError: An instruction that is not known here; the message has it.
    """
    shape = np.broadcast_shapes(*(array.shape for array in inputs))
    registers: dict[str, Words] = {}
    first = count = sum(size * pack // 4 for size in output_sizes)
    for array in inputs:
        whole = np.ascontiguousarray(np.broadcast_to(array, shape))
        words = whole.view(np.uint32).reshape(-1, whole.itemsize * pack // 4)
        for column in words.T:
            registers[f"${count}"] = column
            count += 1
    for line in text.strip().strip("{}").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, rest = line.strip().split(None, 1)
        target, *operands = (part.strip() for part in rest.split(","))
        if name not in INSTRUCTIONS:
            raise NotImplementedError(f"inline assembly with {name}")
        registers[target] = INSTRUCTIONS[name](*(_value(registers, operand) for operand in operands))
    outputs, count = [], 0
    for size in output_sizes:
        width = size * pack // 4
        columns = [registers[f"${index}"] for index in range(count, count + width)]
        count += width
        outputs.append(np.stack(columns, axis=1).view(f"u{size}").reshape(shape))
    assert count == first
    return outputs


def _value(registers: dict[str, Words], operand: str) -> Words:
    if re.fullmatch(r"0[xX][0-9a-fA-F]+|\d+", operand):
        return np.array(int(operand, 0), dtype=np.uint32)
    return registers[operand]


def _permute(low: Words, high: Words, selector: Words) -> Words:
    """`prmt.b32`: each hexadecimal digit of the selector names one of eight bytes."""
    chosen = int(selector)
    if chosen & 0x8888:
        raise NotImplementedError("prmt.b32 that repeats a sign")
    result = np.zeros_like(low)
    for place in range(4):
        digit = chosen >> 4 * place & 7
        result = result | ((low, high)[digit // 4] >> np.uint32(digit % 4 * 8) & np.uint32(255)) << np.uint32(8 * place)
    return result


def _packed(
    widen: Callable[[np.ndarray], np.ndarray], narrow: Callable[[np.ndarray], np.ndarray]
) -> Callable[..., Words]:
    """Multiply-add on two 16-bit floats a register. Exact before the one rounding: float64 holds such products."""

    def multiply_add(a: Words, b: Words, c: Words) -> Words:
        x, y, z = (
            widen(np.ascontiguousarray(word, dtype=np.uint32)[..., None].view(np.uint16)).astype(np.float64)
            for word in (a, b, c)
        )
        return narrow((x * y + z).astype(np.float32)).view(np.uint32)[..., 0]

    return multiply_add


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _permute,
    "fma.rn.bf16x2": _packed(bfloat16_to_float32, float32_to_bfloat16),
    "fma.rn.f16x2": _packed(lambda bits: bits.view(np.float16), lambda values: values.astype(np.float16)),
}
