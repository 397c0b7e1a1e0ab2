"""Who owns which cache block, and which blocks hold a prompt beginning that another request may reuse.

A block is free, or owned by one or more requests. A free block keeps its contents and its hash until it is handed out
again, least recently freed first, so that a later request with the same beginning finds it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from skipstone.core.batch import FIRST_BLOCK


class BlockAccountingError(RuntimeError):
    """The pool's books do not balance: a bug of ours."""


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """Hash of a full block, given the hash of the block before it: equal only for equal beginnings."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Blocks FIRST_BLOCK to num_blocks - 1; those before have special roles, see `core.batch`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(FIRST_BLOCK, num_blocks))
        self._owners = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

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
            known = self._hash_of.pop(block, None)
            if known is not None:
                del self._block_of[known]
            self._owners[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Give up one ownership of each block. The end of a sequence is reused before its beginning."""
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block] < 0:
                raise BlockAccountingError(f"block {block} was released more often than allocated")
            if self._owners[block] == 0:
                self._free[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """Note that an owned block is full and what it holds. A second copy of known contents stays anonymous."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def acquire_prefix(self, token_ids: list[int], most_blocks: int) -> tuple[list[int], list[bytes]]:
        """Own the longest run of cached blocks that begin `token_ids`; returns the blocks and their hashes."""
        blocks: list[int] = []
        hashes: list[bytes] = []
        parent = b""
        for i in range(most_blocks):
            parent = hash_block(parent, token_ids[i * self.block_size : (i + 1) * self.block_size])
            block = self._block_of.get(parent)
            if block is None:
                break
            if self._owners[block] == 0:
                del self._free[block]
            self._owners[block] += 1
            blocks.append(block)
            hashes.append(parent)
        return blocks, hashes

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
        if any(self._block_of.get(known) != block for block, known in self._hash_of.items()):
            raise BlockAccountingError("the two hash tables disagree")
