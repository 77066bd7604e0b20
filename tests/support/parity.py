"""Compare a traced program with the transformers model it came from, on packed, chunked, paged steps."""

from __future__ import annotations

import numpy as np
import torch

from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.plugins.attention_reference import PagedState
from support.packed_driver import Request, drive

# (tokens, prompt, chunks, step of arrival): chunks cross blocks of 8 and windows of 6; one prompt is a single token;
# one request joins while others decode; the last steps run a single token.
_PLAN = ((26, 17, (5, 7), 0), (9, 1, (), 0), (7, 4, (), 2))


def relative_error(program: Program, model: torch.nn.Module, vocab: int = 256) -> float:
    """Largest |logit difference| over all tokens, relative to the largest logit of each sequence."""
    generator = torch.Generator().manual_seed(5)
    requests = [
        Request(torch.randint(0, vocab, (tokens,), generator=generator).tolist(), prompt, chunks, arrives)
        for tokens, prompt, chunks, arrives in _PLAN
    ]
    oracle, state = Oracle(program), PagedState(num_blocks=64, block_size=8)
    logits = drive(lambda step: oracle.run(step, state).numpy(), requests)
    worst = 0.0
    for request, got in zip(requests, logits, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([request.tokens]), use_cache=False).logits[0].numpy()
        worst = max(worst, float(np.abs(wanted - got).max() / np.abs(wanted).max()))
    return worst
