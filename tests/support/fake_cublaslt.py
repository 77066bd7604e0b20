"""cuBLASLt in numpy: keeps what descriptors are told, and multiplies column-major matrices in a fake GPU's memory.

Attributes must have the sizes that the real library wants. Matrices are read exactly as told: a layout that is wrong
reads other numbers, or past the end of an allocation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from llmbuild.plugins.kernels.number_formats import float8_to_float32
from support.fake_device import FakeDevice

SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 7, 15
ATTRIBUTE_BYTES = {
    "MatmulDesc": {3: 4, 4: 4, 7: 4, 8: 8, 17: 8, 18: 8, 25: 1, 26: 4, 31: 4, 32: 4},
    "MatrixLayout": {5: 4, 6: 8},
    "MatmulPreference": {1: 8, 3: 4, 5: 4, 6: 4, 7: 4, 8: 4},
}
FLOAT8 = 28
DTYPES = {0: np.float32, 2: np.float16, FLOAT8: np.uint8}


class Function:
    """A function that ctypes attributes can be set on, as on those of a shared library."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.body = body
        self.restype: Any = None
        self.argtypes: list[Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        assert self.argtypes is not None and len(arguments) == len(self.argtypes), "argtypes do not fit"
        return self.body(*map(plain, arguments))


def plain(argument: Any) -> Any:
    """Return what a C function would see: addresses and numbers."""
    if hasattr(argument, "_obj"):  # byref
        return ctypes.addressof(argument._obj)
    return getattr(argument, "value", argument)


class FakeCublasLt:
    """The shared library. algos: how many algorithms it offers. forgets: algorithms that the check refuses."""

    def __init__(self, device: FakeDevice, *, version: int = 130100, algos: int = 3) -> None:
        self.device = device
        self.algos = algos
        self.rejected: set[int] = set()
        self.objects: dict[int, dict[Any, Any]] = {}
        self.matmuls: list[int] = []  # first byte of the algorithm of each
        self.heuristics = 0
        self._next = 100
        self.cublasLtGetVersion = Function(lambda: version)
        self.cublasLtGetStatusName = Function(lambda status: b"CUBLAS_STATUS_%d" % status)
        self.cublasLtCreate = Function(lambda out: self._create(out, {}))
        self.cublasLtDestroy = Function(self._destroy)
        for kind in ATTRIBUTE_BYTES:
            setattr(self, f"cublasLt{kind}Create", Function(lambda out, *args: self._create(out, {"args": args})))
            setattr(self, f"cublasLt{kind}Destroy", Function(self._destroy))
            setattr(self, f"cublasLt{kind}SetAttribute", Function(self._setter(kind)))
        self.cublasLtMatmulAlgoGetHeuristic = Function(self._heuristic)
        self.cublasLtMatmulAlgoCheck = Function(self._check)
        self.cublasLtMatmul = Function(self._matmul)

    def _create(self, out: int, content: dict[Any, Any]) -> int:
        self._next += 1
        self.objects[self._next] = content
        ctypes.c_uint64.from_address(out).value = self._next
        return SUCCESS

    def _destroy(self, handle: int) -> int:
        del self.objects[handle]
        return SUCCESS

    def _setter(self, kind: str) -> Callable[[int, int, int, int], int]:
        def set_attribute(handle: int, attribute: int, value: int, size: int) -> int:
            if ATTRIBUTE_BYTES[kind].get(attribute) != size:
                return INVALID_VALUE
            self.objects[handle][attribute] = int.from_bytes(ctypes.string_at(value, size), "little")
            return SUCCESS

        return set_attribute

    def _heuristic(self, handle: int, desc: int, a: int, b: int, c: int, d: int, pref: int, *rest: int) -> int:
        count, found, number = rest
        self.heuristics += 1
        assert all(each in self.objects for each in (handle, desc, a, b, c, d))
        assert self.objects[pref][3] == 2, "partial sums must meet in float32"
        offered = min(count, self.algos)
        for index in range(offered):
            ctypes.memset(found + 96 * index, 0, 96)
            ctypes.memset(found + 96 * index, index + 1, 64)
        ctypes.c_int.from_address(number).value = offered
        return SUCCESS

    def _check(self, handle: int, desc: int, a: int, b: int, c: int, d: int, algo: int, result: int) -> int:
        ctypes.memset(result, 0, 96)
        return NOT_SUPPORTED if ctypes.string_at(algo, 1)[0] in self.rejected else SUCCESS

    def _matmul(self, handle: int, desc: int, *rest: int) -> int:
        one, a_at, a, b_at, b, zero, c_at, c, d_at, d, algo, workspace, size, _ = rest
        assert (ctypes.c_float.from_address(one).value, ctypes.c_float.from_address(zero).value) == (1.0, 0.0)
        assert c_at == d_at and c == d
        self.device.view(workspace, size)
        number = ctypes.string_at(algo, 1)[0]

        told = self.objects[desc].copy()

        def work() -> None:
            self.matmuls.append(number)
            left, right, out = (self._matrix(at, layout) for at, layout in ((a_at, a), (b_at, b), (d_at, d)))
            if told[3]:
                left = left.transpose(0, 2, 1)
            made = self._values(a, left) @ self._values(b, right)
            if told.get(31) == told.get(32) == 3:  # a scale for each row of A and each column of B
                down, across = (
                    self.device.view(told[pointer], 4 * count).view(np.float32)
                    for pointer, count in ((17, out.shape[1]), (18, out.shape[2]))
                )
                made = made * down[:, None] * across
            if told.get(7) == 4:
                bias = self.device.view(told[8], out.shape[1] * out.itemsize).view(out.dtype)
                made = made + bias[:, None]
            out[:] = made

        self.device._put(work)
        return SUCCESS

    def _values(self, handle: int, matrix: np.ndarray) -> np.ndarray:
        """Return float64 numbers of a matrix as it lies in memory."""
        kind, *_ = self.objects[handle]["args"]
        return (float8_to_float32(matrix) if kind == FLOAT8 else matrix).astype(np.float64)

    def _matrix(self, address: int, handle: int) -> np.ndarray:
        """Return [batch, rows, cols] over the fake GPU's memory."""
        layout = self.objects[handle]
        kind, rows, cols, lead = layout["args"]
        batch, offset = layout.get(5, 1), layout.get(6, 0)
        assert rows <= lead
        dtype = np.dtype(DTYPES[kind])
        last = (batch - 1) * offset + (cols - 1) * lead + rows
        flat = self.device.view(address, last * dtype.itemsize).view(dtype)
        strides = (offset * dtype.itemsize, dtype.itemsize, lead * dtype.itemsize)
        return as_strided(flat, (batch, rows, cols), strides)
