"""Plugins whose kernels an engine stores: classes in TensorRT's bindings, code, launches, and what they compute.

In the bindings of tensorrt-rtx a few classes are stand-ins; with LLMBUILD_TENSORRT_BINDINGS all are TensorRT's.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmbuild.builder.targets.cuda.parameters import ptx_parameters
from llmbuild.builder.targets.tensorrt import stored_kernels
from llmbuild.builder.targets.tensorrt.stored_kernels import compile_stored, without_parameters
from llmbuild.engine.expressions import evaluate
from llmbuild.errors import ConfigError, EngineError, LLMBuildError
from llmbuild.plugins.tensorrt import bindings, fields, kernel_store
from llmbuild.plugins.tensorrt.form import STORED, PluginForm, Role
from llmbuild.plugins.tensorrt.stored import MOST_SHARED, StoredKernel
from llmbuild.plugins.tensorrt.symbols import Symbols
from support.plugin_bindings import plugin_module, stored_module, trt
from support.plugin_node import dynamic
from support.plugin_steps import FORMS, check, form, steps
from support.stored_layer import Integers, StoredLayer, launch_of

SM = 90
SIZES = {"T": 40, "B": 5, "B1": 6, "S": 96}
PLAIN = ("plain", "groups", "window", "softcap_sinks", "alibi", "head_24_16", "float16", "bfloat16")
SLOW = ("groups", "window", "head_24_16", "float16", "bfloat16")
INPUTS = {
    "store": ["k", "v", "key_pool", "value_pool", "slot_mapping"],
    "attend": ["q", "key_pool", "value_pool", "block_tables", "seq_lens", "cu_q_lens"],
}


@cache
def kernel_of(made: PluginForm, sm: int = SM) -> StoredKernel:
    return compile_stored(made, sm)


def part(role: Role, name: str = "plain") -> PluginForm:
    return replace(form(**FORMS[name]), role=role)


def make(made: PluginForm) -> Any:
    return stored_module.StoredPlugin(made, kernel_of(made))


@pytest.fixture
def integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symbols that hold integers: those of the bindings take nothing but TensorRT's own expressions."""
    monkeypatch.setattr(trt, "ISymExpr", SimpleNamespace)


# ------------------------------------------------------------------------------------------------------ what is stored
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("name", ["plain", "softcap_sinks", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_code_takes_what_tensorrt_gives_and_nothing_else(name: str, sm: int, tmp_path: Path) -> None:
    """Pointers to inputs, numbers, pointers to outputs; the assembler finds nothing that is not declared."""
    from triton import knobs

    for role in STORED:
        made = part(role, name)
        kernel = kernel_of(made, sm)
        pointers = {"pointer": len(made.inputs) + len(made.outputs), "integer": len(kernel.numbers)}
        groups = [each.group for each in ptx_parameters(kernel.ptx)]
        assert {group: groups.count(group) for group in pointers} == pointers and len(groups) == sum(pointers.values())
        assert groups.index("integer") == len(made.inputs) if kernel.numbers else "integer" not in groups
        assert kernel.shared <= MOST_SHARED and f".entry {kernel.symbol}(" in kernel.ptx
        assert f".reqntid {kernel.threads}\n" in kernel.ptx
        (tmp_path / "code.ptx").write_text(kernel.ptx)
        target = next(line.split()[1] for line in kernel.ptx.splitlines() if line.startswith(".target"))
        command = [knobs.nvidia.ptxas.path, f"--gpu-name={target}", "-o", str(tmp_path / "code"), "code.ptx"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.slow
def test_the_kernel_of_a_large_model_fits_too() -> None:
    """Llama 3 8B: keys are still copied ahead, in a smaller tile than without a limit."""
    made = form(heads=32, kv_heads=8, head_dim=128, value_dim=128, dtype="bfloat16", kv_dtype="bfloat16", page=16)
    kernel = kernel_of(replace(made, role="attend"), 80)
    assert 0 < kernel.shared <= MOST_SHARED and "cp.async" in kernel.ptx
    assert kernel.numbers == ("B",) and kernel.grid == ("8", "T // 16 + B", "1")


def test_a_parameter_that_is_read_cannot_be_left_out() -> None:
    head = ".visible .entry f(\n\t.param .u64 .ptr .global .align 1 f_param_0,\n\t.param .u32 f_param_1\n)\n"
    text = head + "{ ld.param.b64 %rd1, [f_param_0]; }"
    bare = without_parameters(text, [1], "here")
    assert [each.group for each in ptx_parameters(bare)] == ["pointer"] and bare.endswith("[f_param_0]; }")
    for read in ("[f_param_1]", "[f_param_1+4]"):
        with pytest.raises(LLMBuildError, match="its kernel reads f_param_1, which TensorRT does not pass"):
            without_parameters(text.replace("[f_param_0]", read), [1], "here")
    with pytest.raises(LLMBuildError, match="there is no kernel in its PTX"):
        without_parameters("// nothing", [1], "here")


def test_kernels_that_no_tiling_makes_small_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def compiled(spec: Any, sm: int) -> Any:
        tried.append((spec.constants["ROWS"], spec.constants["BLOCK_N"], spec.num_stages))
        return SimpleNamespace(launch=SimpleNamespace(shared=MOST_SHARED + 1)), ""

    monkeypatch.setattr(stored_kernels, "compile_with_ptx", compiled)
    with pytest.raises(ConfigError, match="its kernel needs more than 48 KiB of shared memory") as info:
        compile_stored(part("attend"), SM)
    assert info.value.where == "PagedAttend of layer 3"
    assert info.value.hint == "leave the builder option attention=stored out"
    assert tried[0] == (64, 32, 3) and tried[-1] == (16, 16, 1)


@pytest.mark.parametrize("change", [{"num_ctas": 2}, {"global_scratch": 8}, {"pdl": True}, {"cooperative": True}])
def test_kernels_that_need_more_than_tensorrt_gives(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = stored_kernels.compile_with_ptx

    def compiled(spec: Any, sm: int) -> Any:
        cubin, ptx = real(spec, sm)
        return replace(cubin, launch=cubin.launch.model_copy(update=change)), ptx

    monkeypatch.setattr(stored_kernels, "compile_with_ptx", compiled)
    with pytest.raises(LLMBuildError, match="needs more than grid, block and shared memory"):
        compile_stored(part("store"), SM)


# --------------------------------------------------------------------------------------------------- what it computes
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PLAIN])
def test_steps_equal_the_reference(name: str, integers: None) -> None:
    """Prefill in chunks, mixed steps and decode over a cache that earlier steps wrote, launched as TensorRT does it."""
    made = form(**FORMS[name])
    layer, kinds = StoredLayer(made, stored_module.StoredPlugin, SM), []
    for step in steps(made):
        check(made, step, layer.run(step))
        kinds.append(step.kind)
    assert kinds == ["mixed"] * 3 + ["decode"] * 2


# ----------------------------------------------------------------------------------------------------------- launches
@pytest.mark.parametrize("sizes", [(1, 1), (7, 3), (40, 5), (8192, 256)])
def test_sizes_of_a_launch_are_those_of_the_plan(sizes: tuple[int, int], integers: None) -> None:
    given = {"T": sizes[0], "B": sizes[1], "B1": sizes[1] + 1, "S": 96}
    for role in STORED:
        plugin = make(part(role))
        launch, numbers = launch_of(plugin, given)
        known = {"T": given["T"], "B": given["B"]}
        grid = [evaluate(text, known) for text in plugin.kernel.grid]
        assert [launch[f"grid_{axis}"] for axis in "xyz"] == grid
        assert [launch[f"block_{axis}"] for axis in "xyz"] == [plugin.kernel.threads, 1, 1]
        assert launch["shared_mem"] == plugin.kernel.shared
        assert numbers == ([] if role == "store" else [given["B"]])


@pytest.mark.parametrize(
    "text", ["12", "T // 4 + B", "T % 7 * B", "-T + 3 * B", "cdiv(T, 16)", "min(T, B, 5)", "max(cdiv(T, 3), B - 1, 2)"]
)
def test_expressions_are_evaluated_as_here(text: str, integers: None) -> None:
    for tokens, sequences in ((1, 1), (33, 4), (4096, 17)):
        named = {"T": tokens, "B": sequences}
        symbols = Symbols(trt, Integers(), named)
        assert symbols.dimension(text) == evaluate(text, named)
        made = symbols.number(text)
        assert (made.type, made.dtype) == (trt.PluginArgType.INT, trt.PluginArgDataType.INT32)


def test_a_symbol_of_the_bindings_takes_an_expression() -> None:
    """That of TensorRT is an object of C++; so is a capsule."""
    capsule: Any = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    made = Symbols(trt, SimpleNamespace(constant=lambda value: capsule(value, None, None)), {}).number(7)
    assert isinstance(made, trt.ISymExpr)


# ------------------------------------------------------------------------------------------------------------ classes
def create(made: PluginForm, request: str = "STRICT_AOT", **changes: Any) -> Any:
    values = {**fields.form_values(made), "kernels": kernel_store.provide(kernel_of(made)), **changes}
    kept = fields.to_fields(values)  # fields point at their data
    given = plugin_module.field_collection(kept)
    asked = getattr(trt.QuickPluginCreationRequest, request)
    creator = stored_module.StoredCreator(made.role)
    return creator.create_plugin(creator.name, "llmbuild", given, trt.TensorRTPhase.BUILD, asked)


@pytest.mark.parametrize("role", STORED)
def test_creators_make_plugins_of_nodes(role: Role) -> None:
    creator = stored_module.StoredCreator(role)
    name = {"store": "PagedStore", "attend": "PagedAttend"}[role]
    assert (creator.name, creator.plugin_version, creator.plugin_namespace) == (name, "1", "llmbuild")
    assert [field.name for field in creator.field_names] == [*fields.FORM, "kernels"]
    plugin = create(part(role, "window"))
    assert plugin.form == part(role, "window") and plugin.kernel == kernel_of(part(role, "window"))
    assert (plugin.plugin_name, plugin.plugin_version, plugin.plugin_namespace) == (name, "1", "llmbuild")
    assert [tensor.name for tensor in plugin.form.inputs] == INPUTS[role]
    symbol, code = plugin.get_kernel([], [])
    assert symbol == plugin.kernel.symbol and code == plugin.kernel.ptx.encode()
    twin = plugin.clone()
    assert twin is not plugin and (twin.form, twin.kernel) == (plugin.form, plugin.kernel)
    for kind in ("CORE", "BUILD"):
        assert plugin.get_capability_interface(getattr(trt.PluginCapabilityType, kind)) is plugin
    assert plugin.get_valid_tactics() == [] and "window=5" in plugin.get_metadata_string()


def test_the_pools_come_out_of_the_first_node_where_they_went_in() -> None:
    store, attend = make(part("store")), make(part("attend"))
    assert (store.get_num_outputs(), attend.get_num_outputs()) == (2, 1)
    assert [store.get_aliased_input(at) for at in range(2)] == [2, 3]
    assert attend.get_aliased_input(0) == -1


@pytest.mark.parametrize("role", STORED)
def test_types_shapes_and_formats(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    made = part(role, "bfloat16")
    plugin, kinds = make(made), trt.DataType
    given = [kinds.INT32 if tensor.dtype == "int32" else kinds.BF16 for tensor in made.inputs]
    assert plugin.get_output_data_types(given, [0] * len(given)) == [kinds.BF16] * len(made.outputs)
    with pytest.raises(EngineError, match=r"inputs of the types HALF, .*; the node takes BF16, "):
        plugin.get_output_data_types([kinds.HALF, *given[1:]], [])
    tensors = [dynamic(trt, tensor, SIZES) for tensor in (*made.inputs, *made.outputs)]
    found = plugin.get_supported_format_combinations(tensors, len(made.inputs))
    assert [each.type for each in found] == [each.desc.type for each in tensors]
    assert {each.format for each in found} == {trt.TensorFormat.LINEAR}
    plugin.configure_plugin(tensors[: len(made.inputs)], tensors[len(made.inputs) :])
    with pytest.raises(EngineError, match=f"{len(made.inputs) - 1} inputs, not {len(made.inputs)}"):
        plugin.configure_plugin(tensors[1 : len(made.inputs)], [])
    monkeypatch.setattr(trt, "DimsExprs", lambda rank: [None] * rank)
    named = [[f"{dim}" if isinstance(dim, str) else dim for dim in tensor.dims] for tensor in made.inputs]
    shapes = {"store": [["S", 1, 16], ["S", 1, 16]], "attend": [["T", 2, 16]]}
    assert plugin.get_output_shapes(named, [], Integers()) == shapes[role]


def test_timing_is_shared_only_by_the_same_kernels() -> None:
    ids = {make(part("attend", name)).get_timing_cache_id() for name in ("plain", "window", "softcap_sinks")}
    assert len(ids) == 3 and make(part("attend")).get_timing_cache_id() in ids


# ---------------------------------------------------------------------------------------------------- what is refused
def test_nodes_that_will_not_do() -> None:
    with pytest.raises(EngineError, match="PagedStore has a stored kernel alone") as info:
        create(part("store"), "STRICT_JIT")
    assert info.value.hint == "set the node's attribute aot to 1"
    with pytest.raises(EngineError, match=r"the node names kernels 000000000000\.\.\., which nobody provided"):
        create(part("attend"), kernels="0" * 64)
    for role, name in (("store", "int8_token_fused_rope"), ("attend", "float8_layer"), ("store", "fused")):
        with pytest.raises(ConfigError, match="takes q, k and v apart, and a cache without scales"):
            part(role, name)  # type: ignore[arg-type]


def test_kernels_of_python_are_not_taken_for_stored_ones() -> None:
    from llmbuild.plugins.tensorrt.program import KernelSet

    digest = kernel_store.provide(KernelSet(b"{}", b""))
    with pytest.raises(EngineError, match="which nobody provided"):
        kernel_store.find(digest, StoredKernel, "here")


def test_bindings_that_lack_the_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    network = SimpleNamespace(add_plugin_v3=None)
    module = SimpleNamespace(INetworkDefinition=network, ISymExpr=None, IPluginV3QuickCore=None)
    found = bindings.Bindings(module, "tensorrt", bindings.OLDEST)
    monkeypatch.setattr(bindings, "bindings", lambda: found)
    with pytest.raises(ConfigError) as info:
        bindings.require_stored()
    assert info.value.what == (
        "tensorrt 10.15 cannot store kernels in an engine: it has no IPluginV3QuickAOTBuild, IPluginCreatorV3Quick, "
        "QuickPluginCreationRequest"
    )
    assert info.value.hint == "leave the builder option attention=stored out"


def test_kernels_whose_launch_uses_other_sizes() -> None:
    kernel = kernel_of(part("attend"))
    with pytest.raises(ValueError, match="a size in L"):
        StoredKernel(**{**kernel.model_dump(), "numbers": ("L",)})
    assert StoredKernel.model_validate_json(kernel.compact_json()) == kernel
