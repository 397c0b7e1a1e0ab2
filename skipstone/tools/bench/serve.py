"""`skipstone bench serve`: load on an OpenAI server, and how fast it answers."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec

from skipstone.cli.options import Command, Settings
from skipstone.cli.output import check_writable, note, writing
from skipstone.cli.prompts import read_file
from skipstone.errors import ConfigError, needing
from skipstone.models.locate import shipped_prompts
from skipstone.server.config import ServerConfig
from skipstone.tools.check.command import natural, positive, seconds

DEFAULT_URL = "http://127.0.0.1:8000"


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Measure every rate, one after the other; the last line of the output is JSON."""
    with needing("bench", "bench serve"):
        from skipstone.tools.bench import load_report
        from skipstone.tools.bench.load_run import Load, run_load, served_model, spread, warm_up
        from skipstone.tools.bench.load_stats import parse_goals, summarize, values_of
        from skipstone.tools.progress import Progress
    rates, goals = _rates(args.rates), parse_goals(args.goodput)
    for flag, target in (("--html", args.html), ("--json", args.json)):
        if target is not None:
            check_writable(target, flag)
    prompts = spread(read_file(args.prompts or str(shipped_prompts()), flag="--prompts"), args.num_prompts)
    key = settings.values["api_key"]
    key = key[0] if isinstance(key, list) and key else key or None
    url = args.url.rstrip("/").removesuffix("/v1")
    load = Load(
        url=url,
        key=key,
        model=args.model or served_model(url, key, args.timeout),
        prompts=prompts,
        requests=args.requests,
        seed=args.seed,
        most_at_once=args.max_concurrency,
        timeout=args.timeout,
        fields=_fields(args),
    )
    asyncio.run(warm_up(load, args.warm_up, len(rates)))
    runs, values = [], []
    with Progress("requests", len(rates) * args.requests) as bar:
        for turn, rate in enumerate(rates):
            bar.say(f"{rate:g} a second")
            samples, seconds = asyncio.run(run_load(load, rate, turn, bar.tick))
            runs.append(summarize(samples, seconds, rate, goals))
            values.append(values_of(samples))
    facts = {"model": load.model, "url": url, "requests": args.requests, "prompts": len(prompts), "seed": args.seed}
    facts |= {"max_concurrency": args.max_concurrency, "body": load.fields, "limits_ms": goals}
    load_report.render(runs)
    if args.html is not None:
        title = f"{load.model}: {args.requests} requests at each rate"
        with writing(args.html, "--html"):
            Path(args.html).write_text(load_report.page(title, facts, runs, values), encoding="utf-8")
        note(f"wrote {args.html}")
    line = json.dumps({"bench": "serve", **facts, "runs": runs})
    if args.json is not None:
        with writing(args.json):
            Path(args.json).write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--rates {text} must list numbers, as in 1,2,inf") from None
    if not all(rate > 0 for rate in rates):
        raise ConfigError(f"--rates {text}: every rate must be above 0; inf sends all at once")
    return rates


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """What stands in every body."""
    fields: dict[str, Any] = {"max_tokens": args.max_tokens}
    if args.temperature is not None:
        fields["temperature"] = args.temperature
    if args.ignore_eos:
        fields["ignore_eos"] = True
    try:
        return fields | (msgspec.json.decode(args.body, type=dict[str, Any]) if args.body else {})
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--body {args.body} must be a JSON object: {error}") from None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is sent")
    add = group.add_argument
    add("--url", default=DEFAULT_URL, metavar="URL", help=f"the server [{DEFAULT_URL}]")
    add("--model", metavar="NAME", help="the model's name there [the first that the server names]")
    add(
        "--rates", default="1,inf", metavar="LIST", help="requests per second, a run for each; inf: all at once [1,inf]"
    )
    add("--requests", type=positive, default=100, metavar="N", help="requests of a run [100]")
    add("--max-concurrency", type=positive, metavar="N", help="most requests on their way; others wait to be sent")
    add("--prompts", metavar="FILE", help=".txt or .jsonl as for generate [the shipped prompts]")
    add("--num-prompts", type=positive, metavar="N", help="that many, spread over the file [all]")
    add("--max-tokens", type=positive, default=128, metavar="N", help="longest answer, in tokens [128]")
    add("--temperature", type=float, metavar="X", help="[the server's default]")
    add("--ignore-eos", action="store_true", help="answers are as long as --max-tokens")
    add("--body", metavar="JSON", help='further fields of every request, as {"speculation": {"k": 0}}')
    add("--seed", type=natural, default=0, metavar="N", help="of arrivals, order of prompts, and answers [0]")
    add("--warm-up", type=natural, default=2, metavar="N", help="requests before, one after the other [2]")
    add("--timeout", type=seconds, default=600.0, metavar="SECONDS", help="for one request [600]")
    group = parser.add_argument_group("what is reported")
    group.add_argument(
        "--goodput", metavar="LIMITS", help="count requests within these, as ttft:200,tpot:40,e2el:3000 (ms)"
    )
    group.add_argument("--html", metavar="FILE", help="write a page with the table and curves")
    group.add_argument("--json", metavar="FILE", help="write the last line's object to a file as well")


COMMAND = Command(
    summary="load on any OpenAI server with Poisson arrivals: latencies, throughput, goodput, acceptance",
    usage="[--url URL] [--rates LIST] [options]",
    options={ServerConfig: ("api_key",)},
    run=run,
    add_arguments=_add_arguments,
)
