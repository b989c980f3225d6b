"""Decoding is lossless: greedy token for token, sampled in distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.kernels.sampling import probs_from_logits
from paceline.models.config import BackboneConfig, DrafterConfig, TargetConfig
from paceline.models.decoding.speculative import generate_plain, generate_speculative
from paceline.models.drafter import build_drafter
from paceline.models.embedded import resolve_model
from paceline.models.evaluation import audit_greedy
from paceline.models.grouped_attention import ATTENTION_NAME
from paceline.models.kv_cache import SlotCache
from paceline.models.records import DraftProposal, Prompt, SamplingParams
from paceline.models.target import Target
from paceline.models.tiny import TINY_FAMILIES

TAPS = (0, 1, 3)
BACKBONES = {
    "fill_in": BackboneConfig(kind="block", num_layers=2, block_size=6),
    "shift": BackboneConfig(kind="block", num_layers=1, block_size=4, label_layout="shift"),
    "eagle3": BackboneConfig(kind="autoregressive"),
}


def load(family: str) -> Target:
    target = Target.load(TargetConfig(model=f"builtin:tiny-{family}", device="cpu"))
    target.tap(TAPS)
    return target


def drafter_for(target: Target, backbone: BackboneConfig, vocab_size: int | None = None):
    return build_drafter(
        DrafterConfig(backbone=backbone, draft_vocab_size=vocab_size),
        target.spec,
        tap_layer_ids=target.tap_layer_ids,
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
    )


def prompt_ids(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, 200, (length,), generator=generator).tolist())


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_greedy_speculation_equals_transformers_generate(family: str) -> None:
    target = load(family)
    reference = AutoModelForCausalLM.from_pretrained(
        resolve_model(f"builtin:tiny-{family}"), dtype=torch.float32
    )
    sampling = SamplingParams(max_new_tokens=32)
    for seed, (name, backbone) in enumerate(BACKBONES.items()):
        drafter = drafter_for(target, backbone)
        ids = prompt_ids(seed, 9 + seed)
        theirs = reference.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)
        expected = tuple(theirs[0, len(ids) :].tolist())
        assert generate_plain(target, ids, sampling).token_ids == expected
        ours = generate_speculative(target, drafter, ids, sampling, 3)
        assert ours.token_ids == expected, name
        # One bonus token a round, unless the last round ended within its drafts.
        committed = 1 + sum(ours.trace.accepted) + ours.trace.num_drafts
        assert committed - len(ours.token_ids) in (0, 1)


def test_a_perfect_drafter_is_accepted_whole_and_changes_nothing() -> None:
    """A drafter that repeats the target's own answer: the all-accepted path and the bonus token."""
    target = load("llama")
    ids, sampling = prompt_ids(3, 8), SamplingParams(max_new_tokens=30)
    plain = generate_plain(target, ids, sampling).token_ids
    drafter = drafter_for(target, BACKBONES["eagle3"])
    sequence = [*ids, *plain]

    class Oracle:
        """Proposes what comes next in the known answer."""

        config, backbone, tap_layer_ids = drafter.config, drafter.backbone, TAPS
        committed = 0

        def start(self, num_slots, capacity):
            return drafter.start(num_slots, capacity)

        def extend(self, cache, slots, aux, next_ids, counts) -> None:
            assert aux.shape[1] == next_ids.shape[1] == counts[0]
            self.committed += counts[0]
            assert int(next_ids[0, -1]) == sequence[self.committed]

        def propose(self, cache, slots, anchors, count, samplings, generators):
            known = sequence[self.committed + 1 :][:count]
            tokens = torch.tensor(known + [0] * (count - len(known)))
            index = torch.arange(count)
            return [DraftProposal(tokens=tokens, parent=index - 1, depth=index)]

    ours = generate_speculative(target, Oracle(), ids, sampling, 4)
    assert ours.token_ids == plain
    assert set(ours.trace.accepted[:-1]) == {4}
    assert ours.trace.acceptance_length > 4.0


def tiny_vocab_target() -> Target:
    """Six tokens, two layers: small enough to enumerate every continuation."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=6,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=5,
        bos_token_id=0,
        tie_word_embeddings=False,
        attn_implementation=ATTENTION_NAME,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    tokenizer = Target.load(TargetConfig(model="builtin:tiny-llama", device="cpu")).tokenizer
    target = Target(model, tokenizer, TargetConfig(model="six-tokens"))
    target.spec = replace(target.spec, eos_token_ids=(5,))
    target.tap((0, 1))
    return target


def exact_law(target: Target, ids: tuple[int, ...], sampling: SamplingParams) -> dict:
    """Probability of every response of up to max_new_tokens, by enumeration."""
    law: dict[tuple[int, ...], float] = {}

    def extend(response: tuple[int, ...], mass: float) -> None:
        if len(response) == sampling.max_new_tokens or (response and response[-1] == 5):
            law[response] = mass
            return
        tokens = torch.tensor([[*ids, *response]])
        positions = torch.arange(tokens.shape[1])[None]
        cache = SlotCache(1, tokens.shape[1])
        with torch.no_grad():
            out = target.forward(tokens, positions, cache, slice(0, 1))
            logits = target.logits(out.last_hidden_states[0, -1:])
        probs = probs_from_logits(logits, sampling.temperature, sampling.top_k, sampling.top_p)[0]
        for token in range(6):
            if probs[token] > 0:
                extend((*response, token), mass * float(probs[token]))

    extend((), 1.0)
    return law


def total_variation(counts: dict, law: dict, draws: int) -> float:
    keys = set(counts) | set(law)
    return 0.5 * sum(abs(counts.get(k, 0) / draws - law.get(k, 0.0)) for k in keys)


@pytest.mark.parametrize(
    ("name", "temperature", "top_k", "top_p"),
    [("fill_in", 1.0, 0, 1.0), ("eagle3", 0.8, 4, 0.9)],
)
def test_sampled_speculation_has_the_targets_distribution(
    name: str, temperature: float, top_k: int, top_p: float
) -> None:
    target = tiny_vocab_target()
    drafter = drafter_for(target, BACKBONES[name])
    ids = (1, 4, 2)
    draws = 1500
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(draws):
        sampling = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=3, seed=seed
        )
        response = generate_speculative(target, drafter, ids, sampling, 2).token_ids
        counts[response] = counts.get(response, 0) + 1
    law = exact_law(target, ids, sampling)
    assert abs(sum(law.values()) - 1.0) < 1e-5
    assert set(counts) <= set(law)
    # Expected distance of an exact sampler: about 0.4 * sum sqrt(p (1 - p) / n).
    band = 0.005 + 1.6 * 0.4 * sum((p * (1 - p) / draws) ** 0.5 for p in law.values())
    assert total_variation(counts, law, draws) < band
    # The band is narrow enough to refuse the right sampler for a law of another temperature.
    other = exact_law(target, ids, replace(sampling, temperature=3.0 * temperature))
    assert total_variation(counts, other, draws) > 1.5 * band


def test_the_audit_tells_a_tie_from_a_mismatch() -> None:
    target = load("llama")
    ids = prompt_ids(1, 8)
    prompt = Prompt(prompt_id="x", domain="d", token_ids=ids)
    plain = generate_plain(target, ids, SamplingParams(max_new_tokens=12))
    assert audit_greedy(target, prompt, plain, plain).mismatches == 0
    other = (plain.token_ids[5] + 1) % 200
    wrong = (*plain.token_ids[:5], other, *plain.token_ids[6:])
    found = audit_greedy(target, prompt, plain, replace(plain, token_ids=wrong))
    assert (found.tokens, found.ties, found.mismatches) == (5, 0, 1)
    with torch.no_grad():  # make the two tokens score the same: now rounding may choose
        target.lm_head_weight[other] = target.lm_head_weight[plain.token_ids[5]]
    found = audit_greedy(target, prompt, plain, replace(plain, token_ids=wrong))
    assert (found.tokens, found.ties, found.mismatches) == (5, 1, 0)
    short = replace(plain, token_ids=plain.token_ids[:5])
    assert audit_greedy(target, prompt, plain, short).mismatches == 1


def test_drafts_beyond_the_block_or_other_taps_are_refused() -> None:
    target = load("llama")
    drafter = drafter_for(target, BACKBONES["fill_in"])
    sampling = SamplingParams(max_new_tokens=4)
    with pytest.raises(ValueError, match="drafts 1 to 5 tokens"):
        generate_speculative(target, drafter, prompt_ids(0, 5), sampling, 6)
    target.tap((0, 2))
    with pytest.raises(ValueError, match="tap_layer_ids"):
        generate_speculative(target, drafter, prompt_ids(0, 5), sampling, 2)
    with pytest.raises(ValueError, match="max_new_tokens=600"):
        generate_plain(target, prompt_ids(0, 5), SamplingParams(max_new_tokens=600))
