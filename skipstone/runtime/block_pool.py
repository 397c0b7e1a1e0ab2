"""Who owns which cache block, and which blocks hold a prompt beginning that another request may reuse.

A block is free, or owned by one or more requests. A free block keeps its contents and its hash until it is handed out
again, least recently freed first, so that a later request with the same beginning finds it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from skipstone.core.batch import FIRST_BLOCK


class BlockAccountingError(RuntimeError):
    """The pool's books do not balance: a bug of ours."""


def hash_salt(salt: str) -> bytes:
    """Parent of the first block of those who share a salt; empty without one. Never the hash of a block."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"salt").digest() if salt else b""


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """Hash of a full block, given the hash of the block before it: equal only for equal beginnings."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


# What the draft caches of a full block depend on besides its own tokens: the tokens that follow it, as many as the
# proposer looks ahead. None: they were never filled.
Following = tuple[int, ...] | None


class PrefixMatch(NamedTuple):
    """Cached blocks that begin a prompt, now owned. `partial`: the last one's draft caches belong to another text."""

    blocks: list[int]
    hashes: list[bytes]
    partial: bool = False


class BlockPool:
    """Blocks FIRST_BLOCK to num_blocks - 1; those before have special roles, see `core.batch`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(FIRST_BLOCK, num_blocks))
        self._owners = [0] * num_blocks
        self._key_of: dict[int, tuple[bytes, Following]] = {}
        self._blocks_of: dict[bytes, dict[Following, int]] = {}

    @property
    def num_ownable(self) -> int:
        """Blocks that requests can own."""
        return self.num_blocks - FIRST_BLOCK

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks owned by at least one request."""
        return self.num_ownable - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one owner each, or None when there are not as many."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._owners[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Give up one ownership of each block.

        The end of a sequence is handed out again before its beginning, and what nobody can find before all else.
        """
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block] < 0:
                raise BlockAccountingError(f"block {block} was released more often than allocated")
            if self._owners[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            copies = self._blocks_of[key[0]]
            del copies[key[1]]
            if not copies:
                del self._blocks_of[key[0]]

    def register(self, block: int, block_hash: bytes, following: Following = ()) -> None:
        """Note that an owned block is full and what it holds. A second copy of known contents stays anonymous."""
        if block in self._key_of:
            return
        copies = self._blocks_of.setdefault(block_hash, {})
        if following not in copies:
            copies[following] = block
            self._key_of[block] = (block_hash, following)

    def acquire_prefix(
        self, token_ids: list[int], most_blocks: int, next_tokens: int | None = None, parent: bytes = b""
    ) -> PrefixMatch:
        """Own the longest run of cached blocks that begin `token_ids`, hashed from `parent` on.

        `next_tokens` None: only the target's caches matter. Else draft caches must be filled, for the same
        `next_tokens` tokens behind the block; a block whose draft caches were filled for other ones ends the run, and
        its last `next_tokens` positions must be computed again, in a copy.
        """
        blocks: list[int] = []
        hashes: list[bytes] = []
        size = self.block_size
        for i in range(most_blocks):
            parent = hash_block(parent, token_ids[i * size : (i + 1) * size])
            copies = self._blocks_of.get(parent, {})
            if next_tokens is None:
                block = next(iter(copies.values()), None)
            else:
                block = copies.get(tuple(token_ids[(i + 1) * size : (i + 1) * size + next_tokens]))
            if block is None:
                other = next((b for following, b in copies.items() if following is not None), None)
                if other is not None:
                    self._own(other)
                    return PrefixMatch([*blocks, other], hashes, partial=True)
                break
            self._own(block)
            blocks.append(block)
            hashes.append(parent)
        return PrefixMatch(blocks, hashes)

    def _own(self, block: int) -> None:
        if self._owners[block] == 0:
            del self._free[block]
        self._owners[block] += 1

    def check(self, owned: Iterable[list[int]]) -> None:
        """Compare the books with the block lists of all requests. Raises BlockAccountingError."""
        expected = [0] * self.num_blocks
        for blocks in owned:
            for block in blocks:
                expected[block] += 1
        if expected != self._owners:
            wrong = [b for b in range(self.num_blocks) if expected[b] != self._owners[b]]
            raise BlockAccountingError(f"owners of blocks {wrong[:8]} do not match the requests")
        free = {block for block in range(FIRST_BLOCK, self.num_blocks) if self._owners[block] == 0}
        if free != set(self._free):
            raise BlockAccountingError("the free list does not match the owners")
        known = {(h, f): block for h, copies in self._blocks_of.items() for f, block in copies.items()}
        if known != {key: block for block, key in self._key_of.items()}:
            raise BlockAccountingError("the two hash tables disagree")
