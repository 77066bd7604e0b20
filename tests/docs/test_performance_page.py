"""docs/performance.md says what the results say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "performance_page.py"


def test_page_is_what_the_results_give():
    subprocess.run([sys.executable, str(SCRIPT), "--check"], check=True)


def test_plots_are_drawn_inside_of_their_axes():
    for path in sorted((SCRIPT.parents[1] / "docs" / "plots").glob("*.svg")):
        root = ElementTree.fromstring(path.read_text())
        lines = [element for element in root if element.tag.endswith("polyline")]
        assert lines, path.name
        for drawn in lines:
            for point in drawn.attrib["points"].split():
                x, y = map(float, point.split(","))
                assert 64 <= x <= 472 and 36 <= y <= 312, (path.name, point)
