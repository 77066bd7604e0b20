"""`GemmMemory`: which GEMM algorithm won, kept from one process to the next in a small JSON file.

{"cuBLASLt 130100, NVIDIA H200": {"bfloat16 n=4096 k=4096 ... m=64": "<64 bytes as hex>"}}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from llmbuild.runtime.executors.cuda.cublaslt import ALGO_BYTES, GemmShape


def shape_key(shape: GemmShape, rows: int) -> str:
    """Return a text that stands for a shape and a number of rows."""
    fields = " ".join(f"{name}={value}" for name, value in shape._asdict().items())
    return f"m={rows} {fields}"


class GemmMemory:
    """Choices for one version of the library on one kind of GPU; those of others are kept in the file.

    Args:
        section: Names library and GPU.
        paths: Files to read, and to write: the first that can be written. Unreadable ones are passed over: nothing is
            lost but time.
    """

    def __init__(self, section: str, paths: tuple[Path, ...]) -> None:
        self._section = section
        self._paths = paths
        self._changed = False
        self._choices: dict[str, str] = {}
        for path in reversed(paths):
            held = _read(path).get(section)
            if isinstance(held, dict):
                self._choices |= {k: v for k, v in held.items() if isinstance(k, str) and _is_algo(v)}

    def get(self, key: str) -> bytes | None:
        """Return the algorithm chosen for a key of `shape_key`."""
        text = self._choices.get(key)
        return None if text is None else bytes.fromhex(text)

    def put(self, key: str, algo: bytes) -> None:
        self._choices[key] = algo.hex()
        self._changed = True

    def save(self) -> None:
        """Write what is new, to the first path that can be written; to none if none can."""
        if not self._changed:
            return
        for path in self._paths:
            content = _read(path)
            content[self._section] = dict(sorted(self._choices.items()))
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                beside = path.with_name(f"{path.name}.{os.getpid()}")
                beside.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")
                beside.replace(path)
            except OSError:
                continue
            self._changed = False
            return


def memory_paths(engine: Path) -> tuple[Path, ...]:
    """Return where choices are kept: beside the engine, which itself never changes, else in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return engine.parent / f"{engine.name}.gemm.json", cache / "llmbuild" / "gemm.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_algo(value: Any) -> bool:
    try:
        return len(bytes.fromhex(value)) == ALGO_BYTES
    except (TypeError, ValueError):
        return False
