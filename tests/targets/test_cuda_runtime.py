"""The cuda runtime over plans of real models: kernels in Triton's interpreter, on memory of a GPU made of numpy.

What is left to a real GPU is the driver: arguments, arena, inputs, pools, padding, graphs and GEMMs are those that it
would see.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.cuda.lowered import Hardware
from llmbuild.builder.targets.cuda.lowering import Planned, plan_program
from llmbuild.builder.targets.cuda.parameters import launch_parameters
from llmbuild.cuda.kernels import Grid
from llmbuild.engine.cubin import Cubin, Launch
from llmbuild.engine.kernel_pack import CompiledKernel, write_pack
from llmbuild.engine.manifest import LimitsSection, TargetSection
from llmbuild.engine.reader import open_engine
from llmbuild.plugins.kernels.interpreter import interpret
from llmbuild.plugins.kernels.spec import KernelSpec
from llmbuild.runtime.executors.cuda import load as load_module
from llmbuild.runtime.executors.cuda.cublaslt import CublasLt
from llmbuild.runtime.executors.cuda.executor import CudaExecutor
from llmbuild.runtime.llm import LLM
from llmbuild.runtime.sampling_params import SamplingParams
from support.cuda_engine import SECTION, launch, write_weights
from support.fake_cublaslt import FakeCublasLt
from support.fake_device import FakeDevice
from support.fake_engine import sections, write_engine
from support.packed_driver import Request, drive
from support.tiny_models import VOCAB_SIZE, tiny_model
from support.traced import optimized

SIZES = Limits(max_batch_size=4, max_num_tokens=32, max_seq_len=64, block_size=8)
FORMATS = {"i1": "b", "i8": "b", "i32": "i", "i64": "q", "fp32": "f"}


def planned(family: str, *, sampling: bool) -> Planned:
    return plan_program(optimized(family), SIZES, Hardware(90, processors=1, small_gemms=False, sampling=sampling))


def write_planned(out: Path, made: Planned) -> Path:
    """Write an engine of a plan; the code of a kernel is its name."""
    work = out.with_name("work")
    write_weights(work / "weights", {name: each.load().contiguous().numpy() for name, each in made.weights.items()})
    kernels = [
        CompiledKernel(name, spec.grid, {90: Cubin(launch_of(name, spec), name.encode())})
        for name, spec in made.specs.items()
    ]
    write_pack(work / "kernels", kernels, compiler="none")
    payload = {
        "plan/sm90/plan.json": made.plan.to_json(),
        "plan/sm90/kernels.bin": (work / "kernels").read_bytes(),
        "weights/cuda.safetensors": (work / "weights").read_bytes(),
        "report.json": b"{}\n",
    }
    model = sections()["model"].model_copy(update={"vocab_size": made.plan.logits_columns})
    target = TargetSection(name="cuda", requires={}, toolchain={}, section=SECTION)
    limits = LimitsSection(
        max_batch_size=SIZES.max_batch_size, max_num_tokens=SIZES.max_num_tokens, max_seq_len=SIZES.max_seq_len
    )
    kv_cache = sections()["kv_cache"].model_copy(update={"block_size": SIZES.block_size})
    write_engine(out, payload=payload, model=model, target=target, limits=limits, kv_cache=kv_cache)
    return out


def launch_of(name: str, spec: KernelSpec) -> Launch:
    return launch(name).model_copy(update={"parameters": launch_parameters(spec.signature, ())})


def interpreted(name: str, spec: KernelSpec) -> Callable[[FakeDevice, Grid, bytes], None]:
    """Return what runs a kernel with the bytes that it is launched with."""
    kernel, parameters = interpret(spec.function), launch_parameters(spec.signature, ())

    def run(device: FakeDevice, grid: Grid, given: bytes) -> None:
        values: dict[str, Any] = dict(spec.constants)
        for argument, parameter in zip(spec.signature, parameters, strict=False):
            if parameter.kind.startswith("*"):
                (address,) = struct.unpack_from("<Q", given, parameter.offset)
                values[argument] = tensor(device, address, parameter.kind[1:])
            else:
                (values[argument],) = struct.unpack_from("<" + FORMATS[parameter.kind], given, parameter.offset)
        kernel[tuple(grid)](**values)

    return run


ELEMENTS = {"fp32": torch.float32, "i32": torch.int32, "i64": torch.int64, "i8": torch.int8, "i1": torch.bool}


def tensor(device: FakeDevice, address: int, element: str) -> torch.Tensor:
    """Return the GPU's memory from an address to the end of its allocation."""
    start = max(start for start in device.blocks if start <= address)
    held = torch.from_numpy(device.blocks[start])[address - start :]
    dtype = ELEMENTS[element]
    return held[: len(held) // dtype.itemsize * dtype.itemsize].view(dtype)


def install(monkeypatch: pytest.MonkeyPatch, made: Planned) -> FakeDevice:
    """Put a GPU that knows the plan's kernels into the executor's place for one."""
    device = FakeDevice(kernels={name: interpreted(name, spec) for name, spec in made.specs.items()})
    monkeypatch.setattr(load_module, "Device", lambda ordinal: device)
    monkeypatch.setattr(load_module, "open_library", lambda gpu: CublasLt(FakeCublasLt(device)))
    return device


def requests() -> list[Request]:
    draw = np.random.default_rng(7).integers(3, VOCAB_SIZE, 24).tolist()
    return [Request(draw[:14], prompt=11, chunks=(5,)), Request(draw[14:18], prompt=1, arrives=2)]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "mixtral", "gemma2")]


@pytest.mark.parametrize("name", ["llama", *SLOW])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name)
    made = planned(name, sampling=False)
    device = install(monkeypatch, made)
    executor = CudaExecutor(open_engine(write_planned(tmp_path / "engine", made)), num_blocks=9)
    found = np.concatenate(drive(executor.forward, requests(), num_blocks=8))
    executor.close()
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([each.tokens])).logits[0] for each in requests()]).float().numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert device.captures and device.graphs_launched and device.closed


@pytest.mark.slow
def test_tokens_sampled_on_the_device_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    made = planned("llama", sampling=True)
    assert made.plan.sampling is not None
    install(monkeypatch, made)
    prompts = [[5, 6, 7, 8, 9], [10], [11, 12]]
    with LLM(write_planned(tmp_path / "engine", made), kv_cache_blocks=12) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(prompt)
        for _ in range(3):
            with torch.inference_mode():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert list(output.outputs[0].token_ids) == tokens[len(prompt) :]
