"""The engine: what shares a batch changes nothing, faults stay with their request, rows fit tokens.

Target and drafters are tiny and random; drafters accept little, so rounds differ in length.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from paceline.kernels.sampling import probs_from_logits
from paceline.models.checkpoints import new_record
from paceline.models.decoding.requests import Request
from paceline.models.decoding.speculative import generate_plain, generate_speculative
from paceline.models.drafter import Drafter
from paceline.models.fingerprint import TargetMismatchError
from paceline.models.kv_cache import SlotCache
from paceline.models.records import Prompt, SamplingParams
from paceline.models.target import Target
from tests.models.engine_setup import (
    BACKBONES,
    CAPACITY,
    GREEDY,
    SAMPLED,
    STEPS,
    TAPS,
    drafter_for,
    engine_of,
    load,
    prompt,
    response,
    serve,
)


@pytest.mark.parametrize("name", [None, *BACKBONES])
@torch.no_grad()
def test_greedy_output_is_plain_decoding_whatever_shares_the_batch(name: str | None) -> None:
    target = load()
    drafter = drafter_for(target, name) if name else None
    prompts = [prompt(i) for i in range(9)]
    alone = {p.prompt_id: generate_plain(target, p.token_ids, GREEDY).token_ids for p in prompts}
    for slots, order in itertools.product((1, 4), (prompts, prompts[::-1])):
        ended = serve(
            engine_of(target, slots, drafter), [Request(prompt=p, sampling=GREEDY) for p in order]
        )
        assert {i: response(s) for i, s in ended.items()} == alone


@pytest.mark.parametrize("name", ["fill_in", "eagle3"])
@torch.no_grad()
def test_rounds_of_a_batch_accept_what_they_accept_alone(name: str) -> None:
    target = load()
    drafter = drafter_for(target, name)
    prompts = [prompt(i) for i in range(7)]
    ended = serve(
        engine_of(target, 3, drafter), [Request(prompt=p, sampling=GREEDY) for p in prompts]
    )
    for p in prompts:
        alone = generate_speculative(target, drafter, p.token_ids, GREEDY, STEPS)
        assert ended[p.prompt_id].trace == alone.trace


@pytest.mark.parametrize("name", [None, "eagle3"])
@torch.no_grad()
def test_the_same_seed_gives_the_same_draws_beside_other_requests(name: str | None) -> None:
    target = load("qwen3")
    drafter = drafter_for(target, name) if name else None
    requests = [
        Request(
            prompt=prompt(i), sampling=replace(SAMPLED, max_new_tokens=8 + i) if i % 2 else GREEDY
        )
        for i in range(8)
    ]
    together = serve(engine_of(target, 5, drafter), requests)
    alone = {}
    for request in requests:
        alone |= serve(engine_of(target, 1, drafter), [request])
    assert {i: response(s) for i, s in together.items()} == {
        i: response(s) for i, s in alone.items()
    }
    other = replace(requests[1], sampling=replace(requests[1].sampling, seed=6))
    assert response(serve(engine_of(target, 1, drafter), [other])["1"]) != response(alone["1"])


@pytest.mark.parametrize("name", [None, "eagle3"])
@torch.no_grad()
def test_a10_captured_rows_and_logprobs_belong_to_their_own_tokens(name: str | None) -> None:
    target = load("qwen3")
    drafter = drafter_for(target, name) if name else None
    requests = [
        Request(prompt=prompt(i, 5 + i), sampling=SAMPLED if i % 2 else GREEDY) for i in range(6)
    ]
    for sequence in serve(engine_of(target, 3, drafter), requests).values():
        ids = sequence.token_ids[None]
        positions = torch.arange(ids.shape[1])[None]
        whole = target.forward(ids, positions, SlotCache(1, ids.shape[1]), slice(0, 1))
        assert len(sequence.aux_hidden_states) == ids.shape[1]
        close = {"atol": 2e-4, "rtol": 1e-3}
        torch.testing.assert_close(sequence.aux_hidden_states, whole.aux_hidden_states[0], **close)
        torch.testing.assert_close(
            sequence.last_hidden_states, whole.last_hidden_states[0], **close
        )
        first = len(sequence.prompt.token_ids)
        logits = target.logits(whole.last_hidden_states[0, first - 1 : -1])
        if int(sequence.prompt.prompt_id) % 2:  # as sampled
            log_probs = probs_from_logits(logits, 0.9, top_k=40, top_p=0.95).log()
        else:
            log_probs = logits.log_softmax(-1)
        expected = log_probs.gather(1, ids[0, first:, None])[:, 0]
        torch.testing.assert_close(sequence.logprobs[first:], expected, atol=1e-3, rtol=1e-3)
        assert not sequence.logprobs[:first].any()


@torch.no_grad()
def test_responses_of_one_prompt_read_it_once_and_are_those_of_separate_runs() -> None:
    target = load()
    drafter = drafter_for(target)
    same = prompt(2, 30)
    requests = [
        Request(prompt=replace(same, prompt_id=f"{same.prompt_id}-{n}"), sampling=SAMPLED)
        for n in range(4)
    ]
    alone = {}
    for request in requests:
        alone |= serve(engine_of(target, 1, drafter), [request])
    read: list[int] = []
    forward = target.forward
    target.forward = lambda ids, *rest: read.append(ids.shape[1]) or forward(ids, *rest)
    together = serve(engine_of(target, 4, drafter), requests)
    assert read[:4] == [30, 1, 1, 1]
    for i, sequence in together.items():
        assert response(sequence) == response(alone[i])
        torch.testing.assert_close(
            sequence.last_hidden_states, alone[i].last_hidden_states, atol=1e-4, rtol=1e-3
        )
    assert len({response(s) for s in together.values()}) > 1


@torch.no_grad()
def test_a8_long_prompts_are_read_in_pieces_and_keep_all_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = load()
    request = [Request(prompt=prompt(3, 41), sampling=GREEDY)]
    whole = serve(engine_of(target, 1), request)["3"]
    monkeypatch.setattr("paceline.models.decoding.prefill.PREFILL_CHUNK", 16)
    pieces = serve(engine_of(target, 1), request)["3"]
    assert response(pieces) == response(whole)
    assert len(pieces.aux_hidden_states) == len(pieces.token_ids)
    torch.testing.assert_close(
        pieces.aux_hidden_states, whole.aux_hidden_states, atol=1e-4, rtol=1e-3
    )


@torch.no_grad()
def test_stops_end_a_response_where_they_stand() -> None:
    target = load()
    drafter = drafter_for(target)
    base = Request(prompt=prompt(1), sampling=GREEDY)
    full = response(serve(engine_of(target, 1), [base])["1"])
    stop = full[6]
    by_id = replace(base, sampling=replace(GREEDY, stop_token_ids=(stop,)))
    cut = full[: full.index(stop) + 1]
    text = target.tokenizer.decode(list(full[:9]))[-2:]
    by_text = replace(base, sampling=replace(GREEDY, stop_strings=("\0never", text)))
    for d in (None, drafter):
        ended = serve(engine_of(target, 2, d), [by_id])["1"]
        assert (response(ended), ended.finish_reason) == (cut, "stop")
        assert len(ended.last_hidden_states) == len(ended.token_ids)
        ended = serve(engine_of(target, 2, d), [by_text])["1"]
        assert ended.finish_reason == "stop" and len(response(ended)) <= 9
        assert text in target.tokenizer.decode(list(response(ended)))
        assert text not in target.tokenizer.decode(list(response(ended))[:-1])


@torch.no_grad()
def test_tokens_are_streamed_as_they_are_committed() -> None:
    target = load()
    seen: dict[str, list[int]] = {}

    def on_tokens(prompt_id: str, tokens: list[int]) -> None:
        seen.setdefault(prompt_id, []).extend(tokens)

    requests = [Request(prompt=prompt(i), sampling=GREEDY, on_tokens=on_tokens) for i in range(5)]
    ended = serve(engine_of(target, 2, drafter_for(target)), requests)
    assert {i: tuple(tokens) for i, tokens in seen.items()} == {
        i: response(s) for i, s in ended.items()
    }


BAD = {
    "empty": (Prompt(prompt_id="bad", domain="d", token_ids=()), GREEDY, "prompt is empty"),
    "long": (prompt(0, CAPACITY), GREEDY, "need 84 positions and there are 64"),
    "nothing": (prompt(0), replace(GREEDY, max_new_tokens=0), "max_new_tokens=0"),
    "cold": (prompt(0), replace(GREEDY, temperature=-1.0), "temperature=-1.0"),
    "nan": (prompt(0), replace(GREEDY, temperature=float("nan")), "temperature=nan"),
    "top_p": (prompt(0), replace(SAMPLED, top_p=0.0), r"top_p=0.0 is outside"),
    "top_k": (prompt(0), replace(SAMPLED, top_k=-1), "top_k=-1"),
    "stop": (prompt(0), replace(GREEDY, stop_token_ids=(10**6,)), "token 1000000 is outside"),
}


@pytest.mark.parametrize("case", BAD)
@torch.no_grad()
def test_a_request_that_cannot_be_served_fails_alone(case: str) -> None:
    target = load()
    bad_prompt, sampling, message = BAD[case]
    good = [Request(prompt=prompt(i), sampling=GREEDY) for i in range(1, 5)]
    expected = serve(engine_of(target, 2), good)
    bad = Request(prompt=replace(bad_prompt, prompt_id="bad"), sampling=sampling)
    ended = serve(engine_of(target, 2), [*good[:2], bad, *good[2:]])
    failed = ended.pop("bad")
    assert failed.finish_reason == "error" and message in str(failed.error)
    assert {i: response(s) for i, s in ended.items()} == {
        i: response(s) for i, s in expected.items()
    }


class Broken:
    """A drafter whose proposals for one anchor history are no tokens or no probabilities."""

    def __init__(self, drafter: Drafter, victim: int, kind: str) -> None:
        self._drafter, self._victim, self._kind = drafter, victim, kind
        self.tap_layer_ids, self.config = drafter.tap_layer_ids, drafter.config
        self.backbone = drafter.backbone

    def start(self, num_slots: int, capacity: int):
        return self._drafter.start(num_slots, capacity)

    def extend(self, *arguments) -> None:
        self._drafter.extend(*arguments)

    def propose(self, cache, slots, anchors, count, samplings, generators):
        proposals = self._drafter.propose(cache, slots, anchors, count, samplings, generators)
        for i, sampling in enumerate(samplings):
            if sampling.seed != self._victim:
                continue
            tokens, probs = proposals[i].tokens, proposals[i].draft_probs
            if self._kind == "tokens":
                tokens = tokens + 10**6
            elif probs is not None:
                probs = probs * torch.nan
            proposals[i] = replace(proposals[i], tokens=tokens, draft_probs=probs)
        return proposals


@pytest.mark.parametrize(("kind", "message"), [("tokens", "outside"), ("probs", "not finite")])
@torch.no_grad()
def test_a_broken_proposal_fails_its_sequence_alone(kind: str, message: str) -> None:
    target = load()
    drafter = drafter_for(target)
    requests = [Request(prompt=prompt(i), sampling=replace(SAMPLED, seed=i)) for i in range(5)]
    expected = serve(engine_of(target, 5, drafter), requests)
    ended = serve(engine_of(target, 5, Broken(drafter, 3, kind)), requests)
    failed = ended.pop("3")
    assert failed.finish_reason == "error" and message in str(failed.error)
    assert {i: response(s) for i, s in ended.items()} == {
        i: response(s) for i, s in expected.items() if i != "3"
    }


@torch.no_grad()
def test_a_byte_budget_lets_the_rest_wait_and_nothing_fails() -> None:
    target = load()
    spec = target.spec
    row = 2 * spec.num_layers * spec.num_key_value_heads * spec.head_dim * 4
    row += (len(TAPS) + 1) * spec.hidden_size * 4  # captured states
    engine = engine_of(target, 8, max_cache_bytes=3 * row * (CAPACITY + 1) + 100)
    assert engine.num_slots == 3
    requests = [Request(prompt=prompt(i), sampling=GREEDY) for i in range(7)]
    assert all(s.error is None for s in serve(engine, requests).values())
    with pytest.raises(ValueError, match=r"max_cache_bytes=1000 is less than one sequence"):
        engine_of(target, 8, max_cache_bytes=1000)


@torch.no_grad()
def test_f58_a_new_drafter_takes_over_running_sequences_without_changing_a_token() -> None:
    target = load()
    first, second = drafter_for(target, seed=0), drafter_for(target, seed=1)
    record = replace(new_record(second.config, target), drafter_version=7)
    requests = [Request(prompt=prompt(i), sampling=GREEDY) for i in range(4)]
    plain = {i: response(s) for i, s in serve(engine_of(target, 4), requests).items()}
    fresh = serve(engine_of(target, 4, second), requests)

    engine = engine_of(target, 4, first, drafter_version=6)
    for request in requests:
        engine.add(request)
    ended = engine.step()
    engine.update_drafter(second, record)
    while len(ended) < 4:
        ended += engine.step()
    assert {s.prompt.prompt_id: response(s) for s in ended} == plain
    assert {s.drafter_version for s in ended} == {7}
    # After the first round the new drafter stands where it would have stood from the start.
    compared = 0
    for sequence in ended:
        whole = fresh[sequence.prompt.prompt_id].trace.accepted
        if sequence.trace.accepted[0] == whole[0]:
            assert sequence.trace.accepted[1:] == whole[1:]
            compared += 1
    assert compared > 0


@torch.no_grad()
def test_f60_a_drafter_of_another_target_or_other_taps_is_refused_and_the_old_one_stays() -> None:
    target = load()
    engine = engine_of(target, 2, drafter_for(target), drafter_version=1)
    foreign = replace(new_record(drafter_for(target).config, target), target_fingerprint="0123")
    with pytest.raises(TargetMismatchError, match="0123"):
        engine.update_drafter(drafter_for(target, seed=1), foreign)
    other = drafter_for(target, seed=1)
    other.tap_layer_ids = (0, 2)
    with pytest.raises(ValueError, match="tap_layer_ids"):
        engine.update_drafter(other, new_record(other.config, target))
    requests = [Request(prompt=prompt(i), sampling=GREEDY) for i in range(2)]
    assert {s.drafter_version for s in serve(engine, requests).values()} == {1}


@torch.no_grad()
def test_new_target_weights_count_from_the_next_round_and_both_versions_are_noted() -> None:
    target = load()
    engine = engine_of(target, 2)
    engine.add(Request(prompt=prompt(1), sampling=GREEDY))
    engine.step()
    weight = target.model.state_dict()["model.layers.0.mlp.up_proj.weight"]
    engine.update_target({"model.layers.0.mlp.up_proj.weight": weight * 1.5}, version=4)
    late = Request(prompt=replace(prompt(1), prompt_id="late"), sampling=GREEDY)
    ended = {s.prompt.prompt_id: s for s in engine.run([late])}
    assert (ended["1"].min_target_version, ended["1"].max_target_version) == (0, 4)
    assert (ended["late"].min_target_version, ended["late"].max_target_version) == (4, 4)
    # The late one did not take the early one's prompt rows, which are of other weights.
    expected = generate_plain(target, prompt(1).token_ids, GREEDY).token_ids
    assert response(ended["late"]) == expected


@torch.no_grad()
def test_closing_ends_what_runs_and_waits_with_an_error() -> None:
    target = load()
    engine = engine_of(target, 2)
    for i in range(4):
        engine.add(Request(prompt=prompt(i), sampling=GREEDY))
    engine.step()
    ended = engine.close()
    assert {s.prompt.prompt_id for s in ended} == {"0", "1", "2", "3"}
    assert all("closed" in str(s.error) for s in ended)
    assert serve(engine, [Request(prompt=prompt(5), sampling=GREEDY)])["5"].error is None


@torch.no_grad()
def test_sampled_first_tokens_have_the_targets_distribution() -> None:
    """Second tokens of many seeds, drafted and verified, against the target's own probabilities."""
    target = load()
    drafter = drafter_for(target)
    sampling = SamplingParams(temperature=1.0, top_k=6, max_new_tokens=2)
    draws = 600
    requests = [
        Request(prompt=replace(prompt(2), prompt_id=f"n{n}"), sampling=replace(sampling, seed=n))
        for n in range(draws)
    ]
    counts: dict[tuple[int, ...], int] = {}
    for sequence in serve(engine_of(target, 32, drafter), requests).values():
        counts[response(sequence)] = counts.get(response(sequence), 0) + 1
    law: dict[tuple[int, ...], float] = {}
    ids = prompt(2).token_ids
    for first, mass in _next(target, ids):
        if first in target.spec.eos_token_ids:
            law[(first,)] = mass
            continue
        for second, share in _next(target, (*ids, first)):
            law[first, second] = mass * share
    assert set(counts) <= set(law)
    distance = 0.5 * sum(abs(counts.get(k, 0) / draws - p) for k, p in law.items())
    expected = 0.4 * sum((p * (1 - p) / draws) ** 0.5 for p in law.values())
    assert distance < 1.6 * expected + 0.005


def _next(target: Target, ids: tuple[int, ...]) -> list[tuple[int, float]]:
    positions = torch.arange(len(ids))[None]
    output = target.forward(torch.tensor([ids]), positions, SlotCache(1, len(ids)), slice(0, 1))
    logits = target.logits(output.last_hidden_states[0, -1:])
    probs = probs_from_logits(logits, 1.0, top_k=6)[0]
    return [(t, float(probs[t])) for t in torch.nonzero(probs)[:, 0].tolist()]
