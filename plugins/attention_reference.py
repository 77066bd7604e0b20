"""Plain paged attention in torch: the oracle of every kernel, and the state behind `llmbuild::paged_attention`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from llmbuild.plugins.cache_rounding import widened

_STATE: ContextVar[PagedState] = ContextVar("llmbuild_paged_state")


class PagedState:
    """KV pools of all layers and the paging data of the step in flight.

    Pools are made on first use, `[num_blocks * block_size, Hkv, D]` per layer, and scales `[.., Hkv, 1]` where each
    token and head has its own. `set_step` must be called before each run of the graph, with the arrays of
    `runtime.executor.StepInput` as tensors.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.key_scales: dict[int, Tensor] = {}
        self.value_scales: dict[int, Tensor] = {}

    def set_step(self, slot_mapping: Tensor, block_tables: Tensor, seq_lens: Tensor, cu_q_lens: Tensor) -> None:
        """slot_mapping [T], block_tables [B, max_blocks], seq_lens [B] (this step included), cu_q_lens [B + 1]."""
        self.slot_mapping, self.block_tables = slot_mapping.long(), block_tables.long()
        self.seq_lens, self.cu_q_lens = seq_lens.tolist(), cu_q_lens.tolist()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, Hq, Dv]; see `plugins.ops` for the attributes."""
        self.append(self.keys, layer, k)
        self.append(self.values, layer, v)
        if k_scale is not None and v_scale is not None and k_scale.ndim > 1:
            self.append(self.key_scales, layer, k_scale)
            self.append(self.value_scales, layer, v_scale)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        for row, (begin, end) in enumerate(zip(self.cu_q_lens[:-1], self.cu_q_lens[1:], strict=True)):
            queries = q[begin:end]
            slots = self.slots(row)
            keys, values = self.keys[layer][slots], self.values[layer][slots]
            if k_scale is not None and v_scale is not None:
                queries = queries.float()
                keys = widened(keys, self.key_scales[layer][slots] if layer in self.key_scales else k_scale)
                values = widened(values, self.value_scales[layer][slots] if layer in self.value_scales else v_scale)
            out[begin:end] = attend_one(
                queries, keys, values, scale, window=window, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes
            )
        return out

    def append(self, pools: dict[int, Tensor], layer: int, new: Tensor) -> None:
        """Write the rows of the step's tokens to a layer's pool."""
        if layer not in pools:
            pools[layer] = new.new_zeros(self.num_blocks * self.block_size, *new.shape[1:])
        pools[layer][self.slot_mapping] = new

    def slots(self, row: int) -> Tensor:
        """Return the slots of all positions of a sequence."""
        positions = torch.arange(self.seq_lens[row], device=self.block_tables.device)
        return self.block_tables[row][positions // self.block_size] * self.block_size + positions % self.block_size


def attend_one(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence's newest queries over all its keys.

    q [Q, Hq, D] are the last Q positions of keys [S, Hkv, D] and values [S, Hkv, Dv]; returns [Q, Hq, Dv].
    """
    queries, length = q.shape[0], keys.shape[0]
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query_positions = torch.arange(length - queries, length, device=q.device)[:, None]
    distance = torch.arange(length, device=q.device)[None] - query_positions  # <= 0 for keys that the query may see
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.float()[:, None, None] * distance
    visible = distance <= 0
    if window is not None:
        visible &= distance > -window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, queries, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights.to(values.dtype), values)


@contextlib.contextmanager
def paged_state(state: PagedState) -> Iterator[PagedState]:
    """Make `state` the one that `llmbuild::paged_attention` uses inside the `with` block."""
    token = _STATE.set(state)
    try:
        yield state
    finally:
        _STATE.reset(token)


def current_state() -> PagedState:
    try:
        return _STATE.get()
    except LookupError:
        raise RuntimeError("llmbuild::paged_attention was called outside `with paged_state(...)`") from None
