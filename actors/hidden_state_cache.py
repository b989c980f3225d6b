"""The index of hidden-state shards: who wrote what, in which order, and what may be dropped.

Tensors never pass through it. A rollout worker writes a shard file into the cache's folder (shared
by all nodes) and puts its ShardRef here; a trainer asks for refs and maps the files itself.

    folder/manifest.jsonl        one line per event, on disk before the event is acknowledged
    folder/SHARD-HASH.arrow      a shard

Whatever the manifest lists survives a crash at any point; a file it does not list was never
acknowledged and is swept when the cache is opened again. An ordinary class; a pipeline wraps it:

    cache = ray.remote(HiddenStateCache).options(max_restarts=-1).remote(
        folder, config.cache, source, sweep=False
    )
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.actors.config import CacheConfig
from paceline.actors.manifest import Manifest
from paceline.models.files import PARTIAL_SUFFIX
from paceline.models.records import SCHEMA_VERSION, ShardRef
from paceline.models.shards import (
    SHARD_SUFFIX,
    ShardError,
    ShardSource,
    read_header,
    shard_path,
)

MANIFEST_FILE = "manifest.jsonl"


class HiddenStateCache:
    """Shards in rollout order, with leases and a byte budget."""

    def __init__(
        self, folder: Path | str, config: CacheConfig, source: ShardSource, *, sweep: bool = True
    ) -> None:
        """Opens the cache in `folder`, new or with all that its manifest lists.

        `sweep=False` keeps unlisted files, for an actor that Ray restarts while workers write;
        call `sweep()` then before the first worker starts. Raises ShardError if the cache is of
        another target or its manifest is damaged, ValueError if another process has it open.
        """
        self.folder = Path(folder)
        self.config = config
        self.source = source
        self._refs: dict[int, ShardRef] = {}
        self._index_of: dict[str, int] = {}
        self._sequence_ids: dict[str, tuple[str, ...]] = {}
        self._evicted_ids: set[str] = set()
        self._evicted_indices: set[int] = set()
        self._holders: dict[str, set[str]] = {}  # shard id -> who leases it
        self._held: Counter[str] = Counter()
        self._total: int | None = None  # known once rollouts are done
        self.folder.mkdir(parents=True, exist_ok=True)
        self._manifest = Manifest(self.folder / MANIFEST_FILE)
        with ExitStack() as on_error:
            on_error.callback(self._manifest.close)
            self._restore()
            if sweep:
                self.sweep()
            on_error.pop_all()

    def put(self, index: int, ref: ShardRef) -> ShardRef:
        """Registers the file behind `ref` as number `index` of the rollout order.

        Idempotent by shard id: when a worker is run again after a crash and writes the shard anew,
        the first one stays, the second one's file is removed, and the registered ref is returned.
        Raises ShardError if the ref is of another target, its file is missing or another one, or
        `index` is taken; OSError if there is no room for the manifest.
        """
        self.source.check(ref)
        if ref.shard_id in self._evicted_ids:
            raise ShardError(f"shard {ref.shard_id} was evicted: give newly collected ones new ids")
        if ref.shard_id in self._index_of:
            return self._keep_first(index, ref)
        if index < 0 or index in self._refs or index in self._evicted_indices:
            raise ShardError(f"shard {ref.shard_id}: index {index} is taken or negative")
        if self._total is not None and index >= self._total:
            raise ShardError(
                f"shard {ref.shard_id}: index {index} comes after the end, the rollouts are "
                f"complete with {self._total} shards"
            )
        sequence_ids = read_header(self.folder, ref).sequence_ids
        self._manifest.append(
            {"event": "put", "index": index, "ref": asdict(ref), "sequence_ids": sequence_ids}
        )
        self._register(index, ref, sequence_ids)
        return ref

    def refs(self, start: int = 0) -> list[ShardRef]:
        """Shards from index `start` on, in order, up to the first that is not there yet.

        So a trainer that has consumed n shards asks for refs(n). Raises ShardError if `start` has
        been evicted.
        """
        if start in self._evicted_indices:
            raise ShardError(f"shard number {start} was evicted before it was read")
        run: list[ShardRef] = []
        while (ref := self._refs.get(start + len(run))) is not None:
            run.append(ref)
        return run

    def lease(self, holder: str, shard_ids: Sequence[str]) -> list[ShardRef]:
        """Keeps shards from eviction until `holder` acknowledges them.

        Raises ShardError, leasing nothing, if one of them is unknown or evicted.
        """
        for shard_id in shard_ids:
            if shard_id not in self._index_of:
                state = "was evicted" if shard_id in self._evicted_ids else "is unknown"
                raise ShardError(f"shard {shard_id} {state}: ask for refs again")
        for shard_id in shard_ids:
            self._holders.setdefault(shard_id, set()).add(holder)
        return [self._refs[self._index_of[shard_id]] for shard_id in shard_ids]

    def ack(self, holder: str, shard_ids: Sequence[str] | None = None) -> None:
        """Ends leases of `holder`, all of them by default (also for a holder that died)."""
        for shard_id in list(self._holders) if shard_ids is None else shard_ids:
            holders = self._holders.get(shard_id, set())
            holders.discard(holder)
            if not holders:
                self._holders.pop(shard_id, None)

    def evict(self, shard_ids: Iterable[str]) -> list[str]:
        """Drops shards that nobody leases and returns their ids; others stay.

        The manifest forgets a shard before its file goes, so a crash between leaves a file to
        sweep and never a listed shard without one. A policy such as `stale_shards` chooses.
        """
        dropped = []
        for shard_id in shard_ids:
            if shard_id in self._index_of and shard_id not in self._holders:
                self._manifest.append({"event": "evict", "shard_id": shard_id})
                ref = self._forget(shard_id)
                shard_path(self.folder, ref).unlink(missing_ok=True)
                dropped.append(shard_id)
        return dropped

    def complete(self, total: int | None = None) -> None:
        """Marks that rollouts are done and gave `total` shards (None: as many as were put)."""
        if total is None:
            total = max((*self._refs, *self._evicted_indices), default=-1) + 1
        if total != self._total:
            self._manifest.append({"event": "complete", "total": total})
            self._total = total

    def is_complete(self) -> bool:
        """Whether rollouts are done and every one of their shards has been put."""
        return len(self._refs) + len(self._evicted_ids) == self._total

    def finished_sequence_ids(self) -> list[str]:
        """Rollouts that need not be made again, evicted ones included."""
        return [name for names in self._sequence_ids.values() for name in names]

    def has_room(self) -> bool:
        """Whether rollouts may go on: False while the cache holds max_bytes or more."""
        return self._held["bytes"] < self.config.max_bytes

    def stats(self) -> dict[str, int]:
        """Counts of what is held now, and of what has been evicted."""
        return {
            "shards": len(self._refs),
            "tokens": self._held["tokens"],
            "sequences": self._held["sequences"],
            "bytes": self._held["bytes"],
            "leased": len(self._holders),
            "evicted": len(self._evicted_ids),
        }

    def sweep(self) -> list[str]:
        """Removes shard files that the manifest does not list; returns their names."""
        listed = {ref.uri for ref in self._refs.values()}
        swept = [
            path
            for path in self.folder.iterdir()
            if path.suffix in (SHARD_SUFFIX, PARTIAL_SUFFIX) and path.name not in listed
        ]
        for path in swept:
            path.unlink()
        return sorted(path.name for path in swept)

    def close(self) -> None:
        """Lets another process open the cache. Everything is on disk already."""
        self._manifest.close()

    def _restore(self) -> None:
        events = self._manifest.read()
        for line, event in enumerate(events, start=1):
            self._replay(event, line)
        for ref in self._refs.values():
            read_header(self.folder, ref)
        if not events:
            header = {"schema_version": SCHEMA_VERSION, "source": asdict(self.source)}
            self._manifest.append({"event": "open", **header})

    def _keep_first(self, index: int, ref: ShardRef) -> ShardRef:
        kept_index = self._index_of[ref.shard_id]
        if kept_index != index:
            raise ShardError(f"shard {ref.shard_id} is number {kept_index}, not {index}")
        kept = self._refs[kept_index]
        if ref.uri != kept.uri:
            shard_path(self.folder, ref).unlink(missing_ok=True)
        return kept

    def _register(self, index: int, ref: ShardRef, sequence_ids: Iterable[str]) -> None:
        self._refs[index] = ref
        self._index_of[ref.shard_id] = index
        self._sequence_ids[ref.shard_id] = tuple(sequence_ids)
        self._held.update(_sizes(ref))

    def _forget(self, shard_id: str) -> ShardRef:
        index = self._index_of.pop(shard_id)
        ref = self._refs.pop(index)
        self._evicted_ids.add(shard_id)
        self._evicted_indices.add(index)
        self._held.subtract(_sizes(ref))
        return ref

    def _replay(self, event: dict[str, Any], line: int) -> None:
        match event["event"]:
            case "open":
                self._check_header(event)
            case "put":
                ref = _ref_from_json(event["ref"])
                self.source.check(ref)
                self._register(event["index"], ref, event["sequence_ids"])
            case "evict":
                self._forget(event["shard_id"])
            case "complete":
                self._total = event["total"]
            case unknown:
                raise ShardError(
                    f"{self._manifest.path}:{line}: unknown event {unknown!r}; a newer Paceline "
                    "may have written it: use that one, or collect into another folder"
                )

    def _check_header(self, event: dict[str, Any]) -> None:
        found = {**event["source"], "tap_layer_ids": tuple(event["source"]["tap_layer_ids"])}
        expected = asdict(self.source)
        if event["schema_version"] != SCHEMA_VERSION or found != expected:
            raise ShardError(
                f"{self._manifest.path}: the cache has schema {event['schema_version']} and "
                f"{found}, this run has schema {SCHEMA_VERSION} and {expected}: give another "
                "folder (out=), or the target and taps the cache was collected with"
            )


def stale_shards(refs: Iterable[ShardRef], *, min_target_version: int) -> list[str]:
    """Eviction policy: ids of the shards whose newest rows are older than `min_target_version`."""
    return [ref.shard_id for ref in refs if ref.max_target_version < min_target_version]


def _sizes(ref: ShardRef) -> dict[str, int]:
    return {"tokens": ref.num_tokens, "sequences": ref.num_sequences, "bytes": ref.num_bytes}


def _ref_from_json(fields: dict[str, Any]) -> ShardRef:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return ShardRef(**{**fields, **lists})
