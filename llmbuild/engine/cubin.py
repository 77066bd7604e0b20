"""A compiled kernel and what its launch needs, as it lies in an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmbuild.engine.manifest import Bytes, Count, Section


class Parameter(Section):
    """One parameter of a launch.

    name: argument of the kernel; a tensor descriptor is several, NAME.map, NAME.shape0, ..., NAME.stride0, ... (below
    SM 90 NAME.base instead of the map, then all shapes and strides twice, and NAME.nan between: pad with NaN).
    kind: Triton's type ("*bf16", "i32", "fp32"), "tensormap" (CUtensorMap, by value), or "scratch" (a pointer).
    offset, size: bytes in the parameter buffer; each lies at a multiple of its size, a tensormap at one of 64.
    """

    name: str
    kind: str
    offset: Bytes
    size: Count


class TensorMap(Section):
    """How the CUtensorMap of the parameter ARGUMENT.map is to be encoded. Sizes in elements, outermost axis first.

    element: CUtensorMapDataType. element_size: bytes. swizzle: 0 none, 1 32, 2 64, 3 128 bytes.
    """

    argument: str
    element: int
    element_size: Count
    swizzle: Literal[0, 1, 2, 3]
    block: tuple[Count, ...]


class Launch(Section):
    """All of a compiled kernel but its code.

    sm: compute capability, 90 for 9.0; the code runs on no other.
    symbol: function to look up in the module.
    shared: bytes of dynamic shared memory of a block. num_warps: warps of a block, 32 threads each. num_ctas: blocks of
    a cluster.
    global_scratch: bytes that the first scratch parameter needs for each block of the grid, aligned as
    global_scratch_align; 0: pass a null pointer. The second is always null.
    pdl: launch with programmatic stream serialization. cooperative: launch as a cooperative grid.
    """

    sm: Count
    symbol: str
    shared: Bytes
    num_warps: Count
    num_ctas: Count
    global_scratch: Bytes
    global_scratch_align: Count
    pdl: bool
    cooperative: bool
    parameters: tuple[Parameter, ...]
    tensor_maps: tuple[TensorMap, ...]


@dataclass(frozen=True)
class Cubin:
    """data: an ELF image, as cuLibraryLoadData and cuModuleLoadData take it."""

    launch: Launch
    data: bytes | memoryview
