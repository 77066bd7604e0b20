"""The steps of a self-test, for one target.

    graph                              tensorrt, tensorrt-rtx: what is parsed, in onnxruntime, against the oracle
    plugin, kernels                    tensorrt: the plugin's class in these bindings; its kernels, compiled
    enqueue                            tensorrt: the plugin called on the GPU, also captured, against the reference
    build                              convert the model
    load                               the engine on this machine
    prefill, mixed, decode             logits against the oracle, over a cache that earlier steps have written
    serve                              requests through scheduler and sampler
    graphs                             tensorrt: which decode steps were captured in CUDA graphs
    stripped                           tensorrt: an engine that was stripped of its weights: build, load, all steps
    stored                             tensorrt: an engine that stores the kernels of attention: build, load, all steps

For `tensorrt`, every step of the engine calls the plugin's enqueue inside TensorRT too; not where kernels are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbuild.errors import ConfigError, LLMBuildError
from llmbuild.selftest import tensorrt_engines
from llmbuild.selftest.conversation import MAX_BATCH, MAX_SEQ_LEN, MAX_TOKENS, steps
from llmbuild.selftest.environment import Gpu
from llmbuild.selftest.record import NotHere, TargetRecord

if TYPE_CHECKING:
    import numpy as np

    from llmbuild.builder.ir import Program
    from llmbuild.runtime.executor import StepInput
    from llmbuild.runtime.loading import LoadedEngine

Forward = Callable[["StepInput"], Any]
# Share of the largest logit that an error may be: float16 rounds at 2^-11, a few dozen times on the way.
TOLERANCE = {"float32": 1e-4, "float16": 0.02}
ATTENTION_TOLERANCE = 2.0**-8  # of one layer in float16: weights and results are rounded once each
USUAL_SM = {"cuda": 90, "tensorrt-rtx": 89, "tensorrt": 90}  # compiled for where there is no GPU to ask
BLOCKS, BLOCK_SIZE = 16, 16


class Oracle:
    """The model in float32 torch, with caches for executors of any block size."""

    def __init__(self, model: Path) -> None:
        import torch

        from llmbuild.builder.frontend.load import load_program
        from llmbuild.builder.oracle import Oracle
        from llmbuild.builder.pipeline import optimize
        from llmbuild.quantization.recipes import find_recipe

        self.program: Program = load_program(model, dtype=torch.float32, max_seq_len=MAX_SEQ_LEN)
        optimize(self.program, find_recipe("none"))
        self._oracle = Oracle(self.program)

    def forward(self, num_blocks: int, block_size: int) -> Forward:
        from llmbuild.plugins.attention_reference import PagedState

        state = PagedState(num_blocks, block_size)
        return lambda step: self._oracle.run(step, state).numpy()


def test_target(target: str, model: Path, oracle: Oracle, gpu: Gpu | str, folder: Path) -> TargetRecord:
    """Take all steps of a target. folder: where the engine is written."""
    record = TargetRecord(target)
    dtype = "float32" if target == "cpu" else "float16"
    here = no_use(target, gpu)
    sm = gpu.sm if isinstance(gpu, Gpu) and here is None else USUAL_SM.get(target)
    if target == "tensorrt-rtx":
        record.take("graph", lambda: (slot_graph(oracle), None))
    if target == "tensorrt":
        record.take("graph", lambda: (paged_graph(oracle), None))
        record.take("plugin", lambda: (plugin_class(), None))
        record.take("kernels", lambda: (plugin_kernels(oracle, sm or 0), None))
        record.take("enqueue", lambda: (plugin_enqueue(here), None), needs=("plugin", "kernels"))
    record.take("build", lambda: (build_engine(target, model, dtype, sm, folder / target, here), None))
    loaded = record.take("load", lambda: load(folder / target, here), needs=("build",))
    try:
        take_steps(record, loaded, oracle, TOLERANCE[dtype])
        if target == "tensorrt":
            record.take("graphs", lambda: (tensorrt_engines.captured(loaded), None), needs=("decode again",))
    finally:
        if loaded is not None:
            loaded.executor.close()
    if target == "tensorrt":

        def other(name: str, option: str) -> tuple[str, None]:
            said = tensorrt_engines.other_engine(
                lambda: build_engine(target, model, dtype, sm, folder / name, here, option),
                lambda: load(folder / name, here)[1],
                lambda forward: all_steps(forward, oracle, BLOCKS, BLOCK_SIZE, TOLERANCE[dtype]),
            )
            return said, None

        record.take("stripped", lambda: other("stripped", "stripWeights"), needs=("load",))
        record.take("stored", lambda: other("stored", "attention=stored"))  # it may do where the plugin in Python fails
    return record


def no_use(target: str, gpu: Gpu | str) -> str | None:
    """Return why engines of a target cannot run here, None where they can."""
    from llmbuild.builder.targets.gpus import gpus_of

    gpus = gpus_of(target)
    if gpus is None:
        return None
    if isinstance(gpu, str):
        return f"no GPU: {gpu}"
    try:
        gpus.parse(str(gpu.sm))
    except ConfigError as error:
        return f"{error.what} ({gpu.name})"
    return None


def take_steps(record: TargetRecord, loaded: LoadedEngine | None, oracle: Oracle, tolerance: float) -> None:
    """Compare the engine's logits step by step, and serve requests."""
    blocks, size = (BLOCKS, BLOCK_SIZE) if loaded is None else (loaded.executor.num_blocks, loaded.executor.block_size)
    expected = oracle.forward(blocks, size)
    for name, step in steps(blocks, size):

        def compare(step: StepInput = step) -> tuple[str, None]:
            assert loaded is not None
            return difference(loaded.executor.forward(step), expected(step), tolerance), None

        record.take(name, compare, needs=("load",))
    record.take("serve", lambda: (serve(loaded, oracle, tolerance), None), needs=("load",))


def difference(found: np.ndarray, expected: np.ndarray, tolerance: float) -> str:
    """Return the largest difference in words.

    Raises:
        LLMBuildError: It is larger than `tolerance` times the largest logit, or no number.
    """
    import numpy as np

    error, largest = float(np.abs(found - expected).max()), float(np.abs(expected).max())
    text = f"largest error {error:.2g} of logits up to {largest:.3g}, {len(found)} rows"
    if not error <= tolerance * largest:
        raise LLMBuildError(f"{text}; {tolerance * largest:.2g} is allowed")
    return text


def slot_graph(oracle: Oracle) -> str:
    from llmbuild.builder.targets.tensorrt.graph import lower
    from llmbuild.selftest.twins import SlotTwin

    emitter = lower(oracle.program, limits(MAX_SEQ_LEN), target="tensorrt-rtx", paged=False)
    return f"{all_steps(SlotTwin(emitter, MAX_BATCH).run, oracle, MAX_BATCH, MAX_SEQ_LEN)} (onnxruntime)"


def paged_graph(oracle: Oracle) -> str:
    from llmbuild.builder.targets.tensorrt.reference import with_reference
    from llmbuild.builder.targets.tensorrt.surgery import table_stride
    from llmbuild.selftest.twins import PagedTwin, filled

    emitter, (model, forms) = with_plugins(oracle, lambda form: "none")
    whole = filled(with_reference(model, forms), emitter)
    stride = table_stride(limits(BLOCK_SIZE))
    twin = PagedTwin(whole, blocks=BLOCKS, block_size=BLOCK_SIZE, stride=stride)
    return f"{all_steps(twin.run, oracle, BLOCKS, BLOCK_SIZE)} (onnxruntime); {len(forms)} plugin nodes"


def with_plugins(oracle: Oracle, kernels: Callable[[Any], str]) -> tuple[Any, Any]:
    """Return the emitter of the graph for `tensorrt`, and what surgery makes of it."""
    from importlib.util import find_spec

    from llmbuild.builder.targets.tensorrt.graph import lower
    from llmbuild.builder.targets.tensorrt.surgery import add_plugins

    if find_spec("onnx_graphsurgeon") is None:
        raise NotHere("the package onnx-graphsurgeon is missing: pip install 'llmbuild[tensorrt]'")
    emitter = lower(oracle.program, limits(BLOCK_SIZE), target="tensorrt", paged=True)
    return emitter, add_plugins(emitter.model("twin"), limits(BLOCK_SIZE), kernels)


def all_steps(forward: Forward, oracle: Oracle, blocks: int, size: int, tolerance: float = TOLERANCE["float32"]) -> str:
    """Return the largest error of all steps at once."""
    import numpy as np

    expected = oracle.forward(blocks, size)
    pairs = [(forward(step), expected(step)) for _, step in steps(blocks, size)]
    found, wanted = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return difference(found, wanted, tolerance)


def plugin_class() -> str:
    """Make a plugin's creator in the bindings that are installed."""
    from llmbuild.plugins.tensorrt import register
    from llmbuild.plugins.tensorrt.bindings import bindings

    try:
        found = bindings()
    except ConfigError as error:
        raise NotHere(error.what) from error
    creator = register()
    return f"{creator.name} registered with {found.package} {found.version}"


def plugin_kernels(oracle: Oracle, sm: int) -> str:
    from llmbuild.builder.targets.cuda.aot import triton_problem
    from llmbuild.builder.targets.tensorrt.plugin_kernels import compile_kernels

    problem = triton_problem()
    if problem is not None:
        raise NotHere(problem)
    sizes = []

    def compiled(form: Any) -> str:
        kernels = compile_kernels(form, sm)
        sizes.append(len(kernels.pack))
        return kernels.digest

    with_plugins(oracle, compiled)
    return f"{sum(sizes)} bytes for SM {sm}"


def plugin_enqueue(here: str | None) -> str:
    """Call the plugin without TensorRT around it. here: why engines cannot run, None where they can."""
    from llmbuild.selftest import enqueue

    if here is not None:
        raise NotHere(here)
    from llmbuild.builder.targets.tensorrt.plugin_kernels import compile_kernels
    from llmbuild.plugins.tensorrt.plugin import PagedAttention
    from llmbuild.runtime.executors.cuda.driver import Device

    form, device = enqueue.tiny_form(), Device(0)
    try:
        found, expected = enqueue.all_steps(device, PagedAttention.of(form, compile_kernels(form, device.sm), device))
    finally:
        device.close()
    return difference(found, expected, ATTENTION_TOLERANCE)


def limits(block_size: int) -> Any:
    from llmbuild.builder.targets.base import Limits

    return Limits(MAX_BATCH, MAX_TOKENS, MAX_SEQ_LEN, block_size)


def build_engine(
    target: str, model: Path, dtype: str, sm: int | None, output: Path, here: str | None, *options: str
) -> str:
    """options: of the target's builder."""
    from llmbuild.builder.build import BuildConfig, build
    from llmbuild.builder.targets.registry import find_target

    problem = find_target(target).probe()
    if problem is None and target == "tensorrt":  # it times kernels on the GPU that the engine is for
        problem = here
    if problem is not None:
        raise NotHere(problem)
    report = build(
        BuildConfig(
            model=model,
            output=output,
            target=target,
            dtype=dtype,
            sm=None if sm is None else str(sm),
            max_batch_size=MAX_BATCH,
            max_num_tokens=MAX_TOKENS,
            max_seq_len=MAX_SEQ_LEN,
            builder_options=options,
        )
    )
    gpu = "" if sm is None else f" for SM {sm}"
    return f"{dtype}{gpu}, {report.bytes} bytes"


def load(engine: Path, here: str | None) -> tuple[str, LoadedEngine]:
    from llmbuild.engine.reader import open_engine
    from llmbuild.engine.requirements import unmet_requirements
    from llmbuild.runtime.loading import load_engine

    if here is not None:
        raise NotHere(here)
    unmet = unmet_requirements(open_engine(engine, requirements=False).manifest.target)
    if unmet:
        raise NotHere(", ".join(f"{package}{text} is not installed" for package, text, _ in unmet))
    loaded = load_engine(engine)
    return f"{loaded.executor.num_blocks} KV blocks of {loaded.executor.block_size} tokens", loaded


def serve(loaded: LoadedEngine | None, oracle: Oracle, tolerance: float) -> str:
    """More requests than the engine takes at once; every token has, within rounding, the oracle's largest logit."""
    import numpy as np

    from llmbuild.runtime.core import EngineCore
    from llmbuild.runtime.request import make_request
    from llmbuild.runtime.sampling_params import SamplingParams

    assert loaded is not None
    executor = loaded.executor
    core = EngineCore(executor, loaded.limits)
    random = np.random.default_rng(7)
    prompts = [random.integers(3, 256, length).tolist() for length in (1, 40, 6, 12, 20)]
    pool = executor.num_blocks * executor.block_size
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        core.add(make_request(str(number), prompt, params, loaded.limits, pool_tokens=pool))
    found: dict[int, list[int]] = {}
    while core.has_work:
        for output in core.step():
            found[int(output.request_id)] = list(output.outputs[0].token_ids)
    count = 0
    for number, prompt in enumerate(prompts):
        logits = oracle.forward(1, MAX_SEQ_LEN)(whole(prompt + found[number][:-1]))[len(prompt) - 1 :]
        behind = logits.max(-1) - logits[np.arange(len(logits)), found[number]]
        if not behind.max() <= 2 * tolerance * np.abs(logits).max():
            raise LLMBuildError(f"request {number} got tokens whose logits are {behind.max():.2g} below the largest")
        count += len(found[number])
    return f"{len(prompts)} requests, {count} tokens"


def whole(tokens: list[int]) -> StepInput:
    """One sequence in one step."""
    import numpy as np

    from llmbuild.runtime.executor import StepInput

    every = np.arange(len(tokens), dtype=np.int32)
    ids, length = np.array(tokens, np.int32), np.array([len(tokens)], np.int32)
    return StepInput(ids, every, every, np.zeros((1, 1), np.int32), length, np.array([0, len(tokens)], np.int32), every)
