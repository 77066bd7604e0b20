"""What a PagedAttention node launches, in order: the ops of a launch plan, over its inputs, outputs and workspace.

    store    k and v of the step into the pools           always
    attend   one new token a sequence: ranges of keys     decode     } T = B
    merge    what the ranges found                        decode     }
    chunks   any number of new tokens a sequence          mixed

Where qkv is one tensor, `rotate` comes first: it takes queries and keys apart and turns them. Written by the builder,
kept in the engine; read without Triton.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import NamedTuple

from pydantic import ValidationError, field_validator

from llmbuild.engine.expressions import evaluate, parse
from llmbuild.engine.kernel_pack import KernelPack
from llmbuild.engine.launch_plan import KernelOp, Limits, Place, SizeText, most_bytes
from llmbuild.engine.manifest import Section
from llmbuild.errors import EngineError

VERSION = 1
ALIGNMENT = 256  # bytes, of each array in the workspace
AGAIN = "convert the model again with this version of llmbuild"


class Scratch(Section):
    """An array in the workspace. size: bytes, an expression in T and B."""

    name: str
    size: SizeText

    @field_validator("size")
    @classmethod
    def _legal(cls, text: str) -> str:
        if strange := parse(text).names - {"T", "B"}:
            raise ValueError(f"a size in {', '.join(sorted(strange))}")
        return text


class PluginProgram(Section):
    """Places of kind "input" are the node's inputs or its output "out", those of kind "buffer" in its workspace."""

    version: int
    scratch: tuple[Scratch, ...]
    ops: tuple[KernelOp, ...]

    @staticmethod
    def read(text: bytes, names: frozenset[str], where: str) -> PluginProgram:
        """Read and check a program.

        Args:
            names: The node's inputs, and "out".

        Raises:
            EngineError: Of another version, or damaged.
        """
        import json

        try:
            version = json.loads(text)["version"]
        except (ValueError, TypeError, KeyError):
            raise EngineError("the plugin's program is damaged", where=where, hint=AGAIN) from None
        if version != VERSION:
            raise EngineError(
                f"a plugin's program of version {version}; this llmbuild reads version {VERSION}",
                where=where,
                hint=AGAIN,
            )
        try:
            program = PluginProgram.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise EngineError(f"the plugin's program is damaged: {place}: {first['msg']}", where=where) from None
        known = {"input": names, "buffer": {scratch.name for scratch in program.scratch}}
        for op in program.ops:
            for argument in op.arguments:
                if isinstance(argument, Place) and argument.name not in known.get(argument.kind, ()):
                    raise EngineError(f"the plugin's program has no {argument.kind} {argument.name!r}", where=where)
        return program

    def scratch_layout(self, tokens: int, sequences: int) -> tuple[dict[str, int], int]:
        """Return where each array of the workspace starts in a step of these sizes, and how large all are; bytes."""
        sizes = {"T": tokens, "B": sequences}
        offsets, end = {}, 0
        for each in self.scratch:
            offsets[each.name] = end
            end += -(-evaluate(each.size, sizes) // ALIGNMENT) * ALIGNMENT
        return offsets, end

    def most_scratch(self, tokens: int, sequences: int) -> int:
        """Return how large the workspace gets in steps of at most these sizes: what splits need can shrink with B."""
        limits = Limits(max_num_tokens=tokens, max_batch_size=sequences, table_stride=1, block_size=1)
        return sum(-(-most_bytes(each.size, limits) // ALIGNMENT) * ALIGNMENT for each in self.scratch)


class KernelSet(NamedTuple):
    """program: of `PluginProgram`, JSON. pack: `KernelPack` with every kernel that it names, for one GPU."""

    program: bytes
    pack: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of both."""
        return hashlib.sha256(len(self.program).to_bytes(8, "little") + self.program + self.pack).hexdigest()


class Opened:
    """A kernel set, read. program: see `PluginProgram`. pack: of its kernels. sm: the GPU's compute capability."""

    def __init__(self, kernels: KernelSet, names: frozenset[str], where: str) -> None:
        self.kernels = kernels
        self.program = PluginProgram.read(kernels.program, names, where)
        self.pack = KernelPack.read(memoryview(kernels.pack), where)
        if len(self.pack.sms) != 1:
            raise EngineError(f"kernels for SM {self.pack.sms} in a plugin, which is for one GPU", where=where)
        missing = sorted({op.kernel for op in self.program.ops} - set(self.pack.names))
        if missing:
            raise EngineError(f"the plugin has no kernel {', '.join(missing)}", where=where, hint=AGAIN)

    @property
    def sm(self) -> int:
        return self.pack.sms[0]

    @cached_property
    def digest(self) -> str:
        return self.kernels.digest
