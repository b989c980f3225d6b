"""Where a training run stands: data order, learning rate and the checkpoint folders that keep both.

Everything here is a pure function of configuration and of how far the run has come, so that a
resumed run repeats what an uninterrupted one would have done, on any number of ranks.

Data order. Pass 0 takes shards in index order, as they arrive; later passes are shuffled by
seed and pass. Sequences are taken in that order into micro-batches of at most `batch_tokens`
packed tokens; a step takes the next `ranks x accumulation` micro-batches. With batch_tokens 10:

    sequence         s0  s1  s2  s3 | s2  s0  s3  s1      pass 0, then pass 1 shuffled
    tokens            4   5   6   3 |  6   4   3   5
    micro-batch       0   0   1   1 |  2   2   3   3

A checkpoint folder appears by one rename, after all its files and their manifest reached the
disk; a half-written one keeps a hidden name and is swept by the next save.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.models.files import fsync_folder

STATE_FILE = "training.json"
MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = 1
_PREFIX = "step-"
_PARTIAL = ".partial-"


class TrainingCheckpointError(ValueError):
    """A checkpoint cannot be continued from; the message names the file and the remedy."""


def learning_rate(
    step: int, *, lr: float, steps: int, warmup_ratio: float, min_lr_ratio: float
) -> float:
    """Rate of step `step` (from 0): linear warm-up, then cosine down to min_lr_ratio * lr."""
    warmup = math.ceil(warmup_ratio * steps)
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return lr * (min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """All that is needed, beside weights and optimizer moments, to continue a run."""

    step: int = 0
    """Optimizer steps done."""
    tokens_seen: int = 0
    next_micro_batch: int = 0
    epoch: int = 0
    cursor: int = 0
    """Sequences of this epoch already taken."""
    num_shards: int = 0
    data_hash: str = ""
    """Of the ids and sequence lengths of the first num_shards shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The sequences of one micro-step of one rank, as (shard index, sequence index) pairs."""

    index: int
    """Counted over the whole run; with the seed it fixes every random draw of the micro-step."""
    sequences: tuple[tuple[int, int], ...]
    num_tokens: int


def micro_batch_seed(seed: int, index: int) -> int:
    """Seed of the draws of micro-batch `index`, the same whichever rank computes it."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class SequenceSampler:
    """Deterministic order of the sequences of shards that may still be arriving.

    Example:
        >>> sampler = SequenceSampler(batch_tokens=10, seed=0)
        >>> sampler.add_shard("a", [4, 5, 6])
        >>> [batch.sequences for batch in sampler.take(1)]
        [((0, 0), (0, 1))]
        >>> sampler.take(1) is None  # what comes after the 6 tokens is not known yet
        True
    """

    def __init__(self, *, batch_tokens: int, seed: int, state: TrainingState | None = None) -> None:
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.finished = False
        self._resumed = state or TrainingState()
        self._epoch = self._resumed.epoch
        self._cursor = self._resumed.cursor
        self._next_micro_batch = self._resumed.next_micro_batch
        self._lengths: list[tuple[int, ...]] = []
        self._arrival_order: list[tuple[int, int]] = []
        self._shuffled: tuple[int, list[tuple[int, int]]] | None = None
        self._digest = hashlib.sha256()

    @property
    def num_shards(self) -> int:
        return len(self._lengths)

    def add_shard(self, shard_id: str, lengths: Sequence[int]) -> None:
        """The next shard in index order, with the tokens of each of its sequences.

        Raises TrainingCheckpointError if a resumed run is given other shards than it had.
        """
        assert not self.finished, "shards were declared complete"
        shard = len(self._lengths)
        self._lengths.append(tuple(lengths))
        self._arrival_order.extend((shard, sequence) for sequence in range(len(lengths)))
        self._digest.update(f"{shard_id}:{list(lengths)};".encode())
        resumed = self._resumed
        if self.num_shards == resumed.num_shards and self._digest.hexdigest() != resumed.data_hash:
            raise TrainingCheckpointError(
                f"the cache's first {resumed.num_shards} shards differ from those this checkpoint "
                f"(step {resumed.step}) was trained on, at or before shard {shard_id}: resume "
                "with the run's own cache folder, or start a new run from the drafter"
            )

    def finish(self) -> None:
        """No shard comes after those added: later passes may begin.

        Raises ValueError if there is nothing to train on, or less than a resumed run had.
        """
        if not self._arrival_order:
            raise ValueError(
                "no sequence to train on: no rollout reached the hidden-state cache; check "
                "data.prompts, data.limit and data.max_context_tokens"
            )
        if self.num_shards < self._resumed.num_shards:
            raise TrainingCheckpointError(
                f"the cache holds {self.num_shards} shards, but the checkpoint (step "
                f"{self._resumed.step}) was trained on {self._resumed.num_shards}: resume with "
                "the run's own cache folder, or start a new run from the drafter"
            )
        self.finished = True

    def take(self, count: int) -> tuple[MicroBatch, ...] | None:
        """The next `count` micro-batches, or None (and nothing taken) until more shards arrive."""
        if self.num_shards < self._resumed.num_shards:
            return None
        epoch, cursor = self._epoch, self._cursor
        batches: list[MicroBatch] = []
        for offset in range(count):
            keys: list[tuple[int, int]] = []
            tokens = 0
            while True:
                order = self._order(epoch)
                if cursor == len(order):
                    if not self.finished:
                        return None
                    epoch, cursor = epoch + 1, 0
                    continue
                shard, sequence = key = order[cursor]
                length = self._lengths[shard][sequence]
                # A sequence longer than the budget is a micro-batch of its own, and none comes
                # twice within one, however few there are.
                if keys and (tokens + length > self.batch_tokens or key in keys):
                    break
                keys.append(key)
                tokens += length
                cursor += 1
            index = self._next_micro_batch + offset
            batches.append(MicroBatch(index=index, sequences=tuple(keys), num_tokens=tokens))
        self._epoch, self._cursor = epoch, cursor
        self._next_micro_batch += count
        return tuple(batches)

    def _order(self, epoch: int) -> list[tuple[int, int]]:
        if epoch == 0:
            return self._arrival_order
        if self._shuffled is None or self._shuffled[0] != epoch:
            order = list(self._arrival_order)
            random.Random(micro_batch_seed(self.seed, -epoch)).shuffle(order)
            self._shuffled = (epoch, order)
        return self._shuffled[1]

    def state(self, *, step: int, tokens_seen: int) -> TrainingState:
        """Where the run stands after `step` steps; a sampler built from it continues here."""
        assert self.num_shards >= self._resumed.num_shards, "give a resumed run its shards first"
        return TrainingState(
            step=step,
            tokens_seen=tokens_seen,
            next_micro_batch=self._next_micro_batch,
            epoch=self._epoch,
            cursor=self._cursor,
            num_shards=self.num_shards,
            data_hash=self._digest.hexdigest(),
        )


def checkpoint_name(step: int) -> str:
    return f"{_PREFIX}{step:07d}"


def list_checkpoints(root: Path) -> list[Path]:
    """Finished checkpoints below `root`, oldest first."""
    return sorted(path for path in root.glob(f"{_PREFIX}*") if path.is_dir())


@contextmanager
def new_checkpoint(root: Path, state: TrainingState) -> Iterator[Path]:
    """A hidden folder to write into; on leaving it becomes root/step-NNNNNNN, all or nothing.

    Adds the state and a manifest with the sha256 of every file. On an error, the folder is
    removed and older checkpoints are as they were.
    """
    final = root / checkpoint_name(state.step)
    partial = root / f"{_PARTIAL}{final.name}"
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"{_PARTIAL}*"):
        shutil.rmtree(leftover)
    partial.mkdir()
    with ExitStack() as on_error:
        on_error.callback(shutil.rmtree, partial)
        yield partial
        content = {"schema_version": SCHEMA_VERSION, **asdict(state)}
        (partial / STATE_FILE).write_text(json.dumps(content, indent=2) + "\n")
        files = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
        (partial / MANIFEST_FILE).write_text(json.dumps({"sha256": files}, indent=2) + "\n")
        for path in partial.iterdir():
            _fsync_file(path)
        fsync_folder(partial)
        on_error.pop_all()
    if final.exists():
        # A run that went back (lost ranks, or a resume from an older step) made this step again.
        shutil.rmtree(final)
    partial.rename(final)
    fsync_folder(root)


def read_checkpoint(folder: Path) -> TrainingState:
    """Verify every file of a checkpoint against its manifest and read the state.

    Raises TrainingCheckpointError naming the file that is missing, damaged or unknown.
    """
    manifest = _read_json(folder / MANIFEST_FILE).get("sha256")
    if not isinstance(manifest, dict) or STATE_FILE not in manifest:
        raise TrainingCheckpointError(_damaged(folder / MANIFEST_FILE, "lists no files"))
    for name, expected in manifest.items():
        path = folder / name
        if path.name != name or not path.is_file():
            raise TrainingCheckpointError(_damaged(path, "is missing"))
        found = _sha256(path)
        if found != expected:
            reason = f"is truncated or changed (sha256 {found[:12]}, expected {expected[:12]})"
            raise TrainingCheckpointError(_damaged(path, reason))
    content = _read_json(folder / STATE_FILE)
    version = content.pop("schema_version", None)
    if version != SCHEMA_VERSION or content.keys() != asdict(TrainingState()).keys():
        reason = f"has schema version {version}, this Paceline reads {SCHEMA_VERSION}"
        raise TrainingCheckpointError(_damaged(folder / STATE_FILE, reason))
    return TrainingState(**content)


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise TrainingCheckpointError(_damaged(path, "is missing"))
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise TrainingCheckpointError(_damaged(path, f"is not JSON ({error})")) from error
    if not isinstance(content, dict):
        raise TrainingCheckpointError(_damaged(path, "is not a JSON object"))
    return content


def _damaged(path: Path, reason: str) -> str:
    older = [p for p in list_checkpoints(path.parent.parent) if p.name < path.parent.name]
    remedy = f"resume from {older[-1]}" if older else "start the run again"
    return f"checkpoint file {path} {reason}: {remedy}, or restore the file from a copy"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
