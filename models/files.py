"""Files that appear whole or not at all, also when the machine dies in between."""

from __future__ import annotations

import errno
import hashlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO

PARTIAL_SUFFIX = ".partial"
"""Ending of a file that is being written; one that is left over belongs to nobody."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(
    folder: Path, name: Callable[[str], str], write: Callable[[IO[bytes]], None]
) -> tuple[Path, str]:
    """Lets `write` fill a new file of `folder`; it is on disk under its name when this returns.

    `name` gets the content's sha256 and gives the file's name. Returns path and sha256. Raises
    OSError naming the file and the remedy when there is no room; the part written is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{uuid.uuid4().hex}{PARTIAL_SUFFIX}"
    try:
        with partial.open("x+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        path = folder / name(checksum)
        os.replace(partial, path)
        fsync_folder(folder)
    except OSError as error:
        raise with_remedy(error, folder) from None
    finally:
        partial.unlink(missing_ok=True)
    return path, checksum


def replace_text(path: Path, text: str) -> None:
    """Writes a small file in place of the one that may be there. Raises as `write_atomically`."""
    write_atomically(path.parent, lambda _: path.name, lambda file: _write(file, text.encode()))


def _write(file: IO[bytes], content: bytes) -> None:
    file.write(content)


def with_remedy(error: OSError, where: Path) -> OSError:
    """`error`; if there was no room, one that says where and what to do."""
    if error.errno not in _NO_ROOM:
        return error
    return OSError(
        error.errno,
        f"no room to write in {where} ({error.strerror}): free some disk, or give another folder "
        "with out=, then run again with resume=; everything written before is kept",
    )


def fsync_folder(folder: Path) -> None:
    """Makes the names in `folder` last, as fsync does a file's content."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
