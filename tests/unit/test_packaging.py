"""The wheel holds every subpackage, and imports from it alone."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("llmbuild", "plugins", "quantization", "builder", "runtime")


def folders_with_init() -> set[str]:
    found = set()
    for folder in FOLDERS:
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            found.add(".".join(parts if parts[0] == "llmbuild" else ("llmbuild", *parts)))
    return found


def test_every_subpackage_is_listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    assert set(listed) == folders_with_init()
    assert len(listed) == len(set(listed))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")  # setuptools leaves build/ behind: build from a copy
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in names:
        if name.startswith((*(f"{folder}/" for folder in FOLDERS), "pyproject.toml", "README.md", "LICENSE")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)],
        check=True,
        capture_output=True,
    )
    return next(out.glob("*.whl"))


def test_wheel_imports_alone(wheel: Path, tmp_path: Path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        modules = sorted(
            name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for name in archive.namelist()
            if name.endswith(".py")
        )
    assert "llmbuild.py.typed" not in modules and (tmp_path / "llmbuild" / "py.typed").exists()
    code = (
        f"import sys, importlib; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from llmbuild.errors import ConfigError\n"
        f"for name in {modules!r}:\n"
        "    try:\n        importlib.import_module(name)\n"
        # Their base classes are TensorRT's: without TensorRT they say so.
        "    except ConfigError as e:\n        assert name.startswith('llmbuild.plugins.tensorrt.') and e.hint, name\n"
        "        assert name.endswith(('.plugin', '.stored_plugin')), name\n"
        f"import llmbuild; assert llmbuild.__file__.startswith({str(tmp_path)!r}), llmbuild.__file__"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
