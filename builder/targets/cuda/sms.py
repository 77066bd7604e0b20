"""Which GPUs kernels are compiled for, by compute capability without the point: 90 for 9.0. Imports nothing heavy."""

from __future__ import annotations

from llmbuild.errors import ConfigError

SMS = (80, 86, 89, 90, 100, 120)
FLOAT8_SMS = tuple(sm for sm in SMS if sm >= 89)  # that multiply 8-bit floats


def parse_sms(text: str) -> tuple[int, ...]:
    """Read the value of --sm, "80,90": compute capabilities without the point, ascending.

    Raises:
        ConfigError: Not a list of numbers, or one that kernels are not compiled for.
    """
    known = ", ".join(map(str, SMS))
    try:
        sms = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(f"{text!r} is no list of SMs", where="--sm", hint=f"such as 80,90; known: {known}") from None
    if unknown := [sm for sm in sms if sm not in SMS]:
        raise ConfigError(f"no kernels for SM {', '.join(map(str, unknown))}", where="--sm", hint=f"known: {known}")
    return sms
