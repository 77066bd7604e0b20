"""docs/life_of_a_request.md: its code runs, and its files exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.fake_executor import FakeExecutor
from support.requests import LIMITS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "life_of_a_request.md").read_text("utf-8")


def test_the_code_on_the_page_runs() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {"executor": FakeExecutor(LIMITS, num_blocks=8, block_size=4), "limits": LIMITS}
    exec(code, names)
    assert {name: len(tokens) for name, tokens in names["finished"].items()} == {"a": 5, "b": 5}
    assert names["core"].num_free_blocks == 8


def test_the_files_on_the_page_exist_and_none_is_left_out() -> None:
    named = set(re.findall(r"[\w/]+\.py", PAGE))
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "runtime" / name).exists()]
    assert not missing
    files = {str(path.relative_to(ROOT / "runtime")) for path in (ROOT / "runtime").rglob("*.py")}
    assert {name for name in files if "__init__" not in name and not name.startswith("executors/")} <= named
