"""What a GEMM kernel is built for, and what building one gives. Imports no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmbuild.plugins.kernels.attention_shape import PROCESSORS, SHARED_BYTES
from llmbuild.plugins.kernels.spec import POINTER_TYPES, Constant, KernelSpec

FLOATS = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of each
FLOAT8 = "float8_e4m3fn"
INT8 = "int8"
VECTOR_BYTES = 16  # of one load of a thread


@dataclass(frozen=True)
class GemmShape:
    """out[m, n] = Σ_k x[m, k] · w[n, k] (+ bias[n]), accumulated in float32.

    dtype: of out and bias, and of x and w where nothing else is said.
    w_dtype: "float8_e4m3fn": w is that, and row n counts w_scale[n] (float32) times. "int8" likewise, where x is too.
    x_dtype: as w_dtype: x is that too, and row m counts x_scale[m] (float32) times.
    block: rows and columns of w that share a scale, which is w_scale[n // rows, k // columns] then; as many columns of
        x share x_scale[m, k // columns]. Only where x and w are 8-bit numbers; None: one scale a row.
    scales: False where 8-bit numbers are multiplied without any.

    Raises:
        ValueError: A size is not positive, or there is no GEMM of these dtypes.
    """

    n: int
    k: int
    dtype: str = "bfloat16"
    bias: bool = False
    w_dtype: str | None = None
    x_dtype: str | None = None
    block: tuple[int, int] | None = None
    scales: bool = True

    def __post_init__(self) -> None:
        if min(self.n, self.k) < 1:
            raise ValueError(f"a size of {self} is not positive")
        if self.dtype not in FLOATS:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(FLOATS)}")
        known = self.w_dtype in (None, FLOAT8) or (self.w_dtype == INT8 and self.x_dtype == INT8)
        if not known or self.x_dtype not in (None, self.w_dtype):
            raise ValueError(f"no GEMM of {self.x_dtype} rows and {self.w_dtype} weights gives {self.dtype}")
        if self.block is not None and self.x_dtype is None:
            raise ValueError(f"blocks of scales, yet rows of {self.dtype}")

    @property
    def w_bytes(self) -> int:
        """Bytes of one weight."""
        return 1 if self.w_dtype else FLOATS[self.dtype]

    @property
    def x_bytes(self) -> int:
        return 1 if self.x_dtype else FLOATS[self.dtype]

    @property
    def out_align(self) -> int:
        """Elements: rows of out start at multiples of it. The largest power of 2 in n, up to 16 bytes."""
        return min(VECTOR_BYTES // FLOATS[self.dtype], self.n & -self.n)

    def types(self, sm: int) -> dict[str, str]:
        """Triton types of the arguments; absent ones are left out. SMs before 89 take float8 as its bits."""
        plain = POINTER_TYPES[self.dtype]
        narrow = POINTER_TYPES[INT8] if self.w_dtype == INT8 else POINTER_TYPES[FLOAT8] if sm >= 89 else "*u8"
        types = {"x": narrow if self.x_dtype else plain, "w": narrow if self.w_dtype else plain, "out": plain}
        types |= dict.fromkeys(("rows", "x_stride", "out_stride"), "i32") | {"partial": "*fp32"}
        if self.bias:
            types["bias"] = plain
        if self.w_dtype and self.scales:
            types["w_scale"] = "*fp32"
        if self.x_dtype and self.scales:
            types["x_scale"] = "*fp32"
        return types

    def constants(self) -> dict[str, Constant]:
        return {"N": self.n, "K": self.k}


@dataclass(frozen=True)
class SmallKernel:
    """The kernels that compute a GEMM of at most `most_rows` rows (None: any number), in the order of their launches.

    Their arguments, by name; each kernel takes some of them, in this order:

        x, w, x_scale, w_scale, w_offset, bias, out    tensors; row m of x starts at element m * x_stride, out alike
        partial                     float32 workspace
        counters                    int32 state
        rows, x_stride, out_stride  int32: M, and elements from row to row; x_stride is a multiple of 16 bytes, and
                                    out_stride of `GemmShape.out_align`, as n is

    Of x and out only rows 0 .. M - 1 are touched. A kernel without the argument `rows` is for one row exactly.

    workspaces: {name: (dtype, bytes)} of the buffers that live from the first launch to the last. They need not be
    cleared.
    states: {name: bytes} of buffers that are zero before the first launch, and which the kernels leave zero.
    """

    most_rows: int | None
    specs: tuple[KernelSpec, ...]
    workspaces: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    states: Mapping[str, int] = field(default_factory=dict)


def power_of_2(size: int) -> int:
    """The smallest power of 2 that is at least `size`."""
    return 1 << (size - 1).bit_length()


def step_of(k: int, most: int) -> int:
    """Columns of a step over K: the largest power of 2 up to `most` that divides K, or `most` where that is too small.

    Steps of less than a quarter of `most` would cost more than the mask of a last, partial step.
    """
    step = min(most, k & -k)
    return step if step >= max(most // 4, 16) else min(most, max(power_of_2(k), 16))


def stages_for(step_bytes: int, sm: int, programs: int = 2) -> int:
    """Stages of a pipeline whose steps are so many bytes, where `programs` share a processor: 2 to 7."""
    room = (SHARED_BYTES[sm] - 4) * 1024 // programs
    return max(2, min(7, room // step_bytes))


def splits_for(programs: int, steps: int, row_bytes: int, most_rows: int, sm: int) -> int:
    """Programs that share the sums of one tile, a power of 2 up to 8: enough for two on each processor.

    Each takes at least 8 of the `steps` over K, and the sums of all, which are written and read, are an eighth of the
    weights at most. row_bytes: of a row of the weight.
    """
    most = min(8, row_bytes // (8 * 2 * FLOATS["float32"] * most_rows))
    splits = 1
    while 2 * splits <= most and programs * splits < 2 * PROCESSORS[sm] and steps >= 16 * splits:
        splits *= 2
    return splits
