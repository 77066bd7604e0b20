"""llmbuild: ahead-of-time engines for Hugging Face decoder LMs, served by a small runtime.

>>> from llmbuild import LLM, SamplingParams, build, BuildConfig

Names are resolved on first use, so that `import llmbuild` stays light and the runtime never loads the builder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from llmbuild.builder.build import BuildConfig, BuildReport, build
    from llmbuild.errors import AccuracyError, LLMBuildError, UserError
    from llmbuild.runtime.async_llm import AsyncLLM
    from llmbuild.runtime.llm import LLM
    from llmbuild.runtime.outputs import CompletionOutput, RequestOutput
    from llmbuild.runtime.sampling_params import SamplingParams

_EXPORTS = {
    "LLM": "llmbuild.runtime.llm",
    "AsyncLLM": "llmbuild.runtime.async_llm",
    "SamplingParams": "llmbuild.runtime.sampling_params",
    "RequestOutput": "llmbuild.runtime.outputs",
    "CompletionOutput": "llmbuild.runtime.outputs",
    "build": "llmbuild.builder.build",
    "BuildConfig": "llmbuild.builder.build",
    "BuildReport": "llmbuild.builder.build",
    "LLMBuildError": "llmbuild.errors",
    "AccuracyError": "llmbuild.errors",
    "UserError": "llmbuild.errors",
}

__all__ = [
    "LLM",
    "AccuracyError",
    "AsyncLLM",
    "BuildConfig",
    "BuildReport",
    "CompletionOutput",
    "LLMBuildError",
    "RequestOutput",
    "SamplingParams",
    "UserError",
    "__version__",
    "build",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'llmbuild' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
