"""One file with the compiled kernels of an engine, for one or more GPU generations. Written and read without Triton.

    magic (8) | version u32 | header bytes u32 | header, JSON | zeros | code | zeros | code ...

Little-endian. Code starts at multiples of 64 bytes; where it starts and ends is in the header. Equal kernels give an
equal file; equal code is held once.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from llmbuild.engine.cubin import Cubin, Launch
from llmbuild.engine.expressions import parse
from llmbuild.engine.manifest import Bytes, Section
from llmbuild.errors import EngineError, nearest

MAGIC = b"llmbkern"
VERSION = 1
PREFIX = struct.Struct("<8sII")
ALIGNMENT = 64
DAMAGED = "convert the model again with --force, or restore the file from a good copy"


class CodeEntry(Section):
    """offset: from the start of the file. size: bytes of code."""

    launch: Launch
    offset: Bytes
    size: Bytes


class KernelEntry(Section):
    """grid: programs along x, y, z, see `llmbuild.engine.expressions`. code: one for each SM of the file."""

    name: str
    grid: tuple[str, str, str]
    code: tuple[CodeEntry, ...]


class Header(Section):
    """compiler: what made the code, "triton 3.6.0". sms: compute capabilities, ascending."""

    compiler: str
    sms: tuple[int, ...]
    kernels: tuple[KernelEntry, ...]


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel of a pack: its name, its grid, and one `Cubin` for each SM that it was compiled for."""

    name: str
    grid: tuple[str, str, str]
    cubins: Mapping[int, Cubin]


def write_pack(path: Path, kernels: Sequence[CompiledKernel], *, compiler: str) -> None:
    """Write a pack; see `pack_bytes`."""
    path.write_bytes(pack_bytes(kernels, compiler=compiler))


def pack_bytes(kernels: Sequence[CompiledKernel], *, compiler: str) -> bytes:
    """Return a pack. The order of `kernels` plays no part.

    Raises:
        ValueError: Two kernels have a name in common, or not all are compiled for the same SMs.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.name)
    names = [kernel.name for kernel in ordered]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"kernels of the same name: {', '.join(twice)}")
    sms = tuple(sorted(ordered[0].cubins)) if ordered else ()
    if odd := [kernel.name for kernel in ordered if tuple(sorted(kernel.cubins)) != sms]:
        raise ValueError(f"kernels compiled for other SMs than {sms}: {', '.join(odd)}")

    places: dict[bytes, int] = {}  # code -> offset from the first code
    end = 0
    for kernel in ordered:
        for sm in sms:
            data = bytes(kernel.cubins[sm].data)
            if data not in places:
                places[data] = end
                end = _aligned(end + len(data))

    def header(start: int) -> bytes:
        def code(cubin: Cubin) -> CodeEntry:
            data = bytes(cubin.data)
            return CodeEntry(launch=cubin.launch, offset=start + places[data], size=len(data))

        entries = tuple(
            KernelEntry(name=kernel.name, grid=kernel.grid, code=tuple(code(kernel.cubins[sm]) for sm in sms))
            for kernel in ordered
        )
        return Header(compiler=compiler, sms=sms, kernels=entries).compact_json()

    # Offsets are written in decimal, so the header's length depends on them: take the first start that holds it.
    start = _aligned(PREFIX.size + len(header(0)))
    while PREFIX.size + len(text := header(start)) > start:
        start += ALIGNMENT
    content = bytearray(PREFIX.pack(MAGIC, VERSION, len(text)) + text)
    for data, offset in places.items():
        content += bytes(start + offset - len(content)) + data
    return bytes(content)


class KernelPack:
    """An opened pack; `KernelPack.open(path)`. The file stays mapped as long as a kernel of it is held.

    path: the file, or what else holds the pack: for messages.
    """

    def __init__(self, path: Path | str, header: Header, content: memoryview) -> None:
        self.path = path
        self.compiler = header.compiler
        self.sms = header.sms
        self._entries = {entry.name: entry for entry in header.kernels}
        self._content = content

    @classmethod
    def open(cls, path: Path | str) -> KernelPack:
        """Open and check a pack: format version, header, and that all code lies inside the file.

        Raises:
            EngineError: No pack, of another format version, truncated or damaged.
        """
        return cls.read(_content(Path(path)), path)

    @classmethod
    def read(cls, content: memoryview, where: Path | str) -> KernelPack:
        """Check a pack that is in memory; for the errors see `open`."""
        if len(content) < PREFIX.size:
            raise _truncated(where, len(content), PREFIX.size)
        magic, version, length = PREFIX.unpack_from(content)
        if magic != MAGIC:
            raise EngineError("not a file of compiled kernels", where=str(where), hint=DAMAGED)
        if version != VERSION:
            raise EngineError(
                f"kernels in format version {version}; this llmbuild reads version {VERSION}",
                where=str(where),
                hint="convert the model again with this version of llmbuild",
            )
        if len(content) < PREFIX.size + length:
            raise _truncated(where, len(content), PREFIX.size + length)
        header = _parse(bytes(content[PREFIX.size : PREFIX.size + length]), where)
        needed = max((code.offset + code.size for entry in header.kernels for code in entry.code), default=0)
        if len(content) < needed:
            raise _truncated(where, len(content), needed)
        return cls(where, header, content)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def kernel(self, name: str, sm: int) -> Cubin:
        """Return a kernel's code for one compute capability (90 for 9.0), without copying it.

        Raises:
            EngineError: The pack was not built for this SM, or holds no kernel of this name.
        """
        if sm not in self.sms:
            held = ", ".join(map(str, self.sms))
            raise EngineError(
                f"the engine holds no kernels for this GPU (SM {sm}); it was built for SM {held}",
                where=str(self.path),
                hint=f"convert the model again with --sm {','.join(map(str, sorted({*self.sms, sm})))}",
            )
        entry = self._entry(name)
        code = next(code for code in entry.code if code.launch.sm == sm)
        return Cubin(code.launch, self._content[code.offset : code.offset + code.size])

    def grid(self, name: str) -> tuple[str, str, str]:
        """Return the grid of a kernel, as expressions."""
        return self._entry(name).grid

    def _entry(self, name: str) -> KernelEntry:
        if name not in self._entries:
            raise EngineError(
                f"the engine holds no kernel {name!r}", where=str(self.path), hint=nearest(name, list(self._entries))
            )
        return self._entries[name]


def _parse(text: bytes, where: Path | str) -> Header:
    try:
        header = Header.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "header"
        raise EngineError(f"damaged kernels: {place}: {first['msg']}", where=str(where), hint=DAMAGED) from None
    for entry in header.kernels:
        if tuple(code.launch.sm for code in entry.code) != header.sms:
            raise EngineError(f"damaged kernels: SMs of {entry.name}", where=str(where), hint=DAMAGED)
        for expression in entry.grid:
            parse(expression)
    return header


def _content(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise EngineError(
            f"cannot read the kernels: {error.strerror or error}", where=str(path), hint=DAMAGED
        ) from error


def _truncated(path: Path | str, found: int, needed: int) -> EngineError:
    return EngineError(f"truncated kernels: {found} bytes of {needed}", where=str(path), hint=DAMAGED)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
