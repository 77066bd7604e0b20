from __future__ import annotations

import asyncio
import threading
import time

import pytest

from llmbuild.errors import EngineStoppedError, RequestError
from llmbuild.runtime.async_llm import AsyncLLM
from llmbuild.runtime.core import EngineCore
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.llm import LLM
from llmbuild.runtime.sampling_params import SamplingParams
from support.fake_executor import AsyncFakeExecutor, FakeExecutor

LIMITS = ServingLimits(max_batch_size=4, max_num_tokens=32, max_seq_len=4000, vocab_size=64, eos_token_ids=(2,))
LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3000)
SHORT = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)


class Gate(FakeExecutor):
    """A fake whose steps take a millisecond, so that requests live long enough to be interrupted."""

    def __init__(self) -> None:
        super().__init__(LIMITS, num_blocks=2000, block_size=4)

    def execute(self, step, sampling):
        time.sleep(0.001)
        return super().execute(step, sampling)

    def close(self) -> None:
        time.sleep(0.02)  # as long as freeing takes: nobody may hear of the end before
        super().close()


@pytest.fixture
def core_of(monkeypatch):
    """The EngineCore that an AsyncLLM made, for looking at its blocks."""
    made = []
    original = EngineCore.__init__

    def remember(self, *args):
        original(self, *args)
        made.append(self)

    monkeypatch.setattr(EngineCore, "__init__", remember)
    return made


def make_llm() -> AsyncLLM:
    return AsyncLLM.over(Gate(), LIMITS)


async def collect(outputs) -> list[int]:
    async for output in outputs:
        last = output
    return last.outputs[0].token_ids


async def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        await asyncio.sleep(0.002)


def run(test) -> None:
    async def with_llm() -> None:
        async with make_llm() as llm:
            await test(llm)

    asyncio.run(asyncio.wait_for(with_llm(), 60))


def test_many_at_once_equal_one_by_one() -> None:
    prompts = [[i, i + 1, 3] for i in range(12)]
    expected = [
        o.outputs[0].token_ids
        for o in LLM.over(FakeExecutor(LIMITS, num_blocks=99, block_size=4), LIMITS).generate(prompts, SHORT)
    ]

    async def test(llm: AsyncLLM) -> None:
        assert await asyncio.gather(*(collect(llm.generate(prompt, SHORT)) for prompt in prompts)) == expected

    run(test)


def test_outputs_are_cumulative() -> None:
    async def test(llm: AsyncLLM) -> None:
        ids: list[int] = []
        async for output in llm.generate([1], SHORT, "mine"):
            ids += output.outputs[0].new_token_ids
            assert output.request_id == "mine" and output.outputs[0].token_ids == ids
        assert output.finished and len(ids) == 6

    run(test)


def test_abort_gives_a_last_output_and_frees_the_blocks(core_of) -> None:
    async def test(llm: AsyncLLM) -> None:
        seen = []
        async for output in llm.generate([1], LONG, "a"):
            seen.append(output)
            if len(seen) == 5:
                llm.abort("a")
                llm.abort("nobody")
        assert seen[-1].finished and seen[-1].outputs[0].finish_reason == "abort"
        assert len(seen[-1].outputs[0].token_ids) < 3000
        await wait_until(lambda: core_of[0].num_free_blocks == 2000)
        assert len(await collect(llm.generate([1], SHORT, "a"))) == 6  # the id is free again

    run(test)


def test_a_cancelled_consumer_frees_its_blocks(core_of) -> None:
    async def test(llm: AsyncLLM) -> None:
        task = asyncio.create_task(collect(llm.generate([1] * 40, LONG)))
        await wait_until(lambda: core_of[0].num_free_blocks < 2000)
        other = asyncio.create_task(collect(llm.generate([5], SHORT)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: core_of[0].num_free_blocks == 2000)
        assert len(await other) == 6
        await wait_until(lambda: not core_of[0].has_work)

    run(test)


def test_a_consumer_that_leaves_its_loop_frees_its_blocks(core_of) -> None:
    async def test(llm: AsyncLLM) -> None:
        outputs = llm.generate([1], LONG)
        async for _ in outputs:
            break
        await outputs.aclose()
        await wait_until(lambda: core_of[0].num_free_blocks == 2000)

    run(test)


def test_bad_requests_fail_alone() -> None:
    async def test(llm: AsyncLLM) -> None:
        good = asyncio.create_task(collect(llm.generate([1], SHORT)))
        with pytest.raises(RequestError, match="the prompt is empty"):
            await collect(llm.generate([], SHORT))
        with pytest.raises(RequestError, match="token id 64"):
            await collect(llm.generate([64], SHORT))
        running = llm.generate([1], LONG, "twin")
        await running.__anext__()
        with pytest.raises(RequestError, match="a request 'twin' is already running"):
            await collect(llm.generate([1], SHORT, "twin"))
        await running.aclose()
        assert len(await good) == 6

    run(test)


def test_a_failure_reaches_every_consumer_with_its_cause() -> None:
    async def main() -> None:
        executor = Gate()
        executor.fail_at_step = 8
        llm = AsyncLLM.over(executor, LIMITS)
        results = await asyncio.gather(*(collect(llm.generate([i], LONG)) for i in range(6)), return_exceptions=True)
        for error in results:
            assert isinstance(error, EngineStoppedError)
            assert error.what == "the engine failed: the device fell off the bus"
            assert isinstance(error.__cause__, RuntimeError)
        assert len({id(error) for error in results}) == 6
        assert not llm.is_running and executor.closed
        with pytest.raises(EngineStoppedError, match="the engine failed"):
            await collect(llm.generate([1], SHORT))
        llm.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_executor_whose_steps_overlap_is_warm_before_the_first_request() -> None:
    async def main() -> None:
        executor = AsyncFakeExecutor(LIMITS, num_blocks=2000, block_size=4)
        async with AsyncLLM.over(executor, LIMITS) as llm:
            assert executor.is_warm
            results = await asyncio.gather(*(collect(llm.generate([i, 3], SHORT)) for i in range(6)))
        expected = LLM.over(FakeExecutor(LIMITS, num_blocks=2000, block_size=4), LIMITS).generate(
            [[i, 3] for i in range(6)], SHORT
        )
        assert results == [each.outputs[0].token_ids for each in expected]
        assert executor.closed and executor.fed > 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_close_ends_those_who_wait() -> None:
    async def main() -> None:
        llm = make_llm()
        task = asyncio.create_task(collect(llm.generate([1], LONG)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineStoppedError, match="the engine was closed"):
            await task
        llm.close()
        with pytest.raises(EngineStoppedError, match="the engine was closed"):
            await collect(llm.generate([1], SHORT))

    asyncio.run(asyncio.wait_for(main(), 60))
    assert not any(thread.name == "llmbuild-core" for thread in threading.enumerate())


def test_several_event_loops_share_one_engine(core_of) -> None:
    llm = make_llm()
    results: dict[int, list[int]] = {}

    def serve(index: int) -> None:
        async def main() -> None:
            if index == 0:  # this loop ends while its request runs
                async for _ in llm.generate([9], LONG):
                    return
            results[index] = await collect(llm.generate([index], SHORT))

        asyncio.run(main())

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [1, 2, 3] and all(len(ids) == 6 for ids in results.values())
    deadline = time.monotonic() + 5
    while core_of[0].num_free_blocks < 2000 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert core_of[0].num_free_blocks == 2000
    llm.close()


def test_a_loop_that_vanished_ends_its_requests(core_of) -> None:
    """No cancellation reaches the consumer: its loop is closed under it."""
    llm = make_llm()
    loop = asyncio.new_event_loop()
    outputs = llm.generate([1], LONG)
    loop.run_until_complete(outputs.__anext__())
    loop.close()
    deadline = time.monotonic() + 5
    while core_of[0].has_work and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not core_of[0].has_work and core_of[0].num_free_blocks == 2000
    assert llm.is_running
    llm.close()


def test_a_request_that_meets_the_closing_is_told_too() -> None:
    """Its command stands behind the one that ends the thread."""
    entered, release = threading.Event(), threading.Event()

    class Blocked(Gate):
        def execute(self, step, sampling):
            entered.set()
            assert release.wait(10)
            return super().execute(step, sampling)

    async def main() -> None:
        llm = AsyncLLM.over(Blocked(), LIMITS)
        first = asyncio.create_task(collect(llm.generate([1], LONG)))
        await wait_until(entered.is_set)
        closing = asyncio.create_task(asyncio.to_thread(llm.close))
        await wait_until(lambda: not llm._commands.empty())
        second = asyncio.create_task(collect(llm.generate([2], LONG)))
        await wait_until(lambda: llm._commands.qsize() == 2)
        release.set()
        for error in await asyncio.gather(first, second, return_exceptions=True):
            assert isinstance(error, EngineStoppedError) and error.what == "the engine was closed"
        await closing

    asyncio.run(asyncio.wait_for(main(), 30))
