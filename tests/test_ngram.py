"""Drafts looked up in the text itself, against trying everything."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ngram

from skipstone.core.batch import PAD
from skipstone.core.plan import Admission
from skipstone.core.request import SamplingParams
from skipstone.core.sequence_table import SequenceTable
from skipstone.spec.ngram import NgramProposer, find_drafts

EXAMPLES: list[tuple[list[int], int, int, int, list[int]]] = [  # token_ids, k, min_match, max_match, expected
    ([], 3, 1, 3, []),
    ([7], 3, 1, 3, []),
    ([1, 2, 3, 4], 3, 1, 3, []),  # nothing occurs twice
    ([1, 2, 3, 1, 2], 3, 1, 3, [3, 1, 2]),  # a match at the start, drafts up to the end
    ([1, 2, 3, 4, 5, 1, 2], 2, 1, 3, [3, 4]),  # no more than k
    ([1, 2, 3, 4, 5, 1, 2], 0, 1, 3, []),
    ([5, 1, 9, 1, 8, 1], 1, 1, 3, [9]),  # the earliest of several
    ([1, 9, 2, 1, 8, 2, 1], 1, 1, 3, [8]),  # the longer suffix, although the shorter one occurs earlier
    ([1, 9, 2, 1, 8, 2, 1], 1, 1, 1, [9]),  # unless it is too long
    ([1, 9, 2, 1, 8, 2, 1], 2, 2, 3, [8, 2]),
    ([1, 9, 2, 1, 8, 2, 1], 2, 3, 3, []),  # too short
    ([3, 4, 5, 6, 1, 3, 4, 5], 2, 2, 2, [6, 1]),  # found at the length allowed, not at the longest there is
    ([4, 4], 3, 1, 3, [4]),  # the occurrence begins before the suffix, here of length 1
    ([4, 4, 4], 3, 1, 3, [4]),  # and overlaps with it: length 2 beats length 1
    ([4, 4, 4], 3, 1, 1, [4, 4]),
    ([4] * 9, 3, 2, 4, [4, 4, 4]),
    ([4] * 9, 9, 2, 4, [4, 4, 4, 4, 4]),
    ([1, 2, 1, 2, 1], 4, 1, 5, [2, 1]),
    ([1, 2, 1, 2, 1], 4, 1, 2, [2, 1]),
    ([1, 2, 1, 2, 1], 4, 4, 5, []),
    ([6, 1, 2], 4, 3, 9, []),  # the whole text is no suffix that occurs earlier
    ([2, 1, 2, 1, 1, 2, 1], 9, 1, 2, [2, 1, 1, 2, 1]),
    ([2, 1, 2, 1, 1, 2, 1], 9, 1, 3, [1, 2, 1]),
]


def looked_up(token_ids: list[int], k: int, min_match: int, max_match: int) -> list[int]:
    """The drafts for every beginning of a text, all in one call, compared with those of a search in one pass."""
    if not token_ids:
        return []
    lengths = torch.arange(1, len(token_ids) + 1)
    tokens = torch.tensor([[*token_ids, *token_ids[:3], 1]] * len(token_ids), dtype=torch.int32)  # the end is stale
    rows = find_drafts(tokens, lengths, k, min_match, max_match).tolist()
    found = [[token for token in row if token != PAD] for row in rows]
    for length, drafts in zip(lengths.tolist(), found, strict=True):
        assert drafts == ngram.search_drafts(token_ids[:length], k, min_match, max_match)
    return found[-1]


@pytest.mark.parametrize(("token_ids", "k", "min_match", "max_match", "expected"), EXAMPLES)
def test_worked_examples(token_ids: list[int], k: int, min_match: int, max_match: int, expected: list[int]) -> None:
    """Written by hand: they hold the oracle to the rule as well."""
    assert ngram.find_drafts(token_ids, k, min_match, max_match) == expected
    assert looked_up(token_ids, k, min_match, max_match) == expected


@settings(max_examples=600)
@given(st.data())
def test_any_text_over_a_small_alphabet(data: st.DataObject) -> None:
    letters = data.draw(st.integers(1, 3))
    token_ids = data.draw(st.lists(st.integers(0, letters - 1), max_size=24))
    k, min_match = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 6))
    max_match = data.draw(st.integers(min_match, 8))
    expected = ngram.find_drafts(token_ids, k, min_match, max_match)
    assert looked_up(token_ids, k, min_match, max_match) == expected


@settings(max_examples=200)
@given(st.data())
def test_any_text_made_of_repeated_pieces(data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=3))
    order = data.draw(st.lists(st.sampled_from(pieces), max_size=9))
    token_ids = [token for piece in order for token in piece]
    k, min_match = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    max_match = data.draw(st.integers(min_match, 40))
    expected = ngram.find_drafts(token_ids, k, min_match, max_match)
    assert looked_up(token_ids, k, min_match, max_match) == expected


@pytest.mark.parametrize("letters", [2, 30, 2000])
def test_long_texts(letters: int) -> None:
    rng = random.Random(letters)
    for _ in range(10):
        token_ids = [rng.randrange(letters) for _ in range(800)]
        token_ids += token_ids[300 : 300 + rng.randrange(40)]
        for min_match, max_match in ((1, 4), (3, 5), (5, 5), (2, 100)):
            expected = ngram.find_drafts(token_ids, 7, min_match, max_match)
            tokens = torch.tensor([token_ids], dtype=torch.int32)
            found = find_drafts(tokens, torch.tensor([len(token_ids)]), 7, min_match, max_match)[0].tolist()
            assert found == expected + [PAD] * (7 - len(expected))


def drafts_of(
    requests: list[tuple[list[int], list[int], list[int]]], wanted: int, least: int = 2, most: int = 5
) -> list[list[int]]:
    """What the proposer drafts for requests of (prompt, output, prediction) that run together."""
    table = SequenceTable(len(requests), 64, 1, wanted, torch.device("cpu"))
    for slot, (prompt, output, prediction) in enumerate(requests):
        params = (len(prompt), 0, 60, 0, SamplingParams(), [], prediction)
        table.admit([Admission(slot, slot, prompt + output, *params)])
    slots = torch.arange(len(requests))
    newest = torch.tensor([len(prompt) + len(output) - 1 for prompt, output, _ in requests])
    step: Any = SimpleNamespace(
        k=wanted, table=table, newest=newest, draft_slots=slots, draft_at=table.read(slots), max_seq_len=62
    )
    rows = NgramProposer(least, most).propose(step)
    assert rows is not None
    return [[token for token in row if token != PAD] for row in rows.tolist()]


PREDICTIONS = {
    "as predicted so far": ([7, 8, 9], [1, 2], [1, 2, 3, 4, 5, 6], [3, 4, 5]),
    "at its end": ([7, 8, 9], [1, 2], [1, 2], []),
    "back on track after a change": ([7, 8, 9], [1, 0, 3, 4], [1, 2, 3, 4, 5, 6], [5, 6]),
    "it goes before the context": ([3, 4, 9], [0, 3, 4], [1, 3, 4, 5], [5]),
    "the context is looked up too": ([3, 4, 9, 8], [0, 3, 4], [1, 2], [9, 8, 0]),
    "nothing fits": ([7, 8, 9], [0, 1], [4, 5, 6], []),
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_predictions(name: str) -> None:
    prompt, output, prediction, expected = PREDICTIONS[name]
    assert drafts_of([(prompt, output, prediction)], 3) == [expected]


def test_predictions_of_requests_side_by_side() -> None:
    """Of different lengths, with one request among them that predicts nothing."""
    some = [(prompt, output, prediction) for prompt, output, prediction, _ in PREDICTIONS.values()]
    found = drafts_of([*some, ([5, 6, 7, 5, 6], [], [])], 3)
    assert found == [*(expected for *_, expected in PREDICTIONS.values()), [7, 5, 6]]


TOKENS = st.lists(st.integers(0, 2), max_size=8)


@settings(max_examples=300)
@given(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=8), output=TOKENS, prediction=TOKENS)
def test_any_prediction(prompt: list[int], output: list[int], prediction: list[int]) -> None:
    tokens = prompt + output
    expected = ngram.search_drafts([*prediction, PAD, *tokens] if prediction else tokens, 3, 1, 4)
    if PAD in expected:
        expected = expected[: expected.index(PAD)]
    if prediction and output == prediction[: len(output)]:
        expected = prediction[len(output) :][:3]
    assert drafts_of([(prompt, output, prediction)], 3, 1, 4) == [expected]


def test_a_slot_forgets_its_last_prediction() -> None:
    table = SequenceTable(1, 20, 1, 3, torch.device("cpu"))
    for prediction in ([1, 2, 3, 4], [], [5]):
        table.admit([Admission(0, 0, [7], 1, 0, 20, 0, SamplingParams(), [], prediction)])
        assert table.predictions is not None
        assert table.predictions[0].tolist() == prediction + [PAD] * (4 - len(prediction))
