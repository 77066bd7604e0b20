"""What depends on how long a sequence gets is settled at build time, and the report says how."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmbuild.builder.frontend import attention_chunks, rope_policy
from llmbuild.builder.frontend.load import load_program
from support.sweep import VARIANTS
from support.tiny_models import save_tiny, tiny_config, tiny_model

FAMILY, LONGROPE = VARIANTS["phi3 (longrope)"]


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_model(FAMILY, **LONGROPE), tmp_path_factory.mktemp("phi3"), tokenizer=False)


def notices(path: Path, max_seq_len: int | None) -> tuple[int, str]:
    program = load_program(path, dtype=torch.float32, max_seq_len=max_seq_len)
    return program.info.max_position_embeddings, " ".join(program.rewrites[1].declined)


def test_an_engine_of_the_original_length_has_short_factors(phi3: Path) -> None:
    length, said = notices(phi3, None)
    assert length == 256
    assert "short factors, exact up to 256 tokens; a larger --max-seq-len takes the long ones" in said


def test_a_longer_engine_says_that_it_has_long_factors_for_all_sequences(phi3: Path) -> None:
    length, said = notices(phi3, 512)
    assert length == 512
    assert "long factors for all sequences; those of at most 256 tokens differ from transformers" in said


def test_a_config_is_left_alone_where_nothing_depends_on_the_length() -> None:
    config = tiny_config("llama")
    before = config.to_dict()
    assert rope_policy.settle(config, None) == (None, []) == attention_chunks.settle(config)
    assert config.to_dict() == before


def test_attention_in_chunks_ends_with_the_first_chunk() -> None:
    config = tiny_config("llama4_text", attention_chunk_size=100)
    assert "chunked_attention" in config.layer_types
    length, said = attention_chunks.settle(config)
    assert length == 100
    assert said == ["attention_chunk_size: exact up to the end of the first chunk (100), where the engine ends"]
    assert config.layer_types == ["full_attention", "full_attention"] and config.attention_chunk_size is None


def test_chunks_longer_than_the_model_was_made_for_do_not_lengthen_it() -> None:
    config = tiny_config("llama4_text", attention_chunk_size=8192)
    assert attention_chunks.settle(config)[0] == config.max_position_embeddings == 512
