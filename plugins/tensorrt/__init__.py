"""The TensorRT plugin. Importing this package registers it where TensorRT's bindings are installed.

Where they are missing or of another version, nothing is registered and `register()` says why; building, loading or
inspecting an engine of the `tensorrt` target calls it.
"""

from __future__ import annotations

import contextlib

from llmbuild.errors import ConfigError
from llmbuild.plugins.tensorrt.registry import register

__all__ = ["register"]

with contextlib.suppress(ConfigError):  # raised again when the plugin is used
    register()
