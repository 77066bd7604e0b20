"""Recipes: which weights are stored how. The type of a scheme is the key that the passes dispatch on.

find_recipe("int4-wo").linear == WeightOnly(bits=4, granularity=PerGroup(32))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from llmbuild.errors import ConfigError, nearest


@dataclass(frozen=True)
class PerGroup:
    """One scale for every `size` neighbouring input channels of a row."""

    size: int


@dataclass(frozen=True)
class PerChannel:
    """One scale a row (output channel)."""


@dataclass(frozen=True)
class PerToken:
    """One scale for each token's activations, found when they come."""


@dataclass(frozen=True)
class PerTensor:
    """One scale for the activations of all tokens, from calibration."""


@dataclass(frozen=True)
class Plain:
    """Store in the computation dtype; a weight that the checkpoint holds in blocks is dequantized."""


@dataclass(frozen=True)
class KeepStored:
    """Store as the checkpoint does: blocks stay the blocks they are, never rounded again.

    Args:
        kind: Only checkpoints of this kind ("gguf"); None: any that is quantized.
        float8_products: Whether what is stored as 8-bit floats is multiplied as such, activations too. Else it is
            dequantized.
    """

    kind: str | None = None
    float8_products: bool = False


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


@dataclass(frozen=True)
class Gptq:
    """Like `rounding`, but what rounding a column loses is made up for by the columns after it (`quantization.gptq`).

    Args:
        damping: Added to the diagonal of the Gram matrix, as a part of its mean.
        act_order: Round columns of large inputs first; the groups stay those of neighbouring columns.
    """

    rounding: WeightOnly
    damping: float = 0.01
    act_order: bool = False

    def __post_init__(self) -> None:
        if not self.damping > 0:
            raise ConfigError(f"GPTQ needs a damping above 0, not {self.damping}")

    def __str__(self) -> str:
        return f"{self.rounding}, GPTQ" + (" by size of inputs" if self.act_order else "")


@dataclass(frozen=True)
class Awq:
    """Like `rounding`, but channels of large inputs are held larger, and what feeds them smaller (`quantization.awq`).

    Args:
        steps: How many exponents above 0, up to 1, are tried.
    """

    rounding: WeightOnly
    steps: int = 20

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"AWQ tries at least 1 exponent, not {self.steps}")

    def __str__(self) -> str:
        return f"{self.rounding}, AWQ"


@dataclass(frozen=True)
class Int8:
    """Products of 8-bit integers: weights rounded to nearest, one scale a row, and activations with one a token."""

    @property
    def rounding(self) -> WeightOnly:
        """How weights are rounded; where activations cannot be, that is all."""
        return WeightOnly(8, PerChannel())

    @property
    def activations(self) -> PerToken:
        return PerToken()

    def __str__(self) -> str:
        return "int8 per channel, activations int8 per token"


@dataclass(frozen=True)
class SmoothQuant:
    """Like `Int8`, but channels of large inputs are held smaller, and their weights larger (`quantization.smooth`).

    Args:
        steps: The exponents that are tried are 0, 1 / steps, .. 1.
    """

    activations: PerToken | PerTensor = PerToken()
    steps: int = 20

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"SmoothQuant tries exponents in at least 1 step, not {self.steps}")

    @property
    def rounding(self) -> WeightOnly:
        """As `Int8.rounding`."""
        return WeightOnly(8, PerChannel())

    def __str__(self) -> str:
        shared = "token" if isinstance(self.activations, PerToken) else "tensor"
        return f"int8 per channel, activations int8 per {shared}, SmoothQuant"


@dataclass(frozen=True)
class Compensation:
    """What rounding a column of a weight loses is made up for by the columns after it (`quantization.gptq`).

    Args:
        damping, act_order: As `Gptq` has them.
    """

    damping: float = 0.01
    act_order: bool = False

    def __post_init__(self) -> None:
        if not self.damping > 0:
            raise ConfigError(f"GPTQ needs a damping above 0, not {self.damping}")


@dataclass(frozen=True)
class Fp8:
    """Products of 8-bit floats (e4m3): weights rounded to nearest, and activations when they come.

    Args:
        activations: Which share a scale. PerToken and PerTensor: weights have one for each row. PerGroup(128): 128
            channels of a token, and blocks of 128 x 128 weights.
        compensation: How weights with a scale a row are rounded instead of to nearest.
    """

    activations: PerToken | PerTensor | PerGroup = PerToken()
    compensation: Compensation | None = None

    def __post_init__(self) -> None:
        if self.compensation is not None and isinstance(self.activations, PerGroup):
            raise ConfigError("GPTQ rounds 8-bit floats with one scale a row, not in blocks")
        if isinstance(self.activations, PerGroup) and self.activations.size != 128:
            raise ConfigError(f"products of 8-bit floats have blocks of 128 channels, not {self.activations.size}")

    def __str__(self) -> str:
        if isinstance(self.activations, PerGroup):
            return "fp8 in blocks of 128 x 128, activations fp8 per 128 channels of a token"
        shared = "token" if isinstance(self.activations, PerToken) else "tensor"
        how = "" if self.compensation is None else ", GPTQ"
        return f"fp8 per channel{how}, activations fp8 per {shared}"


Calibrated = Gptq | Awq | SmoothQuant  # schemes that need statistics of what a linear reads
Int8Products = Int8 | SmoothQuant
Scheme = Plain | KeepStored | WeightOnly | Gptq | Awq | Int8 | SmoothQuant | Fp8


def observes(scheme: Scheme) -> bool:
    """Whether a scheme needs statistics of what a linear reads."""
    if isinstance(scheme, Fp8):
        return scheme.compensation is not None or isinstance(scheme.activations, PerTensor)
    return isinstance(scheme, Calibrated)


def needs_gram(scheme: Scheme) -> bool:
    """Whether the statistics that a scheme needs include the Gram matrix of what a linear reads."""
    return isinstance(scheme, Gptq) or (isinstance(scheme, Fp8) and scheme.compensation is not None)


KV_CACHES = ("fp8", "int8")


@dataclass(frozen=True)
class KvCache:
    """A KV cache in 8 bits, whatever the weights are.

    Args:
        dtype: "fp8": e4m3, with one scale for the keys of a layer and one for its values. "int8": with a scale for each
            token and head, which is found when it is written.
        stored: The scales of fp8 are those of the checkpoint; else they are calibrated.
    """

    dtype: Literal["fp8", "int8"]
    stored: bool = False

    @property
    def calibrated(self) -> bool:
        """Whether it needs statistics of keys and values."""
        return self.dtype == "fp8" and not self.stored

    @property
    def name(self) -> str:
        """What engines call it."""
        return {"fp8": "float8_e4m3fn", "int8": "int8"}[self.dtype]


@dataclass(frozen=True)
class LayerRule:
    """Weights whose checkpoint name matches `pattern` (`fnmatch`) are stored as `recipe` stores its linears."""

    pattern: str
    recipe: str
    scheme: Scheme


@dataclass(frozen=True)
class Recipe:
    """How each kind of weight is stored; everything that is not a linear or an embedding stays plain.

    Args:
        name: What `--quant` takes.
        summary: One line for help and reports.
        linear: All linears but the last.
        lm_head: The linear that makes the logits. A tied embedding is the same tensor and follows it.
        embedding: Embeddings that are not tied.
        exclude: Patterns (`fnmatch`) over checkpoint names whose weights stay plain. They come before `layers`.
        layers: Weights that are stored otherwise. The first rule that matches counts.
        kv_cache: None for one in the computation dtype.
    """

    name: str
    summary: str
    linear: Scheme
    lm_head: Scheme
    embedding: Scheme
    exclude: tuple[str, ...] = ()
    layers: tuple[LayerRule, ...] = ()
    kv_cache: KvCache | None = None

    @property
    def calibrated(self) -> bool:
        """Whether it needs statistics of what linears read, or of keys and values."""
        if self.kv_cache is not None and self.kv_cache.calibrated:
            return True
        schemes = (self.linear, self.lm_head, *(rule.scheme for rule in self.layers))
        return any(observes(scheme) for scheme in schemes)

    @property
    def float8(self) -> str | None:
        """The name of the recipe, this or that of a rule, that asks for products of 8-bit floats; None if none does."""
        asked = [(self.name, self.linear), (self.name, self.lm_head), *((r.recipe, r.scheme) for r in self.layers)]
        return next((name for name, scheme in asked if isinstance(scheme, Fp8)), None)

    @property
    def keeps_stored(self) -> bool:
        """Whether weights may stay as the checkpoint stores them."""
        return any(isinstance(s, KeepStored) for s in (self.linear, self.lm_head, *(r.scheme for r in self.layers)))

    def excludes(self, tensor: str) -> str | None:
        """Return the pattern that excludes a checkpoint tensor, or None."""
        return next((pattern for pattern in self.exclude if fnmatchcase(tensor, pattern)), None)

    def rule_of(self, tensor: str) -> LayerRule | None:
        """Return the rule that a checkpoint tensor follows instead of its role, or None."""
        return next((rule for rule in self.layers if fnmatchcase(tensor, rule.pattern)), None)


def weight_only(name: str, scheme: WeightOnly, lm_head: WeightOnly) -> Recipe:
    """Return a recipe for linears of one scheme; embeddings that are not tied stay plain."""
    head = "" if lm_head == scheme else f", lm_head {lm_head}"
    return Recipe(name, f"{scheme}{head}", scheme, lm_head, Plain())


INT8 = WeightOnly(bits=8, granularity=PerGroup(32))
INT4 = WeightOnly(bits=4, granularity=PerGroup(32))
GGUF = KeepStored("gguf")
INT8_CHANNEL = WeightOnly(bits=8, granularity=PerChannel())
GPTQ = Gptq(WeightOnly(bits=4, granularity=PerGroup(128)))
AWQ = Awq(WeightOnly(bits=4, granularity=PerGroup(128)))

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("none", "all weights in the computation dtype", Plain(), Plain(), Plain()),
        Recipe("gguf", "the GGUF file's own blocks, bit for bit", GGUF, GGUF, GGUF),
        Recipe("stored", "what a quantized checkpoint stores, bit for bit", KeepStored(), KeepStored(), KeepStored()),
        Recipe("int8-wo", "8-bit weights in groups of 32", INT8, INT8, Plain()),
        Recipe("int4-wo", "4-bit weights in groups of 32, lm_head in 8 bits", INT4, INT8, Plain()),
        weight_only("int8-wo-channel", INT8_CHANNEL, INT8_CHANNEL),
        *(
            weight_only(f"int4-wo-g{size}{suffix}", WeightOnly(4, PerGroup(size), symmetric), INT8)
            for symmetric, suffix in ((True, ""), (False, "-asym"))
            for size in (128, 64, 32)
        ),
        Recipe("int4-awq", f"{AWQ}, lm_head {INT8}", AWQ, INT8, Plain()),
        Recipe("int4-gptq", f"{GPTQ}, lm_head {INT8}", GPTQ, INT8, Plain()),
        *(
            Recipe(name, f"{scheme}, lm_head {'too' if head == scheme else 'plain'}", scheme, head, Plain())
            for name, scheme, head in (
                ("fp8", Fp8(), Plain()),
                ("fp8-lm-head", Fp8(), Fp8()),
                ("fp8-gptq", Fp8(compensation=Compensation()), Plain()),
                ("fp8-static", Fp8(PerTensor()), Plain()),
                ("fp8-block", Fp8(PerGroup(128)), Plain()),
            )
        ),
        *(
            Recipe(name, f"{scheme}, lm_head {INT8}", scheme, INT8, Plain())
            for name, scheme in (
                ("int8", Int8()),
                ("int8-sq", SmoothQuant()),
                ("int8-sq-static", SmoothQuant(PerTensor())),
            )
        ),
    )
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe called `name`.

    Raises:
        ConfigError: There is none; names the nearest.
    """
    return named(name, "--quant")


def named(name: str, option: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(f"unknown quantization recipe {name!r}", where=option, hint=nearest(name, list(RECIPES)))
    return RECIPES[name]


def customized(name: str, exclude: Sequence[str], layers: Sequence[str]) -> Recipe:
    """Return the recipe called `name` with what the user wants otherwise.

    Args:
        exclude: Patterns over checkpoint names, as `--exclude` takes them.
        layers: "PATTERN=RECIPE" each, as `--quant-layer` takes them; the part after the last "=" is the recipe.

    Raises:
        ConfigError: A recipe is unknown, a pattern is empty, or the recipe quantizes nothing.
    """
    recipe = find_recipe(name)
    if exclude and isinstance(recipe.linear, Plain) and not layers:
        raise ConfigError(
            f"recipe {name!r} quantizes nothing, so that there is nothing to exclude",
            where="--exclude",
            hint="leave it out, or choose a recipe with --quant",
        )
    if "" in exclude:
        raise ConfigError("the pattern is empty", where="--exclude", hint="give one such as '*.o_proj.*'")
    return replace(recipe, exclude=(*recipe.exclude, *exclude), layers=tuple(map(parse_rule, layers)))


def multiplying_float8(recipe: Recipe) -> Recipe:
    """Return a recipe for targets that multiply 8-bit floats: those that a checkpoint stores are kept as such."""

    def with_products(scheme: Scheme) -> Scheme:
        return replace(scheme, float8_products=True) if isinstance(scheme, KeepStored) else scheme

    rules = tuple(replace(rule, scheme=with_products(rule.scheme)) for rule in recipe.layers)
    linear, head = with_products(recipe.linear), with_products(recipe.lm_head)
    return replace(recipe, linear=linear, lm_head=head, layers=rules)


def parse_rule(text: str) -> LayerRule:
    """Return the rule of "PATTERN=RECIPE"."""
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise ConfigError(
            f"{text!r} is not PATTERN=RECIPE", where="--quant-layer", hint="such as '*.layers.0.*=int8-wo'"
        )
    return LayerRule(pattern, name, named(name, "--quant-layer").linear)
