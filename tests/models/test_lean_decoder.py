"""The lean decoder is used where it fits, follows the weights, and steps aside where it does not.

That its numbers are transformers' is shown in test_target.py, for every family.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from paceline.kernels.extension import load_extension
from paceline.kernels.masks import ancestor_mask
from paceline.models import lean_decoder as module
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


LEAN = [family for family in TINY_FAMILIES if family != "gemma3"]
needs_native = pytest.mark.skipif(
    not load_extension("decode_layer"), reason="no C++ compiler, or a processor without AVX2"
)
STARTS = [9, 4, 15]
PARENTS = [[-1, 0, 0, 1, 1], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 2]]


def read_slots(target: Target, tree: Tensor | None, chosen: list[int]) -> tuple[Tensor, Tensor]:
    """Last and tapped states of 5 tokens in each chosen slot, after prompts of its own length."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 200, (3, 20), generator=generator)[chosen]
    cache = SlotCache(len(chosen), 32)
    target.tap((0, 2))
    for slot, start in enumerate(STARTS[i] for i in chosen):
        one = slice(slot, slot + 1)
        target.forward(ids[one, :start], torch.arange(start)[None], cache, one)
    starts = torch.tensor([STARTS[i] for i in chosen])[:, None]
    if tree is None:
        positions = starts + torch.arange(5)
    else:
        tree = tree[chosen]
        positions = starts + tree.sum(dim=-1) - 1
    output = target.forward(ids[:, 15:], positions, cache, slice(0, len(chosen)), tree)
    return output.last_hidden_states, output.aux_hidden_states


@needs_native
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", LEAN)
@torch.no_grad()
def test_the_native_layer_equals_its_eager_twin(
    family: str, dtype: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(TargetConfig(model=f"builtin:tiny-{family}", device="cpu", dtype=dtype))
    tree = ancestor_mask(torch.tensor(PARENTS)) if shape == "tree" else None
    native = read_slots(target, tree, [0, 1, 2])
    monkeypatch.setattr(module, "decode_layer_runs", lambda *_: False)
    eager = read_slots(target, tree, [0, 1, 2])
    close = {"atol": 2e-5, "rtol": 1e-4} if dtype == "float32" else {"atol": 0.08, "rtol": 0.05}
    for a, b in zip(native, eager, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, **close)


@needs_native
@torch.no_grad()
def test_a_rows_values_are_the_same_whatever_stands_beside_it() -> None:
    target = Target.load(TargetConfig(model="builtin:tiny-qwen3", device="cpu"))
    tree = ancestor_mask(torch.tensor(PARENTS))
    together = read_slots(target, tree, [0, 1, 2])
    for slot in range(3):
        alone = read_slots(target, tree, [slot])
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[slot], b[0])
