"""cuBLASLt through ctypes: out[i, m, n] = Σ_k x[i, m, k] · weight[i, n, k] + bias[n], one `Matmul` a shape.

The library counts in columns. A row-major [rows, cols] with `stride` elements from row to row is a column-major
[cols, rows] with leading dimension `stride`, so that the transposed product is computed:

    outᵀ [N, M]  =  A [N, K] · B [K, M]      A: the weight   B: xᵀ, as x lies
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

from llmbuild.cuda.calls import INSTALL
from llmbuild.errors import EngineError, LLMBuildError

# cublasLt.h and library_types.h
TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
NUMBERS = {"float8_e4m3fn": 28}  # CUDA_R_8F_E4M3
COMPUTE_32F = 68  # float32 throughout: no TF32
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, BIAS_TYPE = 3, 4, 7, 8, 26
EPILOGUE_BIAS = 4
A_SCALE_POINTER, B_SCALE_POINTER, A_SCALE_MODE, B_SCALE_MODE, FAST_ACCUM = 17, 18, 31, 32, 25
SCALE_OF_ROWS = 3  # CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F: one for each row of A and each column of B
SCALES_VERSION = 120900  # of the library, the first that has them
BATCH_COUNT, BATCH_OFFSET = 5, 6
MAX_WORKSPACE, REDUCTION_MASK, ALIGN_A, ALIGN_B, ALIGN_C, ALIGN_D = 1, 3, 5, 6, 7, 8
REDUCE_IN_FLOAT32 = 2  # partial sums of split K meet in the compute type, never in that of the output
ALGO_BYTES = 64
NEWER_LIBRARY = "install nvidia-cublas of CUDA 12.9 or newer"

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_int, _int64, _uint64 = ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
Algo = ctypes.c_uint64 * (ALGO_BYTES // 8)


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", Algo),
        ("workspace", _size),
        ("state", _int),
        ("waves", ctypes.c_float),
        ("reserved", _int * 4),
    ]


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "cublasLtGetVersion": (_size, []),
    "cublasLtGetStatusName": (ctypes.c_char_p, [_int]),
    "cublasLtCreate": (_int, [_pointer]),
    "cublasLtDestroy": (_int, [_pointer]),
    "cublasLtMatmulDescCreate": (_int, [_pointer, _int, _int]),
    "cublasLtMatmulDescSetAttribute": (_int, [_pointer, _int, _pointer, _size]),
    "cublasLtMatmulDescDestroy": (_int, [_pointer]),
    "cublasLtMatrixLayoutCreate": (_int, [_pointer, _int, _uint64, _uint64, _int64]),
    "cublasLtMatrixLayoutSetAttribute": (_int, [_pointer, _int, _pointer, _size]),
    "cublasLtMatrixLayoutDestroy": (_int, [_pointer]),
    "cublasLtMatmulPreferenceCreate": (_int, [_pointer]),
    "cublasLtMatmulPreferenceSetAttribute": (_int, [_pointer, _int, _pointer, _size]),
    "cublasLtMatmulPreferenceDestroy": (_int, [_pointer]),
    "cublasLtMatmulAlgoGetHeuristic": (_int, [_pointer] * 7 + [_int, _pointer, _pointer]),
    "cublasLtMatmulAlgoCheck": (_int, [_pointer] * 8),
    "cublasLtMatmul": (_int, [_pointer] * 14 + [_size, _pointer]),
}


class GemmShape(NamedTuple):
    """All of a GEMM but its rows and addresses; strides in elements, as in `GemmOp`.

    number_dtype: of x and weight where it is not `dtype`: 8-bit floats. has_scales: a float32 for each row of either.
    align_*: bytes that divide the addresses of weight (a), x (b) and out (d), at most 256.
    """

    n: int
    k: int
    batch: int
    dtype: str
    x_stride: int
    x_batch: int
    weight_layout: str
    weight_stride: int
    weight_batch: int
    out_stride: int
    out_batch: int
    has_bias: bool
    align_a: int
    align_b: int
    align_d: int
    number_dtype: str | None = None
    has_scales: bool = False


class Extras(NamedTuple):
    """Addresses that some shapes have, 0 elsewhere: of the bias [N], and of the scales of x [M] and of weight [N]."""

    bias: int = 0
    x_scale: int = 0
    weight_scale: int = 0


class Matrix(NamedTuple):
    """A column-major matrix: element (row, col) lies at row + col * lead, and the next of a batch `offset` further."""

    rows: int
    cols: int
    lead: int
    offset: int


class Operands(NamedTuple):
    """D = op(A) · B, all column-major; op transposes if `transpose_a`."""

    transpose_a: bool
    a: Matrix
    b: Matrix
    d: Matrix


def operands(shape: GemmShape, rows: int) -> Operands:
    """Return how a GEMM of `rows` rows of x is told to the library."""
    if shape.weight_layout == "nk":
        weight = Matrix(shape.k, shape.n, shape.weight_stride, shape.weight_batch)
    else:
        weight = Matrix(shape.n, shape.k, shape.weight_stride, shape.weight_batch)
    return Operands(
        shape.weight_layout == "nk",
        weight,
        Matrix(shape.k, rows, shape.x_stride, shape.x_batch),
        Matrix(shape.n, rows, shape.out_stride, shape.out_batch),
    )


class CublasLt:
    """The opened library and its handle on the current GPU. version: 130100 for 13.1.

    Args:
        library: What ctypes made of the shared library.

    Raises:
        LLMBuildError: The library refuses.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.version = library_version(library)
        self.handle = _pointer()
        self.call("cublasLtCreate", ctypes.byref(self.handle))
        self.one, self.zero = ctypes.c_float(1), ctypes.c_float(0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a status.

        Raises:
            LLMBuildError: The status is not success.
        """
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = self._library.cublasLtGetStatusName(status)
            raise LLMBuildError(f"{name} failed: {text.decode() if text else status}", where="cuBLASLt")

    def new(self, kind: str, *arguments: Any) -> Any:
        """Create a "MatmulDesc", "MatrixLayout" or "MatmulPreference" and return its handle."""
        handle = _pointer()
        self.call(f"cublasLt{kind}Create", ctypes.byref(handle), *arguments)
        return handle

    def set(self, kind: str, handle: Any, attribute: int, value: Any) -> None:
        """Set an attribute; `value` is a ctypes object of the attribute's exact type."""
        self.call(f"cublasLt{kind}SetAttribute", handle, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def delete(self, kind: str, handle: Any) -> None:
        self.call(f"cublasLt{kind}Destroy", handle)

    def close(self) -> None:
        self.call("cublasLtDestroy", self.handle)


class Matmul:
    """A GEMM of one shape with a certain number of rows. algo: the 64 bytes that say how it is computed, once chosen.

    Args:
        workspace: (address, bytes) on the GPU.

    Raises:
        LLMBuildError: The library refuses the shape, computes no such dtype, or is too old for it.
    """

    def __init__(self, lt: CublasLt, shape: GemmShape, rows: int, workspace: tuple[int, int]) -> None:
        if shape.dtype not in TYPES or shape.number_dtype not in (None, *NUMBERS):
            read = shape.number_dtype or shape.dtype
            raise LLMBuildError(f"cuBLASLt computes no GEMM of {read} into {shape.dtype} here", where=str(shape))
        if shape.has_scales and lt.version < SCALES_VERSION:
            raise EngineError(
                f"the installed cuBLASLt {lt.version} has no scales for rows of 8-bit floats", hint=NEWER_LIBRARY
            )
        self._lt = lt
        self._shape = shape
        self._workspace = workspace
        self.rows = rows
        self.algo: Any = None
        told = operands(shape, rows)
        kind = TYPES[shape.dtype]
        numbers = kind if shape.number_dtype is None else NUMBERS[shape.number_dtype]
        self._desc = lt.new("MatmulDesc", COMPUTE_32F, TYPES["float32"])
        lt.set("MatmulDesc", self._desc, TRANSA, ctypes.c_int32(int(told.transpose_a)))
        lt.set("MatmulDesc", self._desc, TRANSB, ctypes.c_int32(0))
        if shape.has_bias:
            lt.set("MatmulDesc", self._desc, EPILOGUE, ctypes.c_uint32(EPILOGUE_BIAS))
            lt.set("MatmulDesc", self._desc, BIAS_TYPE, ctypes.c_int32(kind))
        if shape.has_scales:
            for mode in (A_SCALE_MODE, B_SCALE_MODE):
                lt.set("MatmulDesc", self._desc, mode, ctypes.c_int32(SCALE_OF_ROWS))
        if shape.number_dtype is not None:
            # Sums stay in the tensor cores' own precision over all of K: docs/decisions/0006-fp8-products.md.
            lt.set("MatmulDesc", self._desc, FAST_ACCUM, ctypes.c_int8(1))
        self._layouts = [
            self._layout(each, matrix, shape.batch)
            for each, matrix in ((numbers, told.a), (numbers, told.b), (kind, told.d))
        ]

    def heuristics(self, count: int, extras: Extras) -> list[bytes]:
        """Return up to `count` algorithms, the library's favourite first. extras: addresses like those to come."""
        lt, shape = self._lt, self._shape
        self._set_extras(extras)
        preference = lt.new("MatmulPreference")
        try:
            for attribute, value in (
                (MAX_WORKSPACE, _uint64(self._workspace[1])),
                (REDUCTION_MASK, ctypes.c_uint32(REDUCE_IN_FLOAT32)),
                (ALIGN_A, ctypes.c_uint32(shape.align_a)),
                (ALIGN_B, ctypes.c_uint32(shape.align_b)),
                (ALIGN_C, ctypes.c_uint32(shape.align_d)),
                (ALIGN_D, ctypes.c_uint32(shape.align_d)),
            ):
                lt.set("MatmulPreference", preference, attribute, value)
            found, number = (Heuristic * count)(), _int(0)
            a, b, d = self._layouts
            lt.call(
                "cublasLtMatmulAlgoGetHeuristic",
                *(lt.handle, self._desc, a, b, d, d, preference),
                *(count, ctypes.addressof(found), ctypes.addressof(number)),
            )
        finally:
            lt.delete("MatmulPreference", preference)
        return [bytes(each.algo) for each in found[: number.value] if each.state == 0]

    def accepts(self, algo: bytes, extras: Extras) -> bool:
        """Whether an algorithm computes this here: the library knows it, and the workspace does."""
        self._set_extras(extras)
        result, a_copy = Heuristic(), Algo.from_buffer_copy(algo)
        a, b, d = self._layouts
        try:
            self._lt.call(
                "cublasLtMatmulAlgoCheck",
                *(self._lt.handle, self._desc, a, b, d, d, ctypes.addressof(a_copy), ctypes.addressof(result)),
            )
        except LLMBuildError:
            return False
        return result.state == 0 and result.workspace <= self._workspace[1]

    def choose(self, algo: bytes) -> None:
        self.algo = Algo.from_buffer_copy(algo)

    def run(self, x: int, weight: int, out: int, extras: Extras, stream: Any) -> None:
        """Put the GEMM into the stream: addresses on the GPU."""
        lt = self._lt
        self._set_extras(extras)
        a, b, d = self._layouts
        lt.call(
            "cublasLtMatmul",
            *(lt.handle, self._desc, ctypes.addressof(lt.one), weight, a, x, b),
            *(ctypes.addressof(lt.zero), out, d, out, d, ctypes.addressof(self.algo)),
            *(self._workspace[0], self._workspace[1], int(stream)),
        )

    def close(self) -> None:
        for layout in self._layouts:
            self._lt.delete("MatrixLayout", layout)
        self._lt.delete("MatmulDesc", self._desc)

    def _layout(self, kind: int, matrix: Matrix, batch: int) -> Any:
        layout = self._lt.new("MatrixLayout", kind, matrix.rows, matrix.cols, matrix.lead)
        if batch > 1:
            self._lt.set("MatrixLayout", layout, BATCH_COUNT, ctypes.c_int32(batch))
            self._lt.set("MatrixLayout", layout, BATCH_OFFSET, _int64(matrix.offset))
        return layout

    def _set_extras(self, extras: Extras) -> None:
        if self._shape.has_bias:
            self._lt.set("MatmulDesc", self._desc, BIAS_POINTER, _pointer(extras.bias))
        if self._shape.has_scales:
            self._lt.set("MatmulDesc", self._desc, A_SCALE_POINTER, _pointer(extras.weight_scale))
            self._lt.set("MatmulDesc", self._desc, B_SCALE_POINTER, _pointer(extras.x_scale))


def library_version(library: Any) -> int:
    """Tell ctypes how the library's functions are called, and return its version: 130100 for 13.1."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return int(library.cublasLtGetVersion())


def find_library() -> Any:
    """Return the shared library: of the package nvidia-cublas, else the system's.

    Raises:
        EngineError: There is none, or it does not load.
    """
    for candidate in (*library_files(), "libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            return ctypes.CDLL(str(candidate))
        except OSError:
            continue
    raise EngineError("the cuda target needs cuBLASLt, which is not installed", hint=INSTALL)


def library_files() -> list[Path]:
    """Return the library's files in installed packages, the newest CUDA first: nvidia/cu13/lib, nvidia/cublas/lib."""
    from importlib.util import find_spec

    spec = find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec is not None else []
    found = {file for folder in folders for file in folder.glob("*/lib*/libcublasLt.so.1[0-9]")}
    return sorted(found, key=lambda file: (file.suffix, str(file)), reverse=True)
