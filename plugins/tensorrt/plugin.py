"""`PagedAttention`, a TensorRT plugin: core, build and runtime capabilities in one class. `form.py` draws its tensors.

Importing this module needs TensorRT's bindings, see `bindings.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from llmbuild.errors import EngineError
from llmbuild.plugins.tensorrt import fields
from llmbuild.plugins.tensorrt.bindings import bindings
from llmbuild.plugins.tensorrt.descriptors import fits, output_shapes, output_types, sizes_of, step_sizes
from llmbuild.plugins.tensorrt.form import NAME, NAMESPACE, VERSION, PluginForm
from llmbuild.plugins.tensorrt.launch import LoadedProgram, Loader, current_kernels
from llmbuild.plugins.tensorrt.program import KernelSet, Opened

if TYPE_CHECKING:
    import tensorrt as trt
else:
    trt = bindings().module


class PagedAttention(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):
    """One layer's attention over a paged cache, which it appends to in place.

    A step with as many tokens as sequences is taken for a decode step: each sequence brings exactly one token.

    Args:
        form: What the node is.
        opened: Its kernels.
        loader: Where they are loaded; None: in the context of the thread that TensorRT calls from.
    """

    def __init__(self, form: PluginForm, opened: Opened, loader: Loader | None = None) -> None:
        trt.IPluginV3.__init__(self)
        trt.IPluginV3OneCore.__init__(self)
        trt.IPluginV3OneBuildV2.__init__(self)
        trt.IPluginV3OneRuntime.__init__(self)
        self.form = form
        self.opened = opened
        self._loader = loader
        self._loaded: LoadedProgram | None = None
        # Read by TensorRT.
        self.plugin_name = NAME
        self.plugin_version = VERSION
        self.plugin_namespace = NAMESPACE
        self.num_outputs = len(form.outputs)
        self.timing_cache_id = opened.digest[:32]
        self.metadata_string = f"{form}"

    @staticmethod
    def of(form: PluginForm, kernels: KernelSet, loader: Loader | None = None) -> PagedAttention:
        """Return the plugin of a node.

        Raises:
            EngineError: The kernels are not those of such a node.
        """
        names = frozenset({"out", *(tensor.name for tensor in form.inputs)})
        return PagedAttention(form, Opened(kernels, names, form.where), loader)

    # Core

    def get_capability_interface(self, type: trt.PluginCapabilityType) -> PagedAttention:
        return self

    def clone(self) -> PagedAttention:
        """Return another plugin over the same kernels, loaded where these are."""
        twin = PagedAttention(self.form, self.opened, self._loader)
        twin._loaded = self._loaded
        return twin

    # Build

    def get_output_data_types(self, input_types: Sequence[trt.DataType]) -> list[trt.DataType]:
        return output_types(trt, self.form, input_types)

    def get_output_shapes(
        self,
        inputs: Sequence[trt.DimsExprs],
        shape_inputs: Sequence[trt.DimsExprs],
        expr_builder: trt.IExprBuilder,
    ) -> list[trt.DimsExprs]:
        return output_shapes(trt, self.form, inputs, shape_inputs, expr_builder)

    def supports_format_combination(
        self, pos: int, in_out: Sequence[trt.DynamicPluginTensorDesc], num_inputs: int
    ) -> bool:
        tensors = (*self.form.inputs, *self.form.outputs)
        known = num_inputs == len(self.form.inputs) and pos < len(tensors)
        return known and fits(trt, tensors[pos], in_out[pos].desc)

    def get_aliased_input(self, output_index: int) -> int:
        return self.form.aliased_input(output_index)

    def configure_plugin(
        self, inp: Sequence[trt.DynamicPluginTensorDesc], out: Sequence[trt.DynamicPluginTensorDesc]
    ) -> None:
        step_sizes(self.form, [sizes_of(each.max) for each in inp])

    def get_workspace_size(
        self, inp: Sequence[trt.DynamicPluginTensorDesc], out: Sequence[trt.DynamicPluginTensorDesc]
    ) -> int:
        tokens, sequences = step_sizes(self.form, [sizes_of(each.max) for each in inp])
        return self.opened.program.most_scratch(tokens, sequences)

    def get_valid_tactics(self) -> list[int]:
        return []

    # Run time

    def get_fields_to_serialize(self) -> trt.PluginFieldCollection_:
        kernels = self.opened.kernels
        values: dict[str, fields.Value] = {"program": kernels.program, "pack": kernels.pack}
        # Kept: fields point at their data, which TensorRT reads after this returns.
        self._fields = fields.to_fields(fields.form_values(self.form) | values)
        self._serialized = field_collection(self._fields)
        return self._serialized

    def on_shape_change(self, inp: Sequence[trt.PluginTensorDesc], out: Sequence[trt.PluginTensorDesc]) -> None:
        step_sizes(self.form, [sizes_of(each.dims) for each in inp])

    def set_tactic(self, tactic: int) -> None:
        """There is one way to compute: TensorRT has no choice to make."""

    def attach_to_context(self, resource_context: trt.IPluginResourceContext) -> PagedAttention:
        """Return a plugin of its own for an execution context, its kernels loaded: not in the middle of a capture."""
        twin = PagedAttention(self.form, self.opened, self._loader)
        twin.load()
        return twin

    def load(self) -> LoadedProgram:
        """Load the kernels into the current context, once; see `LoadedProgram` for the errors."""
        if self._loaded is None:
            self._loaded = LoadedProgram(self.opened, self._loader or current_kernels(), self.form.where)
        return self._loaded

    def enqueue(
        self,
        input_desc: Sequence[trt.PluginTensorDesc],
        output_desc: Sequence[trt.PluginTensorDesc],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Append a step's keys and values to the cache and attend over it.

        Raises:
            EngineError: Dimensions contradict each other, or the cache's outputs are copies of it.
        """
        tokens, sequences = step_sizes(self.form, [sizes_of(each.dims) for each in input_desc])
        for index in range(1, len(self.form.outputs)):
            if outputs[index] != inputs[self.form.aliased_input(index)]:
                raise EngineError(
                    f"{self.form.outputs[index].name} goes in and comes out at different addresses",
                    where=self.form.where,
                    hint="build with PreviewFeature.ALIASED_PLUGIN_IO_10_03, and bind one buffer to both",
                )
        addresses = {tensor.name: address for tensor, address in zip(self.form.inputs, inputs, strict=True)}
        self.load().run(addresses | {"out": outputs[0]}, workspace, tokens, sequences, stream)


class PagedAttentionCreator(trt.IPluginCreatorV3One):
    """Makes plugins of the nodes of an ONNX file, and of what an engine keeps."""

    def __init__(self) -> None:
        trt.IPluginCreatorV3One.__init__(self)
        self.name = NAME
        self.plugin_version = VERSION
        self.plugin_namespace = NAMESPACE
        kinds = fields.FORM | fields.BUILD
        self.field_names = field_collection([fields.Field(name, fields.TYPES[kinds[name]][0], b"") for name in kinds])

    def create_plugin(
        self, name: str, field_collection: trt.PluginFieldCollection_, phase: trt.TensorRTPhase
    ) -> PagedAttention:
        """Return a plugin. While an engine is built, the field `kernels` names what `kernel_store` holds.

        Raises:
            EngineError: Fields are missing or wrong, or the kernels are not there.
            ConfigError: No kernel computes this.
        """
        from llmbuild.plugins.tensorrt import kernel_store

        where = f"{NAME} {name!r}"
        building = phase == trt.TensorRTPhase.BUILD
        known = fields.FORM | (fields.BUILD if building else fields.ENGINE)
        values = fields.read_fields(iter(field_collection), known, where)
        form = fields.form_of(values, where)
        if building:
            kernels = kernel_store.find(str(values["kernels"]), KernelSet, where)
        else:
            kernels = KernelSet(cast(bytes, values["program"]), cast(bytes, values["pack"]))
        return PagedAttention.of(form, kernels)


def field_collection(made: Sequence[fields.Field]) -> Any:
    """Return fields as TensorRT takes them.

    The bindings turn a list of fields into TensorRT's own collection by themselves, but not where TensorRT calls from a
    thread that no Python function of it is running in.
    """
    field: Any = trt.PluginField  # its signature names a type of text that cannot be made
    own: Any = trt.PluginFieldCollection_
    kinds = trt.PluginFieldType
    return own(trt.PluginFieldCollection([field(name, data, getattr(kinds, kind)) for name, kind, data in made]))
