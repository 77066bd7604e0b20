"""15,000 random requests against the runtime: invariants after every step, nothing leaked, tokens as if alone.

Pools are tiny, so that preemption is common; budgets are tiny, so that prompts are cut everywhere; requests arrive and
are aborted at random steps. The model is a hash of everything that the step's arrays lead it to read.
"""

from __future__ import annotations

import random

import pytest
import tokenizers

from llmbuild.errors import RequestError
from llmbuild.runtime.core import EngineCore
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.outputs import RequestOutput
from llmbuild.runtime.request import Request, make_request
from llmbuild.runtime.sampling_params import SamplingParams
from llmbuild.runtime.tokenizer import Tokenizer
from support.fake_executor import AsyncFakeExecutor, FakeExecutor
from support.reference_runtime import run_alone
from support.tiny_tokenizers import byte_definition

SEEDS, REQUESTS = 25, 400
EOS = (3, 5)


class World:
    """One random engine, and a random stream of requests to it."""

    def __init__(self, seed: int, kind: type[FakeExecutor] = FakeExecutor) -> None:
        self.rng = rng = random.Random(seed)
        self.vocab_size = rng.choice([8, 16, 90])  # ASCII: each token is a character
        max_seq_len = rng.choice([6, 14, 30])
        batch = rng.choice([1, 3, 8, 16])
        # Decodes alone may exceed the budget.
        tokens = rng.choice([2, 5, 16, 64])
        self.limits = ServingLimits(batch, tokens, max_seq_len, self.vocab_size, EOS)
        block_size = rng.choice([1, 2, 3, 4, 16])
        longest = -(-max_seq_len // block_size)
        self.num_blocks = rng.choice([max(longest - 1, 1), longest, longest + 2, 2 * longest, 4 * longest])
        self.executor = kind(self.limits, num_blocks=self.num_blocks, block_size=block_size)
        self.core = EngineCore(self.executor, self.limits, Tokenizer(byte_definition()))
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.shown: dict[tuple[str, int], str] = {}
        self.num_finished = self.refused = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.requests) - self.num_finished

    def add_request(self) -> None:
        rng, name = self.rng, str(len(self.requests) + self.refused)
        prompt = [
            rng.randrange(self.vocab_size) for _ in range(rng.randint(1, rng.choice([3, self.limits.max_seq_len])))
        ]
        try:
            request = make_request(
                name,
                prompt,
                self.params(len(prompt)),
                self.limits,
                pool_tokens=self.num_blocks * self.executor.block_size,
                stream=rng.random() < 0.5,
            )
        except RequestError:
            self.refused += 1
            return
        self.requests[name] = request
        self.core.add(request)

    def params(self, prompt_len: int) -> SamplingParams:
        rng, vocab = self.rng, self.vocab_size
        greedy = rng.random() < 0.6
        max_tokens = rng.choice(
            [None, *(rng.randint(1, max(1, self.limits.max_seq_len - prompt_len)) for _ in range(3))]
        )
        return SamplingParams(
            n=1 if greedy or rng.random() < 0.85 else rng.randint(2, 3),
            temperature=0.0 if greedy else rng.choice([0.5, 1.0, 1.5]),
            top_k=rng.choice([0, 0, 3]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            seed=rng.getrandbits(64),
            repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.5]),
            logit_bias=rng.choice([None, None, None, {rng.randrange(vocab): 2.0}]),
            allowed_token_ids=rng.choice([None] * 6 + [rng.sample(range(vocab), 6)]),
            stop=[
                "".join(chr(rng.randrange(vocab)) for _ in range(rng.randint(1, 3)))
                for _ in range(rng.choice([0, 0, 1, 3]))
            ],
            include_stop_str_in_output=rng.random() < 0.3,
            stop_token_ids=rng.sample(range(vocab), rng.choice([0, 0, 1, 2])),
            ignore_eos=rng.random() < 0.5,
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 0, 1, 3]) if max_tokens is None or max_tokens > 3 else 0,
        )

    def receive(self, output: RequestOutput) -> None:
        """Outputs of a stream grow, and their pieces put together are what they say."""
        assert output.request_id not in self.outputs or not self.outputs[output.request_id].finished
        for completion in output.outputs:
            key = (output.request_id, completion.index)
            self.shown[key] = self.shown.get(key, "") + completion.new_text
            assert self.shown[key] == completion.text
        self.outputs[output.request_id] = output
        self.num_finished += output.finished

    def run(self, requests: int) -> None:
        rng = self.rng
        arriving = rng.choice([0.5, 2.0])
        while len(self.requests) + self.refused < requests or self.core.has_work:
            for _ in range(int(rng.expovariate(1 / arriving) + 0.5)):
                if len(self.requests) + self.refused < requests and self.num_unfinished < 25:
                    self.add_request()
            if rng.random() < 0.05:
                alive = [name for name in self.requests if name not in self.outputs or not self.outputs[name].finished]
                if alive:
                    output = self.core.abort(rng.choice(alive))
                    assert output is not None and output.finished
                    self.receive(output)
                    self.core.check_invariants()
            for output in self.core.step():
                self.receive(output)
            self.core.check_invariants()

    def check(self) -> tuple[int, int]:
        """Compare with one-at-a-time execution. Return (completions that ended by themselves, preemptions)."""
        library = tokenizers.Tokenizer.from_str(byte_definition())
        ended = preemptions = 0
        assert self.core.num_free_blocks == self.num_blocks
        assert set(self.outputs) == set(self.requests)
        for name, output in self.outputs.items():
            request = self.requests[name]
            preemptions += output.metrics.preemptions
            assert output.finished and len(output.outputs) == request.params.n
            for found in output.outputs:
                expected = run_alone(
                    request.prompt_token_ids.tolist(),
                    request.params,
                    index=found.index,
                    max_tokens=request.max_tokens,
                    vocab_size=self.vocab_size,
                    eos=EOS,
                    tokenizer=library,
                )
                if found.finish_reason == "abort":
                    assert found.token_ids == expected.token_ids[: len(found.token_ids)]
                    continue
                ended += 1
                assert (found.token_ids, found.text, found.finish_reason, found.stop_reason) == expected
        return ended, preemptions


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_requests(seed: int) -> None:
    world = World(seed)
    world.run(REQUESTS)
    ended, _ = world.check()
    assert ended > REQUESTS // 3
    assert world.executor.largest_step <= world.limits.max_num_tokens


@pytest.mark.parametrize("seed", range(100, 100 + SEEDS))
def test_random_requests_in_steps_that_overlap(seed: int) -> None:
    """The same tokens, though each step starts before the host has seen those of the one before."""
    world = World(seed, AsyncFakeExecutor)
    world.run(REQUESTS // 2)
    ended, _ = world.check()
    assert ended > REQUESTS // 6
    assert isinstance(world.executor, AsyncFakeExecutor)
    assert world.executor.fed > 0 and world.executor.pending == 0


def test_the_simulation_reaches_what_it_is_for() -> None:
    """Over all seeds: preemption, aborts while running and waiting, each way to finish, refusals."""
    reasons: set[str | None] = set()
    stop_types: set[type] = set()
    preemptions = refused = 0
    for seed in range(0, SEEDS, 3):
        world = World(seed)
        world.run(100)
        preemptions += sum(output.metrics.preemptions for output in world.outputs.values())
        refused += world.refused
        for output in world.outputs.values():
            reasons.update(completion.finish_reason for completion in output.outputs)
            stop_types.update(type(completion.stop_reason) for completion in output.outputs)
    assert reasons == {"stop", "length", "abort"}
    assert stop_types == {int, str, type(None)}
    assert preemptions > 50 and refused > 10
