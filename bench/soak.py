"""Mixed load on the server for a while: texts, cache blocks, errors and memory must come out right.

    python bench/soak.py [--minutes 10] [--model demo] [--clients 12] [--texts 48] [--online M] [--no-grammars]

First an engine without speculation and without memory pressure writes the texts that are expected. Then a server with
too few cache blocks and a short queue gets requests from all clients at once: whole and streamed answers with any k,
clients that leave during a stream or while they wait, bodies that are no requests, prompts and bodies that are too
long, bodies made to hold it up (bench/hostile.py), and more silent connections than it has descriptors; another process
asks for its health all the while. At the end its books are read; then the load goes on and the server gets a SIGTERM in
the middle of it: every request under way must end with its text or a clean error. Exit code 1 when anything was wrong;
the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import functools
import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from hostile import WATCH, bodies, keep_silent

from skipstone import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
LIMITS: dict[str, Any] = {
    "max_num_seqs": 8, "max_queue": 4, "num_blocks": 32, "max_model_len": 1024,
    "client_timeout": 5, "allowed_host": "soak", "api_key": "mine",
}  # fmt: skip
KEY, OTHER_KEY = {"authorization": "Bearer mine"}, {"authorization": "Bearer other"}
FILES = 256  # descriptors of the server
SILENT = 400  # connections that say nothing
SLOWEST_HEALTH_S = 0.5  # for an answer while the server works for at least half of it; other programs do not count
PATIENCE_S = 300  # for anything that must happen, on a busy machine too
LONGEST_PROMPT = 1200  # characters
LARGEST_GROWTH = 0.03  # of the median memory, from the middle third of the run to the last
SHORTEST_RUN_S = 120.0  # for growth to be judged, and preemption to be missed
KINDS: list[dict[str, Any]] = [
    {}, {}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1},
    {"stop": ["\n\n"]}, {"n": 2}, {"ignore_eos": True}, {"logit_bias": {"5": -100}},
]  # fmt: skip
BAD_BODIES: list[tuple[bytes, int]] = [
    (b"", 400), (b"{", 400), (b"[1]", 400), (b'{"prompt": "a", "n": 0}', 400), (b'{"prompt": "a", "no_such": 1}', 400),
    (b'{"prompt": "\xff"}', 400), (b'{"prompt": "a", "temperature": NaN}', 400), (b'{"prompt": []}', 400),
    (b'{"prompt": "a", "max_tokens": "many"}', 400), (b'{"prompt": "a", "model": "other"}', 404),
    (b'{"prompt": [99999999]}', 400), (b'{"prompt": "a", "speculation": {"k": 999}}', 400),
]  # fmt: skip
Action = Callable[[], Awaitable[None]]
Hostile = dict[str, tuple[str, bytes, tuple[int, ...]]]  # name -> address, body, statuses
CUT_OFF = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError)


class Text:
    """One request and the texts that must come of it, one per choice."""

    def __init__(self, prompt: str, fields: dict[str, Any]) -> None:
        self.prompt, self.fields = prompt, fields
        self.expected: list[str] = []


def make_texts(count: int, draw: random.Random) -> list[Text]:
    """Prompts of the held-out set with parameters of every kind."""
    lines = (ROOT / "checkpoints" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [text for line in lines if len(text := json.loads(line)["prompt"]) <= LONGEST_PROMPT]
    texts = []
    for number, prompt in enumerate(draw.sample(prompts, count)):
        fields: dict[str, Any] = {"seed": number, "max_tokens": draw.choice([8, 24, 60, 120]), "top_p": 1.0}
        fields["temperature"] = draw.choice([0.0, 0.7, 1.0])
        fields |= draw.choice(KINDS)
        texts.append(Text(prompt, fields))
    return texts


def write_expected(model: str, texts: list[Text]) -> None:
    """What the engine writes without speculation and with all the room it wants."""
    params = []
    for text in texts:
        bias = {int(token): value for token, value in text.fields.get("logit_bias", {}).items()}
        params.append(SamplingParams(**text.fields | {"logit_bias": bias}))
    with LLM(model, spec="off") as llm:
        outputs = llm.generate([text.prompt for text in texts], params, progress=False)
    for text, output in zip(texts, outputs, strict=True):
        text.expected = [choice.text for choice in output.outputs]


class Server:
    """The program as a user starts it; its log goes to a file."""

    def __init__(self, model: str, online: int | None) -> None:
        flags = [word for name, value in LIMITS.items() for word in ("--" + name.replace("_", "-"), str(value))]
        flags += ["--api-key", "other"] + (["--online", str(online)] if online else [])
        command = [sys.executable, "-m", "skipstone", "serve", model, "--port", "0", "--log-format", "json", "--quiet"]
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)  # noqa: SIM115 (it outlives this)
        self.process = subprocess.Popen(
            [*command, *flags],
            cwd=ROOT,
            stderr=self.log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )
        self.url = self._wait_ready()
        host, _, port = self.url.removeprefix("http://").partition(":")
        self.address = host, int(port)
        watch = [sys.executable, "-c", WATCH, host, port, str(self.process.pid)]
        self.watch = subprocess.Popen(watch, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def health(self) -> list[tuple[float, float]]:
        """Seconds that each answer took, and for how many of them the server was at work; ends the watch."""
        found: list[tuple[float, float]] = json.loads(self.watch.communicate()[0])
        return found

    def _wait_ready(self) -> str:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and self.process.poll() is None:
            found = re.search(r'"event": "ready", "url": "([^"]+)"', Path(self.log.name).read_text())
            if found:
                return found[1]
            time.sleep(0.1)
        raise SystemExit(f"the server did not start: {Path(self.log.name).read_text()}")

    @property
    def memory(self) -> float:
        """Resident megabytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: name, with the labels that are its own -> value."""
        found = {}
        for line in httpx.get(self.url + "/metrics", timeout=PATIENCE_S, headers=KEY).text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[re.sub(r'(model_name|engine)="[^"]*",?', "", name).replace(",}", "}").replace("{}", "")] = float(
                    value
                )
        return found

    def errors(self) -> list[str]:
        """Lines of the log that say that something went wrong."""
        lines = Path(self.log.name).read_text().splitlines()
        return [line for line in lines if '"level": "error"' in line or "Traceback" in line]


class Load:
    """The clients, and what came of their requests."""

    def __init__(self, url: str, texts: list[Text], seed: int, hostile: Hostile) -> None:
        self.url, self.texts, self.seed, self.hostile = url, texts, seed, hostile
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.stopping = False  # the server is: refusals and closed connections are as they should be
        self.until = 0.0

    async def run(self, clients: int, until: float, watch: Any = None) -> None:
        """All clients at once until that time; `watch` is called every half second."""
        self.until = until
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, limits=limits, headers=KEY) as http:
            tasks = [asyncio.create_task(Client(self, http, number, clients).run()) for number in range(clients)]
            while not all(task.done() for task in tasks):
                if watch is not None:
                    watch()
                await asyncio.sleep(0.5)
            await asyncio.gather(*tasks)


class Client:
    """One after the other, requests of every kind."""

    def __init__(self, load: Load, http: httpx.AsyncClient, number: int, clients: int) -> None:
        self.load, self.http = load, http
        self.draw = random.Random(f"{load.seed} {number} {sum(load.counts.values()) > 0}")
        self.ordinary = [
            self._whole, self._stream, self._leave_stream, self._leave, self._bad, self._too_long, self._look,
        ]  # fmt: skip
        self.first: list[Action] = []
        if not load.counts:  # so that even a short run does everything
            self.first = [functools.partial(self._hostile, name) for name in list(load.hostile)[number::clients]]
            self.first += [*self.ordinary, self._others][number::clients]
        self.late = False  # whether the server was already ending when the request was sent

    async def run(self) -> None:
        """Go on until the time is over."""
        actions: list[Action] = [*self.ordinary, self._hostile, self._others]
        while time.monotonic() < self.load.until or self.first:
            if self.first and self.draw.random() < 0.5:
                await self.first.pop()()
                continue
            (action,) = self.draw.choices(actions, weights=[26, 26, 14, 8, 10, 8, 8, 6, 3])
            self.late = self.load.stopping
            try:
                await action()
            except CUT_OFF as error:
                # An ending server waits for texts, and hardly for a body that takes long to read.
                unread = self.load.stopping and action == self._hostile
                self._note("no connection", self.late or unread, repr(error))
                await asyncio.sleep(0.2)

    def _note(self, outcome: str, right: bool, detail: str) -> None:
        under_way = self.load.stopping and not self.late
        self.load.counts["under way, then " + outcome if under_way else outcome] += 1
        if not right:
            self.load.wrong.append(f"{outcome}: {detail:.300}")

    def _body(self, stream: bool) -> tuple[Text, dict[str, Any]]:
        text = self.draw.choice(self.load.texts)
        extra: dict[str, Any] = {"speculation": {"k": self.draw.randint(0, 3)}} if self.draw.random() < 0.5 else {}
        extra |= {"cache_salt": self.draw.choice("ab")} if self.draw.random() < 0.3 else {}
        return text, {"prompt": text.prompt, "stream": stream, **text.fields, **extra}

    def _compare(self, text: Text, texts: list[str]) -> None:
        self._note("text", texts == text.expected, f"{text.fields}: {texts} instead of {text.expected}")

    async def _refused(self, answer: httpx.Response) -> None:
        """A full queue, or a server that is ending, says so in the API's way."""
        error = json.loads(await answer.aread())["error"]
        allowed = {429: "queue_full"} | ({503: "draining"} if self.load.stopping else {})
        right = allowed.get(answer.status_code) == error["code"] and "retry-after" in answer.headers
        self._note(f"refused with {answer.status_code}", right, str(error))
        await asyncio.sleep(0.1)

    async def _whole(self) -> None:
        text, body = self._body(stream=False)
        answer = await self.http.post("/v1/completions", json=body)
        if answer.status_code != httpx.codes.OK:
            await self._refused(answer)
            return
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        self._compare(text, [choice["text"] for choice in choices])

    async def _stream(self) -> None:
        text, body = self._body(stream=True)
        parts = [""] * text.fields.get("n", 1)
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                await self._refused(answer)
                return
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    self._compare(text, parts)
                    return
                if line:
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        code = event["error"]["code"]
                        self._note("ended by an error event", self.load.stopping and code == "draining", str(event))
                        return
                    for choice in event["choices"]:
                        parts[choice["index"]] += choice["text"]
        self._note("stream without an end", False, str(body))

    async def _leave_stream(self) -> None:
        _, body = self._body(stream=True)
        events = self.draw.randint(0, 12)
        async with self.http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
            if answer.status_code != httpx.codes.OK:
                await self._refused(answer)
                return
            async for _ in answer.aiter_lines():
                if events == 0:
                    self._note("left a stream", True, "")
                    return
                events -= 1

    async def _leave(self) -> None:
        _, body = self._body(stream=False)
        with contextlib.suppress(TimeoutError):
            ask = self.http.post("/v1/completions", json=body | {"max_tokens": 400, "ignore_eos": True})
            await asyncio.wait_for(ask, self.draw.uniform(0.01, 2.0))
            return
        self._note("left while waiting", True, "")

    async def _bad(self) -> None:
        body, status = self.draw.choice(BAD_BODIES)
        answer = await self.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        right = answer.status_code == status or (self.load.stopping and answer.status_code == 503)
        self._note("bad body", right, f"{body!r}: {answer.status_code} {answer.text}")

    async def _too_long(self) -> None:
        answer = await self.http.post("/v1/completions", json={"prompt": "word " * 3000})
        right = answer.status_code == 400 or (self.load.stopping and answer.status_code == 503)
        self._note("too long", right, f"{answer.status_code} {answer.text}")

    async def _hostile(self, name: str | None = None) -> None:
        name = name or self.draw.choice(list(self.load.hostile))
        path, body, statuses = self.load.hostile[name]
        answer = await self.http.post(path, content=body, headers={"content-type": "application/json"})
        if answer.status_code in (429, 503):
            await self._refused(answer)
        else:
            self._note("hostile body", answer.status_code in statuses, f"{name}: {answer.status_code} {answer.text}")

    async def _others(self) -> None:
        """Another key sees nothing of these requests; another name of this machine is none of the server's."""
        seen = await self.http.get("/slots", headers=OTHER_KEY)
        named = await self.http.get("/v1/models", headers={"host": "elsewhere.example"})
        right = self.load.stopping or (seen.json() == {"requests": []} and named.status_code == 403)
        self._note("kept apart", right, f"{seen.text} {named.status_code}")

    async def _look(self) -> None:
        path = self.draw.choice(["/health", "/ready", "/metrics", "/v1/models", "/openapi.json"])
        answer = await self.http.get(path)
        right = answer.status_code == 200 or (self.load.stopping and answer.status_code == 503)
        self._note("looked", right, f"{path}: {answer.status_code}")


def growth(memory: list[float], of: Callable[[list[float]], float]) -> float:
    """By what share a statistic of the last third of the run exceeds that of the middle third."""
    third = max(len(memory) // 3, 1)
    return of(memory[-third:]) / of(memory[third : 2 * third] or memory) - 1


def wait_idle(server: Server) -> dict[str, float]:
    """The metrics once nothing runs, or after a long time."""
    for _ in range(2 * PATIENCE_S):
        metrics = server.metrics()
        if metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0:
            break
        time.sleep(0.5)
    return metrics


async def load_and_silence(load: Load, clients: int, server: Server, end: float, memory: list[float]) -> int:
    """The load until that time, beside connections that say nothing; returns how many of these there were."""
    silent = asyncio.create_task(keep_silent(*server.address, SILENT, end))
    await load.run(clients, end, lambda: memory.append(server.memory))
    return await silent


async def terminate(server: Server, load: Load, clients: int) -> int:
    """SIGTERM in the middle of the load; the exit code."""

    def signal_once() -> None:
        if not load.stopping and time.monotonic() > began + 2 and sum(load.counts.values()) > before + clients:
            load.stopping = True
            load.until = time.monotonic() + 8
            server.process.send_signal(signal.SIGTERM)
        if server.process.poll() is not None:  # nothing more can go wrong
            load.until = 0.0

    began, before = time.monotonic(), sum(load.counts.values())
    await load.run(clients, began + PATIENCE_S, signal_once)
    return server.process.wait(PATIENCE_S)


def main() -> int:
    """Run it and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-grammars", action="store_true", help="leave out the grammars that are hard to compile")
    text = f"seconds that an answer may take while the server works for half of it [{SLOWEST_HEALTH_S}]"
    parser.add_argument("--slowest-health", type=float, default=SLOWEST_HEALTH_S, metavar="SECONDS", help=text)
    parser.add_argument("--online", type=int, metavar="M", help="the server recomputes one of M verify steps")
    args = parser.parse_args()
    slowest = args.slowest_health
    texts = make_texts(args.texts, random.Random(args.seed))
    write_expected(args.model, texts)
    server = Server(args.model, args.online)
    try:
        load, memory = Load(server.url, texts, args.seed, bodies(not args.no_grammars)), []
        seconds = 60 * args.minutes
        end = time.monotonic() + seconds
        silent = asyncio.run(load_and_silence(load, args.clients, server, end, memory))
        metrics, health = wait_idle(server), server.health()
        under_load = dict(load.counts)
        exit_code = asyncio.run(terminate(server, load, args.clients))
    finally:
        server.process.kill()
        server.watch.kill()
    result = {
        "bench": "soak", "model": args.model, "seconds": seconds, "clients": args.clients, "texts": args.texts,
        "outcomes": under_load, "outcomes_with_sigterm": dict(load.counts - collections.Counter(under_load)),
        "wrong": len(load.wrong), "log_errors": len(server.errors()), "exit_code_after_sigterm": exit_code,
        "leaked_blocks": round(metrics["vllm:kv_cache_usage_perc"] * LIMITS["num_blocks"]),
        "answers_5xx": sum(n for name, n in metrics.items() if re.match(r'skipstone_http_responses.*"5\d\d"', name)),
        "preemptions": metrics["vllm:num_preemptions_total"],
        "aborts": metrics['vllm:request_success_total{finished_reason="abort"}'],
        "generated_tokens": metrics["vllm:generation_tokens_total"],
        "tokens_per_verify_step": round(metrics["skipstone_acceptance_length"], 3),
        "silent_connections": silent, "health_answers": len(health), "slowest_health_s": round(max(health)[0], 3),
        "late_health_answers": sum(wall > slowest and busy > slowest / 2 for wall, busy in health),
        "memory_mb": [round(memory[0], 1), round(max(memory), 1), round(memory[-1], 1)],
        "memory_growth": round(growth(memory, statistics.median), 4),
        "peak_growth": round(growth(memory, max), 4),  # of single large bodies: not judged
    }  # fmt: skip
    if args.online:
        result |= {name: metrics[f"skipstone_{name}_total"] for name in ("online_checks", "online_mismatches")}
    must_be_none = ("wrong", "log_errors", "leaked_blocks", "answers_5xx", "late_health_answers")
    faults = [f"{result[name]} {name}" for name in must_be_none if result[name]]
    faults += [] if exit_code == 0 else [f"exit code {exit_code}"]
    faults += [] if under_load.get("text") else ["no text"]
    if seconds >= SHORTEST_RUN_S:
        faults += [] if result["preemptions"] else ["no preemption"]
        faults += ["memory grew"] if result["memory_growth"] > LARGEST_GROWTH else []
    faults += ["online mismatches"] if result.get("online_mismatches") else []
    for line in [*load.wrong[:20], *server.errors()[:20]]:
        print(line)
    for name, value in result.items():
        print(f"{name:26}{value}")
    print("FAULTS: " + ", ".join(faults) if faults else "no faults")
    print(json.dumps(result | {"faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
