"""A file that says which recipe each weight follows: `llmbuild autoquant` writes it, `convert --quant-config` reads it.

    {"version": 1, "quant": "int4-wo",
     "layers": [{"pattern": "model.layers.0.mlp.down_proj.weight", "recipe": "int8-wo"}],
     "exclude": ["lm_head.weight"],
     "search": null}

`quant`, `layers` and `exclude` are what `--quant`, `--quant-layer` and `--exclude` take, and have the same effect.
`search` tells where they come from; no build reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmbuild.engine.manifest import Section
from llmbuild.errors import ConfigError, UserError

VERSION = 1
OPTION = "--quant-config"


class Layer(Section):
    """Weights whose checkpoint name matches `pattern` (`fnmatch`) follow the linears of `recipe`."""

    pattern: str
    recipe: str


class QuantConfig(Section):
    """See the module. Of several layers that match, the first counts; what is excluded comes before all."""

    version: int
    quant: str
    layers: tuple[Layer, ...]
    exclude: tuple[str, ...]
    search: dict[str, Any] | None = None

    @property
    def quant_layers(self) -> tuple[str, ...]:
        """The layers as `--quant-layer` takes them."""
        return tuple(f"{layer.pattern}={layer.recipe}" for layer in self.layers)

    def to_json(self) -> str:
        """Return the text of the file, the same for equal configs."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def read_quant_config(path: Path) -> QuantConfig:
    """Read and check a file.

    Raises:
        ConfigError: It is not there, no JSON, of another version, has a field too many or too few, or names an unknown
            recipe.
    """
    from llmbuild.quantization.recipes import customized

    where = f"{OPTION} {path}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"there is no file {path}", where=OPTION, hint="llmbuild autoquant writes one") from None
    except ValueError as error:
        raise ConfigError(f"it is not JSON: {error}", where=where, hint="llmbuild autoquant writes one") from None
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(
            f"quant config of version {version!r}; this llmbuild reads version {VERSION}",
            where=where,
            hint="write it with the autoquant of this version",
        )
    try:
        found = QuantConfig.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{field}: {first['msg']}", where=where, hint="fields are version, quant, layers, exclude and search"
        ) from None
    try:
        customized(found.quant, found.exclude, found.quant_layers)
    except UserError as error:
        raise ConfigError(error.what, where=where, hint=error.hint) from None
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} is given twice")
    return dict(pairs)
