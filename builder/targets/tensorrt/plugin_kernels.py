"""The kernels of a PagedAttention node: the cuda target's, compiled for one GPU, and the order they are launched in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmbuild.builder.targets.cuda.aot import COMPILER, compile_all
from llmbuild.engine.kernel_pack import pack_bytes
from llmbuild.engine.launch_plan import Argument, KernelOp, Number, Place, When
from llmbuild.plugins.kernels.attention_hopper import chunk_spec
from llmbuild.plugins.kernels.kv_store import kv_store_spec
from llmbuild.plugins.kernels.kv_store_scaled import kv_store_scaled_spec
from llmbuild.plugins.kernels.paged_attention_decode import decode_plan
from llmbuild.plugins.kernels.spec import KernelSpec
from llmbuild.plugins.kernels.split_rotate import split_rotate_spec
from llmbuild.plugins.tensorrt.form import PluginForm
from llmbuild.plugins.tensorrt.program import VERSION, KernelSet, PluginProgram, Scratch


def compile_kernels(form: PluginForm, sm: int, *, processors: int | None = None) -> KernelSet:
    """Compile what a node launches on GPUs of one compute capability (90 for 9.0). Needs no GPU.

    processors: multiprocessors of the card; those of the usual one of that capability if None.

    Raises:
        As `aot.compile_all`.
    """
    program, specs = plugin_program(form, sm, processors=processors)
    return KernelSet(program.compact_json(), pack_bytes(compile_all(specs, [sm]), compiler=COMPILER))


def plugin_program(
    form: PluginForm, sm: int, *, processors: int | None = None
) -> tuple[PluginProgram, list[KernelSpec]]:
    """Return the program of a node and the specs of its kernels; see `compile_kernels`."""
    shape = form.shape
    if shape.kv_dtype == "float8_e4m3fn" and sm < 89:
        shape = replace(shape, kv_dtype="uint8")  # the same bits: these GPUs have no such type
    scratch: list[Scratch] = []
    ops: list[KernelOp] = []
    specs: list[KernelSpec] = []

    def workspace(name: str, size: str) -> Place:
        scratch.append(Scratch(name=name, size=size))
        return Place(kind="buffer", name=name)

    decode = decode_plan(shape, sm, processors=processors)
    places: dict[str, Argument] = {tensor.name: Place(kind="input", name=tensor.name) for tensor in form.inputs}
    places |= {
        "out": Place(kind="input", name="out"),
        "keys": places["key_pool"],
        "values": places["value_pool"],
        "k_pool": places["key_pool"],
        "v_pool": places["value_pool"],
        "slots": places["slot_mapping"],
        "table_stride": Number(value=str(form.table_stride)),
        "sequences": Number(value="B"),
        "splits": Number(value=decode.splits),
        "partial": workspace("partial", decode.partial_bytes),
        "sums": workspace("sums", decode.sums_bytes),
    }

    def launch(spec: KernelSpec, when: When) -> None:
        specs.append(spec)
        ops.append(KernelOp(kernel=spec.name, arguments=tuple(places[name] for name in spec.signature), when=when))

    row_bytes = shape.head_dim * form.item_bytes
    value_stride = shape.kv_heads * shape.value_dim
    if form.layout == "fused":
        places |= {
            "q": workspace("q", f"T * {shape.heads * row_bytes}"),
            "k": workspace("k", f"T * {shape.kv_heads * row_bytes}"),
            "v": Place(kind="input", name="qkv", offset=form.value_offset * form.item_bytes),
        }
        value_stride = form.width
        launch(
            split_rotate_spec(
                "rotate",
                dtype=shape.dtype,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                stride=form.width,
                rotary_dim=form.rotary_dim,
                interleaved=form.interleaved,
            ),
            "always",
        )
    store: dict[str, Any] = {
        "dtype": shape.dtype,
        "pool_dtype": form.shape.kv_dtype,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "v_head_dim": shape.value_dim,
        "k_stride": shape.kv_heads * shape.head_dim,
        "v_stride": value_stride,
    }
    launch((kv_store_scaled_spec if shape.kv_scales == "token" else kv_store_spec)("store", **store), "always")
    launch(decode.attend, "decode")
    launch(decode.merge, "decode")
    launch(chunk_spec(shape, sm, processors=processors), "mixed")
    return PluginProgram(version=VERSION, scratch=tuple(scratch), ops=tuple(ops)), specs
