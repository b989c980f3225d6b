"""Hidden-state shards on disk: one Arrow IPC file each, written once, memory-mapped when read.

A row is a token. Hidden states are fixed-shape-tensor columns, so a reader's tensors are the file's
own pages and nothing is decoded; bfloat16, which Arrow does not know, is kept as its uint16 bits.
The schema's metadata carries what a ShardRef says, so that a file and its ref can be held against
each other.

    folder/r0-00003-5f0c1d2e9ab4.arrow        shard id, then the start of the file's sha256

With the content's hash in its name, a shard that is written again never touches a file that someone
has mapped or registered.

Shapes: T packed tokens, S sequences, A tapped layers, D width.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from paceline.models.files import write_atomically
from paceline.models.records import SCHEMA_VERSION, HiddenStateShard, ShardRef
from paceline.models.shard_checks import SHARD_DTYPES, ShardError, ShardSource, check_shard

SHARD_SUFFIX = ".arrow"
_METADATA_KEY = b"paceline"
_ARROW_TYPES = {"float32": pa.float32(), "float16": pa.float16(), "bfloat16": pa.uint16()}

# Known only once the file is written, so they cannot stand inside it.
_FIELDS_OUTSIDE_FILE = ("uri", "num_bytes", "checksum")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """What a shard file says of itself, without its rows."""

    fields: dict[str, Any]
    """The ShardRef fields that stand inside the file."""
    sequence_ids: tuple[str, ...]
    sequence_domains: tuple[str, ...]  # one per sequence


def write_shard(
    folder: Path,
    shard: HiddenStateShard,
    *,
    shard_id: str,
    source: ShardSource,
    min_target_version: int = 0,
    max_target_version: int = 0,
) -> ShardRef:
    """Writes `shard` into `folder` and returns its ref; the file is on disk when this returns.

    Hidden states keep the dtype they come in. Raises ShardError if the shard is not fit for
    training (see `check_shard`), and OSError naming the folder and the remedy if the disk is full;
    nothing is left behind then.
    """
    check_shard(shard, source)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", shard_id):
        raise ShardError(f"shard id {shard_id!r}: use letters, digits, '.', '_' and '-' only")
    fields: dict[str, Any] = {
        "shard_id": shard_id,
        "schema_version": SCHEMA_VERSION,
        **asdict(source),
        "min_target_version": min_target_version,
        "max_target_version": max_target_version,
        "norm_applied": shard.norm_applied,
        "dtype": str(shard.last_hidden_states.dtype).removeprefix("torch."),
        "num_tokens": len(shard.input_ids),
        "num_sequences": len(shard.cu_seqlens) - 1,
        "domains": tuple(sorted(set(shard.domains))),
    }
    batch = _record_batch(shard, fields)

    def write(file: IO[bytes]) -> None:
        with pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)

    path, checksum = write_atomically(
        folder, lambda checksum: f"{shard_id}-{checksum[:12]}{SHARD_SUFFIX}", write
    )
    return ShardRef(**fields, uri=path.name, num_bytes=path.stat().st_size, checksum=checksum)


def read_shard(folder: Path, ref: ShardRef, *, verify_checksum: bool = True) -> HiddenStateShard:
    """The shard behind `ref`; its tensors are pages of the file, mapped copy-on-write.

    Raises ShardError naming the file and both values if the file is missing, damaged or differs
    from `ref` in any field. `verify_checksum=False` saves reading the whole file, for a caller that
    has verified it before.
    """
    path = shard_path(folder, ref)
    mapped = _map_file(path, ref)
    if verify_checksum:
        _require_equal(path, "sha256", hashlib.sha256(mapped).hexdigest(), ref.checksum)
    base = pa.py_buffer(mapped)
    batch = _open_batch(path, base)
    header = _checked_header(path, batch.schema, ref)
    _require_equal(path, "num_tokens", batch.num_rows, ref.num_tokens)
    lengths = np.bincount(batch.column("sequence").to_numpy(), minlength=ref.num_sequences)
    _require_equal(path, "num_sequences", len(lengths), len(header.sequence_ids))
    cu_seqlens = np.concatenate(([0], lengths.cumsum())).astype(np.int32)

    def column(name: str, dtype: torch.dtype) -> Tensor:
        values, shape = _values_and_shape(batch.column(name))
        offset = values.buffers()[1].address - base.address
        return torch.frombuffer(mapped, dtype=dtype, count=len(values), offset=offset).view(shape)

    return HiddenStateShard(
        input_ids=column("input_ids", torch.int32),
        position_ids=column("position_ids", torch.int32),
        loss_mask=torch.from_numpy(batch.column("loss_mask").to_numpy(zero_copy_only=False).copy()),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        aux_hidden_states=column("aux_hidden_states", SHARD_DTYPES[ref.dtype]),
        last_hidden_states=column("last_hidden_states", SHARD_DTYPES[ref.dtype]),
        norm_applied=ref.norm_applied,
        domains=header.sequence_domains,
        sequence_ids=header.sequence_ids,
    )


def read_header(folder: Path, ref: ShardRef) -> ShardHeader:
    """The header of the file behind `ref`, held against it in all but the checksum.

    Raises ShardError as `read_shard` does.
    """
    path = shard_path(folder, ref)
    return _checked_header(path, _open_batch(path, pa.py_buffer(_map_file(path, ref))).schema, ref)


def shard_path(folder: Path, ref: ShardRef) -> Path:
    """Where the file of `ref` lies. Raises ShardError for a uri that leaves `folder`."""
    root = folder.resolve()
    path = (root / ref.uri).resolve()
    if not path.is_relative_to(root) or path == root:
        raise ShardError(f"shard {ref.shard_id}: uri {ref.uri!r} leaves the cache folder {folder}")
    return path


def _record_batch(shard: HiddenStateShard, fields: dict[str, Any]) -> pa.RecordBatch:
    lengths = np.diff(shard.cu_seqlens.numpy())
    columns = {
        "input_ids": pa.array(shard.input_ids.numpy().astype(np.int32, copy=False)),
        "position_ids": pa.array(shard.position_ids.numpy().astype(np.int32, copy=False)),
        "loss_mask": pa.array(shard.loss_mask.numpy()),
        "sequence": pa.array(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)),
        "aux_hidden_states": _tensor_column(shard.aux_hidden_states, fields["dtype"]),
        "last_hidden_states": _tensor_column(shard.last_hidden_states, fields["dtype"]),
    }
    metadata = {
        "fields": fields,
        "sequence_ids": shard.sequence_ids,
        "sequence_domains": shard.domains,
    }
    schema = pa.schema(
        [pa.field(name, column.type, nullable=False) for name, column in columns.items()],
        metadata={_METADATA_KEY: json.dumps(metadata)},
    )
    return pa.record_batch(list(columns.values()), schema=schema)


def _tensor_column(hidden: Tensor, dtype: str) -> pa.ExtensionArray:
    """Rows [T, ...] as a column of fixed-shape tensors, without copying contiguous input."""
    hidden = hidden.detach().contiguous()
    if hidden.dtype == torch.bfloat16:
        hidden = hidden.view(torch.uint16)
    row_shape = tuple(hidden.shape[1:])
    flat = pa.array(hidden.reshape(-1).numpy())
    assert flat.type == _ARROW_TYPES[dtype], (flat.type, dtype)
    rows = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(row_shape)))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, row_shape), rows)


def _values_and_shape(column: pa.Array) -> tuple[pa.Array, tuple[int, ...]]:
    """Flat values behind a column, and the shape of all its rows."""
    if isinstance(column, pa.ExtensionArray):
        return column.storage.flatten(), (len(column), *column.type.shape)
    return column, (len(column),)


def _map_file(path: Path, ref: ShardRef) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            _require_equal(path, "num_bytes", size, ref.num_bytes)
            # Copy-on-write: torch wants writable memory, and nobody can change the file by it.
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise ShardError(
            f"{path}: shard {ref.shard_id} has no file; put it back, or delete the cache folder "
            "and collect anew"
        ) from error


def _open_batch(path: Path, buffer: pa.Buffer) -> pa.RecordBatch:
    try:
        reader = pa.ipc.open_file(buffer)
        _require_equal(path, "number of record batches", reader.num_record_batches, 1)
        return reader.get_batch(0)
    except pa.ArrowException as error:
        raise ShardError(f"{path}: not a whole Arrow file ({error}); collect anew") from error


def _checked_header(path: Path, schema: pa.Schema, ref: ShardRef) -> ShardHeader:
    text = (schema.metadata or {}).get(_METADATA_KEY)
    if text is None:
        raise ShardError(f"{path}: an Arrow file, but not a shard of Paceline; remove it")
    metadata = json.loads(text)
    for name, value in asdict(ref).items():
        if name not in _FIELDS_OUTSIDE_FILE:
            found = metadata["fields"].get(name)
            _require_equal(path, name, tuple(found) if isinstance(found, list) else found, value)
    return ShardHeader(
        fields=metadata["fields"],
        sequence_ids=tuple(metadata["sequence_ids"]),
        sequence_domains=tuple(metadata["sequence_domains"]),
    )


def _require_equal(path: Path, name: str, found: object, expected: object) -> None:
    if found != expected:
        raise ShardError(
            f"{path}: {name} is {found!r}, but its ref says {expected!r}: the file is damaged or "
            "another one; delete the cache folder and collect anew, or restore the file"
        )
