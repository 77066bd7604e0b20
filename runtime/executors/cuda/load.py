"""Engine ⇒ what a GPU runs: checks first, then kernels, memory, launches, and the weights last."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmbuild.cuda.calls import CudaError
from llmbuild.engine.kernel_pack import KernelPack
from llmbuild.engine.launch_plan import LaunchPlan
from llmbuild.errors import EngineError
from llmbuild.runtime.executors.cuda import memory, weights
from llmbuild.runtime.executors.cuda.addresses import Addresses
from llmbuild.runtime.executors.cuda.checks import check_gpu, load_kernels, needs_library
from llmbuild.runtime.executors.cuda.cublaslt import CublasLt
from llmbuild.runtime.executors.cuda.device_sampler import DeviceSampler
from llmbuild.runtime.executors.cuda.driver import OUT_OF_MEMORY, Device
from llmbuild.runtime.executors.cuda.gemm_memory import GemmMemory, memory_paths
from llmbuild.runtime.executors.cuda.gemms import Gemms, NoGemms, open_library
from llmbuild.runtime.executors.cuda.inputs import InputArea, input_layout
from llmbuild.runtime.executors.cuda.logits import LogitsReader
from llmbuild.runtime.executors.cuda.sampling_area import SamplingArea, sampling_bytes
from llmbuild.runtime.executors.cuda.step_program import GemmLibrary, StepProgram

if TYPE_CHECKING:
    from llmbuild.engine.reader import Engine


@dataclass(frozen=True)
class Options:
    """See `CudaExecutor`. num_graphs: most graphs that will be captured, for which memory is set aside."""

    num_blocks: int | None
    kv_memory_fraction: float
    num_graphs: int
    random_weights: bool
    tune: bool
    wait: bool


@dataclass(frozen=True)
class Loaded:
    """An engine on a GPU. num_blocks: of the KV pools, besides the one that padding rows use."""

    device: Device
    stream: Any
    plan: LaunchPlan
    num_blocks: int
    inputs: InputArea
    program: StepProgram
    library: GemmLibrary
    sampler: DeviceSampler | None
    logits: LogitsReader


@dataclass(frozen=True)
class Memory:
    """Addresses of what is allocated once. pools: by name, with their bytes."""

    weights: int
    arena: int
    counters: int
    pools: dict[str, tuple[int, int]]
    inputs: InputArea
    sampling: SamplingArea | None
    workspace: int


def open_plan(engine: Engine, device: int, stack: ExitStack) -> tuple[Device, LaunchPlan, KernelPack]:
    """Take hold of a GPU and read the plan and the kernels that the engine has for it.

    Raises:
        EngineError: There is no such GPU or driver, the engine is not for it, or is damaged.
    """
    gpu = Device(device)
    stack.callback(gpu.close)
    section = engine.manifest.target.section
    check_gpu(gpu, section["sms"], engine.path)
    plan = LaunchPlan.read(engine.file(section["plans"][str(gpu.sm)]))
    return gpu, plan, KernelPack.open(engine.file(section["kernels"][str(gpu.sm)]))


def load(engine: Engine, gpu: Device, plan: LaunchPlan, pack: KernelPack, options: Options, stack: ExitStack) -> Loaded:
    """Load what `open_plan` opened. What has to be freed goes onto the stack.

    Raises:
        EngineError: Kernels, weights or memory do not do; found before any weight is read.
        ConfigError: kv_memory_fraction is out of range.
    """
    manifest = engine.manifest
    kernels = load_kernels(plan, pack, gpu)
    weight_file = None if options.random_weights else engine.file(manifest.target.section["weights"])
    stored = [] if weight_file is None else weights.stored_tensors(weight_file, plan)
    lt = open_library(gpu) if needs_library(plan) else None
    placed = weights.layout(plan)
    needs = memory.Needs(
        weights=placed.num_bytes,
        arena=plan.arena_bytes,
        counters=plan.counter_bytes,
        inputs=input_layout(plan)[1],
        sampling=sampling_bytes(plan),
        workspace=memory.GEMM_WORKSPACE if lt is not None else 0,
        graphs=memory.GRAPH_BYTES * options.num_graphs,
    )
    num_blocks = memory.choose_blocks(
        plan,
        needs,
        free=gpu.memory()[0],
        fraction=options.kv_memory_fraction,
        max_seq_len=manifest.limits.max_seq_len,
        num_blocks=options.num_blocks,
        gpu=f"GPU {gpu.ordinal}, {gpu.name}",
    )
    stream = gpu.stream()
    stack.callback(gpu.free_stream, stream)
    try:
        held = allocate(plan, gpu, needs, num_blocks, stream, stack)
    except CudaError as error:
        raise _explained(error, needs) from error

    library: GemmLibrary = NoGemms() if lt is None else _gemms(engine, gpu, lt, plan, held.workspace, options, stack)
    sampling = held.sampling
    address = Addresses.of(
        plan,
        arena=held.arena,
        counters=held.counters,
        inputs=held.inputs.addresses | (sampling.addresses if sampling is not None else {}),
        weights={name: held.weights + offset for name, offset in placed.offsets.items()},
        pools={name: at for name, (at, _) in held.pools.items()},
        state=sampling.state_addresses if sampling is not None else {},
    )
    program = StepProgram(plan, gpu, kernels, address, library, wait=options.wait)
    stack.callback(program.close)
    sampler = None
    if plan.sampling is not None and sampling is not None:
        sampler = DeviceSampler(
            *(plan.sampling, gpu, sampling, program.kernel_step),
            max_rows=plan.limits.max_batch_size,
            vocab_size=manifest.model.vocab_size,
        )
        stack.callback(sampler.close)
    logits = LogitsReader(plan, gpu, address(plan.logits), manifest.model.vocab_size)
    stack.callback(logits.close)

    # Counters begin at zero. Of the rest nothing is read before it is written, but what a mask hides must not be NaN.
    areas = ((held.counters, plan.counter_bytes), (held.arena, plan.arena_bytes))
    for at, num_bytes in (*areas, *held.pools.values()):
        gpu.fill(at, 0, num_bytes, stream)
    if weight_file is None:
        weights.fill_with_noise(gpu, plan, held.weights)
    else:
        weights.upload(gpu, weight_file, stored, held.weights)
    gpu.synchronize(stream)
    return Loaded(gpu, stream, plan, num_blocks, held.inputs, program, library, sampler, logits)


def allocate(
    plan: LaunchPlan, gpu: Device, needs: memory.Needs, num_blocks: int, stream: Any, stack: ExitStack
) -> Memory:
    """Allocate all that stays.

    Raises:
        CudaError: The driver has not so much.
    """

    def taken(num_bytes: int) -> int:
        address = gpu.allocate(num_bytes)
        stack.callback(gpu.free, address)
        return address

    slots = (num_blocks + 1) * plan.limits.block_size  # the last block is the padding rows'
    sizes = {pool.name: slots * pool.token_bytes for pool in plan.pools}
    whole, arena, counters = taken(needs.weights), taken(needs.arena), taken(needs.counters)
    pools = {name: (taken(size), size) for name, size in sizes.items()}
    workspace = taken(needs.workspace)
    inputs = InputArea(plan, gpu, dummy_block=num_blocks)
    stack.callback(inputs.close)
    sampling = None
    if plan.sampling is not None:
        sampling = SamplingArea(plan, plan.sampling, gpu, stream)
        stack.callback(sampling.close)
    return Memory(whole, arena, counters, pools, inputs, sampling, workspace)


def _gemms(
    engine: Engine, gpu: Device, lt: CublasLt, plan: LaunchPlan, workspace: int, options: Options, stack: ExitStack
) -> Gemms:
    remembered = GemmMemory(f"cuBLASLt {lt.version}, {gpu.name}", memory_paths(engine.path))
    gemms = Gemms(
        *(gpu, lt, workspace, memory.GEMM_WORKSPACE), limits=plan.limits, tune=options.tune, memory=remembered
    )
    stack.callback(gemms.close)
    return gemms


def _explained(error: CudaError, needs: memory.Needs) -> Exception:
    if error.code != OUT_OF_MEMORY:
        return error
    return EngineError(
        f"the GPU's memory ran out while loading: {error.what}",
        where=f"weights {needs.weights} bytes, activations {needs.arena} bytes",
        hint="end other processes that use the GPU, or pass a lower kv_memory_fraction",
    )
