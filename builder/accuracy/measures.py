"""How far one model's logits are from another's, token by token: KL divergence, top-1 agreement, perplexity.

With p and q the softmax of the reference's and the candidate's logits at one token, natural logarithms throughout:

    KL(p ‖ q) = Σ p·(log p - log q)      nll = -log p[next token]      perplexity = exp(mean nll)

Float64 from float32 logits, a few rows at a time: [tokens, V] never exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmbuild.builder.accuracy.windows import Step, Window, steps
from llmbuild.errors import AccuracyError

Forward = Callable[[Step], npt.NDArray[np.float32]]
Logits = npt.NDArray[np.float32] | Tensor  # float32 [rows, V]; a tensor lies on any device
Floats = npt.NDArray[np.float64]

# Of float64 logits at a time: few stay in a processor's cache, many keep a GPU busy.
ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 27}


@dataclass(frozen=True)
class Figures:
    """What was measured over all tokens.

    Attributes:
        tokens: Rows of logits compared.
        predicted: Of these, rows whose next token is known: what the perplexities are over.
        kl_mean, kl_p99, kl_max: Of KL(reference ‖ candidate) per token, in nats; p99 interpolates linearly.
        top1: Share of rows in which both have their (first) largest logit at the same token.
        logits_error: ‖y' - y‖ / ‖y‖ of all logits, each row without its mean, which no distribution depends on.
        reference_ppl, candidate_ppl: Perplexities.
    """

    tokens: int
    predicted: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float
    logits_error: float
    reference_ppl: float
    candidate_ppl: float

    @property
    def ppl_increase(self) -> float:
        """By which share the candidate's perplexity is above the reference's; negative when it is below."""
        return self.candidate_ppl / self.reference_ppl - 1


@dataclass
class Comparison:
    """Collects rows; keeps a few numbers of each."""

    kl: list[Floats] = field(default_factory=list)
    agree: int = 0
    gap: float = 0.0  # squared norms: of the differences, and of the reference's logits
    norm: float = 0.0
    reference_nll: list[Floats] = field(default_factory=list)
    candidate_nll: list[Floats] = field(default_factory=list)

    def add(self, reference: Logits, candidate: Logits, targets: np.ndarray) -> None:
        """Add rows of both, float32 [R, V]; `targets` are the next tokens of the first rows, at most R.

        Raises:
            AccuracyError: Logits are NaN or +inf, or a row holds nothing but -inf.
        """
        assert reference.shape == candidate.shape and len(targets) <= len(reference)
        expected, given = torch.as_tensor(reference), torch.as_tensor(candidate)
        at_once = max(1, ELEMENTS[expected.device.type] // expected.shape[1])
        for begin in range(0, len(expected), at_once):
            rows = slice(begin, begin + at_once)
            first, first_top = log_softmax(expected[rows], "the reference's")
            second, second_top = log_softmax(given[rows], "the measured model's")
            self.kl.append(kl_divergence(first, second).cpu().numpy())
            gap, norm = squared_norms(expected[rows], given[rows])
            self.gap, self.norm = self.gap + gap, self.norm + norm
            self.agree += int((first_top == second_top).sum())
            wanted = torch.as_tensor(targets[rows], dtype=torch.int64, device=first.device)[:, None]
            for found, of in ((self.reference_nll, first), (self.candidate_nll, second)):
                found.append(-of[: len(wanted)].gather(1, wanted)[:, 0].cpu().numpy())

    def figures(self) -> Figures:
        """Return the figures of all rows added; there must be one with a target."""
        kl = np.concatenate(self.kl)
        nll, candidate_nll = np.concatenate(self.reference_nll), np.concatenate(self.candidate_nll)
        with np.errstate(over="ignore"):
            perplexities = [float(np.exp(values.mean())) for values in (nll, candidate_nll)]
        return Figures(
            tokens=len(kl),
            predicted=len(nll),
            kl_mean=float(kl.mean()),
            kl_p99=percentile_99(kl),
            kl_max=float(kl.max()),
            top1=self.agree / len(kl),
            logits_error=(self.gap / self.norm) ** 0.5 if self.norm else 0.0 if not self.gap else float("inf"),
            reference_ppl=perplexities[0],
            candidate_ppl=perplexities[1],
        )


def log_softmax(logits: Tensor, whose: str) -> tuple[Tensor, Tensor]:
    """Return log softmax, float64 [R, V], and the first index of each row's largest logit, [R].

    A logit of -inf is a token that cannot follow. Raises AccuracyError for a row without a distribution.
    """
    values = logits.double()
    highest = values.amax(1, keepdim=True)  # NaN if one is
    if not bool(highest.isfinite().all()):
        raise AccuracyError(
            f"{whose} logits are no distribution: a row's largest is {float(highest[~highest.isfinite()][0])}",
            hint="a weight or a scale is broken, or the computation overflows: choose another --quant or --dtype",
        )
    return values.log_softmax(1), values.argmax(1)


def kl_divergence(first: Tensor, second: Tensor) -> Tensor:
    """KL(first ‖ second) of each row of two log softmaxes [R, V]; inf where second rules out what first does not."""
    gap = (first - second).masked_fill_(first.isneginf(), 0.0)  # 0·log 0 is 0
    return gap.mul_(first.exp()).sum(1).clamp_(min=0.0)  # rounding may take it below zero


def squared_norms(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Return ‖second - first‖² and ‖first‖² of logits [R, V], each row around its mean.

    Tokens that both rule out (-inf) are left out; where only one does, the difference is inf.
    """
    ruled_out = first.isneginf()
    kept = (~ruled_out).sum(1, keepdim=True)
    centred = []
    for logits in (first, second):
        values = logits.double().masked_fill(ruled_out, 0.0)
        centred.append((values - values.sum(1, keepdim=True) / kept).masked_fill_(ruled_out, 0.0))
    if not torch.equal(ruled_out, second.isneginf()):
        return float("inf"), float(centred[0].square().sum())
    return float((centred[1] - centred[0]).square_().sum()), float(centred[0].square_().sum())


def percentile_99(values: Floats) -> float:
    """Like numpy's, but defined where values are infinite."""
    ordered = np.sort(values)
    place = 0.99 * (len(ordered) - 1)
    low, high = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
    weight = place - int(place)
    return float(low if weight == 0 or low == high else low + weight * (high - low))


def compare(
    reference: Forward,
    candidate: Forward,
    windows: Sequence[Window],
    *,
    chunk: int,
    block_sizes: tuple[int, int],
    progress: Callable[[int, int], None] | None = None,
) -> Figures:
    """Run both models over all windows and return how they differ.

    Args:
        reference, candidate: Run a step and return its logits, float32 [rows, V].
        chunk: Most tokens in a step.
        block_sizes: Tokens in a KV block, of the reference and of the candidate.
        progress: Called with tokens done and tokens in all.

    Raises:
        AccuracyError: Logits are no distribution.
    """
    comparison = Comparison()
    done, total = 0, sum(map(len, windows))
    for window in windows:
        pairs: Iterable[tuple[tuple[Step, np.ndarray], tuple[Step, np.ndarray]]] = zip(
            *(steps(window, chunk=chunk, block_size=size) for size in block_sizes), strict=True
        )
        for (first, targets), (second, _) in pairs:
            comparison.add(reference(first), candidate(second), targets)
            done += len(first.input_ids)
            if progress is not None:
                progress(done, total)
    return comparison.figures()


def rows_a_step(vocab_size: int, most: int) -> int:
    """Return how many tokens a step has, so that its logits take little beside the model: at most `most`."""
    return max(1, min(most, max(16, (1 << 24) // vocab_size)))
