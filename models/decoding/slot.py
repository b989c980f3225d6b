"""One running sequence of the engine: its tokens so far, its captured states, its end.

Rows and tokens, 3 prompt tokens and 2 of the response, the newest not yet read by the target:

    index        0    1    2    3    4
    token        p0   p1   p2   r0   r1     length 5
    row          h0   h1   h2   h3   -      captured 4; the next round reads r1 at position 4

"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from paceline.models.decoding.capture import CaptureStore
from paceline.models.decoding.requests import CapturedSequence, Request
from paceline.models.records import AcceptanceTrace, Prompt, SamplingParams


class Slot:
    """See the module docstring. `place` is where the capture store keeps its states."""

    def __init__(self, request: Request, *, place: int, target_version: int) -> None:
        self.request = request
        self.place = place
        self.generator = request_generator(request)
        self.captured = 0
        """Tokens whose states are kept."""
        self.tokens = list(request.prompt.token_ids)
        self.last_kept = 0
        """Tokens that the last round committed."""
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.drafter_version: int | None = None
        self.min_target_version = target_version
        self._prompt_length = len(self.tokens)
        self._logprobs: list[float] = []
        self._verified: list[int] = []
        self._accepted: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def decoding(self) -> bool:
        """Whether it takes another token."""
        return self.error is None and self.finish_reason is None

    @property
    def newest(self) -> int:
        """The anchor: committed, not yet read by the target."""
        return self.tokens[-1]

    @property
    def complete(self) -> bool:
        """Ended, and every token has its row; a failed sequence waits for none."""
        return self.error is not None or (
            self.finish_reason is not None and self.captured == self.length
        )

    def commit(
        self, tokens: list[int], logprobs: list[float], stop_ids: tuple[int, ...], tokenizer: Any
    ) -> int:
        """Append tokens up to the first that ends the response; returns how many were kept."""
        sampling = self.request.sampling
        kept = 0
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self._logprobs.append(logprob)
            kept += 1
            if token in stop_ids or token in sampling.stop_token_ids:
                self.finish_reason = "stop"
            elif sampling.stop_strings and self._ends_with_string(sampling, tokenizer):
                self.finish_reason = "stop"
            elif self.length - self._prompt_length == sampling.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        self.last_kept = kept
        if self.request.on_tokens is not None:
            self.request.on_tokens(self.request.prompt.prompt_id, self.tokens[-kept:])
        return kept

    def _ends_with_string(self, sampling: SamplingParams, tokenizer: Any) -> bool:
        # A token is at least a byte, so this many hold any of the strings and the token before.
        window = max(len(text.encode()) for text in sampling.stop_strings) + 4
        first = max(self._prompt_length, self.length - window)
        text = tokenizer.decode(self.tokens[first:])
        return any(stop in text for stop in sampling.stop_strings)

    def note_round(self, verified: int, accepted: int, drafter_version: int | None) -> None:
        """One speculative round, the bonus token not counted."""
        self._verified.append(verified)
        self._accepted.append(accepted)
        self.drafter_version = drafter_version

    def result(self, store: CaptureStore, target_version: int) -> CapturedSequence:
        """The sequence as it ended."""
        logprobs = torch.zeros(self.length)
        logprobs[self._prompt_length :] = torch.tensor(self._logprobs)
        aux, last = store.states(self.place, self.captured)
        rounds = tuple(self._verified)
        return CapturedSequence(
            prompt=self.request.prompt,
            token_ids=torch.tensor(self.tokens),
            logprobs=logprobs,
            aux_hidden_states=aux,
            last_hidden_states=last,
            finish_reason="error" if self.error is not None else str(self.finish_reason),
            trace=AcceptanceTrace(proposed=rounds, verified=rounds, accepted=tuple(self._accepted)),
            min_target_version=self.min_target_version,
            max_target_version=target_version,
            drafter_version=self.drafter_version,
            error=self.error,
        )


def failed(prompt: Prompt, error: str) -> CapturedSequence:
    """The answer to a request that cannot be served."""
    nothing = torch.empty(0)
    return CapturedSequence(
        prompt=prompt,
        token_ids=torch.tensor(prompt.token_ids, dtype=torch.int64),
        logprobs=torch.zeros(len(prompt.token_ids)),
        aux_hidden_states=nothing,
        last_hidden_states=nothing,
        finish_reason="error",
        error=error,
    )


def request_generator(request: Request) -> torch.Generator:
    """Seed and prompt alone decide a request's draws: neither what shares its batch nor which
    worker got it.
    """
    name = f"{request.sampling.seed} {request.prompt.prompt_id}"
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))
