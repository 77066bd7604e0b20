"""Recipes: which weights are stored how. The type of a scheme is the key that the passes dispatch on.

find_recipe("int4-wo").linear == WeightOnly(bits=4, granularity=PerGroup(32))
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from llmbuild.errors import ConfigError, nearest


@dataclass(frozen=True)
class PerGroup:
    """One scale for every `size` neighbouring input channels of a row."""

    size: int


@dataclass(frozen=True)
class PerChannel:
    """One scale a row (output channel)."""


@dataclass(frozen=True)
class Plain:
    """Store in the computation dtype; a weight that the checkpoint holds in blocks is dequantized."""


@dataclass(frozen=True)
class KeepStored:
    """Store as the checkpoint does: blocks stay the blocks they are, never rounded again."""


@dataclass(frozen=True)
class WeightOnly:
    """Round to nearest in `bits` bits; activations stay in the computation dtype.

    Args:
        bits: 2 to 8.
        granularity: Which weights share a scale.
        symmetric: Around zero when True; else each group has its own minimum, which costs one more float a group.
    """

    bits: int
    granularity: PerGroup | PerChannel
    symmetric: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ConfigError(f"weight-only quantization takes 2 to 8 bits, not {self.bits}")
        if isinstance(self.granularity, PerGroup) and self.granularity.size < 1:
            raise ConfigError(f"a quantization group needs at least 1 channel, not {self.granularity.size}")

    def __str__(self) -> str:
        shared = "channel" if isinstance(self.granularity, PerChannel) else f"group {self.granularity.size}"
        return f"int{self.bits} per {shared}" + ("" if self.symmetric else ", asymmetric")


Scheme = Plain | KeepStored | WeightOnly


@dataclass(frozen=True)
class Recipe:
    """How each kind of weight is stored; everything that is not a linear or an embedding stays plain.

    Args:
        name: What `--quant` takes.
        summary: One line for help and reports.
        linear: All linears but the last.
        lm_head: The linear that makes the logits. A tied embedding is the same tensor and follows it.
        embedding: Embeddings that are not tied.
        exclude: Patterns (`fnmatch`) over checkpoint names whose weights stay plain.
    """

    name: str
    summary: str
    linear: Scheme
    lm_head: Scheme
    embedding: Scheme
    exclude: tuple[str, ...] = ()

    def excludes(self, tensor: str) -> str | None:
        """Return the pattern that excludes a checkpoint tensor, or None."""
        return next((pattern for pattern in self.exclude if fnmatchcase(tensor, pattern)), None)


INT8 = WeightOnly(bits=8, granularity=PerGroup(32))
INT4 = WeightOnly(bits=4, granularity=PerGroup(32))

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("none", "all weights in the computation dtype", Plain(), Plain(), Plain()),
        Recipe("gguf", "the GGUF file's own blocks, bit for bit", KeepStored(), KeepStored(), KeepStored()),
        Recipe("int8-wo", "8-bit weights in groups of 32", INT8, INT8, Plain()),
        Recipe("int4-wo", "4-bit weights in groups of 32, lm_head in 8 bits", INT4, INT8, Plain()),
    )
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe called `name`.

    Raises:
        ConfigError: There is none; names the nearest.
    """
    if name not in RECIPES:
        raise ConfigError(f"unknown quantization recipe {name!r}", where="--quant", hint=nearest(name, list(RECIPES)))
    return RECIPES[name]
