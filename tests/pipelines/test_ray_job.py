"""`ray job submit` against a real cluster: the job succeeds, and leaves its MLflow run.

The cluster asks for a token, as a real one should, and a `kernels` distribution that transformers
imports from is installed on it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(420)


@dataclass(frozen=True)
class Cluster:
    address: str
    environment: dict[str, str]
    folder: Path

    def ray(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ray", *arguments],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def wait_until_jobs_are_taken(address: str, head: subprocess.Popen[bytes], log: Path) -> None:
    request = urllib.request.Request(
        f"{address}/api/version", headers={"Authorization": "Bearer token-of-this-test-only"}
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert head.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError(f"no answer from {address}: {log.read_text()}")


@pytest.fixture(scope="module")
def cluster(fake_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head node on ports of its own, stopped by its process id."""
    folder = tmp_path_factory.mktemp("cluster")
    port, dashboard, client, agent, agent_grpc, metrics = free_ports(6)
    temporary = tempfile.mkdtemp(prefix="ray-")  # sockets below it may have 107 characters
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(fake_kernels),
        "FAKE_KERNELS_LOG": str(folder / "fake_kernels.log"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "token-of-this-test-only",
    }
    environment.pop("RAY_ADDRESS", None)
    log = folder / "head.log"
    command = [
        *("ray", "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--port={port}"),
        *(f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}"),
        *(f"--dashboard-agent-grpc-port={agent_grpc}", f"--temp-dir={temporary}"),
        *("--num-cpus=4", f"--object-store-memory={256 * 2**20}"),
    ]
    with log.open("wb") as out:
        head = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{dashboard}"
        wait_until_jobs_are_taken(address, head, log)
        yield Cluster(address, environment, folder)
    finally:
        head.terminate()
        try:
            head.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()
        shutil.rmtree(temporary, ignore_errors=True)


def test_a_submitted_job_succeeds_and_leaves_its_mlflow_run(
    cluster: Cluster, checkout: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    job = ["job", "submit", "--address", cluster.address, "--submission-id", "debug"]
    train = ["python", "-m", "paceline.pipelines.train", "recipe=debug", f"out={out}"]
    done = cluster.ray(*job, "--working-dir", str(checkout), "--", *train)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    status = cluster.ray("job", "status", "--address", cluster.address, "debug")
    assert "succeeded" in status.stdout.lower(), status.stdout + status.stderr

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{out / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert [run.info.status for run in parents] == ["FINISHED"]
    assert len(runs) > len(parents)
    assert (cluster.folder / "fake_kernels.log").exists(), (
        "the job did not meet the other `kernels`"
    )


def test_a_shell_without_the_token_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    stranger = Cluster(
        cluster.address, {**cluster.environment, "RAY_AUTH_TOKEN": "a-guess"}, tmp_path
    )
    done = stranger.ray("job", "submit", "--address", cluster.address, "--", "true")
    assert done.returncode != 0
    assert "authentication" in (done.stdout + done.stderr).lower()
