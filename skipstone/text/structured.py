"""Structured output: JSON schemas, regular expressions, choices and Lark grammars as masks over the vocabulary.

llguidance does the parsing; this file knows how a request asks for it, how to ask about drafts without losing state,
and how to keep from the engine what the library cannot bear.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipstone.core.request import SamplingParams
from skipstone.errors import RequestError, UnsupportedError, needing
from skipstone.text import grammar_trial
from skipstone.text.grammar_trial import LONGEST_S, STACK, on_stack, reason

MOST_KEPT = 32
LONGEST_TEXT = 256 * 1024  # bytes of a schema, an expression, a grammar or all choices
LONGEST_WAIT_S = 15.0  # for a trial, however little processor time it gets
LONGEST_START_S = 60.0
# Processor time of the matcher: what one question may take on the average, and what all may take beyond that.
USUAL_S, EXTRA_S = 0.002, 0.05


class Made:
    """A matcher at its beginning, which nobody moves."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher


class TokenGrammar:
    """A matcher and its place in the text."""

    def __init__(self, made: Made, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.failure: str | None = None
        """Why the text cannot go on, where that is the matcher's fault."""
        self._made = made  # so that a copy of the request finds it
        self._matcher = made.matcher.deep_copy()
        self._vocab_size = vocab_size
        self._ends = sorted(eos_token_ids)
        self._left = EXTRA_S

    def allowed(self, further: list[int]) -> Tensor | None:
        """Which tokens may follow `further`, [V] bool; None when `further` itself leaves the grammar."""
        begun = time.thread_time()
        taken = self._matcher.try_consume_tokens(further) if further else 0
        mask = None
        if taken == len(further):
            mask = torch.from_numpy(_mask(self._matcher)[: self._vocab_size].astype(bool))
            if not self._matcher.is_accepting():
                mask[self._ends] = False  # the library takes one that has a text for that text, and then refuses it
        if taken:
            self._matcher.rollback(taken)
        self._note(begun)
        return mask if mask is None or self.failure is None else torch.zeros_like(mask)

    def legal(self, further: list[int]) -> int:
        """How many of these tokens, from the first on, stay within the grammar."""
        begun = time.thread_time()
        count = int(self._matcher.validate_tokens(further)) if further else 0
        self._note(begun)
        return count

    def advance(self, token: int) -> bool:
        """Take over a committed token. False when the grammar forbids it."""
        begun = time.thread_time()
        taken = self.failure is None and self._matcher.try_consume_tokens([token]) == 1
        self._note(begun)
        return taken

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return bool(self._matcher.is_stopped())

    def _note(self, begun: float) -> None:
        """Give the matcher up when it failed, or keeps the engine waiting."""
        self._left = min(self._left + USUAL_S - (time.thread_time() - begun), EXTRA_S)
        if self.failure is None and self._matcher.is_error():
            self.failure = reason(self._matcher) or None
        elif self.failure is None and self._left < 0:
            self.failure = f"its tokens take more than {USUAL_S * 1000:g} ms each; make it smaller or less ambiguous"


class Trial:
    """A process that makes every grammar first: see grammar_trial."""

    def __init__(self, file: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        arguments = (str(file), str(vocab_size), json.dumps(sorted(eos_token_ids)))
        # Not from this folder: its modules would hide others of the same names.
        self._command = [sys.executable, "-P", grammar_trial.__file__, *arguments]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False

    def start(self) -> None:
        """Begin to start the process if there is none."""
        with self._lock:
            self._running()

    def __call__(self, kind: str, value: str | list[str]) -> dict[str, str]:
        """What the process says of a constraint: its source, or an error."""
        with self._lock:
            process = self._running()
            try:
                self._is_ready = self._is_ready or bool(_ask(process, "", LONGEST_START_S))
                if not self._is_ready:
                    raise UnsupportedError(f"{kind} needs a process of its own, which does not start: {self._command}")
                answer = _ask(process, json.dumps([kind, value]) + "\n", LONGEST_WAIT_S)
            except BaseException:
                self._stop()
                raise
            if answer:
                found: dict[str, str] = json.loads(answer)
                return found
            late = process.wait() in (-signal.SIGKILL, -signal.SIGXCPU)
            self._stop()
            why = f"takes more than {LONGEST_S} s to prepare" if late else "overflows the stack or the memory"
            return {"error": f"it {why}; make it smaller, or nest it less deeply"}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
                env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # an arena would count as the grammar's memory
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
        return self._process

    def _stop(self) -> None:
        self._finalizer()
        self._process, self._is_ready = None, False


def _ask(process: subprocess.Popen[bytes], question: str, seconds: float) -> bytes:
    """The next line of a process; none when it ends, or has to be ended because time is over."""
    assert process.stdin is not None and process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        process.stdin.write(question.encode())
        process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return b""
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(OSError):  # what was not sent cannot be sent any longer
        process.communicate()


@lru_cache(maxsize=2)
def _trial(file: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> Trial:
    """Shared by all who write with the same vocabulary."""
    return Trial(file, vocab_size, eos_token_ids)


class GrammarCompiler:
    """Makes grammars for one tokenizer, from any thread. The vocabulary is read at the first use.

    The latest ones are kept: a copy costs next to nothing, the first of its kind up to seconds.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.folder = folder
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._tokenizer: Any = None
        self._known: weakref.WeakValueDictionary[tuple[str, str], Made] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[tuple[str, str], Made] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, params: SamplingParams) -> TokenGrammar | None:
        """The grammar that the parameters ask for, if any. Raises what `prepare` raises."""
        made = self.prepare(params)
        return None if made is None else TokenGrammar(made, self.vocab_size, self.eos_token_ids)

    def prepare(self, params: SamplingParams, make: bool = True) -> Made | None:
        """What `compile` copies, not made anew while somebody has it. Without `make`: None for one that is not there.

        Raises RequestError naming the field and what is wrong with its value, UnsupportedError without llguidance.
        """
        asked = params.structured_output
        if asked is None:
            return None
        name, value = asked
        key = (name, value if isinstance(value, str) else json.dumps(value))
        with self._lock:
            made = self._known.get(key)
        if made is None and make:
            made = Made(self._make(name, value))
        if made is not None:
            with self._lock:
                self._known[key] = self._kept[key] = made
                self._kept.move_to_end(key)
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        return made

    def _make(self, name: str, value: str | list[str]) -> Any:
        with needing("structured", name, UnsupportedError):
            import llguidance
        size = sum(len(text.encode(errors="replace")) for text in ([value] if isinstance(value, str) else value))
        if size > LONGEST_TEXT:
            raise RequestError(
                f"{name}={value!r:.80} cannot be used: it has {size} bytes, and {LONGEST_TEXT} are the most; "
                "make it smaller"
            )
        file = self.folder / "tokenizer.json"
        if not file.exists() or not self.eos_token_ids:
            missing = "tokenizer.json" if not file.exists() else "eos_token_id"
            raise RequestError(f"{name} needs the model's {missing}, which {self.folder.name} lacks")
        trial = _trial(file, self.vocab_size, self.eos_token_ids)
        trial.start()  # reads the vocabulary at the same time
        if self._tokenizer is None:
            ends = sorted(self.eos_token_ids)
            try:
                self._tokenizer = llguidance.LLTokenizer(str(file), n_vocab=self.vocab_size, eos_token=ends)
            except ValueError as error:
                raise UnsupportedError(f"{name} cannot be used with this tokenizer.json: {error}") from None
        found = trial(name, value)
        if "error" in found:
            raise RequestError(f"{name}={value!r:.80} cannot be used: {found['error']}")
        matcher = on_stack(STACK, partial(llguidance.LLMatcher, log_level=0), self._tokenizer, found["source"])
        _mask(matcher)  # what the first mask costs, copies need not pay again
        return matcher


def _mask(matcher: Any) -> np.ndarray:
    """One byte for each id, 1 where it may follow."""
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
