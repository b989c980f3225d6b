"""A journal: JSON lines of which each is on disk before `append` returns.

A line cut short by a crash was never acknowledged, so it is cut off when the journal is opened
again. One process at a time may have a journal open.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from paceline.models.files import fsync_folder, with_remedy

LOCK_WAIT_SECONDS = 3.0
"""How long a process that was killed may take to die before the next one gives up on its lock."""


class Manifest:
    """The journal in one file, opened for appending."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if another process has it open and does not end soon."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        while not self._lock():
            if time.monotonic() > deadline:
                os.close(self._descriptor)
                raise ValueError(
                    f"{path} is in use by another run: wait for it, or give another folder (out=)"
                )
            time.sleep(0.1)
        fsync_folder(path.parent)

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def read(self) -> list[dict[str, Any]]:
        """All events so far. Raises ValueError naming a line that is damaged."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.ftruncate(self._descriptor, whole)
            os.fsync(self._descriptor)
        events = []
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                events.append(json.loads(line))
            except ValueError as error:
                raise ValueError(
                    f"{self.path}:{number}: not a line of JSON ({error}): the file is damaged; "
                    "delete its folder and run anew"
                ) from error
        os.lseek(self._descriptor, 0, os.SEEK_END)
        return events

    def append(self, event: dict[str, Any]) -> None:
        """Adds one event. Raises OSError naming the file if there is no room; it is as before."""
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        line = json.dumps(event).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            raise with_remedy(error, self.path) from None

    def close(self) -> None:
        """Lets another process open it."""
        os.close(self._descriptor)
