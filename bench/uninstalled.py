"""Makes `llmbuild` importable from a checkout where it is not installed; import this before it.

The folders of the repository are the parts of one package (see `package-dir` in pyproject.toml), so it is enough that
the package also looks into the root: `llmbuild.plugins` is ./plugins.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import llmbuild  # noqa: E402

if ROOT not in llmbuild.__path__:
    llmbuild.__path__.append(ROOT)
