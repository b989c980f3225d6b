"""The lean decoder is used where it fits, follows the weights, and steps aside where it does not.

That its numbers are transformers' is shown in test_target.py, for every family.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from paceline.models.config import TargetConfig
from paceline.models.embedded import resolve_model
from paceline.models.kv_cache import SlotCache
from paceline.models.lean_decoder import lean_decoder
from paceline.models.target import Target
from paceline.models.tiny import TINY_FAMILIES


def model_of(family: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        resolve_model(f"builtin:tiny-{family}"), dtype=torch.float32, attn_implementation="eager"
    )


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_llama_like_families_take_it_and_others_do_not(family: str) -> None:
    assert (lean_decoder(model_of(family).get_decoder()) is None) == (family == "gemma3")


def test_a_layer_with_linears_of_another_kind_runs_its_own_code() -> None:
    class Quantised(nn.Linear):
        pass

    model = model_of("llama")
    attention = model.get_decoder().layers[2].self_attn
    attention.v_proj = Quantised(attention.v_proj.in_features, attention.v_proj.out_features)
    assert lean_decoder(model.get_decoder()) is None


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
@torch.no_grad()
def test_new_weights_reach_the_joined_tensors_and_old_ones_are_gone(family: str) -> None:
    target = Target.load(TargetConfig(model=f"builtin:tiny-{family}", device="cpu"))
    other = model_of(family)
    generator = torch.Generator().manual_seed(0)
    for parameter in other.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    ids = torch.randint(4, 200, (1, 12), generator=generator)

    def read() -> torch.Tensor:
        cache = SlotCache(1, 16)
        return target.forward(ids, torch.arange(12)[None], cache, slice(0, 1)).last_hidden_states

    before = read()
    target.update_weights(other.state_dict(), version=1)
    expected = other(ids, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(read(), expected, atol=2e-4, rtol=1e-4)
    assert (read() - before).abs().max() > 0.1


@torch.no_grad()
def test_joining_leaves_the_models_own_forward_and_its_state_as_they_were() -> None:
    plain, joined = model_of("qwen3"), model_of("qwen3")
    assert lean_decoder(joined.get_decoder()) is not None
    ids = torch.arange(10, 20)[None]
    assert torch.equal(plain(ids).logits, joined(ids).logits)
    state = joined.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
