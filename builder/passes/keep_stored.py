"""When a recipe may keep what the checkpoint stores: asked before any weight is chosen for."""

from __future__ import annotations

from llmbuild.builder.ir import ModelInfo
from llmbuild.errors import ConfigError, UnsupportedError
from llmbuild.quantization.recipes import KeepStored


def check_stored(info: ModelInfo, recipe: str, scheme: KeepStored, option: str) -> None:
    """Refuse to keep what is not there.

    Args:
        recipe: Its name, as given with `option`.

    Raises:
        ConfigError: The checkpoint is not quantized, or not of the recipe's kind.
        UnsupportedError: It is, in groups that no blocks hold.
    """
    if scheme.kind is not None and info.source_kind != scheme.kind:
        raise ConfigError(
            f"recipe {recipe!r} keeps the blocks of a GGUF file, but the model is {info.source_kind!r}",
            where=option,
            hint="use int8-wo or int4-wo to quantize, or none",
        )
    if info.source_kind != "gguf" and info.quantized is None:
        raise ConfigError(
            f"recipe {recipe!r} keeps the weights of a quantized checkpoint, but {info.name!r} is not quantized",
            where=option,
            hint="use int8-wo or int4-wo to quantize, or none",
        )
    if info.scattered:
        others = f" and {len(info.scattered) - 1} more" if len(info.scattered) > 1 else ""
        raise UnsupportedError(
            f"columns were sorted before they were grouped (desc_act, actorder) in {info.scattered[0]}{others}, and "
            "no target reads such groups",
            where=f"{option} {recipe}",
            hint="--quant none dequantizes them exactly, --quant int8-wo rounds that to 8 bits; or quantize the model "
            "again, with desc_act = false",
        )
