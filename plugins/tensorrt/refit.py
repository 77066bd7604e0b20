"""Weights back into an engine that was stripped of them: from the mapped file to TensorRT, without a copy in Python.

The process that builds does it once, which proves that every name TensorRT asks for is in the file; the executor does
it whenever the engine is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmbuild.engine.mapped import MappedWeights
from llmbuild.errors import EngineError

if TYPE_CHECKING:
    import tensorrt as trt

# TensorRT's types by what safetensors calls the bits that hold them; two numbers of 4 bits share a byte.
TYPES = {
    "F32": ("FLOAT",),
    "F16": ("HALF",),
    "BF16": ("BF16",),
    "F8_E4M3": ("FP8",),
    "I64": ("INT64",),
    "I32": ("INT32",),
    "I8": ("INT8", "INT4"),
    "U8": ("UINT8", "INT4"),
    "BOOL": ("BOOL",),
}
BITS = {
    "FLOAT": 32,
    "HALF": 16,
    "BF16": 16,
    "FP8": 8,
    "INT64": 64,
    "INT32": 32,
    "INT8": 8,
    "INT4": 4,
    "UINT8": 8,
    "BOOL": 8,
}
SHOWN = 8  # names in a message


def refit(module: Any, engine: trt.ICudaEngine, log: Any, weights: MappedWeights) -> int:
    """Put every weight that a stripped engine asks for back into it. No step may be running.

    Args:
        module: The bindings.
        log: A logger with `reason()`, what TensorRT said last.
        weights: The file; it may be closed afterwards.

    Returns:
        The number of weights.

    Raises:
        EngineError: Names are not in the file, types or sizes differ, or TensorRT refuses. All concerned are named.
    """
    refitter: trt.Refitter = module.Refitter(engine, log)
    names = refitter.get_all_weights()
    absent = [name for name in names if name not in weights]
    if absent:
        raise problem(f"TensorRT asks for {len(absent)} weight(s) that the file does not hold", absent)
    wrong = []
    for name in names:
        place, like = weights.place(name), refitter.get_weights_prototype(name)
        kind, count = like.dtype.name, like.size
        if kind not in TYPES.get(place.dtype, ()) or -(-count * BITS[kind] // 8) != place.size:
            wrong.append(f"{name} ({place.size} bytes of {place.dtype} for {count} of {kind})")
        elif not refitter.set_named_weights(name, module.Weights(like.dtype, place.address, count)):
            wrong.append(f"{name} ({log.reason()})")
    if wrong:
        raise problem(f"TensorRT does not take {len(wrong)} weight(s) of the file", wrong)
    missing = refitter.get_missing_weights()
    if missing:
        raise problem(f"TensorRT misses {len(missing)} weight(s) besides", missing)
    if not refitter.refit_cuda_engine():
        raise problem("TensorRT did not put the weights into the engine", [log.reason()])
    return len(names)


def problem(what: str, concerned: list[str]) -> EngineError:
    shown = ", ".join(name or "one without a name" for name in concerned[:SHOWN])
    more = f" and {len(concerned) - SHOWN} more" if len(concerned) > SHOWN else ""
    return EngineError(f"{what}: {shown}{more}", hint="convert the model again, without stripWeights if it fails again")
