"""Both forms of the plugin as TensorRT's C++ calls them: through the virtual functions of the bindings' own objects.

    git clone --depth 1 --branch v10.16 https://github.com/NVIDIA/TensorRT
    LLMBUILD_TENSORRT_BINDINGS=build/tensorrt-10.16.1.11 LLMBUILD_TENSORRT_HEADERS=TensorRT/include \
        pytest tests/plugins_tensorrt/test_called_from_c.py

The headers have to be of the version of the bindings: v10.15, v10.16; those of 11.1 do for 11.4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from llmbuild.builder.targets.tensorrt.plugin_kernels import compile_kernels, plugin_program
from llmbuild.builder.targets.tensorrt.stored_kernels import compile_stored
from llmbuild.plugins.tensorrt import fields, kernel_store
from llmbuild.plugins.tensorrt.form import STORED, PluginForm, Role
from llmbuild.plugins.tensorrt.program import Opened
from support.interpreted_kernels import InterpretedKernels
from support.plugin_bindings import FOLDER, plugin_module, stored_module, trt
from support.plugin_node import Node
from support.plugin_steps import FORMS, check, form, steps
from support.tensorrt_caller import HEADERS, TYPES, ask_stored, fields_of, run_plugin

pytestmark = pytest.mark.skipif(FOLDER is None or HEADERS is None, reason="needs TensorRT's bindings and its headers")
SM = 90
SIZES = {"T": 40, "B": 5, "B1": 6, "S": 96}


def node_fields(made: PluginForm, digest: str) -> list[fields.Field]:
    return fields.to_fields({**fields.form_values(made), "kernels": digest})


@pytest.mark.parametrize("role", STORED)
@pytest.mark.parametrize("name", ["plain", "softcap_sinks", "bfloat16"])
def test_nodes_with_a_stored_kernel(name: str, role: Role) -> None:
    made = replace(form(**FORMS[name]), role=role)
    kernel = compile_stored(made, SM)
    given = fields_of(node_fields(made, kernel_store.provide(kernel)), trt.PluginFieldType)
    creator = stored_module.StoredCreator(role)
    told = ask_stored(creator, made, given, int(trt.QuickPluginCreationRequest.STRICT_AOT), SIZES)
    assert (told["creator"], told["build"]) == ("PLUGIN CREATOR_V3QUICK", "PLUGIN_V3QUICKAOT_BUILD")
    assert told["operator"] == told["name"] == made.name and told["namespace"] == "llmbuild"
    assert told["fields"] == len(fields.FORM) + 1
    codes = ("types_code", "shapes_code", "formats_code", "configured", "tactic", "tactics", "kernel")
    assert [told[code] for code in codes] == [0] * len(codes)
    assert (told["formats"], told["linear"]) == (1, 1)
    assert told["types"] == [TYPES[made.shape.dtype]] * told["outputs"]
    rows = kernel.grid[1].split()[2] if role == "attend" else ""
    launch = {
        "store": ["T", "2", "1", "128", "1", "1", "0"],
        "attend": ["1", f"((T // {rows}) + B)", "1", "128", "1", "1", str(kernel.shared)],
    }
    assert told["launch"] == told["second_launch"] == launch[role]
    assert told["numbers"] == told["second_numbers"] == (["B"] if role == "attend" else [])
    expected: dict[Role, Any] = {
        "store": (2, [2, 3], [["S", "1", "16"]] * 2),
        "attend": (1, [-1], [["T", "2", "16"]]),
    }
    assert (told["outputs"], told["aliases"], told["shapes"]) == expected[role]
    assert (told["symbol"], told["code"], told["timing"]) == (kernel.symbol, kernel.ptx, kernel.digest[:32])


def test_a_node_that_python_is_to_run_is_not_made() -> None:
    made = replace(form(), role="store")
    given = fields_of(node_fields(made, kernel_store.provide(compile_stored(made, SM))), trt.PluginFieldType)
    told = ask_stored(stored_module.StoredCreator("store"), made, given, 3, SIZES)  # STRICT_JIT
    assert told["error"] == "no plugin"


@pytest.mark.parametrize("name", ["plain", "softcap_sinks", "int8_token_fused_rope"])
def test_paged_attention_from_a_node_to_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made of a node, written, read again, attached, and run: what comes out is that of the reference."""
    made = form(**FORMS[name])
    kernels, loader = compile_kernels(made, SM, processors=2), InterpretedKernels(SM)
    names = frozenset({"out", *(tensor.name for tensor in made.inputs)})
    loader.know(plugin_program(made, SM, processors=2)[1], Opened(kernels, names, "here").pack)
    monkeypatch.setattr(plugin_module, "current_kernels", lambda: loader)
    given = fields_of(node_fields(made, kernel_store.provide(kernels)), trt.PluginFieldType)
    creator, space = plugin_module.PagedAttentionCreator(), torch.full((8 << 20,), 0xFF, dtype=torch.uint8)
    node = Node(trt, made, None, loader.own)
    for step in steps(made):
        ready = node.prepare(step)
        sizes = {"T": len(step.expected), "B": len(step.arrays["seq_lens"]), "S": len(node.pools["key_pool"])}
        sizes["B1"] = sizes["B"] + 1
        places = [loader.own(tensor) for tensor in (*ready.inputs, *ready.outputs)]
        told = run_plugin(creator, made, given, sizes, places, (loader.own(space), len(space)))
        check(made, step, ready.outputs[0])
        assert (told["creator"], told["build"]) == ("PLUGIN CREATOR_V3ONE", "PLUGIN_V3ONE_BUILD")
        assert told["build_version"] == 2  # the one with aliases
        codes = ("types_code", "shapes_code", "configured", "tactics", "tactic", "shape_change", "enqueue")
        assert [told[code] for code in codes] == [0] * len(codes)
        assert told["supported"] == [1] * (len(made.inputs) + len(made.outputs))
        assert told["aliases"] == [made.aliased_input(at) for at in range(len(made.outputs))]
        assert told["shapes"][0] == ["T", "2", "16"] and told["kept"] == len(fields.FORM) + 2
        assert told["timing"] == kernels.digest[:32] and "heads=2" in told["metadata"]
