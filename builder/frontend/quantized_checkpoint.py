"""A quantized checkpoint under the model's own names: the tensors of a module become its weight, the rest stays."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from llmbuild.builder.frontend.cache_scales import CACHE_SUFFIXES, cache_scales
from llmbuild.builder.frontend.quantized_weight import QuantizedWeight
from llmbuild.builder.frontend.safetensors_checkpoint import SafetensorsCheckpoint
from llmbuild.builder.ir import WeightExpr
from llmbuild.errors import ModelError
from llmbuild.quantization.formats import Format, Layout


class QuantizedCheckpoint:
    """A `Checkpoint`: what `format` stores quantized is one weight each, other tensors are as they are.

    Attributes:
        scattered: Names of weights whose groups are not of neighbouring columns: no blocks hold them.
        cache_scales: By layer, those of keys and values of an fp8 KV cache; empty unless all layers have them.

    Raises:
        ModelError: Tensors of a module are missing or contradict each other or the config.
        UnsupportedError: They mean something that cannot be read exactly.
    """

    kind = "huggingface"

    def __init__(self, stored: SafetensorsCheckpoint, format: Format) -> None:
        self.files: tuple[Path, ...] = stored.files
        self._weights: dict[str, WeightExpr] = {}
        modules: dict[str, dict[str, WeightExpr]] = {}
        unused: Counter[str] = Counter()
        self.cache_scales = cache_scales(stored)
        for name in stored.names():
            module, _, suffix = name.rpartition(".")
            if suffix in format.suffixes:
                modules.setdefault(module, {})[suffix] = stored.weight(name)
            elif self.cache_scales and suffix in CACHE_SUFFIXES:
                continue
            elif suffix in format.unused:
                unused[f"*.{suffix}, {format.unused[suffix]}"] += 1
            else:
                self._weights[name] = stored.weight(name)
        layouts: dict[str, Layout] = {}
        for module, parts in modules.items():
            layout = format.layout(module, parts)
            if layout is None:
                self._weights.update({f"{module}.{suffix}": part for suffix, part in parts.items()})
                continue
            weight = f"{module}.weight"
            if weight in self._weights:
                raise ModelError(f"{module!r} is stored both quantized and as it is")
            layouts[weight] = layout
            self._weights[weight] = QuantizedWeight(weight, layout, parts)
        self.scattered = tuple(name for name, layout in layouts.items() if layout.scattered)
        self.notices = (*stored.notices, *told(format, layouts, unused))

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._weights))

    def weight(self, name: str) -> WeightExpr:
        return self._weights[name]


def told(format: Format, layouts: dict[str, Layout], unused: Counter[str]) -> list[str]:
    """Return lines for the report: what is stored how, and what is not used."""
    kinds = Counter(layout.label for layout in layouts.values())
    lines = [f"{count} weights stored as {label}" for label, count in sorted(kinds.items())]
    if not layouts:
        lines.append(f"no weight is stored quantized, although the config describes {format.label}")
    wide = [name for name, layout in layouts.items() if layout.block_format is None and not layout.scattered]
    wide = [name for name in wide if not layouts[name].label.split(",")[0].endswith("float8")]
    if wide:
        lines.append(f"dequantized, as zero points with float32 scales are in no blocks exactly: {len(wide)} weights")
    lines += format.notices
    lines += [f"not used yet: {count} tensors {what}" for what, count in sorted(unused.items())]
    return lines
