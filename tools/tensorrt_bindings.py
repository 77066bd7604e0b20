"""The Python bindings of any TensorRT, without its libraries: for tests of the plugin, and to type-check it.

    python tools/tensorrt_bindings.py build/trt-11.4 --version 11.4.0.106
    LLMBUILD_TENSORRT_BINDINGS=build/trt-11.4 pytest tests/plugins_tensorrt
    python tools/tensorrt_bindings.py build/trt-11.4 --version 11.4.0.106 --check

The wheel of the bindings is on PyPI, the libraries of the full TensorRT are not. The bindings ask them for nine C
functions, and for none of them when classes of plugins are defined, made and called: libraries whose functions return
null let them load. --check makes stubs of the bindings (needs pybind11-stubgen) and runs mypy with them over the
plugin and all else that calls TensorRT. --python fetches wheels for another Python than this one, for another machine.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
CHECKED = (
    "plugins/tensorrt/*.py",
    "builder/targets/tensorrt/build_process.py",
    "builder/targets/tensorrt/opened.py",
    "runtime/executors/tensorrt/session.py",
    "runtime/executors/tensorrt/streaming.py",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--package", choices=("tensorrt", "tensorrt-rtx"), default="tensorrt")
    parser.add_argument("--version", required=True, help="such as 11.4.0.106; of tensorrt-rtx 1.7.1.116")
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument(
        "--check", action="store_true", help="type-check all that calls TensorRT against these bindings"
    )
    given = parser.parse_args()
    fetch(given.folder, given.package, given.version, given.python)
    if given.check:
        sys.exit(check(given.folder, given.package))


def fetch(folder: Path, package: str, version: str, python: str) -> None:
    """Fill a folder for `sys.path`: the bindings, libraries for them, and a package of the name that users import."""
    module = package.replace("-", "_")
    with tempfile.TemporaryDirectory() as wheels:
        only = ["--only-binary", ":all:", "--no-deps", "--python-version", python, "-q", "-d", wheels]
        pip = [sys.executable, "-m", "pip", "download", *only, f"{package}-cu13-bindings=={version}"]
        subprocess.run(pip, check=True)
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    libraries = folder / "libraries"
    libraries.mkdir(exist_ok=True)
    names = sorted(needed(folder / f"{module}_bindings" / f"{module}.so"))
    source = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in FUNCTIONS)
    for name in names:
        options = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", "-", "-o", str(libraries / name)]
        subprocess.run([os.environ.get("CC", "cc"), *options], input=source, text=True, check=True)
    (folder / module).mkdir(exist_ok=True)
    (folder / module / "__init__.py").write_text(
        "import ctypes\n"
        "import sys\n"
        "from pathlib import Path\n\n"
        f"for name in {names!r}:\n"
        '    ctypes.CDLL(str(Path(__file__).parents[1] / "libraries" / name), mode=ctypes.RTLD_GLOBAL)\n'
        f"import {module}_bindings\n\n"
        f"sys.modules[__name__] = {module}_bindings  # tensorrt.plugin, too, is then that of the bindings\n"
    )


def needed(library: Path) -> set[str]:
    """Return which of TensorRT's libraries a library asks for."""
    import re

    found = re.findall(rb"\0(lib(?:nvinfer|nvonnxparser|tensorrt)\w*\.so\.\d+)", library.read_bytes())
    return {name.decode() for name in found}


def repaired(line: str) -> str:
    """Return a line of a stub as it is meant: stubs are made from what TensorRT's docstrings say.

    They name parameters `in`, which no Python may; take the parameter of get_aliased_input for self; and say what
    calls from Python may pass (SupportsInt), where the plugin's methods are called with plain integers.
    """
    if not line.lstrip().startswith("def "):
        return line
    line = line.replace("(in: ", "(in_: ").replace(", in: ", ", in_: ")
    line = line.replace("get_aliased_input(self: ", "get_aliased_input(self, output_index: ")
    line = line.replace("typing.SupportsInt", "int")
    try:
        ast.parse(line.strip() + " ...")
    except SyntaxError:
        name = line.split("(")[0]
        return f"{name}(self, *arguments: typing.Any, **named: typing.Any) -> typing.Any:\n"
    return line


def check(folder: Path, package: str) -> int:
    """Make stubs of the bindings and type-check what calls TensorRT against them; return mypy's exit code."""
    module = package.replace("-", "_")
    stubs = (folder / "stubs").resolve()
    code = f"import {module}, pybind11_stubgen as s; s.main(['{module}_bindings', '-o', {str(stubs)!r}])"
    quiet = [sys.executable, "-c", code.replace("])", ", '--ignore-all-errors'])")]
    subprocess.run(quiet, env={**os.environ, "PYTHONPATH": str(folder)}, check=True, stdout=subprocess.DEVNULL)
    for file in stubs.rglob("*.pyi"):
        file.write_text("".join(map(repaired, file.read_text().splitlines(keepends=True))))
    (stubs / "tensorrt").mkdir(exist_ok=True)
    (stubs / "tensorrt" / "__init__.pyi").write_text(f"from {module}_bindings.{module} import *\n__version__: str\n")
    with tempfile.TemporaryDirectory() as tree:
        package_root = Path(tree, "llmbuild")
        package_root.mkdir()
        for item in (*(ROOT / "llmbuild").iterdir(), ROOT / "plugins", ROOT / "builder", ROOT / "runtime"):
            (package_root / item.name).symlink_to(item)
        files = [str(path) for name in CHECKED for path in sorted(package_root.glob(name))]
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            "--follow-imports=silent",
        ]
        command += ["--cache-dir", str(folder / "mypy"), *files]
        environment = {**os.environ, "MYPYPATH": f"{stubs}:{tree}"}
        said = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True).stdout.splitlines()
    ours = [line for line in said if line.startswith("llmbuild/")]  # what is wrong in the stubs is not ours
    print("\n".join([*ours, f"{len(files)} files checked against {package}"]) if said else "mypy said nothing")
    return int(bool(ours) or not said)


if __name__ == "__main__":
    main()
