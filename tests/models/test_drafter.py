"""Drafters: the training forward and the cached drafting step are the same function."""

from __future__ import annotations

import pytest
import torch

from paceline.models.batches import batch_from_sequences
from paceline.models.config import BackboneConfig, DrafterConfig, FuserConfig, TargetConfig
from paceline.models.drafter import Drafter, build_drafter, default_tap_layer_ids
from paceline.models.kv_cache import SlotCache
from paceline.models.records import HiddenStateShard, SamplingParams, TrainBatch
from paceline.models.target import Target
from paceline.models.vocab import vocab_from_ids
from paceline.models.warm_start import start_from_target

TAPS = (0, 1, 3)
LENGTHS = (23, 17)
PROMPTS = (6, 4)
ONE = slice(0, 1)
VARIANTS = {
    "fill_in": BackboneConfig(kind="block", num_layers=2, block_size=5, anchors_per_sequence=64),
    "shift": BackboneConfig(
        kind="block", num_layers=2, block_size=4, label_layout="shift", anchors_per_sequence=64
    ),
    "eagle3": BackboneConfig(kind="autoregressive", ttt_steps=4),
    "eagle31": BackboneConfig(kind="autoregressive", ttt_steps=4, norm_output=True),
}


@pytest.fixture(scope="module")
def target() -> Target:
    target = Target.load(TargetConfig(model="builtin:tiny-llama", device="cpu"))
    target.tap(TAPS)
    return target


@pytest.fixture(scope="module")
def shard(target: Target) -> HiddenStateShard:
    """Two sequences with the target's real states."""
    generator = torch.Generator().manual_seed(5)
    parts = []
    for length in LENGTHS:
        ids = torch.randint(4, 200, (1, length), generator=generator)
        positions = torch.arange(length)[None]
        with torch.no_grad():
            out = target.forward(ids, positions, SlotCache(1, length), slice(0, 1))
        parts.append((ids[0], out.aux_hidden_states[0], out.last_hidden_states[0]))
    return HiddenStateShard(
        input_ids=torch.cat([ids for ids, _, _ in parts]).int(),
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS]).int(),
        loss_mask=torch.cat([torch.arange(n) >= p for n, p in zip(LENGTHS, PROMPTS, strict=True)]),
        cu_seqlens=torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32),
        aux_hidden_states=torch.cat([aux for _, aux, _ in parts]),
        last_hidden_states=torch.cat([last for _, _, last in parts]),
        norm_applied=True,
    )


@pytest.fixture(scope="module")
def batch(shard: HiddenStateShard) -> TrainBatch:
    return batch_from_sequences([(shard, 0), (shard, 1)])


def make(target: Target, name: str, fuser: str = "concat_fc") -> Drafter:
    ids = torch.arange(0, 260, 2)
    config = DrafterConfig(
        backbone=VARIANTS[name], fuser=FuserConfig(kind=fuser), draft_vocab_size=len(ids)
    )
    drafter = build_drafter(
        config,
        target.spec,
        tap_layer_ids=TAPS,
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
        vocab=vocab_from_ids(ids, target.spec.vocab_size),
        seed=3,
    )
    with torch.no_grad():  # away from the tidy initial state: every parameter must matter
        generator = torch.Generator().manual_seed(9)
        for parameter in drafter.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return drafter


def training_logits(drafter: Drafter, batch: TrainBatch) -> dict[tuple[int, int], torch.Tensor]:
    """(packed index of the anchor, slot) -> logits of the training forward."""
    with torch.no_grad():
        rows = drafter.training_forward(batch, torch.Generator().manual_seed(0))
        logits = drafter.lm_head(rows.hidden)
    found = {}
    for i in torch.nonzero(rows.valid)[:, 0].tolist():
        slot = int(rows.slot[i])
        found[int(rows.label_index[i]) - 1 - slot, slot] = logits[i]
    return found


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("fuser", ["concat_fc", "concat_fc_normed"])
@torch.no_grad()
def test_f54_cached_drafting_equals_the_training_forward(
    target: Target, batch: TrainBatch, name: str, fuser: str
) -> None:
    drafter = make(target, name, fuser)
    expected = training_logits(drafter, batch)
    slots = max(slot for _, slot in expected) + 1
    seen: list[torch.Tensor] = []
    drafter.lm_head.register_forward_hook(lambda _m, _i, logits: seen.append(logits))
    checked = 0
    for first, length, prompt in zip((0, LENGTHS[0]), LENGTHS, PROMPTS, strict=True):
        for anchor in range(prompt, length - slots):
            if (first + anchor, slots - 1) not in expected:
                continue
            cache = drafter.start(1, length + slots)
            # Committed in two pieces, with a draft in between that must leave no trace.
            for start, end in ((0, prompt - 1), (prompt - 1, anchor)):
                rows = slice(first + start, first + end)
                following = batch.input_ids[first + start + 1 : first + end + 1]
                aux = batch.aux_hidden_states[rows][None]
                drafter.extend(cache, ONE, aux, following[None], [end - start])
                drafter.propose(cache, ONE, following[-1:], slots, [SamplingParams()], [None])
            seen.clear()
            tokens = batch.input_ids[first + anchor :]
            forced_propose(drafter, cache, tokens, slots)
            drafted = torch.cat([logits.flatten(0, -2) for logits in seen])
            for slot in range(slots):
                torch.testing.assert_close(
                    drafted[slot], expected[first + anchor, slot], atol=1e-4, rtol=1e-4
                )
                checked += 1
    assert checked >= 40


def forced_propose(drafter: Drafter, cache, tokens: torch.Tensor, slots: int) -> None:
    """Draft with the data's own tokens fed back, as training-time test does."""
    if drafter.config.backbone.kind == "block":
        drafter.propose(cache, ONE, tokens[:1], slots, [SamplingParams()], [None])
        return
    hidden = cache.last_hidden
    for slot in range(slots):
        if slot:
            hidden = drafter.backbone.draft_hidden_next(
                cache, ONE, hidden, tokens[slot : slot + 1], slot - 1, drafter.embedding_weight
            )
        drafter.lm_head(drafter.backbone.norm(hidden))


@pytest.mark.parametrize("name", VARIANTS)
def test_d34_no_row_sees_its_label_or_anything_after_it(
    target: Target, batch: TrainBatch, shard: HiddenStateShard, name: str
) -> None:
    drafter = make(target, name)
    before = training_logits(drafter, batch)
    cut = LENGTHS[0] - 5  # everything from here on is changed, in the first sequence
    ids, aux = shard.input_ids.clone(), shard.aux_hidden_states.clone()
    ids[cut : LENGTHS[0]] = 7
    aux[cut : LENGTHS[0]] += 3.0
    import dataclasses

    changed = dataclasses.replace(shard, input_ids=ids, aux_hidden_states=aux)
    after = training_logits(drafter, batch_from_sequences([(changed, 0), (changed, 1)]))
    compared = 0
    for (anchor, slot), logits in before.items():
        # A block's slots read the anchor only; a chain's slot k also reads the k tokens after it.
        reads = anchor + (slot if name.startswith("eagle") else 0)
        if anchor >= LENGTHS[0] or reads < cut:
            torch.testing.assert_close(after[anchor, slot], logits, atol=1e-5, rtol=1e-5)
            compared += 1
    assert compared > 40
    late = [key for key in before if cut < key[0] < LENGTHS[0]]
    assert any(not torch.equal(before[key], after[key]) for key in late)


def test_default_taps_follow_the_papers() -> None:
    eagle = DrafterConfig(backbone=BackboneConfig(kind="autoregressive"))
    dflash = DrafterConfig(backbone=BackboneConfig(kind="block", num_layers=5))
    single = DrafterConfig(backbone=BackboneConfig(kind="block", num_layers=1))
    assert default_tap_layer_ids(eagle, 36) == (1, 17, 32)
    assert default_tap_layer_ids(dflash, 36) == (1, 9, 17, 25, 33)
    assert default_tap_layer_ids(single, 36) == (18,)


def test_b_a_draft_vocabulary_larger_than_the_targets_is_refused(target: Target) -> None:
    config = DrafterConfig(backbone=VARIANTS["eagle3"], draft_vocab_size=10_000)
    with pytest.raises(ValueError, match="draft_vocab_size=10000 is larger"):
        build_drafter(
            config,
            target.spec,
            tap_layer_ids=TAPS,
            embedding_weight=target.embedding_weight,
            lm_head_weight=target.lm_head_weight,
        )


@pytest.mark.parametrize("name", ["fill_in", "eagle3"])
def test_layers_can_start_from_the_targets_own(target: Target, name: str) -> None:
    base = VARIANTS[name]
    ids = (1, 3)[: base.num_layers]
    config = DrafterConfig(backbone=base.model_copy(update={"init_from_target_layers": ids}))
    drafter = build_drafter(
        config,
        target.spec,
        tap_layer_ids=TAPS,
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
    )
    start_from_target(drafter, target)
    for layer, layer_id in zip(drafter.backbone.layers, ids, strict=True):
        source = target.layers[layer_id]
        assert torch.equal(layer.mlp.up_proj.weight, source.mlp.up_proj.weight)
        assert torch.equal(layer.self_attn.o_proj.weight, source.self_attn.o_proj.weight)


def test_d32_rotary_angles_stay_float32_in_a_bfloat16_drafter() -> None:
    from paceline.models.layers import rotate

    heads = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    position = torch.tensor([4097])
    exact = rotate(heads.float(), position, 10_000.0)
    rounded = rotate(heads, position, 10_000.0).float()
    assert (exact - rounded).abs().max() < 0.05
