"""`round_rows`: rows as products of 8-bit numbers see them, before the passes have made such products.

Importing this module registers the op beside `llmbuild.plugins.ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmbuild.plugins.scaled_ops import LIB, quantize_rows

LIB.define("round_rows(Tensor x, Tensor? scale, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
# x [..., K] -> the same shape and dtype: q · scale of `quantize_rows(x, scale, dtype)`.


@torch.library.impl("llmbuild::round_rows", "CompositeExplicitAutograd")
def round_rows(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    q, scales = quantize_rows(x, scale, dtype)
    return (q.float() * scales).to(x.dtype)


torch.library.register_fake("llmbuild::round_rows")(lambda x, *a, **k: torch.empty_like(x))
