"""Makes grammars in a process of its own, so that one that overflows, hangs or fills the memory ends nothing else.

Started by path with a vocabulary; imports nothing of the package, so that it is there in a tenth of a second. A line
[kind, value] in, a line out: {"source": the library's form} of what can be used, else {"error": reason}.
"""

from __future__ import annotations

import json
import math
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
MIB = 1 << 20
# The library recurses once for each rule that a rule leads to. What fits here fits the larger stack behind the trial.
TRIAL_STACK, STACK, WALK_STACK = 64 * MIB, 128 * MIB, MIB  # bytes
MOST_MEMORY = 192 * MIB  # bytes that one grammar may take
LONGEST_S = 2  # seconds of processor time that one grammar may take, and up to one more
SLOW_S = 0.05  # longest that one token may take
WALK = 8  # tokens
LONGEST_REASON = 300  # characters of the library's explanation that an error shows
_stack_size = threading.Lock()


def on_stack(size: int, call: Callable[..., T], *arguments: Any) -> T:
    """What the call returns or raises, made on a stack of so many bytes."""
    result = Future[T]()

    def work() -> None:
        try:
            result.set_result(call(*arguments))
        except BaseException as error:
            result.set_exception(error)

    with _stack_size:
        before = threading.stack_size(size)
        try:
            thread = threading.Thread(target=work, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return result.result()


def reason(matcher: Any) -> str:
    """What the library says, on one line and without its state. Empty where it only says that no token fits."""
    text = matcher.get_error().partition("<state>")[0].partition("<backtrace>")[0]
    return "" if text.startswith("NoExtension") else " ".join(text.split())[:LONGEST_REASON]


def grammar_source(llguidance: Any, kind: str, value: Any) -> str:
    """The library's form of a constraint. Raises ValueError for text that is no JSON or Unicode, or a bad schema."""
    if kind == "json_schema":
        try:
            json.loads(value)
        except ValueError as error:
            raise ValueError(f"not valid JSON: {error}") from None
        except RecursionError:
            raise ValueError("nested too deeply") from None
        # Free whitespace lets a model fill its answer with blanks.
        return str(llguidance.LLMatcher.grammar_from_json_schema(value, defaults={"whitespace_flexible": False}))
    if kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(value))
    if kind == "grammar":
        value = _as_lark(value)
    if kind == "choice":
        # As one terminal: a parser's row holds 2,000 alternatives at most.
        value = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(option) for option in value)
    return str(llguidance.LLMatcher.grammar_from_lark(value))


def _as_lark(text: str) -> str:
    """A grammar as Lark; GBNF, which other engines take, is translated. Raises ValueError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # the translator raises nothing more specific
        raise ValueError(f"neither Lark nor GBNF: {error}") from None


def _try(llguidance: Any, tokenizer: Any, kind: str, value: Any) -> dict[str, str]:
    try:
        source = grammar_source(llguidance, kind, value)
    except ValueError as error:
        return {"error": str(error)}
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
    fault = reason(matcher) if matcher.is_error() else on_stack(WALK_STACK, _walk, matcher)
    return {"error": fault} if fault else {"source": source}


def _walk(matcher: Any) -> str | None:
    """What is wrong with a text of a few random tokens. The library's limits on size show at the first."""
    draw, clock = random.Random(0), 0.0
    first = matcher.compute_bitmask()  # what the first mask costs is paid once
    if not any(first) or matcher.is_error():
        return reason(matcher) or "no text fits it"
    for place in range(WALK):
        begun = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        clock = max(clock, time.thread_time() - begun)
        if not mask or matcher.is_stopped():
            break
        shift = draw.randrange(mask.bit_length())
        token = shift + (mask >> shift & -(mask >> shift)).bit_length() - 1
        begun = time.thread_time()
        matcher.try_consume_tokens([token])
        clock = max(clock, time.thread_time() - begun)
        if clock > SLOW_S:
            return f"one of its first tokens takes {clock * 1000:.0f} ms, more than the {SLOW_S * 1000:.0f} allowed"
        if matcher.is_error():
            return None if place else reason(matcher)
    return None


def _limit(resource_id: int, value: int) -> None:
    resource.setrlimit(resource_id, (value, resource.getrlimit(resource_id)[1]))


def main(file: str, vocab_size: str, eos_token_ids: str) -> None:
    """Answer until the input ends."""
    import llguidance

    ends = json.loads(eos_token_ids)
    tokenizer = llguidance.LLTokenizer(file, n_vocab=int(vocab_size), eos_token=ends)
    print("ready", flush=True)
    for line in sys.stdin:
        with open("/proc/self/statm") as pages:
            used = int(pages.read().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, used + TRIAL_STACK + WALK_STACK + MOST_MEMORY)
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + LONGEST_S)
        answer = on_stack(TRIAL_STACK, _try, llguidance, tokenizer, *json.loads(line))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
