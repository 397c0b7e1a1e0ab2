"""What the server adds to the engine: the same prompts by `LLM.generate`, and as streams over HTTP.

    python bench/serve_overhead.py [--model demo] [--clients 16] [--tokens 96] [--rounds 5]

The engine alone and the server run in turn, in processes of their own with one thread for products. Counted are seconds
by the clock, and the processor time of the process that computes, which other programs on the machine disturb less. The
clients' own work is not counted, but takes time from a server that has no second core. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "checkpoints" / "prompts.jsonl"
OFFLINE = """
import json, sys, time
from skipstone import LLM, SamplingParams
model, count, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
llm = LLM(model, prefix_caching=False, max_num_seqs=count)
params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
for line in sys.stdin:
    start, used = time.perf_counter(), time.process_time()
    outputs = llm.generate(json.loads(line), params, progress=False)
    times = time.perf_counter() - start, time.process_time() - used
    print(json.dumps([*times, [output.outputs[0].text for output in outputs]]), flush=True)
"""


class Offline:
    """The engine in a process that takes lists of prompts."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [sys.executable, "-c", OFFLINE, args.model, str(args.clients), str(args.tokens)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
        )

    def run(self, prompts: list[str]) -> tuple[float, float, list[str]]:
        """Seconds, processor seconds and texts."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(prompts) + "\n")
        self.process.stdin.flush()
        seconds, used, texts = json.loads(self.process.stdout.readline())
        return seconds, used, texts


class Server:
    """The server, and as many clients as there are prompts."""

    def __init__(self, args: argparse.Namespace) -> None:
        options = ["--port", "0", "--log-format", "json", "--no-prefix-caching", "--max-num-seqs", str(args.clients)]
        command = [sys.executable, "-m", "skipstone", "serve", args.model, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
        assert self.process.stderr is not None
        self.url = next(json.loads(line)["url"] for line in self.process.stderr if line.startswith("{"))
        self.tokens, self.model = args.tokens, args.model

    def run(self, prompts: list[str]) -> tuple[float, float, list[str]]:
        """Seconds, processor seconds and texts."""
        used = self._processor_seconds()
        seconds, texts = asyncio.run(self._streams(prompts))
        return seconds, self._processor_seconds() - used, texts

    def _processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def _streams(self, prompts: list[str]) -> tuple[float, list[str]]:
        async with openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0) as client:

            async def read(prompt: str) -> str:
                options: dict[str, Any] = {
                    "max_tokens": self.tokens,
                    "temperature": 0,
                    "extra_body": {"ignore_eos": True},
                }
                stream = await client.completions.create(model=self.model, prompt=prompt, stream=True, **options)
                return "".join([event.choices[0].text async for event in stream])

            await client.models.list()  # the client's own start is no part of it
            start = time.perf_counter()
            texts = await asyncio.gather(*map(read, prompts))
            return time.perf_counter() - start, list(texts)


def environment() -> dict[str, str]:
    """One thread for products, and the package of this tree."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    lines = PROMPTS.read_text().splitlines()[: args.clients]
    prompts = [json.loads(line)["prompt"][:600] for line in lines]
    kinds: dict[str, Any] = {"engine": Offline(args), "server": Server(args)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    texts = {}
    try:
        for i in range(args.rounds + 1):
            for name in sorted(kinds, reverse=bool(i % 2)):
                seconds, used, texts[name] = kinds[name].run(prompts)
                if i:  # the first turn warms up
                    found[name].append((seconds, used))
                    print(f"{name}: {seconds:.2f} s, {used:.2f} s of a processor", flush=True)
    finally:
        for kind in kinds.values():
            kind.process.terminate()
            kind.process.wait()
    assert texts["engine"] == texts["server"], "the texts differ"
    result: dict[str, Any] = {"clients": args.clients, "tokens": args.tokens, "rounds": args.rounds}
    for place, what in enumerate(("seconds", "processor_seconds")):
        medians = {name: statistics.median(values[place] for values in found[name]) for name in kinds}
        result |= {f"{name}_{what}": round(value, 3) for name, value in medians.items()}
        result[f"overhead_{what}"] = round(medians["server"] / medians["engine"] - 1, 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
