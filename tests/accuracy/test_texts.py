"""The text that accuracy is measured on: files, and documentation strings that nobody has to trust."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmbuild.builder.accuracy import texts
from llmbuild.builder.accuracy.texts import (
    docstrings,
    documentation_strings,
    documented_modules,
    load_text,
    module_files,
    read_text,
)
from llmbuild.errors import ConfigError

OPTION = "--text"


def test_modules_serve_one_purpose_and_are_sorted() -> None:
    calibration, evaluation = documented_modules("calibration"), documented_modules("evaluation")
    assert not set(calibration) & set(evaluation)
    assert calibration == sorted(calibration) and evaluation == sorted(evaluation)
    assert len(calibration) > 50 and len(evaluation) > 50
    assert {"json", "argparse"} <= {*calibration, *evaluation}
    assert not {"test", "this", "antigravity", "_pydecimal"} & {*calibration, *evaluation}


def test_purposes_share_no_long_string() -> None:
    """Modules that repeat one another (decimal and _pydecimal) would make the measured text a calibrated one."""
    strings = {}
    for purpose in ("calibration", "evaluation"):
        files = [path for name in documented_modules(purpose) for path in module_files(name)]
        strings[purpose] = {text for path in files for text in docstrings(path) if len(text) > 1000}
    assert not strings["calibration"] & strings["evaluation"]


def test_the_same_text_twice_and_whole_modules() -> None:
    short = documentation_strings("evaluation", 5_000)
    assert short == documentation_strings("evaluation", 5_000)
    assert short.sha256 == documentation_strings("evaluation", 5_000).sha256
    longer = documentation_strings("evaluation", 50_000)
    assert len(longer.content) >= 50_000 > len(short.content) >= 5_000
    assert longer.content.startswith(short.content)
    assert documentation_strings("calibration", 5_000).sha256 != short.sha256
    assert "(evaluation)" in short.source and "Python 3." in short.source


def test_nothing_of_the_library_is_imported() -> None:
    code = (
        "import sys\n"
        "from llmbuild.builder.accuracy.texts import documentation_strings\n"
        "before = set(sys.modules)\n"
        "for purpose in ('calibration', 'evaluation'):\n"
        "    assert len(documentation_strings(purpose, 300_000).content) >= 300_000\n"
        "new = {name for name in set(sys.modules) - before if not name.startswith(('encodings', '_sysconfig'))}\n"
        "assert new <= {'platform', 'subprocess'}, new\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_docstrings_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(
        '"""one"""\nclass A:\n    """two"""\n    def f(self):\n        """three"""\n'
        'def g():\n    x = """not one"""\nasync def h():\n    "four"\nraise SystemExit("imported")\n'
    )
    assert docstrings(path) == ["one", "two", "three", "four"]


def test_a_source_that_does_not_parse_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def")
    with pytest.raises(ConfigError, match="does not parse") as caught:
        docstrings(tmp_path / "m.py")
    assert caught.value.where == str(tmp_path / "m.py")


def test_python_without_sources(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(texts, "library", lambda: tmp_path)
    with pytest.raises(ConfigError, match="has no sources of its standard library"):
        documentation_strings("evaluation", 10)


def test_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffnaïve\r\ncafé".encode())
    text = load_text(path, "evaluation", characters=1, option=OPTION)
    assert (text.content, text.source) == ("naïve\r\ncafé", "a.txt")
    assert text.sha256 == hashlib.sha256(text.content.encode()).hexdigest()


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": "one\u2028line", "id": 3}, {"text": "two"}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    assert read_text(path, OPTION).content == "one\u2028line\n\ntwo"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"ab\xffc", "is not UTF-8: byte 2 is 0xff"),
        ("a.jsonl", b'{"text": "x"}\n{', "line 2 of .*a.jsonl is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}', "line 2 of .*a.jsonl has no text"),
        ("a.jsonl", b'["text"]', "line 1 of .*a.jsonl has no text"),
        ("a.jsonl", b'{"text": 3}', "line 1 of .*a.jsonl has no text"),
        ("a.jsonl", b"\n\n", "holds no text"),
    ],
)
def test_bad_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_text(tmp_path / name, OPTION)
    assert caught.value.where == OPTION and caught.value.hint


def test_no_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        read_text(tmp_path / "none", OPTION)
    with pytest.raises(ConfigError, match="is a directory") as caught:
        read_text(tmp_path, OPTION)
    assert "to_json" in str(caught.value.hint)
