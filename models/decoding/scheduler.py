"""How many drafted tokens of each sequence a target pass should verify (DSpark, arXiv 2607.05147).

A pass over more tokens takes longer; a token far down a chain is rarely reached. The scheduler adds
tokens to the pass, likeliest first, as long as the expected tokens per second grow.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


def schedule_lengths(
    accept_probs: Sequence[Sequence[float]], seconds: Callable[[int], float]
) -> list[int]:
    """The number of drafted tokens of each sequence to verify, by DSpark's Algorithm 1.

    Starts with the R anchors alone: B = R tokens in the pass, tau = R expected tokens out of it.
    Visits (sequence r, draft j) by decreasing probability of its prefix, a = the product of
    accept_probs[r][0..j] (ties: lower r, then lower j; a prefix always before its extension). Each
    visit makes B one larger and tau larger by a, and stands if tau / seconds(B) is above every
    value before it. The first that is not ends the schedule.

    That break is what keeps sampling exact, not a shortcut. Entry j + 1 of a sequence is computed
    from its draft j. Whether draft j is verified must not depend on which token it is, so it is
    decided before entry j + 1 is read, and nothing read later takes it back. Picking the best of
    all lengths instead would verify a draft more readily when its own token promises a long
    continuation, and leave it out (the target then draws afresh) when it does not: tokens with
    promising continuations would be emitted too often. The price: the lengths are the best ones
    only if tau / seconds(B) rises to one peak; on jagged timings the schedule ends at the first.

    Args:
        accept_probs: for each of R sequences, entry j is the calibrated probability that its draft
            j is accepted given that the ones before it are. Entry j may depend on the context and
            on drafts before j, not on draft j. Entries are read lazily, in the order of the visits:
            of each sequence the first, and one beyond each draft that is verified.
        seconds: measured seconds of a target pass over n tokens, above 0; asked for R, R + 1, ...

    Returns:
        R lengths, each from 0 to the number of entries of its sequence.

    Raises:
        ValueError: a probability outside 0..1.
    """
    lengths = [0] * len(accept_probs)
    if not lengths:
        return lengths
    ahead: list[tuple[float, int, int]] = []  # (-prefix probability, sequence, draft)
    for sequence in range(len(lengths)):
        _push(ahead, accept_probs, sequence, 0, 1.0)
    num_tokens, expected_tokens = len(lengths), float(len(lengths))
    best_rate = expected_tokens / seconds(num_tokens)
    while ahead:
        negative_prefix_prob, sequence, draft = heapq.heappop(ahead)
        num_tokens += 1
        expected_tokens -= negative_prefix_prob
        rate = expected_tokens / seconds(num_tokens)
        if rate <= best_rate:
            break
        best_rate = rate
        lengths[sequence] = draft + 1
        _push(ahead, accept_probs, sequence, draft + 1, -negative_prefix_prob)
    return lengths


def _push(
    ahead: list[tuple[float, int, int]],
    accept_probs: Sequence[Sequence[float]],
    sequence: int,
    draft: int,
    prefix_prob: float,
) -> None:
    """Reads the entry of a draft, if there is one, and queues the draft for its visit."""
    if draft == len(accept_probs[sequence]):
        return
    prob = accept_probs[sequence][draft]
    if not 0.0 <= prob <= 1.0:
        raise ValueError(
            f"sequence {sequence} has acceptance probability {prob} at position {draft}, outside "
            "0..1: pass calibrated probabilities, not logits"
        )
    heapq.heappush(ahead, (-prefix_prob * prob, sequence, draft))
