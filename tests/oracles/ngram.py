"""Prompt lookup by trying everything, and in one pass over the whole text."""

from __future__ import annotations


def find_drafts(token_ids: list[int], k: int, min_match: int, max_match: int) -> list[int]:
    """Up to k tokens that followed the earliest other occurrence of the longest suffix that has one."""
    end = len(token_ids)
    for length in range(max_match, min_match - 1, -1):
        for start in range(end - length):
            if token_ids[start : start + length] == token_ids[end - length :]:
                return token_ids[start + length :][:k]
    return []


def search_drafts(token_ids: list[int], k: int, min_match: int, max_match: int) -> list[int]:
    """Up to k tokens that followed the earliest other occurrence of the longest matching suffix.

    The suffix has min_match to max_match tokens; occurrences may overlap it. Empty without a match. Linear time: over
    the reversed tokens, the prefix function gives for every place how long a suffix of the text ends there.
    """
    length = len(token_ids)
    if k <= 0 or length <= min_match:
        return []
    backwards = token_ids[::-1]
    matched = [0] * length  # longest proper border of backwards[: i + 1], cut at max_match
    best, best_end = 0, 0
    border = 0
    for i in range(1, length):
        if border == max_match:
            border = matched[border - 1]
        while border and backwards[i] != backwards[border]:
            border = matched[border - 1]
        if backwards[i] == backwards[border]:
            border += 1
        matched[i] = border
        if border >= max(best, min_match):  # `>=`: the later in reverse, the earlier in the text
            best, best_end = border, i
    if best < min_match:
        return []
    follows = length - 1 - best_end + best  # the text's index behind the occurrence
    return token_ids[follows : follows + k]
