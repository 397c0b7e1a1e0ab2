"""Which cached blocks a request takes over, and which of its own later ones may: those of equal beginnings."""

from __future__ import annotations

from skipstone.core.request import Request
from skipstone.runtime.block_pool import BlockPool, Following, hash_block
from skipstone.spec.proposer import ProposerNeeds


class PrefixCache:
    """Over the blocks of a pool; `needs`: the proposer's, whose caches lie in the same blocks."""

    def __init__(self, pool: BlockPool, needs: ProposerNeeds | None, enabled: bool) -> None:
        self.pool, self.needs, self.enabled = pool, needs, enabled

    def match(self, request: Request, follows: bool) -> list[tuple[int, int]]:
        """Take over cached blocks; returns the blocks to copy, as (source, destination).

        The last token is always computed, as its logits are wanted. `follows`: draft caches must be filled as well.
        """
        if not self.enabled or request.params.prompt_logprobs is not None:
            return []
        size = self.pool.block_size
        most = (len(request.token_ids) - 1) // size
        drafts = follows and self.needs is not None and self.needs.uses_caches
        next_tokens = self.needs.next_tokens if drafts and self.needs is not None else None
        match = self.pool.acquire_prefix(request.token_ids, most, next_tokens, request.first_parent)
        request.block_ids, request.block_hashes = match.blocks, match.hashes
        request.num_computed_tokens = len(match.blocks) * size
        copies = self._copy_last_block(request, next_tokens or 0) if match.partial else []
        request.num_draft_computed = request.num_computed_tokens if drafts else 0
        return copies

    def _copy_last_block(self, request: Request, rows: int) -> list[tuple[int, int]]:
        """Exchange the last block for a copy of it, of which the last `rows` positions are computed again."""
        source = request.block_ids.pop()
        copy = self.pool.allocate(1)
        self.pool.release([source])
        if copy is None:
            request.num_computed_tokens -= self.pool.block_size
            return []
        request.block_ids += copy
        request.num_computed_tokens -= rows
        return [(source, copy[0])]

    def register(self, request: Request) -> None:
        """Hash blocks that hold committed tokens only, so that others can reuse them."""
        if not self.enabled:
            return
        size = self.pool.block_size
        full = min(request.num_computed_tokens, len(request.token_ids))
        if request.num_draft_computed:  # until its draft caches are filled as well, a block is of less use to others
            full = min(full, request.num_draft_computed)
        full //= size
        for i in range(len(request.block_hashes), full):
            parent = request.block_hashes[-1] if request.block_hashes else request.first_parent
            block_hash = hash_block(parent, request.token_ids[i * size : (i + 1) * size])
            request.block_hashes.append(block_hash)
            self.pool.register(request.block_ids[i], block_hash, self._following(request, (i + 1) * size))

    def _following(self, request: Request, end: int) -> Following:
        """The tokens behind a block that its draft caches depend on; None when they are not filled up to `end`."""
        if self.needs is None or not self.needs.uses_caches:
            return ()
        if request.num_draft_computed < end:
            return None
        return tuple(request.token_ids[end : end + self.needs.next_tokens])
