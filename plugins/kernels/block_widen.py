"""Values of 4 bits to 16-bit floats, four bytes an instruction sequence, without a conversion of integers.

A value q in the low bits of the mantissa of 2**7 (bfloat16) or 2**10 (float16) is that power plus q, exactly. So q -
zero is one packed addition, exact too: all numbers on the way have few bits. Eight values cost four permutations of
bytes, which spread them among the upper bytes of the power, three other integer operations and four additions.
"""

from __future__ import annotations

import triton
import triton.language as tl

REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r")  # written before all are read, hence &


@triton.constexpr_function
def widening(zero, is_bfloat16):
    """PTX: $0, $1 = four values less `zero` in the low halves of the bytes of $4; $2, $3 = those in the high halves.

    `inline_ptx` runs the text in the interpreter.
    """
    # The byte above a value; 1 and minus (power + zero), bits of floats: the unit in the last place of the powers is 1.
    upper, one, minus = (0x43, 0x3F80, 0xC300 + zero) if is_bfloat16 else (0x64, 0x3C00, 0xE400 + zero)
    float2 = "bf16x2" if is_bfloat16 else "f16x2"
    lines = [".reg .b32 low, high, one, minus"]
    lines += [f"mov.b32 one, {one * 0x10001:#x}", f"mov.b32 minus, {minus * 0x10001:#x}"]
    lines += ["and.b32 low, $4, 0x0f0f0f0f", "shr.u32 high, $4, 4", "and.b32 high, high, 0x0f0f0f0f"]
    for index, half in enumerate(["low", "high"]):
        for place, selector in enumerate(["0x4140", "0x4342"]):
            target = f"${2 * index + place}"
            lines.append(f"prmt.b32 {target}, {half}, {upper * 0x1010101:#x}, {selector}")
            lines.append(f"fma.rn.{float2} {target}, {target}, one, minus")
    return "{ " + "; ".join(lines) + "; }"


@triton.jit
def widen_halves(units, ZERO: tl.constexpr, dtype: tl.constexpr):
    """uint8 -> q - ZERO of the low and of the high halves, as bfloat16 or float16 (dtype) of the same shape, exact."""
    if dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            widening(ZERO, True), REGISTERS, [units], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            widening(ZERO, False), REGISTERS, [units], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, high
