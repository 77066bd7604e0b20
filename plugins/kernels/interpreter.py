"""Runs a Triton kernel on the CPU, program after program, as a GPU would compute it: `interpret(kernel)[grid](...)`.

Triton has an interpreter; by itself it must be switched on by an environment variable before a kernel is defined, and
then the process can no longer compile it. Here the language is patched for the length of one launch instead, so that
the same function object is compiled and interpreted in one process. Besides:

- bfloat16 and 8-bit floats round to nearest even (Triton 3.6 truncates, and rounds wrongly), products of bfloat16 are
  those of the values (Triton 3.6 multiplies the bits as integers), other arithmetic on bfloat16 is refused.
- each access to memory must lie inside a tensor that was passed: an index out of range is an error with the address.
- Programmatic dependent launch (`gdc_wait`, `gdc_launch_dependents`) does nothing.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import cuda as cuda_language
from triton.runtime import interpreter as base
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from llmbuild.plugins.kernels.exact_builder import ExactBuilder, Memory
from llmbuild.plugins.kernels.spec import POINTER_TYPES


class KernelError(Exception):
    """A kernel failed in the interpreter; the message says in which program."""


class Interpreted:
    """`interpret(kernel)`; index it with the grid, one to three integers, and call the result with the arguments."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: Sequence[int]) -> Any:
        programs = (*grid, 1, 1, 1)[:3]
        return lambda *arguments, **named: _launch(self.function, programs, arguments, named)


def interpret(function: Any) -> Interpreted:
    """Return a launcher of a `@triton.jit` function for the CPU.

    Arguments are CPU torch tensors or numpy arrays (bfloat16 and float8: torch or ml_dtypes), `TensorDescriptor`s,
    integers, floats, None; constants (`tl.constexpr`) by name or in order. Tensors are written in place. Options of
    the compiler (num_warps, num_stages, ...) are ignored.

    Raises (at launch):
        KernelError: The kernel raised, or touched memory outside its arguments.
        TypeError: Arguments that the kernel does not take, or a tensor that is not in this process's memory.
    """
    return Interpreted(function)


def _launch(function: Any, grid: Sequence[int], arguments: Sequence[Any], named: dict[str, Any]) -> None:
    plain = plain_function(function.fn)
    parameters = inspect.signature(function.fn).parameters
    unknown = named.keys() - parameters.keys() - COMPILER_OPTIONS
    if unknown:
        raise TypeError(f"{function.fn.__name__} takes no argument {', '.join(sorted(unknown))}")
    bound = inspect.signature(function.fn).bind(*arguments, **{k: v for k, v in named.items() if k in parameters})
    bound.apply_defaults()
    memory = Memory()
    builder = ExactBuilder(memory)
    constants = {name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation)}
    with language_for(builder), np.errstate(all="ignore"):  # a GPU divides by zero without a word
        values = {k: v if k in constants else to_language(v, memory) for k, v in bound.arguments.items()}
        builder.set_grid_dim(*grid)
        for program in np.ndindex(*grid):
            builder.set_grid_idx(*program)
            try:
                plain(**values)
            except Exception as error:  # whatever a kernel raises: the program is what one needs to know
                raise KernelError(f"{function.fn.__name__}, program {program} of {tuple(grid)}: {error!r}") from error


COMPILER_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "enable_fp_fusion"}


def to_language(value: Any, memory: Memory) -> Any:
    """Return what a kernel sees of an argument; the memory of a tensor becomes legal to access."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | np.integer | np.floating):
        return _scalar(value)
    if isinstance(value, TensorDescriptor):
        memory.allow(*extent(value.base))
        return base._implicit_cvt(value)
    address, begin, end, kind = pointer(value)
    memory.allow(begin, end)
    pointer_type = tl.pointer_type(tl.str_to_ty(kind[1:], None))
    return tl.tensor(base.TensorHandle(np.array([address], dtype=np.uint64), pointer_type), pointer_type)


def _scalar(value: Any) -> tl.tensor:
    if isinstance(value, bool):
        kind, data = tl.int1, np.array([value], dtype=np.bool_)
    elif isinstance(value, float | np.floating):
        kind, data = tl.float32, np.array([value], dtype=np.float32)  # as at a real launch
    elif -(2**31) <= value < 2**31:
        kind, data = tl.int32, np.array([value], dtype=np.int32)
    else:
        kind, data = tl.int64, np.array([value], dtype=np.int64)
    return tl.tensor(base.TensorHandle(data, kind), kind)


def pointer(tensor: Any) -> tuple[int, int, int, str]:
    """Return (address of the first element, begin, end, Triton type) of a CPU tensor or numpy array."""
    kind = POINTER_TYPES.get(str(tensor.dtype).removeprefix("torch."))
    if kind is None:
        raise TypeError(f"no kernel takes a pointer to {tensor.dtype}")
    begin, end = extent(tensor)
    return begin, begin, end, kind


def extent(tensor: Any) -> tuple[int, int]:
    """Return the addresses [begin, end) that the elements of a tensor or array with any (positive) strides lie in."""
    if isinstance(tensor, np.ndarray):
        itemsize = tensor.itemsize
        address, strides = tensor.ctypes.data, list(tensor.strides)
    else:
        if tensor.device.type != "cpu":
            raise TypeError(f"a tensor on {tensor.device} cannot be interpreted")
        itemsize = tensor.element_size()
        address, strides = tensor.data_ptr(), [stride * itemsize for stride in tensor.stride()]
    if 0 in tensor.shape:
        return address, address
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return address, address + last + itemsize


@contextlib.contextmanager
def language_for(builder: ExactBuilder) -> Iterator[None]:
    """Make `triton.language` compute with `builder` inside the `with` block, all of it, and restore it after."""
    scope = base._LangPatchScope()
    try:
        for language in (tl, tl.core):
            base._patch_builtin(language, builder, scope)
            base._patch_builtin(language.tensor, builder, scope)
            base._patch_lang_tensor(language.tensor, scope)
            base._patch_lang_core(language, scope)
        base._patch_builtin(tl.math, builder, scope)
        base._patch_builtin(tl.core.tensor_descriptor_base, builder, scope)
        # Functions of Triton's own library and helpers of a kernel are JIT functions too; inside a kernel they run.
        scope.set_attr(JITFunction, "__call__", _call_helper)
        for name, member in inspect.getmembers(tl.tensor):
            if isinstance(member, JITFunction):  # x.sum(): not bound to x, as JIT functions are no Python functions
                scope.set_attr(tl.tensor, name, _as_method(member))
        scope.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
        scope.set_attr(base.ReduceScanOpInterface, "check_tensor", _check_reduced)
        for name in ("gdc_wait", "gdc_launch_dependents"):
            scope.set_attr(cuda_language, name, lambda: None)
        yield
    finally:
        scope.restore()


def _call_helper(function: JITFunction, *arguments: Any, **named: Any) -> Any:
    return plain_function(function.fn)(*arguments, **named)


@cache
def plain_function(function: Callable[..., None]) -> Callable[..., Any]:
    """Return a Python function with each assigned value wrapped as the language's."""
    return base.InterpretedFunction(function).rewrite()


def _as_method(function: JITFunction) -> Any:
    return lambda *arguments, **named: _call_helper(function, *arguments, **named)


def _check_reduced(operation: Any, tensors: Sequence[Any]) -> None:
    for tensor in tensors:
        if tensor.dtype.scalar == tl.bfloat16:
            raise NotImplementedError("a reduction over bfloat16: cast to float32 first")
        operation.check_axis(tensor.shape, operation.axis)
