"""Grammars that overflow a stack, fill the memory or take for ever: refused or obeyed, and nobody else notices."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import statistics
import string
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import LONG, Serving, serving
from waiting import below, slowness, wait_for

from skipstone import LLM, SamplingParams
from skipstone.cli import main as cli
from skipstone.errors import RequestError
from skipstone.text import structured
from skipstone.text.structured import GrammarCompiler

DEMO = Path(__file__).resolve().parent.parent / "checkpoints" / "demo"
pytestmark = pytest.mark.skipif(
    not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here"
)
VOCAB, EOS = 6144, frozenset([2, 6])
TOKENS: dict[str, int] = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]


def chained_schema(length: int) -> str:
    """Objects, each in the one before, by reference."""
    parts: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(length - 1)
    }
    return json.dumps({"$defs": parts | {f"d{length - 1}": {"type": "string"}}, "$ref": "#/$defs/d0"})


def chained_rules(length: int) -> str:
    return "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(length - 1)) + f'r{length - 1}: "b"\n'


def shortest_rules(size: int) -> str:
    """As many rules that lead to one another as so many bytes hold."""
    letters = string.ascii_lowercase
    names = [a + b + c + d for a in letters for b in letters for c in letters for d in letters][: size // 11]
    return f"start:{names[0]}\n" + "".join(f"{a}:{b}\n" for a, b in itertools.pairwise(names)) + names[-1] + ':"b"\n'


def nested(text: str, depth: int) -> str:
    return '{"type":"array","items":' * depth + text + "}" * depth


AMBIGUOUS = 'start: a\na: a a | a a a | "x" |\n'
# What is asked for, and None where it can be had, else a part of the reason.
CASES: dict[str, tuple[str, str | list[str], str | None]] = {
    "references": ("json_schema", chained_schema(1000), None),
    "rules": ("grammar", chained_rules(2700), None),
    "more rules": ("grammar", shortest_rules(250_000), "overflows"),
    "too many bytes": ("json_schema", chained_schema(10_000), "262144"),
    "too many choices": ("choice", [f"option {i}" for i in range(40_000)], "262144"),
    "multiples": ("json_schema", '{"type": "integer", "multipleOf": 1000003}', "2 s to prepare|overflows"),
    "depth": ("json_schema", nested("{}", 5_000), "too deeply"),
    "half the depth": ("json_schema", nested("{}", 200), "recursion limit"),
    "all of itself": ("json_schema", '{"allOf": [{"$ref": "#"}, {"type": "object"}]}', "circular"),
    "itself": ("json_schema", '{"$ref": "#"}', "no text fits"),
    "only itself": ("grammar", "start: a\na: b\nb: a\n", "no text fits"),
    "parentheses": ("regex", "(" * 50_000 + "a" + ")" * 50_000, "regex"),
    "brackets in GBNF": ("grammar", "root ::= " + "(" * 900 + '"a"' + ")" * 900 + "\n", "neither Lark nor GBNF"),
    "exponential": ("regex", "(a|b)*a(a|b){30}", None),
    "repetitions": ("regex", "(.{1,1000}x){1,1000}", None),
    "a long text": ("json_schema", '{"type": "string", "minLength": 1000000}', None),
    "many products": (
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"properties": {c: {}}}, {"required": [c]}]} for c in string.ascii_letters]}),
        "too large",
    ),
    "patterns": (
        "json_schema",
        json.dumps({"type": "object", "patternProperties": {f"^{c}.*{c}.{{9}}$": {} for c in "abcdef"}}),
        None,
    ),
    "nullable": ("grammar", "start: (((a?)*)*)*\na: (b?)*\nb: a* | a a\n", ""),
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(DEMO, VOCAB, EOS)


@pytest.mark.parametrize("name", CASES)
def test_refused_or_obeyed(name: str, compiler: GrammarCompiler) -> None:
    kind, value, why = CASES[name]
    params = SamplingParams(**{kind: value})
    if why:
        with pytest.raises(RequestError, match=rf"^{kind}=.*cannot be used: .*({why})") as raised:
            compiler.compile(params)
        assert len(str(raised.value)) < 600
        return
    try:
        grammar = compiler.compile(params)
    except RequestError:
        assert why == ""
        return
    assert grammar is not None
    draw = random.Random(0)
    for _ in range(40):
        mask = grammar.allowed([])
        assert mask is not None
        tokens = mask.nonzero()[:, 0].tolist()
        if not tokens or not grammar.advance(draw.choice(tokens)) or grammar.ended:
            break


def test_after_what_ended_the_trial_the_next_one_is_made(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="overflows"):
        compiler.compile(SamplingParams(grammar=shortest_rules(249_000)))
    assert compiler.compile(SamplingParams(regex="[ab]{7}")) is not None


def test_what_a_job_holds_is_not_made_again(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others come between, so the engine's thread finds what was made beside it; nor is it leaked."""
    monkeypatch.setattr(structured, "MOST_KEPT", 1)
    asked = SamplingParams(regex="[xy]{5}")
    held = compiler.prepare(asked)
    for i in range(3):
        compiler.compile(SamplingParams(regex=f"[xy]{{{i + 6}}}"))
    assert held is not None and compiler.prepare(asked, make=False) is held
    grammar = compiler.compile(asked)
    del held
    compiler.compile(SamplingParams(regex="[xy]{6}"))
    assert compiler.prepare(asked, make=False) is not None and grammar is not None
    compiler.compile(SamplingParams(regex="[xy]{7}"))
    del grammar
    assert compiler.prepare(asked, make=False) is None


def test_an_ordinary_schema_takes_milliseconds(compiler: GrammarCompiler) -> None:
    """Processor time of this process; the trial takes as long again."""
    names = itertools.count()

    def median() -> float:
        times = []
        for _ in range(12):
            schema = {
                "type": "object",
                "properties": {f"k{next(names)}": {"type": "string"}, "n": {"type": "integer"}},
            }
            begun = time.process_time()
            compiler.compile(SamplingParams(json_schema=json.dumps(schema)))
            times.append(time.process_time() - begun)
        return statistics.median(times)

    below(0.02, median)


def test_a_costly_token_ends_its_own_text() -> None:
    """An ambiguous grammar costs more with every token; the library itself would go on to half a second each."""
    llm = LLM("demo", spec="off")
    bias = dict.fromkeys(EOS, -float("inf"))
    params = SamplingParams(grammar=AMBIGUOUS, logit_bias=bias, temperature=1.0, seed=1, max_tokens=2000)
    free = SamplingParams(temperature=0.0, max_tokens=30)
    steps: list[float] = []
    step = llm._step

    def timed() -> Any:
        begun = time.thread_time()
        events = step()
        steps.append(time.thread_time() - begun)
        return events

    llm._step = timed  # type: ignore[method-assign]
    costly, other = llm.generate(["x", "def read("], [params, free], progress=False)
    choice = costly.outputs[0]
    assert choice.finish_reason == "abort" and set(choice.text) <= {"x"}
    assert choice.error is not None and "its grammar was given up" in choice.error and "2 ms" in choice.error
    assert other.outputs[0].text == llm.generate("def read(", free, progress=False)[0].outputs[0].text
    assert max(steps[2:]) < 0.3 * slowness()


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running
        wait_for(lambda: running.idle)


def body(kind: str, value: str | list[str]) -> dict[str, Any]:
    if kind == "json_schema" and isinstance(value, str):
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": json.loads(value)}}}
    return {"structured_outputs": {kind: value}}


HOSTILE = (
    "references",
    "rules",
    "more rules",
    "too many bytes",
    "all of itself",
    "itself",
    "parentheses",
    "exponential",
)


def ask_for_hostile_grammars(server: Serving) -> None:
    for name in HOSTILE:
        kind, value, why = CASES[name]
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 4} | body(kind, value))
        assert answer.status_code == (400 if why else 200), (name, answer.text)
        assert server.get("/health").status_code == 200
    for depth in (40, 300):
        tool = {"type": "function", "function": {"name": "f", "parameters": json.loads(nested("{}", depth))}}
        tool["function"]["parameters"] = {"type": "object", "properties": {"a": tool["function"]["parameters"]}}
        chat = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required"}
        answer = server.post("/v1/chat/completions", chat | {"max_tokens": 4})
        assert answer.status_code == (200 if depth == 40 else 400), answer.text


def test_a_server_goes_on(server: Serving) -> None:
    """Whoever else writes gets the same text, and a token at least every half second."""
    client = server.client()
    options: dict[str, Any] = {"model": "demo", "prompt": "def read(", "temperature": 0, "max_tokens": 200}
    expected = client.completions.create(**options).choices[0].text

    def longest_gap() -> float:
        gaps, over = list[float](), threading.Event()

        def write() -> str | None:
            """The first text that is wrong."""
            while not over.is_set():
                text, before = "", time.monotonic()
                for event in client.completions.create(**options, stream=True):
                    text += event.choices[0].text
                    gaps.append(time.monotonic() - before)
                    before = time.monotonic()
                if text != expected:
                    return text
            return None

        server.service.llm._grammars._kept.clear()  # type: ignore[attr-defined]  # so that all are made again
        with ThreadPoolExecutor(1) as pool:
            wrong = pool.submit(write)
            try:
                ask_for_hostile_grammars(server)
            finally:
                over.set()
            assert wrong.result() is None
        return max(gaps)

    below(0.5, longest_gap)


@pytest.mark.parametrize("depth", [100, 900, 3_000, 100_000])
def test_deep_bodies_are_answered(server: Serving, depth: int) -> None:
    """Wherever a body takes any JSON: no 500, and the server lives."""
    deep, messages = '{"a":' * depth + "1" + "}" * depth, '"messages": [{"role": "user", "content": "a"}]'
    deep_text = json.dumps(deep)
    called = f'{{"id": "a", "type": "function", "function": {{"name": "f", "arguments": {deep_text}}}}}'
    bodies = [
        f'{{"prompt": {"[" * depth + "]" * depth}}}',
        f'{{{messages}, "chat_template_kwargs": {{"x": {deep}}}}}',
        f'{{{messages}, "response_format": {{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}}}',
        f'{{{messages}, "structured_outputs": {{"json": {deep}}}}}',
        f'{{{messages}, "structured_outputs": {{"json": {deep_text}}}}}',
        f'{{{messages}, "tools": [{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]}}',
        f'{{{messages}, "unknown": {deep}}}',
        f'{{"messages": [{{"role": "assistant", "content": "", "tool_calls": [{called}]}}]}}',
    ]
    for text in bodies:
        path = "/v1/completions" if "prompt" in text[:9] else "/v1/chat/completions"
        answer = server.post_text(path, text[:-1] + ', "max_tokens": 2}')
        assert answer.status_code in (200, 400), (text[:200], answer.text)
    assert server.get("/health").status_code == 200


class TestCommandLine:
    def run(self, capsys: Any, *arguments: str) -> tuple[int, str, str]:
        code = cli.run(["generate", "demo", "-q", "-p", "a", "--max-tokens", "4", *arguments])
        return code, *capsys.readouterr()

    @pytest.mark.parametrize("name", ["references", "rules", "more rules", "depth", "parentheses", "too many bytes"])
    def test_flags(self, name: str, capsys: Any) -> None:
        kind, value, why = CASES[name]
        assert isinstance(value, str)
        code, out, err = self.run(capsys, f"--{kind.replace('_', '-')}", value)
        if why:
            assert code == 2 and err.startswith(f"error: {kind}=") and err.count("\n") == 1
        else:
            assert code == 0 and out.startswith(('{"a"', "a")), err

    def test_nothing_possible(self, capsys: Any) -> None:
        code, out, err = self.run(capsys, "--choice", "}", "--logit-bias", f"{TOKENS['}']}=-inf", "--json", "-")
        assert code == 2 and err.startswith("error: -p") and "choice and logit_bias" in err, err
        line = json.loads(out)
        assert (line["text"], line["finish_reason"]) == ("", "abort") and "no token is allowed" in line["error"]


class TestEndTokenWithAText:
    """A checkpoint whose end of text is an ordinary entry of the vocabulary."""

    SCHEMA = (
        '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false}'
    )

    @pytest.mark.parametrize("text", ['"', "a", "}", "e"])
    def test_what_is_allowed_can_be_taken(self, text: str) -> None:
        compiler, draw = GrammarCompiler(DEMO, VOCAB, frozenset([2, TOKENS[text]])), random.Random(1)
        for asked_for in ({"regex": '[a-f"}]{3,8}'}, {"json_schema": self.SCHEMA}, {"choice": "bead"}):
            grammar = compiler.compile(SamplingParams(**asked_for))
            assert grammar is not None
            for _ in range(30):
                mask = grammar.allowed([])
                assert mask is not None
                tokens = mask.nonzero()[:, 0].tolist()
                asked = [*draw.sample(tokens, min(20, len(tokens))), *({TOKENS[text]} & set(tokens))]
                assert all(grammar.legal([token]) == 1 for token in asked)
                if not tokens or not grammar.advance(draw.choice(tokens)) or grammar.ended:
                    break

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("ends") / "quote"
        shutil.copytree(DEMO, folder, copy_function=lambda a, b: Path(b).symlink_to(a))
        (folder / "generation_config.json").unlink()
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, TOKENS['"']]}))
        return folder

    def test_the_server_says_what_is_wrong(self, folder: Path) -> None:
        asked = body("json_schema", self.SCHEMA)
        path = "response_format.json_schema.schema"
        with serving(str(folder)) as running:
            client = running.client()
            options: dict[str, Any] = {"model": "quote", "max_tokens": 20, "extra_body": asked, "seed": 1, "n": 2}
            ask: list[Callable[[], Any]] = [
                lambda: client.completions.create(**options, prompt="abc"),
                lambda: list(client.completions.create(**options, prompt="abc", stream=True)),
                lambda: client.chat.completions.create(**options, messages=[{"role": "user", "content": "a"}]),
            ]
            for call in ask:
                with pytest.raises(openai.APIError, match=r"no token is allowed by.*end token") as raised:
                    call()
                assert raised.value.param == path and raised.value.code == "invalid_value"
            fine = client.completions.create(model="quote", prompt="abc", max_tokens=5, extra_body=LONG["extra_body"])
            assert fine.choices[0].finish_reason in ("stop", "length")
            wait_for(lambda: running.idle)
