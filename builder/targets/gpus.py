"""Which GPUs targets compile for, by compute capability without the point. Imports nothing heavy: options ask first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Gpus(NamedTuple):
    """default: those compiled for where none is named. float8: those of them that multiply 8-bit floats.

    can_float8: whether a GPU does. parse: reads the value of --sm and refuses what the target does not compile for.
    products: whether 8-bit floats that a checkpoint stores are multiplied as such.
    at_hand: whether an engine is for the one GPU that is there when it is built; --sm then only says which it must be.
    """

    default: tuple[int, ...]
    can_float8: Callable[[int], bool]
    parse: Callable[[str], tuple[int, ...]]
    products: bool
    at_hand: bool = False

    @property
    def float8(self) -> tuple[int, ...]:
        return tuple(sm for sm in self.default if self.can_float8(sm))


def gpus_of(target: str) -> Gpus | None:
    """Return what `target` compiles for; None for a target that compiles for no GPU."""
    if target == "cuda":
        from llmbuild.builder.targets.cuda.sms import FLOAT8_SMS, SMS, parse_sms

        return Gpus(SMS, FLOAT8_SMS.__contains__, parse_sms, products=True)
    if target in ("tensorrt", "tensorrt-rtx"):
        from llmbuild.builder.targets.tensorrt.capabilities import CAPABILITIES, FLOAT8_FROM

        found = CAPABILITIES[target]
        return Gpus(found.default_sms, lambda sm: sm >= FLOAT8_FROM, found.parse_sms, False, found.at_hand)
    return None
