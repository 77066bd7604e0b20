"""What each TensorRT can build, as one record each. Imports nothing heavy: options are checked against it first."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from llmbuild.errors import ConfigError, UnsupportedError

FLOAT8_FROM, BFLOAT16_FROM = 89, 80  # SMs whose tensor cores have these types


@dataclass(frozen=True)
class Capability:
    """One target's record.

    Args:
        target: Name of the target.
        package: What it is built with, and `module`, how that is imported.
        versions: Range of the package that engines are built and loaded with.
        extra: Of llmbuild, that installs it.
        sms: Compute capabilities without the point that it builds for.
        default_sms: Those built for where none is named.
        plugins: Whether networks may hold plugins: attention over pages, else over slots.
        at_hand: Whether an engine is for the one GPU that is there when it is built.
    """

    target: str
    package: str
    module: str
    versions: str
    extra: str
    sms: tuple[int, ...]
    default_sms: tuple[int, ...]
    plugins: bool
    at_hand: bool

    def problem(self) -> str | None:
        """Return None when the package is there in a version that works, else what is wrong and what to install."""
        from importlib.metadata import PackageNotFoundError, version

        from packaging.specifiers import SpecifierSet

        install = f"pip install 'llmbuild[{self.extra}]'"
        try:
            found = version(self.package)
        except PackageNotFoundError:
            return f"the package {self.package} ({self.versions}) is missing: {install}"
        if not SpecifierSet(self.versions).contains(found, prereleases=True):
            return f"{self.package} {found} is installed, but {self.versions} is needed: {install}"
        if importlib.util.find_spec(self.module) is None:
            return f"{self.package} {found} is installed, but {self.module} is not there: {install}"
        return None

    def parse_sms(self, text: str) -> tuple[int, ...]:
        """Read the value of --sm, "86,89".

        Raises:
            ConfigError: Not a list of numbers, or one that this target does not build for.
        """
        known = f"{self.target} builds for {', '.join(map(str, self.sms))}"
        try:
            sms = tuple(sorted({int(part) for part in text.split(",")}))
        except ValueError:
            raise ConfigError(f"{text!r} is no list of SMs", where="--sm", hint=f"such as 86,89; {known}") from None
        if unknown := [sm for sm in sms if sm not in self.sms]:
            other = "; --target cuda has kernels for 90 and 100" if not self.at_hand else ""
            raise ConfigError(
                f"{self.target} does not build for SM {', '.join(map(str, unknown))}", where="--sm", hint=known + other
            )
        return sms

    def check_types(self, sms: tuple[int, ...], dtype: str, *, float8: bool) -> None:
        """Check that every GPU of the engine has the types it computes with.

        Raises:
            UnsupportedError: A GPU lacks one.
        """
        if dtype == "bfloat16" and (lacking := [sm for sm in sms if sm < BFLOAT16_FROM]):
            raise UnsupportedError(
                f"SM {', '.join(map(str, lacking))} has no bfloat16",
                where="--dtype",
                hint=f"use --dtype float16, or --sm with {BFLOAT16_FROM} and above",
            )
        if float8 and (lacking := [sm for sm in sms if sm < FLOAT8_FROM]):
            raise UnsupportedError(
                f"SM {', '.join(map(str, lacking))} has no 8-bit floats, which this recipe multiplies",
                where="--quant",
                hint=f"use --quant int8-wo-channel or int4-wo-g128, or --sm with {FLOAT8_FROM} and above",
            )


RTX = Capability(
    target="tensorrt-rtx",
    package="tensorrt-rtx",
    module="tensorrt_rtx",
    versions=">=1.7,<1.8",  # an engine is read by the very release that built it
    extra="tensorrt-rtx",
    sms=(75, 80, 86, 89, 120, 121),
    default_sms=(86, 89, 120),
    plugins=False,
    at_hand=False,
)

TENSORRT = Capability(
    target="tensorrt",
    package="tensorrt",
    module="tensorrt",
    # Those whose bindings the plugins were made and checked in; 10.14 does not build with kernels to store.
    versions=">=10.15,<12",
    extra="tensorrt",
    sms=(80, 86, 89, 90, 100, 120),  # those that the plugin's kernels are compiled for
    default_sms=(80, 86, 89, 90, 100, 120),
    plugins=True,
    at_hand=True,
)
CAPABILITIES = {each.target: each for each in (TENSORRT, RTX)}
