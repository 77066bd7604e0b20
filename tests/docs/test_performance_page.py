"""docs/performance.md says what the results say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "performance_page.py"


def test_page_is_what_the_results_give():
    subprocess.run([sys.executable, str(SCRIPT), "--check"], check=True)
