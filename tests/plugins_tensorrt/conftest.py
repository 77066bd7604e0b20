"""The bindings that LLMBUILD_TENSORRT_BINDINGS names are found before anything imports the plugin.

Importing llmbuild's plugin package looks for bindings once a process, and what it found first stays.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if folder := os.environ.get("LLMBUILD_TENSORRT_BINDINGS"):
    sys.path.insert(0, str(Path(folder).resolve(strict=True)))
