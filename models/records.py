"""What flows between the parts of Paceline: frozen records with versions on every one of them.

Letters: L rollout length, T packed tokens, S sequences, A tapped layers, D target width, V target
vocabulary, Vd draft vocabulary, K speculative tokens, M proposed tokens, R supervised rows.

Index alignment, used by every record that carries hidden states (token ids x, hidden rows h):

    index            0    1    2    3    4
    input_ids        x0   x1   x2   x3   x4
    hidden row       h0   h1   h2   h3   h4     h_t is the target's state after reading x_t
    teacher of x_t   -    h0   h1   h2   h3     lm_head(last_hidden_states[t - 1]) predicts x_t

Example:
    >>> trace = AcceptanceTrace(proposed=(4, 4), verified=(4, 4), accepted=(2, 4))
    >>> trace.num_drafts, trace.num_accepted_tokens, trace.acceptance_length
    (2, 6, 4.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a token is drawn: temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """End a response besides the target's own end tokens."""
    stop_strings: tuple[str, ...] = ()
    """End a response at the token that completes one of them; the token is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, tokenised; `response_token_ids` is set when the response is given."""

    prompt_id: str
    domain: str
    token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceTrace:
    """Per round: tokens proposed, tokens verified, tokens accepted (the bonus token not counted).

    Names follow vLLM's metrics; `acceptance_length` includes the bonus token.
    """

    proposed: tuple[int, ...] = ()
    verified: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def num_drafts(self) -> int:
        return len(self.accepted)

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.verified)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted)

    @property
    def num_accepted_tokens_per_pos(self) -> tuple[int, ...]:
        """Rounds in which position k (from 0) was accepted."""
        width = max(self.verified, default=0)
        return tuple(sum(n > k for n in self.accepted) for k in range(width))

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per round, bonus token included (cycle-weighted); 1.0 without rounds."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.accepted else 1.0

    @property
    def histogram(self) -> tuple[int, ...]:
        """Rounds by number of accepted tokens: entry n counts the rounds that accepted n."""
        width = max(self.verified, default=0)
        return tuple(sum(a == n for a in self.accepted) for n in range(width + 1))

    @staticmethod
    def concat(traces: Sequence[AcceptanceTrace]) -> AcceptanceTrace:
        return AcceptanceTrace(
            proposed=tuple(n for trace in traces for n in trace.proposed),
            verified=tuple(n for trace in traces for n in trace.verified),
            accepted=tuple(n for trace in traces for n in trace.accepted),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One prompt and its response, as the target produced (or was given) it."""

    rollout_id: str
    domain: str
    token_ids: Tensor  # [L] int32, prompt then response
    loss_mask: Tensor  # [L] bool, True on response tokens; set by position, never by text
    logprobs: Tensor  # [L] float32, of response tokens under the target; 0 on the prompt
    sampling: SamplingParams
    min_target_version: int
    max_target_version: int
    drafter_version: int | None = None
    finish_reason: str = "stop"  # "stop", "length" or "given"
    trace: AcceptanceTrace = AcceptanceTrace()


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStateShard:
    """Packed sequences with the target's tapped hidden states: what drafters are trained on."""

    input_ids: Tensor  # [T] int32
    position_ids: Tensor  # [T] int32, from 0 in each sequence
    loss_mask: Tensor  # [T] bool
    cu_seqlens: Tensor  # [S + 1] int32, sequence s is rows cu_seqlens[s]:cu_seqlens[s + 1]
    aux_hidden_states: Tensor  # [T, A, D], outputs of the tapped layers
    last_hidden_states: Tensor  # [T, D]
    norm_applied: bool
    """True when last_hidden_states are after the target's final norm, ready for lm_head."""
    domains: tuple[str, ...] = ()  # one per sequence
    sequence_ids: tuple[str, ...] = ()  # one per sequence, the rollout ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRef:
    """The only form in which hidden states pass between actors: a description and a place."""

    shard_id: str
    uri: str  # a file relative to the cache folder
    schema_version: int
    target_fingerprint: str
    min_target_version: int
    max_target_version: int
    tap_layer_ids: tuple[int, ...]  # 0-based: 3 means the output of decoder layer 3
    norm_applied: bool
    tokenizer_hash: str
    dtype: str
    num_tokens: int
    num_sequences: int
    num_bytes: int
    domains: tuple[str, ...]
    checksum: str  # sha256 of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Packed sequences of one micro-step of one rank."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    document_ids: Tensor  # [T] int64, the sequence each row belongs to
    cu_seqlens: Tensor  # [S + 1] int64
    loss_mask: Tensor  # [T] bool
    aux_hidden_states: Tensor  # [T, A, D]
    last_hidden_states: Tensor  # [T, D], after the final norm
    min_target_version: int = 0
    max_target_version: int = 0

    @property
    def num_valid_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TrainBatch:
        """The batch on another device, hidden states in `dtype`."""
        return TrainBatch(
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            document_ids=self.document_ids.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            loss_mask=self.loss_mask.to(device),
            aux_hidden_states=self.aux_hidden_states.to(device, dtype),
            last_hidden_states=self.last_hidden_states.to(device, dtype),
            min_target_version=self.min_target_version,
            max_target_version=self.max_target_version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """What a backbone's training forward hands to the objective: one row per supervised guess.

    A row at slot k with label_index t says: from the anchor k + 1 tokens before x_t, predict x_t.
    Rows are anchor-major: rows i * num_slots + k for k < num_slots belong to anchor i.
    """

    hidden: Tensor  # [R, D], ready for the drafter's lm_head
    slot: Tensor  # [R] int64, 0 for the first drafted token
    label_index: Tensor  # [R] int64, packed index of the token to predict
    valid: Tensor  # [R] bool, False on padding, off the loss mask and across documents
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftProposal:
    """Tokens a drafter proposes. parent -1 is the anchor: a chain is (-1, 0, 1, ...)."""

    tokens: Tensor  # [M] int64, target vocabulary
    parent: Tensor  # [M] int64
    depth: Tensor  # [M] int64, 0 for children of the anchor
    draft_probs: Tensor | None = None  # [M, V] as sampled from; None: point mass (deterministic)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What one target pass decided."""

    accepted: tuple[int, ...]  # node indices of the accepted path, root first
    bonus_token: int
    rows: tuple[int, ...]
    """Rows of the target pass that are now committed: row 0 is the anchor, row i + 1 is node i."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCheckpoint:
    """A drafter on disk."""

    uri: str
    method: str
    drafter_version: int
    parent_version: int | None
    target_model: str
    target_fingerprint: str
    target_version: int
    tap_layer_ids: tuple[int, ...]
    step: int
    tokens_seen: int
    sha256: str
    mlflow_run_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """One evaluation of one domain ("total" for all of them)."""

    domain: str
    num_prompts: int
    num_speculative_tokens: int
    temperature: float
    acceptance_length: float  # cycle-weighted: tokens committed / rounds
    acceptance_length_prompt_weighted: float  # mean over prompts of the prompt's own mean
    acceptance_histogram: tuple[int, ...]
    accept_rate_per_pos: tuple[float, ...]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    speedup: float
    audit_tokens: int
    audit_ties: int
    audit_mismatches: int
    target_fingerprint: str
    target_version: int
    drafter_version: int | None
    device: str
