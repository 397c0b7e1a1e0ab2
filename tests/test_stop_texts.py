"""A stop text that ends in the middle of a run of accepted drafts: nothing of what lies behind it is left."""

from __future__ import annotations

import pytest
from oracles.speculation import Folders, letter, load

from skipstone import LLM, SamplingParams

PROMPT = [9, 30, *[7] * 16]
TOKEN = 7  # all that is written
RUN = 4  # tokens of a step: each finds its drafts in the prompt


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load(Folders(tmp_path_factory.mktemp("stop")).target("m3"), f"ngram:{RUN - 1}", max_num_seqs=4)


def params(count: int, **changes: object) -> SamplingParams:
    """One token only, and a stop text of so many."""
    fixed = {"temperature": 0.0, "logit_bias": {TOKEN: 100.0}, "max_tokens": 40, "logprobs": 2}
    return SamplingParams(**(fixed | {"stop": [letter(TOKEN) * count]} | changes))


@pytest.mark.parametrize("count", range(1, 2 * RUN + 2))
def test_an_answer_ends_where_its_stop_text_does(llm: LLM, count: int) -> None:
    """Tokens, log-probabilities, counts of drafts and of tokens, wherever in a run it ends."""
    before = llm.stats()
    (out,) = llm.generate([PROMPT], params(count), progress=False)
    (choice,) = out.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", letter(TOKEN) * count)
    assert choice.token_ids == [TOKEN] * count
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
    after = {name: value - before[name] for name, value in llm.stats().items()}
    assert after["output_tokens"] == count
    # The prompt's own step gives one token; of every run that is complete the last token is no draft.
    assert after["accepted_tokens"] == (count - 1) - (count - 1) // RUN
    assert choice.speculation.accepted == after["accepted_tokens"]
    assert after["cache_blocks_used"] == 0


@pytest.mark.parametrize("count", [1, 3, 6])
def test_events_of_a_stream_add_up_to_the_answer(llm: LLM, count: int) -> None:
    events = list(llm.stream(PROMPT, params(count)))
    assert [token for event in events for token in event.token_ids] == [TOKEN] * count
    assert "".join(event.text for event in events) == ""
    assert len(events[-1].output.outputs[0].logprobs) == count


def test_a_shown_stop_text_is_the_end_of_the_text(llm: LLM) -> None:
    (out,) = llm.generate([PROMPT], params(6, include_stop_str_in_output=True), progress=False)
    assert out.outputs[0].text == letter(TOKEN) * 6
    assert len(out.outputs[0].logprobs) == 6
