"""Model config → the transformers model on fake tensors: names, shapes and code, without memory for weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from llmbuild.builder.frontend import attention_hook, experts_hook
from llmbuild.builder.frontend.contract import check_config
from llmbuild.errors import LLMBuildError, UnsupportedError


@dataclass(frozen=True)
class FakeModel:
    """A model that can be traced.

    Attributes:
        model: In eval mode, every name with a parameter of its own. Attention is hooked where the model's class uses
            the interface of transformers, else its own (`own_attention` finds it in the graph).
        ties: Name -> name of the parameter it shares its value with, as config and class say.
        mode: The fake mode its tensors belong to.
        own_experts: What the config says of experts that the model's own code runs; None when there are none.
    """

    model: PreTrainedModel
    ties: dict[str, str]
    mode: FakeTensorMode
    own_experts: str | None = None


def build_fake_model(config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False) -> FakeModel:
    """Build the decoder that `config` describes, computing in `dtype`.

    Raises:
        UnsupportedError: the config cannot be represented exactly, or the model's code does not run.
    """
    check_config(config)
    attention_hook.register()
    experts_hook.register()
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    # Initial values mean nothing here, and some initialisers look at what they drew.
    with foreign_code(config), mode, torch.no_grad(), no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation=experts_hook.NAME,
            trust_remote_code=trust_remote_code,
        ).eval()
        if model._can_set_attn_implementation():
            model.set_attn_implementation(attention_hook.NAME)
        ties = _untie(model)
    return FakeModel(model, ties, mode, experts_hook.prepare(model))


def _untie(model: PreTrainedModel) -> dict[str, str]:
    """Give every tied name its own parameter, so that the graph reads each by its name. Returns the ties."""
    ties = dict(model.all_tied_weights_keys or {})
    for name in ties:
        module_name, _, attribute = name.rpartition(".")
        module = model.get_submodule(module_name)
        tied = getattr(module, attribute)
        setattr(module, attribute, nn.Parameter(torch.empty_like(tied), requires_grad=False))
    return ties


@contextlib.contextmanager
def foreign_code(config: PretrainedConfig) -> Iterator[None]:
    """Turn whatever a model's code or the exporter raises into UnsupportedError, with its cause.

    Models are other people's code: there is no list of what they raise, and any of it means "cannot be traced".
    """
    try:
        yield
    except LLMBuildError:
        raise
    except Exception as error:
        raise _untraceable(config, error) from error


def _untraceable(config: PretrainedConfig, error: Exception) -> UnsupportedError:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return UnsupportedError(
        f"model type {config.model_type!r} cannot be traced: {type(error).__name__}: {reason.strip()[:300]}",
        hint="the model's code must run on packed tokens without looking at their values",
    )
