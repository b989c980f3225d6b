"""What a hidden-state shard must satisfy before anything is trained on it.

Every check answers a fault that a peer system trained through in silence: captures cut by an
engine's prefix cache, rows padded with zeros, masks without a prompt, hidden states of another
target or of other layers.

Shapes: T packed tokens, S sequences, A tapped layers, D width.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch

from paceline.models.records import HiddenStateShard, ShardRef

SHARD_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class ShardError(ValueError):
    """A shard that is incomplete, damaged, or not the one its ref describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """The target that hidden states come from, and which of its layers were tapped."""

    target_fingerprint: str
    tokenizer_hash: str
    tap_layer_ids: tuple[int, ...]

    def check(self, ref: ShardRef) -> None:
        """Raises ShardError, with both values, if `ref` comes from another target or other taps."""
        found = (ref.target_fingerprint, ref.tokenizer_hash, ref.tap_layer_ids)
        for (name, expected), value in zip(asdict(self).items(), found, strict=True):
            if value != expected:
                raise ShardError(
                    f"shard {ref.shard_id} ({ref.uri}) has {name} {value!r}, but this run's target "
                    f"has {expected!r}: use the target and taps it was collected with, or collect "
                    "anew into another folder (out=)"
                )


def check_shard(shard: HiddenStateShard, source: ShardSource) -> None:
    """Raises ShardError, naming the sequence where it can, for rows that would train nonsense.

    That is: fewer hidden rows than tokens, sequences that do not tile the rows, another number of
    taps, a loss mask that is all ones or all zeros within a sequence, and hidden rows that are zero
    or not finite.
    """
    tokens = len(shard.input_ids)
    rows_of = {
        "position_ids": len(shard.position_ids),
        "loss_mask": len(shard.loss_mask),
        "aux_hidden_states": len(shard.aux_hidden_states),
        "last_hidden_states": len(shard.last_hidden_states),
    }
    for name, rows in rows_of.items():
        if rows != tokens:
            raise ShardError(
                f"{name} has {rows} rows for {tokens} tokens: the capture is short; turn off the "
                "engine's prefix cache and chunked prefill while hidden states are captured"
            )
    _check_sequences(shard, tokens)
    _check_masks(shard)
    taps = shard.aux_hidden_states.shape[1]
    if taps != len(source.tap_layer_ids):
        raise ShardError(
            f"aux_hidden_states has {taps} tapped layers, but tap_layer_ids is "
            f"{source.tap_layer_ids}: capture exactly these layers"
        )
    dtypes = {shard.aux_hidden_states.dtype, shard.last_hidden_states.dtype}
    if len(dtypes) != 1 or not dtypes <= set(SHARD_DTYPES.values()):
        raise ShardError(
            f"hidden states have dtypes {sorted(map(str, dtypes))}: give both the same one of "
            f"{', '.join(SHARD_DTYPES)}"
        )
    _check_hidden_rows(shard, "aux_hidden_states", shard.aux_hidden_states)
    _check_hidden_rows(shard, "last_hidden_states", shard.last_hidden_states)


def _check_sequences(shard: HiddenStateShard, tokens: int) -> None:
    bounds = shard.cu_seqlens.numpy()
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or (np.diff(bounds) <= 0).any():
        raise ShardError(f"cu_seqlens {bounds.tolist()} does not tile {tokens} tokens from 0")
    sequences = len(bounds) - 1
    for name, names in (("domains", shard.domains), ("sequence_ids", shard.sequence_ids)):
        if len(names) != sequences:
            raise ShardError(f"{name} names {len(names)} sequences, cu_seqlens {sequences}")
    if len(set(shard.sequence_ids)) != sequences:
        raise ShardError(f"sequence_ids are not unique: {sorted(shard.sequence_ids)}")
    positions = np.arange(tokens) - np.repeat(bounds[:-1], np.diff(bounds))
    if not np.array_equal(shard.position_ids.numpy(), positions):
        raise ShardError("position_ids do not count from 0 within each sequence: rows moved")


def _check_masks(shard: HiddenStateShard) -> None:
    bounds = shard.cu_seqlens.numpy()
    counts = np.add.reduceat(shard.loss_mask.numpy().astype(np.int64), bounds[:-1])
    for sequence, ones, length in zip(shard.sequence_ids, counts, np.diff(bounds), strict=True):
        if ones in (0, length):
            raise ShardError(
                f"sequence {sequence}: its loss mask is all {'ones' if ones else 'zeros'} over "
                f"{length} tokens; it must hold a prompt (False) and a response (True)"
            )


def _check_hidden_rows(shard: HiddenStateShard, name: str, hidden: torch.Tensor) -> None:
    # The largest magnitude of a row tells all: NaN and inf spread to it, 0 means an empty row.
    peaks = hidden.abs().amax(-1).reshape(len(hidden), -1)  # [T, A or 1]
    bad = (~torch.isfinite(peaks) | (peaks == 0)).any(-1).nonzero()
    if len(bad):
        row = int(bad[0])
        index = int(np.searchsorted(shard.cu_seqlens.numpy(), row, side="right")) - 1
        raise ShardError(
            f"sequence {shard.sequence_ids[index]}: {name} row {row} is zero or not finite "
            f"({len(bad)} such rows): the capture is incomplete or overflows its dtype; nothing "
            "was written"
        )
