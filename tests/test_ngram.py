"""Drafts looked up in the text itself, against trying everything."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ngram

from skipstone.core.request import Request, SamplingParams
from skipstone.spec.ngram import Lookup, NgramProposer
from skipstone.spec.proposer import DraftRequest, DraftStep

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
    """The drafts for a text that grew token by token, compared with those of a search in one pass at every length."""
    lookup = Lookup(min_match, max_match)
    for length, token in enumerate(token_ids, start=1):
        lookup.extend([token])
        assert lookup.drafts(k) == ngram.search_drafts(token_ids[:length], k, min_match, max_match)
    return lookup.drafts(k)


@pytest.mark.parametrize(("token_ids", "k", "min_match", "max_match", "expected"), EXAMPLES)
def test_worked_examples(token_ids: list[int], k: int, min_match: int, max_match: int, expected: list[int]) -> None:
    """Written by hand: they hold the oracle to the rule as well."""
    assert ngram.find_drafts(token_ids, k, min_match, max_match) == expected
    assert looked_up(token_ids, k, min_match, max_match) == expected


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_text_over_a_small_alphabet(data: st.DataObject) -> None:
    letters = data.draw(st.integers(1, 3))
    token_ids = data.draw(st.lists(st.integers(0, letters - 1), max_size=24))
    k, min_match = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 6))
    max_match = data.draw(st.integers(min_match, 8))
    expected = ngram.find_drafts(token_ids, k, min_match, max_match)
    assert looked_up(token_ids, k, min_match, max_match) == expected


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
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
            lookup = Lookup(min_match, max_match)
            lookup.extend(token_ids[:500])
            lookup.extend(token_ids[500:])
            expected = ngram.find_drafts(token_ids, 7, min_match, max_match)
            assert lookup.drafts(7) == expected


@pytest.mark.parametrize("period", [1, 50, 100_000])
def test_a_step_costs_the_same_in_a_long_text(period: int) -> None:
    """A pass over 100,000 tokens takes 20 ms."""
    lookup = Lookup(2, 5)
    lookup.extend([place % period for place in range(100_000)])
    begin = time.perf_counter()
    for place in range(1000):
        lookup.extend([place % period])
        lookup.drafts(4)
    assert time.perf_counter() - begin < 0.1


def test_a_text_without_repetition_takes_one_node_a_token() -> None:
    lookup = Lookup(2, 64)
    lookup.extend(list(range(4000)))
    assert len(lookup._ends) == 4001


def test_the_text_is_left_alone() -> None:
    token_ids = [1, 2, 3, 1, 2]
    lookup = Lookup(1, 3)
    lookup.extend(token_ids)
    drafts = lookup.drafts(3)
    drafts.append(9)
    assert token_ids == [1, 2, 3, 1, 2]
    assert lookup.drafts(3) == [3, 1, 2]


def draft_request(request: Request, emitted: list[int], wanted: int, start: int = 0, rows: int = 1) -> DraftRequest:
    return DraftRequest(request, slice(0, rows), start, emitted, wanted)


def propose(proposer: NgramProposer, draft: DraftRequest) -> list[int]:
    return proposer.propose(DraftStep(Any, Any, [draft], Any))[0].token_ids  # type: ignore[arg-type]


def drafts_of(prompt: list[int], output: list[int], prediction: list[int], wanted: int = 3) -> list[int]:
    """What the proposer drafts for one request; the last output token is this step's."""
    request = Request("r", prompt + output[:-1], SamplingParams(), 0, 100, num_prompt_tokens=len(prompt))
    request.prediction = prediction
    return propose(NgramProposer(2, 5), draft_request(request, output[-1:], wanted))


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
    assert drafts_of(prompt, output, prediction) == expected


TOKENS = st.lists(st.integers(0, 2), max_size=8)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=8), runs=st.lists(TOKENS, max_size=8), prediction=TOKENS)
def test_a_request_that_grows_gets_the_drafts_of_its_whole_text(
    prompt: list[int], runs: list[list[int]], prediction: list[int]
) -> None:
    """Also when steps in between ask for none, and when the prompt comes in chunks."""
    proposer, request = NgramProposer(1, 4), Request("r", list(prompt), SamplingParams(), 0, 100)
    request.prediction = prediction
    for start in range(0, len(prompt) - 1, 3):
        assert propose(proposer, draft_request(request, [], 0, start, min(3, len(prompt) - 1 - start))) == []
    for emitted in filter(None, runs):
        wanted, tokens = len(emitted) % 4, request.token_ids + emitted
        output = tokens[len(prompt) :]
        expected = ngram.search_drafts([*prediction, -1, *tokens] if prediction else tokens, wanted, 1, 4)
        if -1 in expected:
            expected = expected[: expected.index(-1)]
        if prediction and output == prediction[: len(output)]:
            expected = prediction[len(output) :][:wanted]
        assert propose(proposer, draft_request(request, emitted, wanted, len(request.token_ids) - 1)) == expected
        request.token_ids += emitted


def test_only_a_chunk_that_was_read_is_taken_in() -> None:
    """The rest of a long prompt is for later steps."""
    proposer, request = NgramProposer(2, 5), Request("r", list(range(90)), SamplingParams(), 0, 100)
    for start in range(0, 90, 30):
        propose(proposer, draft_request(request, [], 0, start, 30))
        assert len(proposer._lookups[request]) == start + 30


def test_what_was_kept_of_a_request_goes_with_it() -> None:
    proposer, request = NgramProposer(2, 5), Request("r", [1, 2, 1], SamplingParams(), 0, 100)
    assert propose(proposer, draft_request(request, [2], 3)) == [1, 2]
    assert len(proposer._lookups) == 1
    del request
    gc.collect()
    assert len(proposer._lookups) == 0
