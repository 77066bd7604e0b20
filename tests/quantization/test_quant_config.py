"""Files of recipes by weight: what they hold, what is refused, and that they do what the options do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmbuild.builder.options import BuildConfig, choose
from llmbuild.builder.quant_config import Layer, QuantConfig, read_quant_config
from llmbuild.errors import ConfigError

CONFIG = QuantConfig(
    version=1,
    quant="int4-wo",
    layers=(Layer(pattern="*.down_proj.*", recipe="int8-wo"), Layer(pattern="lm_head.*", recipe="int8-wo-channel")),
    exclude=("*.o_proj.*",),
    search={"max_kl": 0.1},
)


def written(path: Path, **changes: Any) -> Path:
    data = json.loads(CONFIG.to_json())
    data.update(changes)
    path.write_text(json.dumps({key: value for key, value in data.items() if value != "LEFT OUT"}))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(CONFIG.to_json())
    found = read_quant_config(tmp_path / "c.json")
    assert found == CONFIG and found.to_json() == CONFIG.to_json()
    assert found.quant_layers == ("*.down_proj.*=int8-wo", "lm_head.*=int8-wo-channel")


def test_it_stands_for_the_three_options(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": tmp_path, "output": tmp_path / "e", "target": "cpu"}
    config = BuildConfig(**options, quant_config=written(tmp_path / "c.json"))
    assert (config.quant, config.exclude, config.quant_config) == ("int4-wo", ("*.o_proj.*",), None)
    assert replace(config, max_seq_len=9).quant_layers == CONFIG.quant_layers
    same = BuildConfig(**options, quant="int4-wo", exclude=("*.o_proj.*",), quant_layers=CONFIG.quant_layers)
    assert choose(config).recipe == choose(same).recipe


@pytest.mark.parametrize("given", [{"quant": "none"}, {"exclude": ("*",)}, {"quant_layers": ("*=none",)}])
def test_not_together_with_them(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--quant-config says all that --"):
        BuildConfig(model=tmp_path, output=tmp_path, quant_config=written(tmp_path / "c.json"), **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "quant config of version 2; this llmbuild reads version 1"),
        ({"version": True}, "quant config of version True"),
        ({"version": "LEFT OUT"}, "quant config of version None"),
        ({"quant": "LEFT OUT"}, "quant: Field required"),
        ({"quant": None}, "quant: Input should be a valid string"),
        ({"kv": "int8"}, "kv: Extra inputs are not permitted"),
        ({"layers": [{"pattern": "*"}]}, "layers.0.recipe: Field required"),
        ({"layers": {"*": "int8-wo"}}, "layers: Input should be a valid"),
        ({"quant": "int5"}, "unknown quantization recipe 'int5'"),
        ({"layers": [{"pattern": "*", "recipe": "int5"}]}, "unknown quantization recipe 'int5'"),
        ({"layers": [{"pattern": "", "recipe": "int8"}]}, "is not PATTERN=RECIPE"),
        ({"exclude": [""]}, "the pattern is empty"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_quant_config(written(tmp_path / "c.json", **changes))
    assert message in caught.value.what
    assert caught.value.where == f"--quant-config {tmp_path / 'c.json'}" and caught.value.hint


@pytest.mark.parametrize("content", ["", "[]", "{", '{"version": 1, "version": 1}', "\xff"])
def test_what_is_no_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError):
        read_quant_config(tmp_path / "c.json")


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="there is no file"):
            read_quant_config(path)
