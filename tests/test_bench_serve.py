"""`skipstone bench serve`: against a server whose times are known, and against our own counters."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import socket
import statistics
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import DONE, HELD, Scripted, answer, event, scripted
from serving import serving
from waiting import PATIENCE_S, below, wait_for

from skipstone.cli import main as cli
from skipstone.cli.prompts import Prompt
from skipstone.errors import ConfigError
from skipstone.tools.bench.serve_client import Drafts, Load, Sample, due_times, run_load
from skipstone.tools.bench.serve_report import METRICS, PERCENTILES, meets, parse_goals, summarize

DEMO = Path(__file__).resolve().parent.parent / "checkpoints" / "demo"
SLACK_S = 0.15  # by which a time may differ where no other program disturbs it


def load(server: Scripted, **options: Any) -> Load:
    prompts = [Prompt(f"{i}", f"{i}", text=f"text {i}") for i in range(5)]
    usual: dict[str, Any] = {"key": None, "model": "m", "requests": 5, "seed": 3, "most_at_once": None}
    return Load(url=server.url, prompts=prompts, fields={}, timeout=PATIENCE_S, **usual | options)


def run(server: Scripted, rate: float, turn: int = 0, **options: Any) -> list[Sample]:
    return asyncio.run(run_load(load(server, **options), rate, turn, lambda: None))[0]


@contextmanager
def nobody() -> Iterator[str]:
    """An address where nobody listens, nor can."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{place.getsockname()[1]}"


class TestClient:
    def test_times_are_those_of_the_script(self) -> None:
        def error() -> float:
            with scripted(answer(first=0.3, gap=0.1, events=5)) as server:
                samples = run(server, math.inf)
            errors = []
            for sample in samples:
                assert sample.error is None and (sample.prompt_tokens, sample.output_tokens) == (7, 15)
                assert sample.first >= 0.3 and len(sample.gaps) == 4
                assert sample.seconds == sample.arrivals[-1] >= 0.69
                assert sample.per_token == pytest.approx((sample.seconds - sample.first) / 14)
                errors += [sample.first - 0.3, abs(sum(sample.gaps) - 0.4), (sample.seconds - 0.7) / 3]
            return max(errors)

        below(SLACK_S, error)

    def test_an_event_that_only_names_the_role_is_no_token(self) -> None:
        deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": ""}, {}]
        waits = [0.0, 0.2, 0.0, 0.0]
        script = [
            (wait, event(choices=[{"delta": delta, "finish_reason": "stop" if not delta else None}]))
            for wait, delta in zip(waits, deltas, strict=True)
        ]
        with scripted([*script, (0, DONE)]) as server:
            (sample,) = run(server, math.inf, requests=1)
        assert sample.first >= 0.2 and sample.error is None
        assert sample.output_tokens == len(sample.arrivals) == 3  # without counts, every event is one token

    def test_faults_are_counted_and_stop_nothing(self) -> None:
        good = answer(0, 0, 1)
        broken = [(0.0, event(choices=[{"text": "a"}])), (0.0, event(error={"message": "engine"}))]
        with scripted(good, 429, broken, good[:1], [(0.0, DONE)], [(0.0, "data: {\n\n")]) as server:
            errors = [sample.error for sample in run(server, math.inf, requests=6, most_at_once=1)]
        expected = [None, "HTTP 429: too busy", "error in the stream", "cut off", "no tokens", "DecodeError"]
        for error, words in zip(errors, expected, strict=True):
            assert (error is None) == (words is None) and (words or "") in (error or ""), errors

    def test_nobody_listens(self) -> None:
        with nobody() as url:
            (sample,) = run(Scripted([], url=url), math.inf, requests=1)
        assert sample.error is not None and "ConnectError" in sample.error


class TestArrivals:
    def test_they_are_a_poisson_process(self) -> None:
        gaps = np.diff(due_times(4.0, 20_001, seed=1))
        assert gaps.mean() == pytest.approx(0.25, rel=0.03) and gaps.std() == pytest.approx(0.25, rel=0.03)
        assert (gaps > 0.25 * math.log(2)).mean() == pytest.approx(0.5, abs=0.02)
        assert due_times(4.0, 9, 1) == due_times(4.0, 9, 1) != due_times(4.0, 9, 2)
        assert due_times(math.inf, 3, 1) == [0.0, 0.0, 0.0]

    def test_nothing_waits_for_earlier_answers(self) -> None:
        """None is answered before the last has come."""
        due = due_times(20.0, 5, 3)

        def error() -> float:
            with scripted([(HELD, ": all are here\n\n"), *answer(0, 0, 1)], wanted=5) as server:
                samples = run(server, 20.0)
            errors = []
            for sample, wanted, came in zip(samples, due, server.times, strict=True):
                assert sample.error is None and sample.due == wanted <= sample.sent
                errors += [sample.sent - wanted, abs(came - server.times[0] - wanted)]
            return max(errors)

        below(SLACK_S, error)

    def test_a_cap_makes_them_wait_and_says_so(self) -> None:
        def error() -> float:
            with scripted([(HELD, ": two are here\n\n"), *answer(first=0.2, gap=0, events=1)], wanted=2) as server:
                samples = run(server, math.inf, most_at_once=2)
            assert server.most_open == 2 and all(sample.first >= 0.2 for sample in samples)
            assert summarize(samples, 1.0, math.inf, {})["max_wait_ms"] >= 390
            return max(sample.first for sample in samples) - 0.2  # from sending, not from when it was due

        below(SLACK_S, error)

    def test_prompts_come_in_turn_with_seeds_of_their_own(self) -> None:
        with scripted(answer(0, 0, 1)) as server:
            for turn in range(2):
                run(server, math.inf, turn, most_at_once=1, requests=10)
        texts, seeds = ([body[name] for body in server.bodies] for name in ("prompt", "seed"))
        assert all(sorted(texts[i : i + 5]) == [f"text {n}" for n in range(5)] for i in range(0, 20, 5))
        assert len({tuple(texts[i : i + 5]) for i in range(0, 20, 5)}) > 1
        assert seeds == list(range(3, 23))
        with scripted(answer(0, 0, 1)) as again:
            run(again, math.inf, most_at_once=1, requests=10)
        assert again.bodies == server.bodies[:10]


class TestNumbers:
    def test_percentiles(self) -> None:
        draw = random.Random(1)
        values = [draw.expovariate(1) for _ in range(57)]
        result = summarize([Sample(prompt="", due=0, arrivals=[each], seconds=each) for each in values], 1.0, 1.0, {})
        for share in PERCENTILES:
            assert result[f"p{share}_ttft_ms"] == pytest.approx(1e3 * np.percentile(values, share))
            assert result[f"p{share}_itl_ms"] == 0.0
        one = summarize([Sample(prompt="", due=0, arrivals=[3.0], seconds=3.0)], 1.0, 1.0, {})
        assert one["p99_e2el_ms"] == one["median_e2el_ms"] == 3000.0

    def test_by_hand(self) -> None:
        samples = [
            Sample(prompt="a", due=0, arrivals=[0.1, 0.2, 0.5], seconds=0.5, prompt_tokens=4, output_tokens=5),
            Sample(prompt="b", due=0, sent=0.25, arrivals=[0.3], seconds=0.3, prompt_tokens=6, output_tokens=1),
            Sample(prompt="c", due=0, arrivals=[0.1], seconds=9.0, output_tokens=7, error="cut"),
        ]
        result = summarize(samples, 2.0, 3.0, {"ttft": 200.0, "tpot": 100.0})
        assert (result["completed"], result["failed"], result["errors"]) == (2, 1, {"cut": 1})
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (10, 6)
        assert (result["request_throughput"], result["output_throughput"]) == (1.0, 3.0)
        assert result["request_goodput"] == 0.5  # b was late
        assert result["max_wait_ms"] == 250
        means = {name: result[f"mean_{name}_ms"] for name in METRICS}
        assert means == pytest.approx({"ttft": 200, "tpot": 100, "itl": 200, "e2el": 400})
        assert result["std_ttft_ms"] == pytest.approx(statistics.pstdev([100, 300]))
        assert "spec_decode_num_drafts" not in result

    def test_acceptance(self) -> None:
        # 10 steps with 3 drafts: 4 kept none, 3 one, 2 two, 1 three; then 5 steps with 2.
        one = Drafts(
            num_spec_steps=10, num_draft_tokens=30, num_accepted_draft_tokens=10, acceptance_histogram=[4, 3, 2, 1]
        )
        two = Drafts(
            num_spec_steps=5, num_draft_tokens=10, num_accepted_draft_tokens=10, acceptance_histogram=[0, 0, 5]
        )
        samples = [Sample(prompt="", due=0, arrivals=[1.0], seconds=1.0, drafts=each) for each in (one, two, None)]
        result = summarize(samples, 1.0, 1.0, {})
        assert result["spec_decode_acceptance_length"] == pytest.approx(1 + 20 / 15)
        assert result["spec_decode_acceptance_rate"] == 50
        assert result["spec_decode_per_position_acceptance_rates"] == pytest.approx([11 / 15, 8 / 15, 1 / 15])

    def test_goals(self) -> None:
        goals = parse_goals("ttft:200, e2el:1000.5")
        assert goals == {"ttft": 200, "e2el": 1000.5} and parse_goals(None) == {}
        assert meets(Sample(prompt="", due=0, arrivals=[0.2], seconds=1.0), goals)
        assert not meets(Sample(prompt="", due=0, arrivals=[0.2], seconds=1.1), goals)
        for text in ("ttft", "ttft:soon", "itl:3", "speed:3"):
            with pytest.raises(ConfigError, match=re.escape(text)):
                parse_goals(text)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = cli.run(["bench", "serve", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


class TestCommand:
    def test_everything(self, command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SKIPSTONE_API_KEY", "secret")
        drafts = {"num_spec_steps": 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 4}
        metrics = {"speculative_decoding": drafts | {"acceptance_histogram": [1, 2, 1]}}
        page, file = tmp_path / "page.html", tmp_path / "result.json"
        with scripted(answer(0.05, 0.01, 3, metrics=metrics)) as server:
            options = ["--rates", "50,inf", "--requests", 6, "--goodput", "ttft:10000", "--max-tokens", 9]
            body = ["--body", '{"speculation": {"k": 2}}', "--temperature", 0, "--ignore-eos"]
            code, out, err = command("--url", server.url + "/v1/", *options, *body, "--html", page, "--json", file)
        assert code == 0 and "requests: 100 %" in err
        assert len(server.bodies) == 2 * 6 + 2 and set(server.keys) == {"bearer secret"}
        fields = {"model": "scripted", "max_tokens": 9, "temperature": 0, "ignore_eos": True, "speculation": {"k": 2}}
        assert all(body.items() >= fields.items() and len(body["prompt"]) > 20 for body in server.bodies)
        result = json.loads(out.splitlines()[-1])
        assert json.loads(file.read_text()) == result
        assert [each["request_rate"] for each in result["runs"]] == [50, "inf"]
        for each in result["runs"]:
            assert each["completed"] == 6 and each["request_goodput"] == each["request_throughput"]
            assert each["spec_decode_per_position_acceptance_rates"] == [0.75, 0.25]
            assert 50 <= each["p50_ttft_ms"] <= each["p99_ttft_ms"]
        assert "ttft p99" in out and "tokens per verify step" in out and "secret" not in out + page.read_text()
        self.check_page(page.read_text())

    def check_page(self, text: str) -> None:
        """It fetches nothing, and every picture is well-formed."""
        assert not re.search(r"<script|<link|src=|@import|url\(", text)
        pictures = re.findall(r"<svg.*?</svg>", text, flags=re.S)
        assert len(pictures) == len(METRICS)
        for picture in pictures:
            tree = xml.etree.ElementTree.fromstring(picture)
            lines = [element.get("points", "").split() for element in tree.iter("polyline")]
            assert len(lines) == 2
            for line in lines:
                places = [tuple(map(float, point.split(","))) for point in line]
                assert all(0 <= x <= 520 and 0 <= y <= 260 for x, y in places)
                assert places == sorted(places, key=lambda place: (place[0], -place[1]))

    def test_failures_are_shown(self, command: Run) -> None:
        with scripted(answer(0, 0, 1), answer(0, 0, 1), 429) as server:
            code, out, _ = command("--url", server.url, "--rates", "inf", "--requests", 3, "--max-concurrency", 1)
        assert code == 0 and "all at once: 1 times: HTTP 429: too busy" in out
        assert json.loads(out.splitlines()[-1])["runs"][0]["failed"] == 1

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--rates", "1,fast"], "--rates 1,fast must list numbers"),
            (["--rates", "0"], "--rates 0: every rate must be above 0"),
            (["--goodput", "ttft"], "--goodput ttft"),
            (["--timeout", "0"], "--timeout: 0 must be a number above 0"),
            (["--timeout", "-5"], "--timeout: -5 must be a number above 0"),
            (["--timeout", "nan"], "--timeout: nan must be a number above 0"),
            (["--seed", "-1"], "--seed: -1 must be at least 0"),
            (["--warm-up", "-1"], "--warm-up: -1 must be at least 0"),
            (["--body", "[]"], "--body [] must be a JSON object"),
            (["--html", "/nowhere/page.html"], "--html /nowhere/page.html"),
            (["--prompts", "/nowhere.txt"], "--prompts /nowhere.txt cannot be read"),
        ],
    )
    def test_errors(self, command: Run, options: list[str], words: str) -> None:
        with scripted(400) as server:
            code, _, err = command("--url", server.url, *options)
        assert code == 2 and words in err and not server.bodies

    def test_without_a_server(self, command: Run) -> None:
        with nobody() as url:
            code, _, err = command("--url", url)
        assert code == 2 and f"url={url} cannot be used" in err

    def test_a_server_that_refuses_ends_it_at_once(self, command: Run) -> None:
        with scripted(400) as server:
            code, _, err = command("--url", server.url)
        assert code == 2 and "a first request was not answered: HTTP 400: too busy" in err
        assert len(server.bodies) == 1

    def test_words(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.run(["bench"]) == 2 and "bench serve" in capsys.readouterr().out
        assert cli.run(["bench", "nothing"]) == 2 and "did you mean bench " in capsys.readouterr().err
        assert cli.run(["bench", "serve", "--help"]) == 0 and "--rates LIST" in capsys.readouterr().out


@pytest.mark.skipif(not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here")
def test_counts_are_those_of_our_server(command: Run) -> None:
    with serving() as server:
        options = ["--rates", "20", "--requests", 8, "--max-tokens", 12, "--warm-up", 0]
        code, out, _ = command("--url", server.url, *options)
        wait_for(lambda: server.idle)
        stats = server.service.llm.engine.scheduler.stats.speculation
        assert code == 0
        result = json.loads(out.splitlines()[-1])["runs"][0]
        assert result["completed"] == 8
        assert result["total_output_tokens"] == server.service.llm.engine.stats.output_tokens
        assert result["spec_decode_num_drafts"] == stats.steps
        assert result["spec_decode_draft_tokens"] == stats.drafted
        assert result["spec_decode_acceptance_length"] == pytest.approx(stats.acceptance_length)
        assert result["spec_decode_per_position_acceptance_rates"] == pytest.approx(
            [count / stats.steps for count in stats.accepted_per_position]
        )
