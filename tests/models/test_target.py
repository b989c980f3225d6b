"""Targets: taps, norms, caches and fingerprints agree with transformers, family by family."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.models.config import TargetConfig
from paceline.models.embedded import resolve_model
from paceline.models.fingerprint import TargetMismatchError, require_same_target
from paceline.models.kv_cache import SlotCache
from paceline.models.target import Target
from paceline.models.tiny import NUM_LAYERS, TINY_FAMILIES

TAPS = (0, 2, 3)


def reference(family: str):
    return AutoModelForCausalLM.from_pretrained(
        resolve_model(f"builtin:tiny-{family}"), dtype=torch.float32, attn_implementation="eager"
    )


@pytest.fixture(params=TINY_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def target(family: str) -> Target:
    target = Target.load(TargetConfig(model=f"builtin:tiny-{family}", device="cpu"))
    target.tap(TAPS)
    return target


def read(target: Target, ids: torch.Tensor, cache: SlotCache, start: int = 0):
    positions = torch.arange(start, start + ids.shape[1]).expand_as(ids)
    return target.forward(ids, positions, cache, slice(0, len(ids)))


@torch.no_grad()
def test_a5_taps_are_layer_outputs_and_last_hidden_is_after_the_norm(
    target: Target, family: str
) -> None:
    ids = torch.randint(4, 200, (1, 21), generator=torch.Generator().manual_seed(1))
    ours = read(target, ids, SlotCache(1, 32))
    theirs = reference(family)(ids, output_hidden_states=True)
    for i, tap in enumerate(TAPS):
        expected = theirs.hidden_states[tap + 1]
        torch.testing.assert_close(ours.aux_hidden_states[:, :, i], expected, atol=2e-4, rtol=1e-4)
    # transformers' last entry is after the final norm; lm_head of ours gives its logits.
    torch.testing.assert_close(
        ours.last_hidden_states, theirs.hidden_states[-1], atol=2e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        target.logits(ours.last_hidden_states), theirs.logits.float(), atol=5e-4, rtol=1e-3
    )


@torch.no_grad()
def test_a9_pieces_over_the_cache_equal_one_pass(target: Target) -> None:
    ids = torch.randint(4, 200, (1, 30), generator=torch.Generator().manual_seed(2))
    whole = read(target, ids, SlotCache(1, 40))
    cache = SlotCache(1, 40)
    pieces = [read(target, ids[:, a:b], cache, a) for a, b in ((0, 13), (13, 14), (14, 30))]
    joined = torch.cat([piece.last_hidden_states for piece in pieces], dim=1)
    torch.testing.assert_close(joined, whole.last_hidden_states, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_rejected_rows_are_forgotten_when_positions_are_written_again(target: Target) -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 200, (1, 20), generator=generator)
    wrong = torch.randint(4, 200, (1, 6), generator=generator)
    clean = read(target, ids, SlotCache(1, 40))
    cache = SlotCache(1, 40)
    read(target, ids[:, :12], cache)
    read(target, wrong, cache, 12)
    again = read(target, ids[:, 12:], cache, 12)
    torch.testing.assert_close(
        again.last_hidden_states, clean.last_hidden_states[:, 12:], atol=1e-4, rtol=1e-4
    )


@torch.no_grad()
def test_slots_of_different_lengths_do_not_see_each_other(target: Target) -> None:
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(4, 200, (1, n), generator=generator) for n in (5, 17, 9)]
    cache = SlotCache(3, 24)
    for slot, ids in enumerate(prompts):
        positions = torch.arange(ids.shape[1])[None]
        target.forward(ids, positions, cache, slice(slot, slot + 1))
    new = torch.tensor([[11], [12], [13]])
    lengths = torch.tensor([[5], [17], [9]])
    together = target.forward(new, lengths, cache, slice(0, 3))
    for slot, ids in enumerate(prompts):
        alone = read(target, torch.cat((ids, new[slot : slot + 1]), dim=1), SlotCache(1, 24))
        torch.testing.assert_close(
            together.last_hidden_states[slot, 0],
            alone.last_hidden_states[0, -1],
            atol=1e-4,
            rtol=1e-4,
        )


@pytest.fixture
def llama() -> Target:
    return Target.load(TargetConfig(model="builtin:tiny-llama", device="cpu"))


def test_a7_a_tap_outside_the_model_or_on_its_last_layer_is_refused(llama: Target) -> None:
    for bad in ((1, NUM_LAYERS - 1), (NUM_LAYERS + 3,), (-1,)):
        with pytest.raises(ValueError, match=rf"tap_layer_ids.*0 to {NUM_LAYERS - 2}"):
            llama.tap(bad)
    with pytest.raises(ValueError, match="must increase"):
        llama.tap((2, 1))


def test_the_fingerprint_follows_weights_and_template_and_nothing_else(llama: Target) -> None:
    again = Target.load(TargetConfig(model="builtin:tiny-llama", device="cpu"))
    assert again.fingerprint == llama.fingerprint
    state = {name: value.clone() for name, value in again.model.state_dict().items()}
    weight = state["model.layers.2.mlp.up_proj.weight"]
    weight.view(-1)[777] += 1e-3  # one number that no sample of the tensor holds
    again.update_weights(state, version=1)
    assert again.fingerprint != llama.fingerprint
    assert again.version == 1


def test_f58_an_update_that_would_do_nothing_is_refused(llama: Target) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    weight = llama.model.state_dict()[name].clone()
    before = (llama.fingerprint, llama.version)
    for state in (
        {f"module.{name}": weight},
        {name: weight[:-1]},
        {name: weight + 1.0, "model.layers.99.mlp.up_proj.weight": weight},
        {},
    ):
        with pytest.raises(ValueError, match=r"update to target version 5 holds .*does not have"):
            llama.update_weights(state, version=5)
    assert (llama.fingerprint, llama.version) == before
    assert torch.equal(llama.model.state_dict()[name], weight)
    llama.update_weights({name: weight + 1.0}, version=5)
    assert llama.fingerprint != before[0]


def test_a_foreign_fingerprint_is_refused_with_both_values(llama: Target) -> None:
    with pytest.raises(TargetMismatchError, match=rf"0123abcd.*{llama.fingerprint}"):
        require_same_target("x", "0123abcd", model="m", lineage=[llama.fingerprint])


def test_an_unknown_model_is_named_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="target.model=/no/such/folder"):
        Target.load(TargetConfig(model="/no/such/folder"))
    with pytest.raises(ValueError, match="known: smollm2-135m-instruct"):
        Target.load(TargetConfig(model="builtin:nonsense"))
