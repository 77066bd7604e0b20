"""The commands in README.md, CONTRIBUTING.md and docs/*.md do what the pages say."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.console_blocks import Command, find_commands, first_missing, run_command
from support.warm_command import serve_warm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_WITH_COMMANDS = [page for page in PAGES if page.exists() and find_commands(page.read_text(encoding="utf-8"))]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Where the commands of a page run, one after another. `model/` is a tiny Llama with tokenizer and template."""
    from support.tiny_models import save_tiny, tiny_model

    save_tiny(tiny_model("llama"), tmp_path / "model")
    return tmp_path


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Iterator[Path]:
    """A folder with `llmbuild`."""
    with serve_warm(tmp_path_factory.mktemp("warm")) as found:
        yield found


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page, folder, warm):
    tools = (str(warm), str(Path(sys.executable).parent))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*tools, os.environ["PATH"]]),
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }
    for command in find_commands(page.read_text(encoding="utf-8")):
        difference = run_command(command, folder, environment)
        assert difference is None, f"{page.relative_to(ROOT)}, {difference}"


# --- the runner itself ------------------------------------------------------------------------------------------------

SAMPLE = """Text.

```console
$ echo one; echo two
one
$ printf '%s\\n' \\
>     x
x
```

```sh
$ false
```

```console exit=3
$ exit 3
```
"""


def test_commands_are_found():
    assert find_commands(SAMPLE) == [
        Command(4, "echo one; echo two", 0, ["one"]),
        Command(6, "printf '%s\\n' \\\n    x", 0, ["x"]),
        Command(16, "exit 3", 3),
    ]


def test_a_block_that_begins_with_output_is_refused():
    with pytest.raises(ValueError, match="line 2: a console block begins with a command"):
        find_commands("```console\nhello\n```\n")


def test_sample_runs(tmp_path):
    assert [run_command(command, tmp_path, os.environ) for command in find_commands(SAMPLE)] == [None] * 3


def test_wrong_exit_code_and_wrong_output_are_told(tmp_path):
    told = run_command(Command(7, "echo hi; exit 4", 0), tmp_path, os.environ)
    assert told == "line 7: $ echo hi; exit 4\nexit code 4, expected 0\nhi\n"
    told = run_command(Command(7, "echo hi", 0, ["ho"]), tmp_path, os.environ)
    assert told == "line 7: $ echo hi\nthe output has no line like 'ho' here:\nhi\n"


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        (["a", "c"], None),
        (["c", "a"], "a"),
        (["a", "...", "c"], None),
        (["b 1... s"], None),
        (["b 2... s"], "b 2... s"),
        (["  a  "], None),
        (["a.c"], "a.c"),
    ],
)
def test_matching(shown, missing):
    assert first_missing(shown, "a\nb 1.5 s\nc\n") == missing
