"""Rows of prompt data, one dict each, with the place every row came from.

A row's place (`prompts.jsonl:12`, `data.parquet row 12`) stands in each error about it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORKLOAD_FOLDER = Path(__file__).resolve().parent.parent / "pipelines" / "workload"

Row = tuple[str, dict[str, Any]]
"""(place, fields)"""


def read_rows(spec: str, key: str) -> Iterator[Row]:
    """Rows of `spec`, read as they are asked for.

    `spec` is `builtin:workload/NAME`, a .jsonl or .parquet file, a folder that `datasets` reads, or
    a `datasets` id: `ID`, `ID:SPLIT` or `ID:CONFIG:SPLIT` (split `train` unless given).
    `key` is the configuration key that gave `spec`, for errors.

    Raises ValueError for a source that is missing, empty, unreadable or of an unknown kind, and for
    a line that is not a JSON object.
    """
    if spec.startswith("builtin:"):
        return _jsonl_rows(_builtin_file(spec, key), key)
    path = Path(spec).expanduser()
    if path.suffix == ".jsonl":
        return _jsonl_rows(_existing(path, key), key)
    if path.suffix == ".parquet":
        return _parquet_rows(_existing(path, key), key)
    if path.is_file() or path.suffix in (".json", ".csv", ".txt", ".gz"):
        raise ValueError(
            f"{key}={spec}: cannot read {path.suffix or 'a file without an ending'}; give a .jsonl "
            "file (one JSON object a line), a .parquet file or a datasets id"
        )
    return _dataset_rows(spec, key)


def _builtin_file(spec: str, key: str) -> Path:
    known = sorted(f"builtin:workload/{file.stem}" for file in WORKLOAD_FOLDER.glob("*.jsonl"))
    if spec not in known:
        raise ValueError(f"{key}={spec} is unknown; known: {', '.join(known)}")
    return WORKLOAD_FOLDER / f"{spec.removeprefix('builtin:workload/')}.jsonl"


def _existing(path: Path, key: str) -> Path:
    if not path.is_file():
        raise ValueError(
            f"{key}={path}: no such file (looked in {path.parent.resolve()}); check the path, or "
            f"use the prompts that come with Paceline: {key}=builtin:workload/train"
        )
    return path


def _jsonl_rows(path: Path, key: str) -> Iterator[Row]:
    empty = True
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    empty = False
                    yield f"{path}:{number}", _json_object(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}={path} is not UTF-8 text ({error.reason}): convert it") from error
    if empty:
        raise ValueError(f"{key}={path} is empty: give it one JSON object a line")


def _json_object(line: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place}: not JSON ({error.msg} at column {error.colno}): {_excerpt(line)}; each line "
            'is one object, such as {"messages": [{"role": "user", "content": "..."}]}'
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{place}: a JSON {type(value).__name__}, not an object: {_excerpt(line)}; each line "
            'is one object, such as {"prompt": "..."}'
        )
    return value


def _excerpt(line: str) -> str:
    line = line.strip()
    return repr(line if len(line) <= 60 else line[:57] + "...")


def _parquet_rows(path: Path, key: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{key}={path} is not a Parquet file: {error}") from error
    if table.metadata.num_rows == 0:
        raise ValueError(f"{key}={path} is empty: it has no rows")
    number = 0
    for batch in table.iter_batches(batch_size=256):
        for fields in batch.to_pylist():
            number += 1
            yield f"{path} row {number}", _without_nulls(fields)


def _dataset_rows(spec: str, key: str) -> Iterator[Row]:
    import datasets

    name, *rest = spec.split(":")
    split = rest[-1] if rest else "train"
    config = rest[0] if len(rest) == 2 else None
    try:
        dataset = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}={spec}: not a file, and datasets cannot load it ({error}); give an existing "
            ".jsonl or .parquet file, or a reachable id as ID, ID:SPLIT or ID:CONFIG:SPLIT"
        ) from error
    if len(dataset) == 0:
        raise ValueError(f"{key}={spec} is empty: split {split} has no rows")
    for number, fields in enumerate(dataset, start=1):
        yield f"{spec} row {number}", _without_nulls(fields)


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct the keys of all structs of its column; the ones not set are None."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
