"""Engines whose weights may stay in host memory: how many of them lie on the GPU.

    GPU memory | what others use | KV cache, inputs, logits | activations | weights that lie here |

Weights come last: streamed, they cross PCIe in every step. So the KV cache that is asked for is set aside, and the
weights get what is left. Whoever wants more of them on the GPU asks for fewer KV blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmbuild.errors import EngineError
from llmbuild.units import human_size

if TYPE_CHECKING:
    import tensorrt as trt

HEADROOM = 256 << 20  # for what TensorRT and the driver allocate besides: kernels, constants of contexts, graphs


def fit_weights(engine: trt.ICudaEngine, room: int, *, activations: int) -> int:
    """Keep as many weights on the GPU as fit. To be called before there are contexts.

    Args:
        room: Bytes of GPU memory for weights and activations.
        activations: How many contexts bring memory of their own.

    Returns:
        Bytes of weights on the GPU.

    Raises:
        EngineError: Even the least does not fit, or TensorRT does not take a budget.
    """
    budget = engine.streamable_weights_size
    while True:
        engine.weight_streaming_budget_v2 = budget
        if engine.weight_streaming_budget_v2 > budget:
            raise EngineError(
                f"TensorRT does not keep {human_size(budget)} of {human_size(engine.streamable_weights_size)} of "
                f"weights on the GPU: its budget is {human_size(engine.weight_streaming_budget_v2)}",
                hint="convert the model again without --builder-option allowWeightStreaming",
            )
        # With fewer weights on the GPU, activations grow by the places into which the others are streamed.
        scratch = activations * engine.device_memory_size_v2
        excess = budget + scratch - room
        if excess <= 0:
            return budget
        if budget == 0:
            raise EngineError(
                f"with all weights in host memory, activations alone need {human_size(scratch)} of GPU memory; "
                f"{human_size(max(room, 0))} are free beside the KV cache",
                hint="end other processes that use the GPU, load the engine with fewer kv_cache_blocks, or convert the "
                "model again with a smaller --max-num-tokens",
            )
        budget = max(0, budget - excess)
