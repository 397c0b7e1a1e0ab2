"""Prompt lookup by trying everything."""

from __future__ import annotations


def find_drafts(token_ids: list[int], k: int, min_match: int, max_match: int) -> list[int]:
    """Up to k tokens that followed the earliest other occurrence of the longest suffix that has one."""
    end = len(token_ids)
    for length in range(max_match, min_match - 1, -1):
        for start in range(end - length):
            if token_ids[start : start + length] == token_ids[end - length :]:
                return token_ids[start + length :][:k]
    return []
