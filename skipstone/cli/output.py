"""What the command line shows: results on standard output, everything else on standard error.

Knows the objects that `LLM` returns. rich is imported only for a terminal.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from skipstone.cli.options import DEFAULT, Settings
from skipstone.config import options_of
from skipstone.core.request import SamplingParams
from skipstone.core.speculation import SpeculationStats
from skipstone.errors import ConfigError

if TYPE_CHECKING:
    from skipstone.cli.prompts import Prompt
    from skipstone.llm import LLM
    from skipstone.outputs import CompletionOutput, RequestOutput

ALWAYS_SHOWN = ("temperature", "max_tokens", "seed")


def note(text: str) -> None:
    """One line for the person, never part of the result."""
    print(text, file=sys.stderr, flush=True)


def show_card(rows: Sequence[tuple[str, str]], title: str) -> None:
    """A table on a terminal, `name: value` lines elsewhere."""
    if not sys.stderr.isatty():
        for name, value in rows:
            note(f"{name}: {value}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows:
        table.add_row(name, value)
    Console(stderr=True, markup=False, highlight=False).print(table)


def sampling_line(settings: Settings) -> str:
    """The sampling parameters that are set or always of interest, and where they come from."""
    parts = []
    for name, option in options_of(SamplingParams).items():
        value, source = settings.values[name], settings.sources[name]
        if name in ALWAYS_SHOWN or value != option.default:
            shown = {"max_tokens": "up to the context length", "seed": "random"}.get(name) if value is None else None
            origin = "" if source == DEFAULT else f" ({source})"
            parts.append(f"{name}={shown or json.dumps(value, ensure_ascii=False)}{origin}")
    return "sampling: " + ", ".join(parts)


def result_object(output: RequestOutput, choice: CompletionOutput, request_id: str, prompt: object) -> dict[str, Any]:
    """The JSON line of one answer."""
    result: dict[str, Any] = {
        "id": request_id,
        "index": choice.index,
        "prompt": prompt,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(choice.token_ids),
    }
    if choice.error is not None:
        result["error"] = choice.error
    if choice.logprobs is not None:
        result["logprobs"] = choice.logprobs
    if choice.speculation is not None:
        stats = choice.speculation
        derived = {"acceptance_length": stats.acceptance_length, "acceptance_rates": stats.acceptance_rates}
        result["speculation"] = msgspec.structs.asdict(stats) | derived
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = output.prompt_logprobs
    return result


def check_writable(target: str, flag: str = "--json") -> None:
    """Find out before the work whether its results can be kept. Raises ConfigError."""
    folder = Path(target).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {target}: the folder {folder} does not exist; make it first")
    if Path(target).is_dir() or not os.access(target if Path(target).exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {target} cannot be written; name another file, or - for standard output")


@contextmanager
def writing(target: str, flag: str = "--json") -> Iterator[None]:
    """Turn what goes wrong while a file is written into a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {target} cannot be written: {error.strerror or error}; name another file") from None


class Results:
    """Finished answers in the order of their prompts: `target` is a file, - (standard output), or None for plain text.

    A file gets each answer as soon as those before it are there. At the end of the block, an interrupt's too, whatever
    is finished and not yet written follows; standard output gets all of it then, apart from a progress bar.
    """

    def __init__(self, target: str | None, prompts: Sequence[Prompt], headings: bool) -> None:
        self._target = target
        self._prompts = prompts
        self._headings = headings
        self._ready: dict[int, RequestOutput] = {}
        self._next = 0
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or not issubclass(kind, Exception):  # after an error there is nobody to read them
                for place in sorted(self._ready):
                    self._write(place)
            if self._target in (None, "-"):
                sys.stdout.flush()
        finally:
            if self._file is not None:
                self._file.close()

    def take(self, place: int, output: RequestOutput) -> None:
        """The result of the prompt at that place. Raises ConfigError when the file cannot be written."""
        self._ready[place] = output
        while self._target not in (None, "-") and self._next in self._ready:
            self._write(self._next)
            self._next += 1

    def _write(self, place: int) -> None:
        output, prompt = self._ready.pop(place), self._prompts[place]
        if self._target is None:
            print(_text(output, prompt, self._headings))
            return
        given = prompt.text if prompt.text is not None else prompt.token_ids or prompt.messages
        objects = [result_object(output, choice, prompt.request_id, given) for choice in output.outputs]
        lines = b"".join(msgspec.json.encode(item) + b"\n" for item in objects)
        if self._target == "-":
            sys.stdout.write(lines.decode())
            return
        with writing(self._target):
            if self._file is None:  # not before, so that a run without results leaves an older file alone
                self._file = Path(self._target).open("wb", buffering=0)  # noqa: SIM115 (closed at exit)
            while lines:
                lines = lines[self._file.write(lines) :]


def _text(output: RequestOutput, prompt: Prompt, headings: bool) -> str:
    """The answers as plain text, with a heading above each where there are several."""
    parts = []
    for choice in output.outputs:
        number = f"{prompt.request_id}.{choice.index}" if len(output.outputs) > 1 else prompt.request_id
        parts += [f"== {number}: {prompt.heading}"] if headings else []
        parts.append(choice.text)
    return "\n".join(parts)


def cut_short(llm: LLM, outputs: Sequence[RequestOutput]) -> str | None:
    """A remark when answers ended at a limit and not by themselves: at which, and what raises it."""
    longest = llm.engine.caches.max_model_len
    choices = [(output, choice) for output in outputs for choice in output.outputs]
    cut = [(output, choice) for output, choice in choices if choice.finish_reason == "length"]
    if not cut:
        return None
    full = sum(len(output.prompt_token_ids) + len(choice.token_ids) >= longest for output, choice in cut)
    what = "the answer" if len(choices) == 1 else f"{len(cut)} of {len(choices)} answers"
    parts = ["--max-tokens raises it"] if full < len(cut) else []
    if full:
        where = "that is" if full == len(cut) else f"for {full} that is"
        parts.append(f"{where} max_model_len={longest}, prompt included: {llm.engine.caches.advice}")
    return f"{what} ended at the length limit (finish_reason length); {'; '.join(parts)}"


def speculation_line(stats: SpeculationStats) -> str:
    """Acceptance in words: mean tokens per verify step, then the share of drafts kept at each position."""
    if not stats.steps:
        return "no draft was verified"
    rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rates)
    length = f"{stats.acceptance_length:.2f} tokens per verify step"
    text = f"{length}; {stats.accepted} of {stats.drafted} drafts accepted, by position {rates}"
    return "SIMULATED acceptance, the text means nothing: " + text if stats.simulated else text


def stats_rows(
    stats: Mapping[str, float], outputs: Sequence[RequestOutput], proposer: str | None
) -> list[tuple[str, str]]:
    """What --stats shows. Rates per request are means over the requests; the total divides by the engine's time."""
    seconds, steps = max(stats["seconds"], 1e-9), int(stats["steps"])
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    produced = int(stats["output_tokens"])
    prefill, decode = [], []
    for output in outputs:
        first, total = output.metrics.first_token_s or 0.0, output.metrics.total_s or 0.0
        longest = max(len(choice.token_ids) for choice in output.outputs)
        if first > 0:
            prefill.append((len(output.prompt_token_ids) - output.num_cached_tokens) / first)
        if longest > 1 and total > first:
            decode.append((longest - 1) / (total - first))
    rates = {"prefill, per request": prefill, "decode, per request": decode}
    drafts = [choice.speculation for output in outputs for choice in output.outputs if choice.speculation is not None]
    speculation = functools.reduce(SpeculationStats.plus, drafts) if drafts else None
    used, blocks = int(stats["cache_blocks_used"]), int(stats["cache_blocks_total"])
    return [
        ("prompt tokens", f"{prompt_tokens}, of which {int(stats['prefix_hit_tokens'])} came from the prefix cache"),
        ("output tokens", f"{produced} in {seconds:.2f} s: {produced / seconds:.1f} tokens/s"),
        *((name, f"{sum(values) / len(values):.1f} tokens/s") for name, values in rates.items() if values),
        ("steps", f"{steps}, {seconds / max(steps, 1) * 1e3:.1f} ms each"),
        *([("speculation", f"{proposer}: {speculation_line(speculation)}")] if speculation else []),
        ("preemptions", f"{int(stats['preemptions'])}"),
        ("cache blocks in use", f"{used} of {blocks}"),
    ]
