"""Every causal language model of transformers is in the sweep, refused by name, or known to be something else."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmbuild.builder.frontend.fake_model import build_fake_model
from llmbuild.builder.frontend.trace import trace
from llmbuild.errors import UnsupportedError
from support.families import FAMILIES, MOE_FAMILIES
from support.other_models import COVERED, HYBRIDS, OTHERS, REFUSED

TABLES = (FAMILIES, MOE_FAMILIES, REFUSED, HYBRIDS, OTHERS)
SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=64)
OWN_SIZES = ("mamba2", "zamba", "zamba2", "blt", "reformer")  # whose configs do not take just any sizes
SLOW = ("cpmant", "diffllama", "dory", "hrm_text", "jetmoe", "longcat_flash", "rwkv", "xlstm", "reformer")


def test_nobody_is_forgotten() -> None:
    """In the version that the tables were made for, and in older ones. Newer ones only tell what is new."""
    known = {name for table in TABLES for name in table}
    new = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - known)
    if new and Version(transformers.__version__).release[:2] > Version(COVERED).release:
        pytest.skip(f"transformers {transformers.__version__} has new models: {', '.join(new)}")
    assert new == []


def test_nobody_is_in_two_tables() -> None:
    names = [name for table in TABLES for name in table]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in (*REFUSED, *HYBRIDS)]
)
def test_refused_by_name(name: str) -> None:
    released = HYBRIDS[name][1] if name in HYBRIDS else {}
    config = AutoConfig.for_model(name, **({} if name in OWN_SIZES else SIZES), **released)
    with pytest.raises(UnsupportedError) as caught:
        trace(build_fake_model(config, torch.float32))
    assert len(caught.value.what) > 10 and "TypeError" not in caught.value.what
