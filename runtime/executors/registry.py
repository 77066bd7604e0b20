"""Which executor runs which target. Listing them imports none of them."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from llmbuild.errors import ConfigError, EngineError, nearest
from llmbuild.runtime.executor import Executor

if TYPE_CHECKING:
    from llmbuild.engine.reader import Engine

EXECUTORS: dict[str, str] = {
    "cpu": "llmbuild.runtime.executors.cpu:CpuExecutor",
    "cuda": "llmbuild.runtime.executors.cuda.executor:CudaExecutor",
    "tensorrt": "llmbuild.runtime.executors.tensorrt.paged:TensorRTExecutor",
    "tensorrt-rtx": "llmbuild.runtime.executors.tensorrt.executor:RtxExecutor",
}


def load_executor(engine: Engine, **options: Any) -> Executor:
    """Return the executor of the engine's target, loaded.

    Args:
        options: What the executor's constructor takes besides the engine; None means its default.

    Raises:
        EngineError: This version has no executor for the target.
        ConfigError: The target has no such option.
    """
    name = engine.manifest.target.name
    if name not in EXECUTORS:
        raise EngineError(
            f"the engine was built for the target {name!r}, which this version cannot run",
            where=str(engine.path),
            hint=nearest(name, list(EXECUTORS)),
        )
    module, _, attribute = EXECUTORS[name].partition(":")
    constructor = getattr(importlib.import_module(module), attribute)
    given = {key: value for key, value in options.items() if value is not None}
    parameters = list(inspect.signature(constructor).parameters.values())[1:]
    known = [each.name for each in parameters]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for key in given:
        if key not in known and not takes_any:
            raise ConfigError(f"the {name} target has no option {key!r}", hint=nearest(key, known))
    return constructor(engine, **given)
