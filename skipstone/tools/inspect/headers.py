"""Headers of safetensors files: dtypes, shapes and sizes, without reading any tensor.

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
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "BF16": 16} | {
    f"{kind}{size}": size for kind in ("I", "U", "F") for size in (16, 32, 64)
}


class Entry(msgspec.Struct, frozen=True):
    """One tensor, as the header of its file describes it."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.data_offsets[1] - self.data_offsets[0]


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one shard, by name.

    Raises CheckpointError naming the file when it cannot be read, is no safetensors file, is truncated (with expected
    and actual bytes), or when a tensor's bytes do not match its shape.
    """
    try:
        with file.open("rb") as stream:
            prefix = stream.read(LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            text = stream.read(min(length, LARGEST_HEADER))
        actual = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    if prefix == GIT_LFS_POINTER[:LENGTH_BYTES]:
        raise CheckpointError(f"{file} is a Git LFS pointer, not the weights; run git lfs pull in its repository")
    if len(prefix) < LENGTH_BYTES or (len(text) < length <= LARGEST_HEADER):
        needed = LENGTH_BYTES + length if prefix else LENGTH_BYTES
        raise _damaged(file, f"is truncated: its header alone needs {needed} bytes, the file has {actual}")
    try:
        header = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _damaged(file, "is not a safetensors file") from None
    header.pop("__metadata__", None)
    try:
        entries = msgspec.convert(header, dict[str, Entry])
    except msgspec.ValidationError as error:
        raise _damaged(file, f"has a malformed safetensors header: {error}") from None
    expected = LENGTH_BYTES + length + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if actual != expected:
        what = "truncated" if actual < expected else "damaged"
        raise _damaged(file, f"is {what}: its header describes {expected} bytes, the file has {actual}")
    for name, entry in entries.items():
        bits = BITS.get(entry.dtype)
        if bits is not None and entry.num_bytes * 8 != math.prod(entry.shape) * bits:
            has = f"{name} has {entry.num_bytes} bytes, which is not {entry.dtype} {entry.shape}"
            raise CheckpointError(f"{file}: {has}")
    return entries


def _damaged(file: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{file} {how}; download it again")
