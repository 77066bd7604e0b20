"""Kernels that an engine stores, on a GPU: the driver loads their PTX and launches it with what TensorRT passes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmbuild.cuda.calls import checked, import_driver
from llmbuild.plugins.tensorrt.form import PluginForm
from support.plugin_bindings import stored_module, trt
from support.plugin_steps import FORMS, check, form, steps
from support.stored_layer import StoredLayer

pytestmark = pytest.mark.gpu

PLAIN = ("plain", "groups", "window", "softcap_sinks", "alibi", "head_24_16", "float16", "bfloat16")
LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128, "scale": 128**-0.5, "page": 16}


class GpuLayer(StoredLayer):
    """Likewise, in the memory of a GPU."""

    def __init__(self, form: PluginForm) -> None:
        self.driver: Any = import_driver("a test", "pip install 'llmbuild[cuda]'")
        torch.zeros(1, device="cuda")  # makes the context
        major, minor = torch.cuda.get_device_capability()
        super().__init__(form, stored_module.StoredPlugin, 10 * major + minor)
        self.functions = [self.load(*plugin.get_kernel([], [])) for plugin in self.nodes]

    def load(self, symbol: str, code: bytes) -> Any:
        driver = self.driver
        module = checked(driver, "cuModuleLoadData", driver.cuModuleLoadData(code + b"\0"))
        return checked(driver, "cuModuleGetFunction", driver.cuModuleGetFunction(module, symbol.encode()))

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cuda")

    def start(self, at: int, launch: dict[str, int], arguments: list[Any]) -> None:
        values = [ctypes.c_int32(a) if isinstance(a, int) else ctypes.c_void_p(a.data_ptr()) for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = [launch[f"{what}_{axis}"] for what in ("grid", "block") for axis in "xyz"]
        stream, driver = torch.cuda.current_stream().cuda_stream, self.driver
        given = (*sizes, launch["shared_mem"], stream, ctypes.addressof(pointers), 0)
        checked(driver, "cuLaunchKernel", driver.cuLaunchKernel(self.functions[at], *given))
        torch.cuda.synchronize()


@pytest.mark.parametrize("name", [*PLAIN, "llama"])
def test_steps_equal_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt, "ISymExpr", SimpleNamespace)  # that of the bindings takes nothing but TensorRT's own
    made = form(**(FORMS[name] if name != "llama" else {**LLAMA, "dtype": "bfloat16", "kv_dtype": "bfloat16"}))
    layer, kinds = GpuLayer(made), []
    for step in steps(made):
        check(made, step, layer.run(step).cpu())
        kinds.append(step.kind)
    assert set(kinds) == {"mixed", "decode"}
