"""PagedStore and PagedAttend, TensorRT plugins whose kernel the engine stores: no Python runs when it is executed.

TensorRT asks these classes while it builds and never again. Importing this module needs the bindings of the full
TensorRT, see `bindings.require_stored`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmbuild.errors import EngineError
from llmbuild.plugins.tensorrt import fields, kernel_store
from llmbuild.plugins.tensorrt.bindings import bindings, checked_stored
from llmbuild.plugins.tensorrt.descriptors import (
    data_type,
    named_dims,
    output_shapes,
    output_types,
    sizes_of,
    step_sizes,
)
from llmbuild.plugins.tensorrt.form import NAMES, NAMESPACE, VERSION, PluginForm, Role
from llmbuild.plugins.tensorrt.plugin import field_collection
from llmbuild.plugins.tensorrt.stored import StoredKernel
from llmbuild.plugins.tensorrt.symbols import Symbols

if TYPE_CHECKING:
    import tensorrt as trt
else:
    trt = checked_stored(bindings()).module


class StoredPlugin(trt.IPluginV3, trt.IPluginV3QuickCore, trt.IPluginV3QuickAOTBuild):
    """One of the two nodes of a layer.

    Args:
        form: What the node is.
        kernel: What it launches.
    """

    def __init__(self, form: PluginForm, kernel: StoredKernel) -> None:
        trt.IPluginV3.__init__(self)
        trt.IPluginV3QuickCore.__init__(self)
        trt.IPluginV3QuickAOTBuild.__init__(self)
        self.form, self.kernel = form, kernel
        self._kept: list[Any] = []  # what TensorRT may still look at after a call
        # Read by TensorRT.
        self.plugin_name = form.name
        self.plugin_version = VERSION
        self.plugin_namespace = NAMESPACE

    def get_capability_interface(self, type: trt.PluginCapabilityType) -> StoredPlugin:
        return self

    def clone(self) -> StoredPlugin:
        return StoredPlugin(self.form, self.kernel)

    def get_num_outputs(self) -> int:
        return len(self.form.outputs)

    def get_output_data_types(self, input_types: Sequence[trt.DataType], ranks: Sequence[int]) -> list[trt.DataType]:
        return output_types(trt, self.form, input_types)

    def get_output_shapes(
        self,
        inputs: Sequence[trt.DimsExprs],
        shape_inputs: Sequence[trt.DimsExprs],
        expr_builder: trt.IExprBuilder,
    ) -> list[trt.DimsExprs]:
        return output_shapes(trt, self.form, inputs, shape_inputs, expr_builder)

    def get_supported_format_combinations(
        self, in_out: Sequence[trt.DynamicPluginTensorDesc], num_inputs: int
    ) -> list[trt.PluginTensorDesc]:
        """Return the one that there is: each tensor has one type, row after row."""
        made = []
        for tensor in (*self.form.inputs, *self.form.outputs):
            one = trt.PluginTensorDesc()
            one.type, one.format = data_type(trt, tensor.dtype), trt.TensorFormat.LINEAR
            made.append(one)
        return made

    def get_aliased_input(self, output_index: int) -> int:
        return self.form.aliased_input(output_index)

    def configure_plugin(
        self, inputs: Sequence[trt.DynamicPluginTensorDesc], outputs: Sequence[trt.DynamicPluginTensorDesc]
    ) -> None:
        step_sizes(self.form, [sizes_of(each.max) for each in inputs])

    def get_valid_tactics(self) -> list[int]:
        return []

    def set_tactic(self, tactic: int) -> None:
        """There is one way to compute: TensorRT has no choice to make."""

    def get_timing_cache_id(self) -> str:
        return self.kernel.digest[:32]

    def get_metadata_string(self) -> str:
        return f"{self.form}"

    def get_launch_params(
        self,
        inputs: Sequence[trt.DimsExprs],
        in_out: Sequence[trt.DynamicPluginTensorDesc],
        num_inputs: int,
        launch: trt.KernelLaunchParams,
        numbers: trt.ISymExprs,
        expr_builder: trt.IExprBuilder,
    ) -> None:
        """Tell grid, block and shared memory, and the numbers between the pointers, as expressions of the inputs."""
        symbols = Symbols(trt, expr_builder, named_dims(self.form, inputs))
        kernel = self.kernel
        sizes = (*kernel.grid, kernel.threads, 1, 1, kernel.shared)
        names = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_mem")
        made = [symbols.number(size) for size in sizes]
        for name, one in zip(names, made, strict=True):
            setattr(launch, name, one)
        passed = [symbols.number(size) for size in kernel.numbers]
        numbers.nbSymExprs = len(passed)
        for at, one in enumerate(passed):
            numbers[at] = one
        self._kept = made + passed

    def get_kernel(
        self, inputs: Sequence[trt.PluginTensorDesc], outputs: Sequence[trt.PluginTensorDesc]
    ) -> tuple[str, bytes]:
        """Return the kernel's name and its PTX."""
        return self.kernel.symbol, self.kernel.ptx.encode()


class StoredCreator(trt.IPluginCreatorV3Quick):
    """Makes plugins of the nodes of an ONNX file. role: of the nodes."""

    def __init__(self, role: Role) -> None:
        trt.IPluginCreatorV3Quick.__init__(self)
        self._role: Role = role
        self.name = NAMES[role]
        self.plugin_version = VERSION
        self.plugin_namespace = NAMESPACE
        kinds = fields.FORM | fields.BUILD
        self.field_names = field_collection([fields.Field(name, fields.TYPES[kinds[name]][0], b"") for name in kinds])

    def create_plugin(
        self,
        name: str,
        namespace: str,
        field_collection: trt.PluginFieldCollection_,
        phase: trt.TensorRTPhase,
        request: trt.QuickPluginCreationRequest,
    ) -> StoredPlugin:
        """Return a plugin whose kernel `kernel_store` holds. TensorRT tells the operator, not the name of the node.

        Raises:
            EngineError: Fields are missing or wrong, the kernel is not there, or Python is to run in its place.
            ConfigError: No kernel computes this.
        """
        if request == trt.QuickPluginCreationRequest.STRICT_JIT:
            raise EngineError(f"{name} has a stored kernel alone", hint="set the node's attribute aot to 1")
        values = fields.read_fields(iter(field_collection), fields.FORM | fields.BUILD, name)
        form = fields.form_of(values, name, self._role)
        return StoredPlugin(form, kernel_store.find(str(values["kernels"]), StoredKernel, form.where))
