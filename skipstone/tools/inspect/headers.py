"""Headers of safetensors files: names, dtypes, shapes and sizes, without reading any tensor.

Layout: 8 bytes little-endian header length, the header as JSON, then the tensors' bytes at the offsets it gives.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from skipstone.errors import CheckpointError

LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000
GIT_LFS_POINTER = b"version https://git-lfs"
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4} | {
    f"{kind}{size}": size for kind in ("I", "U", "F") for size in (16, 32, 64)
}
BITS["BF16"] = 16


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor of a shard, as its header describes it."""

    name: str
    dtype: str
    shape: list[int]
    num_bytes: int
    file: str

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one shard, in the file's order.

    Raises CheckpointError naming the file when it cannot be read, is no safetensors file, is truncated (with expected
    and actual bytes), or when a tensor's bytes do not match its shape.
    """
    header, length = _read_raw(file)
    header.pop("__metadata__", None)
    try:
        entries = msgspec.convert(header, dict[str, _Entry])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file} has a malformed safetensors header: {error}; download it again") from None
    end = max((entry.data_offsets[1] for entry in entries.values()), default=0)
    expected, actual = LENGTH_BYTES + length + end, file.stat().st_size
    if actual < expected:
        raise CheckpointError(
            f"{file} is truncated: its header describes {expected} bytes, the file has {actual}; download it again"
        )
    if actual > expected:
        raise CheckpointError(
            f"{file} is damaged: its header describes {expected} bytes, the file has {actual}; download it again"
        )
    tensors = [_tensor(file, name, entry) for name, entry in entries.items()]
    return sorted(tensors, key=lambda tensor: entries[tensor.name].data_offsets)


def _read_raw(file: Path) -> tuple[dict[str, Any], int]:
    """The header as a dictionary, and its length in bytes."""
    try:
        with file.open("rb") as stream:
            prefix = stream.read(LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            text = stream.read(min(length, LARGEST_HEADER))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    if prefix == GIT_LFS_POINTER[:LENGTH_BYTES]:
        raise CheckpointError(f"{file} is a Git LFS pointer, not the weights; run git lfs pull in its repository")
    if len(prefix) < LENGTH_BYTES or (len(text) < length <= LARGEST_HEADER):
        raise CheckpointError(
            f"{file} is truncated: its header alone needs {LENGTH_BYTES + length if prefix else LENGTH_BYTES} bytes, "
            f"the file has {file.stat().st_size}; download it again"
        )
    try:
        header = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise CheckpointError(f"{file} is not a safetensors file; download it again") from None
    return header, length


def _tensor(file: Path, name: str, entry: _Entry) -> StoredTensor:
    start, end = entry.data_offsets
    bits = BITS.get(entry.dtype)
    if bits is not None and (end - start) * 8 != math.prod(entry.shape) * bits:
        raise CheckpointError(f"{file}: {name} has {end - start} bytes, which is not {entry.dtype} {entry.shape}")
    return StoredTensor(name, entry.dtype, entry.shape, end - start, file.name)
