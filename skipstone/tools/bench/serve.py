"""`skipstone bench serve`: load on an OpenAI server, and how fast it answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from pathlib import Path
from typing import Any

import msgspec

from skipstone.cli.options import Command, Settings
from skipstone.cli.output import check_writable, note, writing
from skipstone.errors import ConfigError, needing
from skipstone.server.config import ServerConfig
from skipstone.tools.flags import choose_prompts, natural, positive, reals

DEFAULT_URL = "http://127.0.0.1:8000"


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Measure every rate, one after the other; the last line of the output is JSON."""
    with needing("bench", "bench serve"):
        from skipstone.tools.bench import serve_report
        from skipstone.tools.bench.serve_client import Load, run_load, served_model, warm_up
        from skipstone.tools.progress import Progress
    goals = serve_report.parse_goals(args.goodput)
    for flag, target in (("--html", args.html), ("--json", args.json)):
        if target is not None:
            check_writable(target, flag)
    prompts = choose_prompts(args.prompts, args.num_prompts)
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
    asyncio.run(warm_up(load, args.warm_up, len(args.rates)))
    runs, values = [], []
    with Progress("requests", len(args.rates) * args.requests) as bar:
        for turn, rate in enumerate(args.rates):
            bar.say(f"{rate:g} a second")
            samples, seconds = asyncio.run(run_load(load, rate, turn, bar.tick))
            runs.append(serve_report.summarize(samples, seconds, rate, goals))
            values.append(serve_report.values_of(samples))
    facts = {"model": load.model, "url": url, "requests": args.requests, "prompts": len(prompts), "seed": args.seed}
    facts |= {"max_concurrency": args.max_concurrency, "body": load.fields, "limits_ms": goals}
    serve_report.render(runs)
    if args.html is not None:
        title = f"{load.model}: {args.requests} requests at each rate"
        with writing(args.html, "--html"):
            Path(args.html).write_text(serve_report.page(title, facts, runs, values), encoding="utf-8")
        note(f"wrote {args.html}")
    line = json.dumps({"bench": "serve", **facts, "runs": runs})
    if args.json is not None:
        with writing(args.json):
            Path(args.json).write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


def _rates(text: str) -> list[float]:
    rates = reals("--rates", "1,2,inf")(text)
    if not all(rate > 0 for rate in rates):
        raise ConfigError(f"--rates {text}: every rate must be above 0; inf sends all at once")
    return rates


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """What stands in every body."""
    fields: dict[str, Any] = {"max_tokens": args.max_tokens}
    fields |= {"temperature": args.temperature} if args.temperature is not None else {}
    fields |= {"ignore_eos": True} if args.ignore_eos else {}
    try:
        return fields | (msgspec.json.decode(args.body, type=dict[str, Any]) if args.body else {})
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--body {args.body} must be a JSON object: {error}") from None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is sent").add_argument
    add("--url", default=DEFAULT_URL, metavar="URL", help=f"the server [{DEFAULT_URL}]")
    add("--model", metavar="NAME", help="the model's name there [the first that the server names]")
    rates_help = "requests per second, a run for each; inf: all at once [1,inf]"
    add("--rates", type=_rates, default="1,inf", metavar="LIST", help=rates_help)
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
    add("--timeout", type=_seconds, default=600.0, metavar="SECONDS", help="for one request [600]")
    add = parser.add_argument_group("what is reported").add_argument
    add("--goodput", metavar="LIMITS", help="count requests within these, as ttft:200,tpot:40,e2el:3000 (ms)")
    add("--html", metavar="FILE", help="write a page with the table and curves")
    add("--json", metavar="FILE", help="write the last line's object to a file as well")


COMMAND = Command(
    summary="load on any OpenAI server with Poisson arrivals: latencies, throughput, goodput, acceptance",
    usage="[--url URL] [--rates LIST] [options]",
    options={ServerConfig: ("api_key",)},
    run=run,
    add_arguments=_add_arguments,
)
