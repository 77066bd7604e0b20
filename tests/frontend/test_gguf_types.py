"""GGUF block types are unpacked bit-exactly."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from llmbuild.errors import UnsupportedError
from llmbuild.quantization.gguf_types import BLOCK_TYPES, decode
from support.tiny_gguf import random_blocks


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_equals_gguf_py_bit_by_bit(name):
    raw = random_blocks(name, rows=7, columns=512)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    blocks = decode(name, raw, (7, 512))
    assert blocks.dequantize().numpy().view(np.uint32).tolist() == wanted.view(np.uint32).tolist()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_form_is_what_it_says(name):
    kind, blocks = BLOCK_TYPES[name], decode(name, random_blocks(name, rows=3, columns=512), (3, 512))
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.columns, kind.bytes)
    form = blocks.format
    assert (form.source, form.bits, form.block_size) == (name, kind.bits, kind.group)
    assert blocks.q.dtype is torch.uint8 and blocks.q.shape == blocks.shape == (3, 512)
    assert blocks.q.max() == 2**form.bits - 1 and blocks.q.min() == 0
    assert blocks.scale.shape == (3, 512 // form.block_size) and blocks.scale.dtype is torch.float32
    assert (blocks.offset is not None) == form.has_offset


def test_unknown_type_is_named_with_the_known_ones():
    with pytest.raises(UnsupportedError, match="GGUF tensor type Q3_K is not supported") as caught:
        decode("Q3_K", np.zeros((1, 110), np.uint8), (1, 256))
    assert "Q4_K" in str(caught.value)


@pytest.mark.parametrize("shape", [(2, 33), (3, 32), (2, 64)])
def test_bytes_that_do_not_fit_the_shape(shape):
    with pytest.raises(ValueError, match="do not hold"):
        decode("Q4_0", np.zeros((2, 18), np.uint8), shape)
