"""docs/supported_models.md is the sweep's: the same families in the same order, the same refusals, all token-exact."""

from __future__ import annotations

import re
from pathlib import Path

from support.other_models import HYBRIDS, OTHERS, REFUSED
from support.sweep import FAMILY_COUNT, SWEEP

PAGE = (Path(__file__).parents[2] / "docs" / "supported_models.md").read_text(encoding="utf-8")
TABLE, REST = PAGE.split("## Refused, by name")
ROWS = [line.split(" | ") for line in TABLE.splitlines() if line.startswith("| ")][1:]


def test_the_page_lists_the_families_of_the_sweep():
    assert tuple(row[0].removeprefix("| ") for row in ROWS) == SWEEP
    assert f"**{FAMILY_COUNT} families**" in TABLE


def test_every_row_is_token_exact_and_close():
    assert [row[0] for row in ROWS if row[1] != "equal" or float(row[2]) >= 1e-4] == []
    assert f"{len(SWEEP)} of these {len(SWEEP)} rows" in TABLE.replace("\n", " ")


def test_the_page_names_everything_else():
    refused = re.findall(r"^\| (\S+) \| (.+) \|$", REST, re.M)
    assert dict(refused) == {**REFUSED, **{name: why for name, (why, _) in HYBRIDS.items()}}
    for name, reason in OTHERS.items():
        assert re.search(rf"^- {re.escape(reason)}: .*\b{re.escape(name)}\b", REST, re.M), name
