"""All rollout workers of a run: hands out shards to make, registers what comes back.

    pool = RolloutPool(config, cache, ...)
    pool.start(tasks)
    while not pool.done:
        for finished in pool.poll(timeout=1.0): ...

Shard files go from worker to folder to trainer; only references pass here. A worker has at most
UNCONSUMED_SHARDS ready and then waits until they are taken (back-pressure). A worker that dies is
started again, and makes the shards that it had not delivered.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from paceline.actors.config import CacheConfig, RolloutConfig
from paceline.actors.rollout_shards import FinishedShard, ShardTask
from paceline.actors.rollout_worker import RolloutWorker
from paceline.models.config import TargetConfig

MAX_RESTARTS = 3
UNCONSUMED_SHARDS = 2
"""Shards that a worker may have ready before it waits for the pool."""

WEIGHTS_WHILE_GENERATING = 2
"""Calls that a worker serves at once: one generates, one takes new weights."""

logger = logging.getLogger(__name__)


class RolloutPool:
    """See the module docstring."""

    def __init__(
        self,
        target: TargetConfig,
        rollout: RolloutConfig,
        cache_config: CacheConfig,
        cache: ActorHandle,
        *,
        tap_layer_ids: tuple[int, ...],
        cache_folder: str,
    ) -> None:
        self.rollout = rollout
        self.cache = cache
        self._max_bytes = cache_config.max_bytes
        self._arguments = (target, rollout, cache_config)
        self._keywords = {
            "tap_layer_ids": tap_layer_ids,
            "cache_folder": cache_folder,
            "threads": max(1, round(rollout.num_cpus)),
        }
        self._workers: dict[int, ActorHandle] = {}
        self._streams: dict[ObjectRefGenerator, int] = {}
        self._left: dict[int, dict[int, ShardTask]] = {}  # worker -> shard index -> task
        self._restarts = 0
        self._newest_target: ObjectRef | None = None
        self._target_version = 0
        self._newest_drafter: ObjectRef | None = None

    @property
    def done(self) -> bool:
        """Every shard has been made and registered."""
        return not any(self._left.values())

    def start(self, tasks: Sequence[ShardTask]) -> None:
        """Give each worker every n-th task, so that early shards come from all of them."""
        for number in range(min(self.rollout.num_workers, len(tasks))):
            own = tasks[number :: self.rollout.num_workers]
            self._left[number] = {task.index: task for task in own}
            self._launch(number)

    def _launch(self, number: int) -> None:
        worker = (
            ray.remote(RolloutWorker)
            .options(
                num_cpus=self.rollout.num_cpus,
                num_gpus=self.rollout.num_gpus,
                max_concurrency=WEIGHTS_WHILE_GENERATING,
            )
            .remote(
                *self._arguments,
                **self._keywords,
                target_state=self._newest_target,
                target_version=self._target_version,
                drafter_state=self._newest_drafter,
            )
        )
        self._workers[number] = worker
        stream = worker.generate.options(
            num_returns="streaming", _generator_backpressure_num_objects=UNCONSUMED_SHARDS
        ).remote(list(self._left[number].values()))
        self._streams[stream] = number

    def update_target(self, state: ObjectRef, version: int) -> None:
        """Weights behind a reference become the target of every worker, from its next round on.

        A worker that is started again later takes them too. Raises what a worker raises of them.
        """
        _wait([w.update_target.remote(state, version) for w in self._workers.values()])
        self._newest_target, self._target_version = state, version

    def update_drafter(self, state: ObjectRef) -> None:
        """A DrafterState behind a reference becomes the drafter of every worker, likewise."""
        _wait([worker.update_drafter.remote(state) for worker in self._workers.values()])
        self._newest_drafter = state

    def poll(self, timeout: float) -> list[FinishedShard]:
        """Shards that were finished since, registered in the cache; waits up to `timeout` s.

        Raises what a worker raised (ValueError, OSError with its remedy), and RuntimeError if
        workers die again and again.
        """
        if self.done:
            return []
        if not ray.get(self.cache.has_room.remote()):
            raise ValueError(
                f"the hidden-state cache is full: cache.max_bytes={self._max_bytes} is reached "
                "before the last prompt; raise it, lower data.limit, or store fewer bytes with "
                "cache.dtype=bfloat16. What was collected is kept: continue with resume="
            )
        ready, _ = ray.wait(list(self._streams), num_returns=len(self._streams), timeout=timeout)
        finished: list[FinishedShard] = []
        for stream in ready:
            number = self._streams[stream]
            try:
                ref: ObjectRef = next(stream)
                shard: FinishedShard = ray.get(ref)
            except StopIteration:
                del self._streams[stream]
                continue
            except RayActorError as error:
                self._restart(stream, number, error)
                continue
            ray.get(self.cache.put.remote(shard.index, shard.ref))
            del self._left[number][shard.index]
            finished.append(shard)
        return finished

    def _restart(self, stream: ObjectRefGenerator, number: int, error: RayActorError) -> None:
        del self._streams[stream]
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            raise RuntimeError(
                f"rollout workers died {self._restarts} times (often memory: lower "
                "rollout.batch_size or rollout.num_workers); finished shards are kept, "
                "continue with resume="
            ) from error
        logger.warning("rollout worker %d died and is started again: %s", number, error)
        if self._left[number]:
            self._launch(number)

    def close(self) -> None:
        """End the workers and free what they hold."""
        for worker in self._workers.values():
            ray.kill(worker)
        self._workers = {}
        self._streams = {}


def _wait(updates: list[ObjectRef]) -> None:
    """Raise what a worker raised; one that died is started again with the newest weights."""
    for update in updates:
        try:
            ray.get(update)
        except RayActorError as error:
            logger.warning("a rollout worker died while it took new weights: %s", error)
