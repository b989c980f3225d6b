"""Joining a Ray cluster, or starting a local one for the length of a run."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from paceline.actors.config import ClusterConfig


@contextmanager
def ray_cluster(config: ClusterConfig) -> Iterator[None]:
    """Ray for the run: the cluster at `cluster.address` (or RAY_ADDRESS), else a local one.

    Token authentication is always stated: Ray turns it on by itself when it is unset and a token
    lies about, and then refuses whoever has none.
    """
    os.environ.setdefault("RAY_AUTH_MODE", config.auth_mode)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = config.address or os.environ.get("RAY_ADDRESS")
    on_terminate = signal.getsignal(signal.SIGTERM)
    common = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address is not None:
        ray.init(address=address, **common)
    else:
        ray.init(num_cpus=config.num_cpus, include_dashboard=False, **common)
    # Ray's own handler would exit without a word; the command line's closes the run as KILLED.
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        ray.shutdown()
