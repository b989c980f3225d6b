"""The rollout stage of a run: workers fill the cache while something else may train on it.

with Rollouts(config, prepared, run, bars) as rollouts:
    rollouts.advance(timeout=0.0)          # register what is finished, log it
    refs = rollouts.refs(start=0)          # shards in order, as far as they are there
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType

import ray

from paceline.actors.hidden_state_cache import HiddenStateCache
from paceline.actors.rollout_pool import RolloutPool
from paceline.models.records import AcceptanceTrace, ShardRef
from paceline.pipelines.config import RunConfig
from paceline.pipelines.preparation import Preparation
from paceline.pipelines.progress import Bars
from paceline.pipelines.run_log import RunLog

CACHE_FOLDER = "hidden_states"


class Rollouts:
    """See the module docstring. What a cache already holds is not rolled out again."""

    def __init__(self, config: RunConfig, prepared: Preparation, run: RunLog, bars: Bars) -> None:
        self.folder = run.out / CACHE_FOLDER
        self._run = run
        self._bars = bars
        self._total = len(prepared.tasks)
        # Swept before the first worker writes; a cache that Ray restarts must not sweep. Opened in
        # this process first, so that what is wrong with it is said as it is.
        HiddenStateCache(self.folder, config.cache, prepared.source).close()
        self._cache = (
            ray.remote(HiddenStateCache)
            .options(num_cpus=0, max_restarts=-1, max_task_retries=-1)
            .remote(self.folder, config.cache, prepared.source, sweep=False)
        )
        self._pool = RolloutPool(
            config.target,
            config.rollout,
            config.cache,
            self._cache,
            tap_layer_ids=prepared.tap_layer_ids,
            cache_folder=str(self.folder),
        )
        finished = set(ray.get(self._cache.finished_sequence_ids.remote()))
        self._tasks = [
            task
            for task in prepared.tasks
            if any(prompt.prompt_id not in finished for prompt in task.prompts)
        ]
        self._traces: list[AcceptanceTrace] = []
        self._stack = ExitStack()
        self.done = False

    def __enter__(self) -> Rollouts:
        self._stage = self._stack.enter_context(self._run.stage("rollout"))
        self._started = time.time()
        self._tokens_before = ray.get(self._cache.stats.remote())["tokens"]
        self._pool.start(self._tasks)
        return self

    def advance(self, timeout: float) -> None:
        """Register finished shards, waiting up to `timeout` seconds for one; log and show them."""
        if self.done:
            return
        finished = self._pool.poll(timeout)
        self._traces += [shard.trace for shard in finished]
        if finished or self._pool.done:
            self._log(ray.get(self._cache.stats.remote()))
        if self._pool.done:
            ray.get(self._cache.complete.remote(self._total))
            self._pool.close()
            self._stack.close()
            self.done = True

    def _log(self, stats: dict[str, int]) -> None:
        seconds = time.time() - self._started
        rate = (stats["tokens"] - self._tokens_before) / seconds
        metrics = {
            "rollout/shards": stats["shards"],
            "rollout/tokens": stats["tokens"],
            "rollout/tokens_per_second": rate,
            "cache/bytes": stats["bytes"],
        }
        trace = AcceptanceTrace.concat(self._traces)
        if trace.num_drafts:
            metrics["rollout/acceptance_length"] = trace.acceptance_length
        self._stage.log(metrics, step=stats["shards"])
        note = f"{stats['tokens']:,} tokens, {rate:.0f}/s"
        self._bars.update("rollout", stats["shards"], self._total, note)

    def refs(self, start: int) -> list[ShardRef]:
        """Shards from index `start` on, in order, up to the first that is missing."""
        return ray.get(self._cache.refs.remote(start))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.close()
        # An open stage is closed with the error that is passing, FAILED or KILLED.
        self._stack.__exit__(kind, error, trace)
