"""Which part may import which: llmbuild <- plugins <- quantization <- builder, and llmbuild <- plugins <- runtime."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "llmbuild": set(),
    "plugins": {"llmbuild"},
    "quantization": {"llmbuild", "plugins"},
    "builder": {"llmbuild", "plugins", "quantization"},
    "runtime": {"llmbuild", "plugins"},
}
HEAVY = {"torch", "transformers", "onnx", "onnxscript", "gguf", "triton"}


def part_of(module: str) -> str | None:
    """The part that a module name belongs to; None outside this project."""
    names = module.split(".")
    if names[0] != "llmbuild":
        return None
    return names[1] if len(names) > 1 and names[1] in ALLOWED else "llmbuild"


def imports(tree: ast.Module, *, lazy: bool, types: bool) -> list[tuple[int, str]]:
    """(line, module) of the imports. lazy: those inside functions too. types: those for the type checker only too."""
    found: list[tuple[int, str]] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.append((node.lineno, node.module or ""))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (lazy or not in_function) and (types or not is_type_checking(node)):
            waiting += ast.iter_child_nodes(node)
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_what_lies_below_it(part: str) -> None:
    wrong = []
    for path in sorted((ROOT / part).rglob("*.py")):
        # llmbuild's commands and lazy names reach upwards when they are used. Types may be named across; but the
        # runtime does not even know the builder's.
        tree = ast.parse(path.read_text("utf-8"))
        for line, module in imports(tree, lazy=part != "llmbuild", types=part == "runtime"):
            target = part_of(module)
            if target is not None and target not in ALLOWED[part] | {part}:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", ["llmbuild", "runtime"])
def test_what_serves_needs_no_builder_library(part: str) -> None:
    wrong = []
    for path in sorted((ROOT / part).rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        for line, module in imports(tree, lazy=part != "llmbuild", types=part == "runtime"):
            if module.split(".")[0] in HEAVY:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_checker_sees_what_it_looks_for() -> None:
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import llmbuild.builder.ir\n"
        "def f():\n    from llmbuild import builder\n"
        "from llmbuild.runtime.llm import LLM\n"
    )
    everything = {part_of(module) for _, module in imports(tree, lazy=True, types=True)}
    assert everything == {"builder", "llmbuild", "runtime", None}
    assert {part_of(module) for _, module in imports(tree, lazy=False, types=False)} == {"runtime", None}
    assert "llmbuild.builder.ir" in [module for _, module in imports(tree, lazy=False, types=True)]
    assert "llmbuild.builder" in [module for _, module in imports(tree, lazy=True, types=False)]
