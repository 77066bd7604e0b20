"""What the process that builds does with the full TensorRT alone: weights that come later, and the engine opened.

An engine without weights is filled here once as it will be wherever it is loaded: TensorRT says which weights it asks
for only when it has built the engine, and a name that the file lacks is to stop the build, not the first user.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbuild.engine.mapped import MappedWeights, mapped_file
from llmbuild.errors import EngineError

if TYPE_CHECKING:
    import tensorrt as trt

HINT = "leave stripWeights out, or give refit beside it: then only weights of the file are taken out of the engine"


def allow_refitting(config: trt.IBuilderConfig, network: trt.INetworkDefinition, order: dict[str, Any]) -> list[str]:
    """Say which weights may be put into the engine later; return names that TensorRT does not know.

    The same weights again (REFIT_IDENTICAL): TensorRT folds and fuses as it does without. Others: those of the file,
    one by one (REFIT_INDIVIDUAL), so that the graph's own constants stay what they are.
    """
    import tensorrt as trt

    options = order["options"]
    if options["strip_weights"]:
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
        if not options["refit"]:
            config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
    if not options["refit"]:
        return []
    config.set_flag(trt.BuilderFlag.REFIT_INDIVIDUAL)
    return [name for name in order["initializers"] if not network.mark_weights_refittable(name)]


def opened(log: Any, order: dict[str, Any], weights: MappedWeights) -> dict[str, Any]:
    """Open the engine where it was built, which proves that it loads; fill it if it was stripped.

    Args:
        log: A logger with `errors`, and `reason()`, which is their end.

    Returns:
        {"inspector": what the engine says of its layers, JSON; "activations": bytes of each profile; "refitted": how
        many weights it was filled with}; or {"errors", and perhaps "hint"}.
    """
    import tensorrt as trt

    runtime = trt.Runtime(log)  # lives as long as its engine
    with mapped_file(Path(order["engine"])) as content:
        engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        return {"errors": ["the engine that was built does not open", *log.errors]}
    refitted = 0
    if order["options"]["strip_weights"]:
        from llmbuild.plugins.tensorrt.refit import refit

        try:
            refitted = refit(trt, engine, log, weights)
        except EngineError as error:
            return {"errors": [f"its engine without weights cannot be filled again: {error.what}"], "hint": HINT}
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    profiles = range(engine.num_optimization_profiles)
    activations = [engine.get_device_memory_size_for_profile_v2(at) for at in profiles]
    return {"inspector": text, "activations": activations, "refitted": refitted}
