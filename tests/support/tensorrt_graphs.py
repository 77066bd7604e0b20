"""The ONNX graphs of the TensorRT targets, executed by onnxruntime over slots that the test owns."""

from __future__ import annotations

import numpy as np
import onnx

from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.onnx_graph.emitter import Emitter
from llmbuild.builder.targets.tensorrt.graph import lower
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.selftest.twins import SlotTwin, filled
from support.cpu_engines import Conversation

SLOTS, CAPACITY = 4, 48
LIMITS = Limits(max_batch_size=SLOTS, max_num_tokens=32, max_seq_len=CAPACITY, block_size=CAPACITY)


class Twin(SlotTwin):
    """The graph of tensorrt-rtx in onnxruntime, after ONNX's own checks."""

    def __init__(self, emitter: Emitter, slots: int = SLOTS) -> None:
        onnx.checker.check_model(filled(emitter.model("twin"), emitter), full_check=True)
        super().__init__(emitter, slots)


def scenario(vocab_size: int = 256) -> list[dict[str, list[int]]]:
    """Sequences that join, prefill in chunks across window edges, padded and alone, decode beside prompts and leave."""
    random = np.random.default_rng(1)

    def tokens(count: int) -> list[int]:
        return random.integers(0, vocab_size, count).tolist()

    return [
        {"a": tokens(7), "b": tokens(1), "c": tokens(3)},
        {"a": tokens(1), "b": tokens(6), "c": tokens(5), "d": tokens(1)},
        {"b": tokens(1), "d": tokens(9)},
        {"a": tokens(1), "b": tokens(1), "c": tokens(1), "d": tokens(1)},
        {"c": tokens(13), "b": tokens(2)},
        {"c": tokens(1)},
        {"b": tokens(1), "c": tokens(1)},
    ]


def differences(program: Program, twin: Twin, steps: list[dict[str, list[int]]] | None = None) -> tuple[float, float]:
    """Largest difference of the twin's logits from the oracle's over `steps` (the scenario), and the largest logit."""
    errors, largest = row_errors(program, twin, steps)
    return float(errors.max()), largest


def row_errors(
    program: Program, twin: Twin, steps: list[dict[str, list[int]]] | None = None
) -> tuple[np.ndarray, float]:
    """Likewise, of each row."""
    conversation = Conversation(num_blocks=SLOTS, block_size=CAPACITY)
    oracle, state = Oracle(program), PagedState(SLOTS, CAPACITY)
    errors, largest = [], 0.0
    for chunks in scenario() if steps is None else steps:
        step = conversation.step(chunks)
        expected = oracle.run(step, state).numpy()
        errors.append(np.abs(expected - twin.run(step)).max(-1))
        largest = max(largest, float(np.abs(expected).max()))
    return np.concatenate(errors), largest


def twin_of(program: Program) -> Twin:
    return Twin(lower(program, LIMITS, target="tensorrt-rtx", paged=False))
