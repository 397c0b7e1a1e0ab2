"""`--online M`: what is computed again, that it finds faults, and that it disturbs nobody."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Serving, serving
from waiting import wait_for

from skipstone import LLM
from skipstone.core.plan import StepPlan
from skipstone.core.request import Request
from skipstone.core.sequence_table import TABLE
from skipstone.errors import ConfigError
from skipstone.kernels.reference.decode import Accepted
from skipstone.server.online_check import OnlineCheck
from skipstone.session import Session
from skipstone.spec.verify import Verifier

DEMO = Path(__file__).resolve().parent.parent / "checkpoints" / "demo"
pytestmark = pytest.mark.skipif(
    not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here"
)
PROMPT = "The module provides"
# Whatever depends on the tokens before, on their number, or on the length of the prompt.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 3},
    {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.8, "presence_penalty": 0.3},
    {"temperature": 1, "seed": 5, "repetition_penalty": 1.3, "min_p": 0.02},
    {"temperature": 1, "seed": 6, "n": 2, "logprobs": 2},
    {"temperature": 1, "seed": 7, "min_tokens": 20, "logit_bias": {"5": 2}},
    {"temperature": 1, "seed": 8, "stop": ["\n"], "max_tokens": 60},
    {"temperature": 1, "seed": 9, "response_format": {"type": "json_object"}},
]


def ask(server: Serving, fields: dict[str, Any]) -> list[str]:
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 24} | fields)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def counts(server: Serving) -> tuple[int, int]:
    wait_for(lambda: server.idle)
    values = dict(line.split(" ") for line in server.get("/metrics").text.splitlines() if line[0] != "#")
    found = {name.split("{")[0]: float(value) for name, value in values.items()}
    return int(found["skipstone_online_checks_total"]), int(found["skipstone_online_mismatches_total"])


@pytest.fixture(scope="module")
def plain() -> Iterator[Serving]:
    with serving(spec="mtp:3") as running:
        yield running


@pytest.mark.parametrize("every", [1, 5])
def test_texts_and_counts_are_those_without_it(plain: Serving, every: int) -> None:
    expected = [ask(plain, fields) for fields in KINDS]
    assert counts(plain)[0] == 0
    with serving(server={"online": every}, spec="mtp:3", num_blocks=130) as server:
        assert [ask(server, fields) for fields in KINDS] == expected
        checks, mismatches = counts(server)
        steps = server.service.llm.engine.scheduler.stats.speculation.steps
        assert mismatches == 0
        assert steps // every // 4 <= checks <= steps // every  # one copy at a time
        server.service.llm.engine.scheduler.check()


def test_generated_tokens_are_those_of_the_clients() -> None:
    with serving(server={"online": 1}, spec="mtp:3") as server:
        ask(server, {"temperature": 0, "ignore_eos": True})
        checks, _ = counts(server)
        assert checks > 2 and server.service.llm.engine.stats.output_tokens == 24


class WrongVerifier(Verifier):
    """Accepts one draft too many whenever it can."""

    def verify(self, *args: Any) -> Accepted:
        right, drafted = super().verify(*args), args[2]
        column = torch.arange(drafted.token_ids.shape[1])
        own = drafted.token_ids.roll(-1, dims=1)  # what follows each row, if the drafts are right
        real = (column < column[-1]) & (own >= 0) & (drafted.newest[:, None] + 1 + column < drafted.end[:, None])
        count = right.num_accepted
        more = real.gather(1, count[:, None]).squeeze(1)
        emitted = right.emitted.clone()
        last = emitted.gather(1, count[:, None])
        emitted.scatter_(1, count[:, None], torch.where(more[:, None], own.gather(1, count[:, None]), last))
        emitted.scatter_(1, (count + more)[:, None], last)
        following = emitted.gather(1, torch.minimum(column, (count + more)[:, None]))
        return Accepted(count + more, emitted, following, right.start + more)


def test_a_wrong_acceptance_rule_is_found(caplog: pytest.LogCaptureFixture) -> None:
    with serving(server={"online": 2}, spec="mtp:3") as server:
        server.service.llm.engine.runner.step.verifier = WrongVerifier()
        body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
        server.post("/v1/completions", body, headers={"x-request-id": "wrong-one"})
        checks, mismatches = counts(server)
        assert 0 < mismatches <= checks
    (first, *_) = [record for record in caplog.records if record.name == "skipstone.online"]
    assert first.levelno == logging.ERROR and first.request_id == "wrong-one"  # type: ignore[attr-defined]
    assert 0 <= first.position < 40  # type: ignore[attr-defined]


def test_caches_that_speculation_left_wrong_are_found() -> None:
    """The copy is computed from the first token on, so it does not read what is wrong."""
    with serving(server={"online": 1}, spec="mtp:3") as server:
        runner = server.service.llm.engine.runner
        start = runner.start

        def spoiling(plan: StepPlan) -> Any:
            handle = start(plan)
            for item in plan.items:
                if item.num_drafts:
                    first = runner.table.values[item.slot, TABLE]
                    for tensors in runner.cache.layers.values():
                        for tensor in tensors.values():
                            tensor[first] *= -1
            return handle

        runner.start = spoiling
        ask(server, {"temperature": 0, "ignore_eos": True})
        assert counts(server)[1] > 0


def test_a_copy_is_what_a_request_was(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("demo", spec="mtp:3")
    check = OnlineCheck(llm, 1)
    add_copy, copies = llm.add_copy, []

    def noting(request: Request, end: int, count: int) -> Session:
        session = add_copy(request, end, count)
        copies.append((request, end, count, session.choices[0].request))
        return session

    monkeypatch.setattr(llm, "add_copy", noting)
    session = llm.add(PROMPT, llm._params_for(None, 1)[0])
    while not copies:
        for event in llm.step():
            check.on_tokens(session.choices[0].request, len(event.token_ids), "r")
    request, end, count, copy = copies[0]
    assert copy.token_ids == request.token_ids[:end] and copy.max_total_tokens == end + count
    assert copy.num_prompt_tokens == request.num_prompt_tokens < end and copy.seed == request.seed
    assert copy.max_drafts == 0 and request.max_drafts == 3
    llm.step()
    assert copy.num_cached_tokens == 0
    llm.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spec": "off"}, ["online=10", "spec='off'"]),
        ({"spec": "ngram:2", "exact": False}, ["online=10", "exact=false"]),
        ({"spec": "ngram:2", "verification": "rejection"}, ["online=10", "verification=exact"]),
        ({"spec": "ngram:2", "simulate_acceptance": "0.5"}, ["online=10", "simulated acceptance"]),
    ],
)
def test_where_it_would_say_nothing_it_is_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        OnlineCheck(LLM("demo", **options), 10)
    assert all(word in str(refused.value) for word in words)
