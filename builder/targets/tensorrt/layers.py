"""What the builder's log says about an engine: its layers after fusion, and how much memory they take.

TensorRT tells this only of engines that it has opened, which takes a GPU; the builder of tensorrt-rtx writes the same
into its log. The full TensorRT builds where its GPU is: there the engine is asked (`inspected_layers`).

    Name: _gemm_mha_v2_myl0_14, LayerType: kgen, Inputs: [ { Name: .., Datatype: BFloat16, .. }], Constants: [],
    Outputs: [ .. ], TacticName: .., StreamId: 0, Metadata: [ONNX Layer: paged_attention][ONNX Layer: ..]
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<kind>\w+), Inputs: (?P<inputs>.*), Constants: (?P<constants>.*), "
    r"Outputs: (?P<outputs>.*?), TacticName: .*?, StreamId: \d+, Metadata: ?(?P<nodes>.*)$"
)
PROFILE = re.compile(r"_myl(\d+)_\d+$")
NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
DATATYPE = re.compile(r"Datatype: (\w+)")


def layers(log: Sequence[str]) -> list[dict[str, Any]]:
    """Return the engine's layers in order.

    Each has name, kind, profile, inputs, weights and outputs (their types, in order), and nodes: the graph's nodes that
    became part of it.
    """
    listing = next((message for message in log if message.startswith("Layers:")), "")
    found = (LAYER.match(line) for line in listing.splitlines())
    return [layer(match) for match in found if match is not None]


def layer(match: re.Match[str]) -> dict[str, Any]:
    profile = PROFILE.search(match["name"])
    # A node of the graph may be several operators of ONNX: linear_3, linear_3.1.
    nodes = dict.fromkeys(name.split(".")[0] for name in NODE.findall(match["nodes"]))
    return {
        "name": match["name"],
        "kind": match["kind"],
        "profile": int(profile[1]) if profile else 0,
        "inputs": DATATYPE.findall(match["inputs"]),
        "weights": DATATYPE.findall(match["constants"]),
        "outputs": DATATYPE.findall(match["outputs"]),
        "nodes": list(nodes),
    }


def inspected_layers(text: str) -> list[dict[str, Any]]:
    """Return the layers that an engine of the full TensorRT tells of itself, as `layers` does.

    Args:
        text: JSON of `EngineInspector.get_engine_information`, of an engine built with detailed verbosity; of others
            layers are names alone.
    """
    return [inspected(each) for each in json.loads(text)["Layers"]]


def inspected(found: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"Name": found} if isinstance(found, str) else found
    name, tensors = described["Name"], lambda key: [t["Format/Datatype"] for t in described.get(key, [])]
    profile = re.search(r" \[profile (\d+)\]$", name)
    weights = [each["Type"] for key in ("Weights", "Bias") if isinstance(each := described.get(key), dict)]
    nodes = dict.fromkeys(node.split(".")[0] for node in NODE.findall(described.get("Metadata", "")))
    return {
        "name": name,
        "kind": described.get("LayerType", ""),
        "profile": int(profile[1]) if profile else 0,
        "inputs": tensors("Inputs"),
        "weights": [each for each in weights if each],
        "outputs": tensors("Outputs"),
        "nodes": list(nodes),
    }


def memory(log: Sequence[str]) -> dict[str, Any]:
    """Return bytes: activations of each profile, and weights."""
    amounts = {kind: [int(m.split(": ")[1].split()[0]) for m in log if m.startswith(kind)] for kind in KINDS}
    return {"activations": amounts[KINDS[0]], "weights": sum(amounts[KINDS[1]])}


KINDS = ("Total Activation Memory", "Total Weights Memory")
