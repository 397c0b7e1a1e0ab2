"""How requests begin and end: stop ids, end of text, limits, aborts, and bad requests that leave the engine usable."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from oracles.tiny import CONTEXT, EOS, VOCAB

from skipstone import LLM, SamplingParams
from skipstone.errors import ConfigError, RequestError

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
LURE = {EOS: 100.0}  # makes the end of text all but certain


@pytest.fixture(scope="module")
def shared(folder: Callable[[str], Path]) -> LLM:
    """One engine for all tests of this file: each must leave it as it found it."""
    return LLM(model=str(folder("m3")), dtype="float32", max_num_batched_tokens=32, max_num_seqs=4, num_blocks=60)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared engine; afterwards nothing may be queued or hold a block, and it must still write the same text."""
    before = run(shared, temperature=0.0, max_tokens=3).token_ids
    yield shared
    assert not shared.engine.has_work
    shared.engine.scheduler.check()
    assert shared.stats()["cache_blocks_used"] == 0
    assert run(shared, temperature=0.0, max_tokens=3).token_ids == before


def run(llm: LLM, prompt: list[int] = PROMPT, **settings: Any) -> Any:
    """The only choice of one request."""
    (out,) = llm.generate([prompt], SamplingParams(**{"seed": 1, "max_tokens": 12} | settings), progress=False)
    assert list(out.prompt_token_ids) == prompt
    (choice,) = out.outputs
    return choice


def greedy(llm: LLM, count: int) -> list[int]:
    """The likeliest continuation of PROMPT."""
    return list(run(llm, temperature=0.0, ignore_eos=True, max_tokens=count).token_ids)


class TestEnds:
    """The first of end of text, stop id, max_tokens and context ends a choice; its last token is part of it."""

    def test_stop_id(self, llm: LLM) -> None:
        text = greedy(llm, 20)
        for place in (0, 4, 9):
            first = text.index(text[place])
            choice = run(llm, temperature=0.0, max_tokens=20, stop_token_ids=[text[place]], logprobs=1)
            assert list(choice.token_ids) == text[: first + 1]
            assert choice.finish_reason == "stop"
            assert choice.stop_reason == text[place]
            assert len(choice.logprobs) == first + 1

    def test_the_earliest_of_several(self, llm: LLM) -> None:
        text = greedy(llm, 20)
        choice = run(llm, temperature=0.0, max_tokens=20, stop_token_ids=[text[9], text[4], text[15]])
        end = min(text.index(text[i]) for i in (4, 9, 15))
        assert list(choice.token_ids) == text[: end + 1]
        assert choice.stop_reason == text[end]

    def test_end_of_text(self, llm: LLM) -> None:
        choice = run(llm, temperature=0.0, logit_bias=LURE)
        assert (list(choice.token_ids), choice.finish_reason, choice.stop_reason) == ([EOS], "stop", EOS)
        choice = run(llm, logit_bias=LURE)
        assert (list(choice.token_ids), choice.finish_reason) == ([EOS], "stop")

    def test_ignore_eos(self, llm: LLM) -> None:
        choice = run(llm, temperature=0.0, logit_bias=LURE, ignore_eos=True)
        assert (list(choice.token_ids), choice.finish_reason, choice.stop_reason) == ([EOS] * 12, "length", None)
        choice = run(llm, temperature=0.0, logit_bias=LURE, ignore_eos=True, stop_token_ids=[EOS])
        assert (list(choice.token_ids), choice.finish_reason) == ([EOS], "stop")

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_min_tokens(self, llm: LLM, temperature: float) -> None:
        """So many tokens first, none of them an end; the next one may be."""
        for least in (1, 5):
            choice = run(llm, temperature=temperature, logit_bias=LURE, min_tokens=least)
            assert len(choice.token_ids) == least + 1
            assert list(choice.token_ids).index(EOS) == least
            assert choice.finish_reason == "stop"
        stop = greedy(llm, 1)
        choice = run(llm, temperature=0.0, stop_token_ids=stop, min_tokens=7, max_tokens=7)
        assert (len(choice.token_ids), choice.finish_reason) == (7, "length")
        assert stop[0] not in choice.token_ids

    def test_max_tokens(self, llm: LLM) -> None:
        text = greedy(llm, 12)
        for count in (1, 2, 12):
            choice = run(llm, temperature=0.0, ignore_eos=True, max_tokens=count)
            assert (list(choice.token_ids), choice.finish_reason) == (text[:count], "length")

    def test_who_says_what_ends_a_text(self, folder: Callable[[str], Path], tmp_path: Path) -> None:
        """generation_config.json; config.json where that has no such key, or where there is none."""
        shutil.copytree(folder("dsa"), tmp_path / "model")
        file = tmp_path / "model" / "generation_config.json"
        for text, ends in (('{"eos_token_id": [7, 9]}', {7, 9}), ("{}", {EOS}), (None, {EOS})):
            file.unlink(missing_ok=True)
            if text is not None:
                file.write_text(text)
            llm = LLM(model=str(tmp_path / "model"), dtype="float32", num_blocks=10)
            for token in sorted(ends | {7, EOS}):
                choice = run(llm, logit_bias={token: 100.0}, max_tokens=3)
                assert (len(choice.token_ids) == 1) == (choice.finish_reason == "stop") == (token in ends)

    @pytest.mark.parametrize(("length", "asked"), [(CONTEXT - 1, None), (CONTEXT - 6, None), (CONTEXT - 6, 50)])
    def test_context(self, llm: LLM, length: int, asked: int | None) -> None:
        choice = run(llm, [7] * length, temperature=0.0, ignore_eos=True, max_tokens=asked)
        assert (len(choice.token_ids), choice.finish_reason) == (CONTEXT - length, "length")

    def test_a_shorter_context(self, folder: Callable[[str], Path]) -> None:
        llm = LLM(model=str(folder("dsa")), dtype="float32", max_model_len=20)
        choice = run(llm, max_tokens=None, ignore_eos=True)
        assert (len(choice.token_ids), choice.finish_reason) == (10, "length")
        with pytest.raises(RequestError, match="20"):
            run(llm, [1] * 20)
        with pytest.raises(ConfigError, match=f"max_model_len={CONTEXT + 1}"):
            LLM(model=str(folder("dsa")), max_model_len=CONTEXT + 1)

    def test_fewer_blocks_than_the_context_needs(self, folder: Callable[[str], Path]) -> None:
        """A text that outgrows the whole cache ends there; it does not wait for ever."""
        llm = LLM(model=str(folder("m3")), dtype="float32", block_size=8, num_blocks=4, max_num_seqs=4)
        params = SamplingParams(temperature=0, ignore_eos=True)
        outs = llm.generate([[5] * n for n in (3, 10, 20, 31)], params, progress=False)
        assert [len(out.outputs[0].token_ids) for out in outs] == [29, 22, 12, 1]
        with pytest.raises(RequestError, match="32"):
            run(llm, [5] * 32)

    def test_choices_have_seeds_of_their_own(self, llm: LLM) -> None:
        """The first is that of one choice alone; no other is that of a neighbouring seed."""
        settings = {"temperature": 2.0, "max_tokens": 8, "ignore_eos": True}
        (out,) = llm.generate([PROMPT], SamplingParams(n=4, seed=5, **settings), progress=False)
        texts = [tuple(choice.token_ids) for choice in out.outputs]
        alone = [tuple(run(llm, **settings, seed=seed).token_ids) for seed in range(5, 9)]
        assert texts[0] == alone[0]
        assert len({*texts, *alone}) == 7

    def test_choices_end_on_their_own(self, llm: LLM) -> None:
        params = SamplingParams(n=6, seed=5, max_tokens=40, logit_bias={EOS: 4.0})
        (out,) = llm.generate([PROMPT], params, progress=False)
        assert [choice.index for choice in out.outputs] == list(range(6))
        assert len({len(choice.token_ids) for choice in out.outputs}) > 1
        for choice in out.outputs:
            assert (choice.finish_reason == "stop") == (choice.token_ids[-1] == EOS)
            assert EOS not in choice.token_ids[:-1]


BAD = [
    ("n", 0), ("n", -1), ("n", 129), ("temperature", -0.1), ("temperature", float("nan")),
    ("temperature", float("inf")), ("top_k", -2), ("top_k", 2**63), ("top_p", 0.0), ("top_p", 1.1),
    ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 1.1), ("min_p", float("nan")), ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0), ("repetition_penalty", float("inf")), ("presence_penalty", 2.1),
    ("presence_penalty", float("nan")), ("frequency_penalty", -2.1), ("max_tokens", 0), ("max_tokens", -5),
    ("min_tokens", -1), ("logprobs", -2), ("logprobs", 21), ("prompt_logprobs", -2), ("prompt_logprobs", 21),
    ("seed", -1), ("seed", 2**63),
]  # fmt: skip
BAD_TYPES = [
    ("temperature", "hot"), ("temperature", None), ("top_k", 2.5), ("top_p", None), ("max_tokens", 3.5),
    ("max_tokens", "3"), ("n", 1.5), ("n", None), ("seed", 1.5), ("min_tokens", 0.5), ("logprobs", 1.5),
    ("stop_token_ids", 5), ("stop_token_ids", [1.5]), ("stop_token_ids", None), ("logit_bias", [5]),
    ("logit_bias", {"5": 1.0}), ("logit_bias", {5: "high"}), ("logit_bias", None), ("stop", 5),
]  # fmt: skip


class TestBadRequests:
    """Each raises RequestError with the field and the value, before anything runs."""

    @pytest.mark.parametrize(("field", "value"), BAD)
    def test_values_out_of_range(self, llm: LLM, field: str, value: object) -> None:
        with pytest.raises(RequestError) as error:
            run(llm, **{field: value})
        assert field in str(error.value)
        assert repr(value) in str(error.value)

    @pytest.mark.parametrize(("field", "value"), BAD_TYPES)
    def test_values_of_a_wrong_type(self, llm: LLM, field: str, value: object) -> None:
        with pytest.raises(RequestError) as error:
            run(llm, **{field: value})
        assert str(error.value).startswith(f"{field}={value!r} has the wrong type: ")

    def test_keys_of_a_wrong_type(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match=r"^logit_bias={'5': 1.0} .*Expected `int`, got `str` as a key$"):
            run(llm, logit_bias={"5": 1.0})

    @pytest.mark.parametrize("params", [{"max_tokens": 2}, "x", [{}], 5, [SamplingParams(), None]])
    def test_parameters_of_another_kind(self, llm: LLM, params: Any) -> None:
        calls = [lambda: llm.generate([PROMPT], params), lambda: llm.stream(PROMPT, params)]
        for call in (*calls, lambda: llm.add(PROMPT, params)):
            with pytest.raises(RequestError, match="give SamplingParams, or a list of them") as error:
                call()
            assert repr(params)[:60] in str(error.value)

    @pytest.mark.parametrize("token", [-1, VOCAB, 2**63])
    @pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "logit_bias"])
    def test_token_ids_outside_the_vocabulary(self, llm: LLM, field: str, token: int) -> None:
        value = {"prompt": [5, token, 6], "stop_token_ids": [4, token], "logit_bias": {4: 1.0, token: 1.0}}[field]
        with pytest.raises(RequestError) as error:
            run(llm, **{field: value})
        assert field in str(error.value)
        assert str(token) in str(error.value)
        assert str(VOCAB - 1) in str(error.value)

    @pytest.mark.parametrize("token", [-1, VOCAB])
    def test_predicted_ids_outside_the_vocabulary(self, llm: LLM, token: int) -> None:
        with pytest.raises(RequestError, match=f"prediction token id {token} .* {VOCAB - 1}"):
            llm.add([5, 6], SamplingParams(max_tokens=2), [7, token])
        assert not llm.engine.has_work and not llm._sessions

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_logit_bias_that_is_no_number(self, llm: LLM, value: float) -> None:
        with pytest.raises(RequestError, match=r"logit_bias\[4\]"):
            run(llm, logit_bias={4: value})

    def test_more_tokens_at_least_than_at_most(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match=r"min_tokens=9.*max_tokens=8"):
            run(llm, min_tokens=9, max_tokens=8)

    @pytest.mark.parametrize("prompt", [[], [1.5], ["a"], [None], [[1]], "text", 5, None])
    def test_prompts_of_a_wrong_kind(self, llm: LLM, prompt: Any) -> None:
        """Also a text, as this folder has no tokenizer."""
        with pytest.raises(RequestError, match=r"prompt|tokenizer"):
            llm.generate([PROMPT, prompt], SamplingParams(), progress=False)

    @pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 3000])
    def test_prompts_that_do_not_fit(self, llm: LLM, length: int) -> None:
        with pytest.raises(RequestError) as error:
            run(llm, [1] * length)
        assert str(length) in str(error.value)
        assert str(CONTEXT) in str(error.value)

    def test_stop_strings_need_a_tokenizer(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="stop"):
            run(llm, stop=["end"])

    def test_one_parameter_each(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match=r"2.*3"):
            llm.generate([PROMPT] * 3, [SamplingParams()] * 2, progress=False)

    def test_one_bad_request_of_many_runs_none(self, llm: LLM) -> None:
        steps = llm.stats()["steps"]
        for bad in ([PROMPT, [VOCAB], PROMPT], [PROMPT, PROMPT, [1] * CONTEXT]):
            with pytest.raises(RequestError):
                llm.generate(bad, SamplingParams(n=2), progress=False)
        params = [SamplingParams(), SamplingParams(top_p=3.0)]
        with pytest.raises(RequestError, match="top_p"):
            llm.generate([PROMPT] * 2, params, progress=False)
        assert llm.stats()["steps"] == steps

    def test_no_prompts(self, llm: LLM) -> None:
        assert llm.generate([], SamplingParams(), progress=False) == []


class TestAborts:
    """An aborted request ends at once with what it has; the others do not notice."""

    PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=25, ignore_eos=True, logprobs=2)

    def prompts(self) -> list[list[int]]:
        """Six prompts, more than run at once."""
        return [[i + 1] * 5 + PROMPT + list(range(i, i + 10 * i)) for i in range(6)]

    @pytest.mark.parametrize("after", [0, 1, 4, 12])
    def test_the_others_go_on(self, llm: LLM, after: int) -> None:
        """Running and waiting requests are aborted after some steps."""
        alone = [llm.generate([p], self.PARAMS, progress=False)[0].outputs[0] for p in self.prompts()]
        sessions = [llm.add(prompt, self.PARAMS) for prompt in self.prompts()]
        for _ in range(after):
            llm.step()
        for i in (1, 5, 1):
            llm.abort(sessions[i].session_id)
        while llm.engine.has_work:
            llm.step()
        for i, (session, whole) in enumerate(zip(sessions, alone, strict=True)):
            (choice,) = session.output().outputs
            count = len(choice.token_ids)
            assert choice.token_ids == whole.token_ids[:count]
            assert choice.logprobs == whole.logprobs[:count]
            assert choice.finish_reason == ("abort" if i in (1, 5) else "length")
            assert count == 25 or i in (1, 5)
            assert count < 25 or i not in (1, 5)

    def test_every_choice(self, llm: LLM) -> None:
        session = llm.add(PROMPT, SamplingParams(n=6, max_tokens=50, seed=1, ignore_eos=True))
        for _ in range(3):
            llm.step()
        llm.abort(session.session_id)
        assert not llm.engine.has_work
        assert [choice.finish_reason for choice in session.output().outputs] == ["abort"] * 6

    def test_unknown_and_finished_ids(self, llm: LLM) -> None:
        llm.abort("nobody")
        session = llm.add(PROMPT, SamplingParams(max_tokens=1, temperature=0))
        llm.step()
        before = session.output()
        llm.abort(session.session_id)
        assert session.output() == before
        assert before.outputs[0].finish_reason == "length"

    def test_closing_a_stream(self, llm: LLM) -> None:
        other = llm.add(PROMPT[::-1], self.PARAMS)
        stream = llm.stream(PROMPT, self.PARAMS)
        got = [token for _ in range(4) for token in next(stream).token_ids]
        stream.close()
        assert got == run(llm, temperature=1.0, seed=3, ignore_eos=True).token_ids[: len(got)]
        while llm.engine.has_work:
            llm.step()
        (alone,) = llm.generate([PROMPT[::-1]], self.PARAMS, progress=False)
        assert other.output().outputs == alone.outputs

    @pytest.mark.parametrize("end", [lambda llm, request_id: llm.abort(request_id), lambda llm, _: llm.close()])
    def test_a_stream_says_that_it_was_ended(self, llm: LLM, end: Callable[[LLM, str], None]) -> None:
        stream = llm.stream(PROMPT, SamplingParams(n=2, max_tokens=50, seed=1, ignore_eos=True))
        events = [next(stream) for _ in range(3)]
        end(llm, events[0].request_id)
        assert not llm.engine.has_work
        events += list(stream)
        assert [(event.index, event.finished) for event in events[-2:]] == [(0, True), (1, True)]
        assert [event.output is None for event in events] == [True] * (len(events) - 1) + [False]
        for choice in events[-1].output.outputs:
            assert choice.finish_reason == "abort"
            assert choice.token_ids == [t for e in events if e.index == choice.index for t in e.token_ids] != []

    def test_a_stream_is_the_text(self, llm: LLM) -> None:
        events = list(llm.stream(PROMPT, self.PARAMS))
        (whole,) = llm.generate([PROMPT], self.PARAMS, progress=False)
        assert [t for event in events for t in event.token_ids] == whole.outputs[0].token_ids
        assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1].output.outputs == whole.outputs

    def test_joining_while_others_run(self, llm: LLM) -> None:
        """Requests that arrive at any step get what they get alone, `generate` in between included."""
        alone = [llm.generate([p], self.PARAMS, progress=False)[0].outputs for p in self.prompts()]
        sessions = []
        for prompt in self.prompts()[:4]:
            sessions.append(llm.add(prompt, self.PARAMS))
            llm.step()
            llm.step()
        late = llm.generate(self.prompts()[4:], self.PARAMS, progress=False)
        while llm.engine.has_work:
            llm.step()
        assert [s.output().outputs for s in sessions] + [out.outputs for out in late] == alone
