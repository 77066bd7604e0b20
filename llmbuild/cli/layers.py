"""What `llmbuild inspect --plan` shows of a TensorRT engine: layers after fusion, profiles, memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from llmbuild.cli.console import print_json, print_table
from llmbuild.units import human_size

if TYPE_CHECKING:
    from llmbuild.engine.reader import Engine


def print_layers_of(engine: Engine, *, as_json: bool = False) -> None:
    """Print an engine's `plan/layers.json`, which the builder's log told."""
    listing = json.loads(engine.file(engine.manifest.target.section["layers"]).read_text(encoding="utf-8"))
    if as_json:
        print_json(listing)
        return
    for number, profile in enumerate(listing["profiles"]):
        activations = listing["memory"]["activations"]
        size = f", {human_size(activations[number])} of activations" if number < len(activations) else ""
        rows = [
            (name, *("x".join(map(str, shape)) for shape in shapes))
            for name, shapes in profile.items()
            if not name.startswith(("keys.", "values."))
        ]
        print_table(f"Profile {number}{size}", ("input", "least", "usual", "most"), rows)
    rows = [
        (
            str(layer["profile"]),
            layer["kind"],
            types(layer["weights"]),
            types(layer["outputs"]),
            " ".join(layer["nodes"]),
        )
        for layer in listing["layers"]
    ]
    beside = " beside the engine, put back when it is loaded" if listing.get("stripped") else ""
    title = f"{len(rows)} layers, {human_size(listing['memory']['weights'])} of weights{beside}"
    print_table(title, ("profile", "kind", "weights", "outputs", "graph nodes"), rows)
    plugins = listing.get("plugins", {})
    if plugins:
        names = list(next(iter(plugins.values())))
        rows = [(name, *(str(each[name]) for each in plugins.values())) for name in names]
        print_table("Fields of the plugins", ("field", *plugins), rows)


def types(names: list[str]) -> str:
    return " ".join(dict.fromkeys(names))
