"""Recipes by name, and what the passes make of them."""

from __future__ import annotations

import pytest
import torch

from llmbuild.builder.ir import LAST_BLOCKS, BlockPart, Constant, Program
from llmbuild.builder.passes.quantize_weights import choose_formats
from llmbuild.builder.pipeline import optimize
from llmbuild.errors import ConfigError
from llmbuild.quantization.blocks import BlockFormat, BlockTensor
from llmbuild.quantization.expressions import Dequantized, Quantized
from llmbuild.quantization.primitives import quantize_blocks
from llmbuild.quantization.recipes import (
    RECIPES,
    KeepStored,
    PerChannel,
    PerGroup,
    Plain,
    Recipe,
    WeightOnly,
    customized,
    find_recipe,
)
from support.small_programs import count, random, result, small_program

linear, embedding = torch.nn.functional.linear, torch.nn.functional.embedding
UP, DOWN, HEAD = random(24, 16, seed=1), random(16, 24, seed=2), random(32, 16, seed=3)


def model(x, p, up, down, head):
    return linear(x + linear(linear(x, up).relu(), down), head)


def program() -> Program:
    return small_program(model, up=UP, down=DOWN, head=HEAD)


class Stored(Constant):
    """A constant that claims to be stored in blocks, as a GGUF tensor would be."""

    @property
    def block_format(self):
        return BlockFormat(4, 8, 8, has_offset=False, source="Q4_0")

    def load(self):
        return self.load_blocks().dequantize()

    def load_blocks(self) -> BlockTensor:
        blocks = quantize_blocks(self.value, WeightOnly(4, PerGroup(8)), name="stored")
        return BlockTensor(self.block_format, blocks.q, blocks.scale, None)


def test_recipes_are_found_by_name_and_the_nearest_is_named() -> None:
    assert all(find_recipe(name) is recipe and recipe.name == name for name, recipe in RECIPES.items())
    assert {"none", "gguf", "int8-wo", "int4-wo"} <= set(RECIPES)
    with pytest.raises(ConfigError, match=r"unknown quantization recipe 'int4wo'(.|\n)*did you mean 'int4-wo'"):
        find_recipe("int4wo")


def test_int4_quantizes_linears_and_gives_lm_head_8_bits() -> None:
    subject = program()
    optimize(subject, find_recipe("int4-wo"))
    assert count(subject, "linear") == 0 and count(subject, "embedding") == 1
    nodes = [node for node in subject.graph.nodes if "linear_blockwise" in str(node.target)]
    assert [node.args[5:] for node in nodes] == [(4, 16, 8), (4, 24, 8), (8, 16, 128)]
    assert "table: recipe 'int4-wo' keeps embedding plain" in logs(subject)["choose_formats"].declined


def logs(program: Program) -> dict:
    return {rewrite.name: rewrite for rewrite in program.rewrites}


def test_the_quantized_program_computes_what_its_dequantized_weights_do() -> None:
    subject, control = program(), program()
    optimize(subject, find_recipe("int8-wo"))
    for name in ("up", "down", "head"):
        weights = quantize_blocks(control.weights[name].load(), WeightOnly(8, PerGroup(32)), name=name)
        control.weights[name] = Constant(weights.dequantize())
    torch.testing.assert_close(result(subject), result(control), atol=1e-4, rtol=1e-5)


def test_a_tied_embedding_follows_lm_head_and_stays_one_tensor() -> None:
    subject = small_program(lambda x, p, tied: linear(embedding(p, tied) + x, tied), tied=HEAD)
    optimize(subject, find_recipe("int4-wo"))
    assert count(subject, "embedding_blockwise") == 1 and count(subject, "linear_blockwise") == 1
    looked_up = next(node for node in subject.graph.nodes if "embedding_blockwise" in str(node.target))
    product = next(node for node in subject.graph.nodes if "linear_blockwise" in str(node.target))
    assert looked_up.args[1:3] == product.args[1:3] and product.args[5] == 8
    assert set(subject.weights) == {"table", "tied_q", "tied_scale"}
    assert logs(subject)["use_blocks"].count == 2


def test_weights_used_by_other_ops_stay_plain_and_say_why() -> None:
    subject = small_program(lambda x, p, w: linear(x, w) + x @ w.sin(), w=random(16, 16))
    log = choose_formats(subject, find_recipe("int8-wo"))
    assert any(line.startswith("w: is used by sin aten.sin") for line in log.declined), log.declined


class Named(Constant):
    def sources(self):
        return frozenset({"model.layers.0.up.weight"})


def named_program() -> Program:
    subject = program()
    subject.weights["up"] = Named(UP)
    return subject


def test_group_sizes_and_symmetry_are_in_the_names_of_recipes() -> None:
    for size in (128, 64, 32):
        for suffix, symmetric in (("", True), ("-asym", False)):
            recipe = find_recipe(f"int4-wo-g{size}{suffix}")
            assert recipe.linear == WeightOnly(4, PerGroup(size), symmetric)
            assert recipe.lm_head == find_recipe("int8-wo").linear
    assert find_recipe("int8-wo-channel").linear == WeightOnly(8, PerChannel())


def test_a_rule_gives_some_weights_another_recipe() -> None:
    subject = named_program()
    log = choose_formats(subject, customized("int4-wo", [], ["*.up.*=int8-wo", "*=none"]))
    assert subject.weights["up"].block_format.bits == 8 and subject.weights["down"].block_format.bits == 4
    assert log.count == 3
    subject = named_program()
    log = choose_formats(subject, customized("int4-wo", [], ["*.up.*=none"]))
    assert subject.weights["up"].block_format is None
    assert "up: recipe 'none' of '*.up.*' keeps it plain" in log.declined


def test_rules_alone_quantize_and_exclusions_come_first() -> None:
    subject = named_program()
    log = choose_formats(subject, customized("none", [], ["*.up.*=int8-wo"]))
    assert subject.weights["up"].block_format.bits == 8 and log.count == 1
    subject = named_program()
    choose_formats(subject, customized("none", ["*.0.up.*"], ["*.up.*=int8-wo"]))
    assert subject.weights["up"].block_format is None


@pytest.mark.parametrize(
    ("exclude", "layers", "text"),
    [
        (["*.q_proj.*"], [], r"no weight of the checkpoint matches '\*.q_proj.\*'(.|\n)*--exclude"),
        ([], ["*.q_proj.*=int8-wo"], r"no weight of the checkpoint matches '\*.q_proj.\*'(.|\n)*--quant-layer"),
        ([], ["*.up.*=gguf"], r"recipe 'gguf' keeps the blocks of a GGUF file(.|\n)*--quant-layer"),
    ],
)
def test_patterns_that_would_do_nothing_are_refused(exclude: list[str], layers: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        choose_formats(named_program(), customized("int4-wo", exclude, layers))


@pytest.mark.parametrize(
    ("name", "exclude", "layers", "text"),
    [
        ("none", ["*"], [], "nothing to exclude"),
        ("int4-wo", [""], [], "the pattern is empty"),
        ("int4-wo", [], ["*.up.*"], "'\\*.up.\\*' is not PATTERN=RECIPE"),
        ("int4-wo", [], ["=int8-wo"], "is not PATTERN=RECIPE"),
        ("int4-wo", [], ["*=int8w"], "unknown quantization recipe 'int8w'"),
    ],
)
def test_rules_are_checked_before_anything_is_read(name: str, exclude: list, layers: list, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        customized(name, exclude, layers)


def test_excluded_weights_stay_plain() -> None:
    subject = named_program()
    recipe = Recipe("mine", "", WeightOnly(8, PerGroup(8)), Plain(), Plain(), exclude=("*.up.weight",))
    log = choose_formats(subject, recipe)
    assert log.count == 1 and subject.weights["up"].block_format is None
    assert "up: model.layers.0.up.weight is excluded by '*.up.weight'" in log.declined


def test_stored_blocks_are_kept_by_gguf_and_dequantized_by_none() -> None:
    kept, plain = program(), program()
    for subject in (kept, plain):
        object.__setattr__(subject.info, "source_kind", "gguf")
        subject.weights["up"] = Stored(UP)
    optimize(kept, find_recipe("gguf"))
    assert count(kept, "linear_blockwise") == 1 and count(kept, "linear") == 2
    optimize(plain, find_recipe("none"))
    assert count(plain, "linear_blockwise") == 0 and isinstance(plain.weights["up"], Dequantized)
    assert "up: dequantized from Q4_0: recipe 'none' keeps linear plain" in logs(plain)["choose_formats"].declined
    torch.testing.assert_close(result(kept), result(plain))


def test_stored_blocks_are_not_rounded_again_to_as_many_bits() -> None:
    subject = program()
    subject.weights["up"] = Stored(UP)
    log = choose_formats(subject, find_recipe("int4-wo"))
    assert isinstance(subject.weights["up"], Stored) and isinstance(subject.weights["down"], Quantized)
    assert "up: kept in 4 bits as stored (Q4_0); rounding again to 4 gains nothing" in log.declined


def test_gguf_is_refused_for_other_checkpoints() -> None:
    with pytest.raises(ConfigError) as caught:
        optimize(program(), find_recipe("gguf"))
    text = str(caught.value)
    assert "keeps the blocks of a GGUF file, but the model is 'huggingface'" in text and "use int8-wo" in text
    assert isinstance(find_recipe("gguf").linear, KeepStored)


def test_q_scale_and_offset_are_computed_once_and_one_weight_is_held() -> None:
    loads: list[str] = []

    class Counted(Constant):
        def load(self):
            loads.append("load")
            return super().load()

    scheme = WeightOnly(4, PerGroup(8), symmetric=False)
    first, second = (Quantized(Counted(weight), scheme) for weight in (UP, DOWN))
    for source in (first, second):
        parts = {part: BlockPart(source, part) for part in ("q", "scale", "offset")}
        loaded = {part: expr.load() for part, expr in parts.items()}
        assert all(tuple(loaded[part].shape) == expr.shape for part, expr in parts.items())
        assert all(loaded[part].dtype == expr.dtype for part, expr in parts.items())
    assert loads == ["load"] * 2
    BlockPart(first, "q").load()
    assert len(loads) == 3  # only the last one is held
    LAST_BLOCKS.forget()
    BlockPart(first, "q").load()
    assert len(loads) == 4


def test_one_line_says_it_for_all_weights_with_the_same_reason() -> None:
    subject = program()
    for name in ("up", "down", "head"):
        subject.weights[name] = Stored(subject.weights[name].value)
    log = choose_formats(subject, find_recipe("int4-wo"))
    assert "up and 1 more: kept in 4 bits as stored (Q4_0); rounding again to 4 gains nothing" in log.declined
    assert "head: kept in 4 bits as stored (Q4_0); rounding again to 8 gains nothing" in log.declined
