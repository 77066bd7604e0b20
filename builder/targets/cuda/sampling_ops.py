"""The sampling kernels of an engine as operations of its launch plan."""

from __future__ import annotations

from llmbuild.engine.launch_plan import ITEM_BYTES, Argument, Input, KernelOp, Number, Place, Sampling
from llmbuild.plugins.kernels.sampling_plan import Array, SamplingLaunch, SamplingPlan


def sampling_ops(plan: SamplingPlan, logits: Place) -> tuple[Sampling, tuple[tuple[str, str, str], ...]]:
    """Return the section, and the buffers that its kernels need after the last op: (name, dtype, bytes in L).

    logits: where the rows of logits lie, in the dtype and with the columns that the plan was made for. The kernels to
    compile are `plan.specs`; `feed` writes the step's input "input_ids".
    """
    kinds = {array.name: "state" for array in plan.state}
    kinds |= {array.name: "input" for array in plan.inputs} | {"input_ids": "input"}
    kinds |= {array.name: "buffer" for array in plan.workspaces}

    def place(name: str) -> Place:
        return logits if name == "logits" else Place(kind=kinds[name], name=name)  # type: ignore[arg-type]

    def op(launch: SamplingLaunch) -> KernelOp:
        arguments: list[Argument] = [
            place(launch.arrays[name]) if name in launch.arrays else Number(value=launch.numbers[name])
            for name in launch.spec.signature
        ]
        return KernelOp(kernel=launch.spec.name, arguments=tuple(arguments), label="sampling")

    def ops(launches: tuple[SamplingLaunch, ...]) -> tuple[KernelOp, ...]:
        return tuple(op(launch) for launch in launches)

    def result(name: str) -> Place:
        return place(f"{plan.prefix}_{name}")

    section = Sampling(
        greedy=ops(plan.greedy),
        full=ops(plan.full),
        adjusted=ops(plan.adjusted),
        logprobs=ops(plan.logprobs),
        count=ops(plan.count),
        enter=ops(plan.enter),
        feed=ops(plan.feed),
        inputs=_inputs(plan.inputs),
        state=_inputs(plan.state),
        num_tokens=plan.num_tokens,
        token_ids=result("token_ids"),
        status=result("status"),
        logprob_ids=result("logprob_ids"),
        logprob_values=result("logprobs"),
        ranks=result("ranks"),
    )
    buffers = [(array.name, array.dtype, f"({array.size}) * {ITEM_BYTES[array.dtype]}") for array in plan.workspaces]
    return section, tuple(buffers)


def _inputs(arrays: tuple[Array, ...]) -> tuple[Input, ...]:
    return tuple(Input(name=array.name, dtype=array.dtype, size=array.size) for array in arrays)
