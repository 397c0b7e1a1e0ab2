"""Structured output: JSON schemas, regular expressions, choices and Lark grammars as masks over the vocabulary.

llguidance does the parsing; this file knows how a request asks for it and how to ask about drafts without losing state.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipstone.core.request import SamplingParams
from skipstone.errors import RequestError, UnsupportedError

MOST_KEPT = 32
LONGEST_REASON = 300  # characters of the library's explanation that an error shows
LOG = logging.getLogger(__name__)


class TokenGrammar:
    """A matcher and its place in the text."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self, further: list[int]) -> Tensor | None:
        """Which tokens may follow `further`, [V] bool; None when `further` itself leaves the grammar."""
        taken = self._matcher.try_consume_tokens(further) if further else 0
        mask = None
        if taken == len(further):
            mask = torch.from_numpy(_mask(self._matcher)[: self._vocab_size].astype(bool))
        if taken:
            self._matcher.rollback(taken)
        return mask

    def legal(self, further: list[int]) -> int:
        """How many of these tokens, from the first on, stay within the grammar."""
        return int(self._matcher.validate_tokens(further)) if further else 0

    def advance(self, token: int) -> bool:
        """Take over a committed token. False when the grammar forbids it."""
        taken = self._matcher.try_consume_tokens([token]) == 1
        if self._matcher.is_error():
            LOG.warning("a grammar failed, so its text ends: %s", _reason(self._matcher))
        return taken

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Makes grammars for one tokenizer, from any thread. The vocabulary is read at the first use.

    The latest ones are kept: a copy costs next to nothing, the first of its kind up to seconds.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.folder = folder
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._tokenizer: Any = None
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, params: SamplingParams) -> TokenGrammar | None:
        """The grammar that the parameters ask for, if any.

        Raises RequestError naming the field and what is wrong with its value, UnsupportedError without llguidance.
        """
        asked = params.structured_output
        if asked is None:
            return None
        name, value = asked
        key = (name, value if isinstance(value, str) else json.dumps(value))
        with self._lock:
            matcher = self._kept.get(key)
            if matcher is not None:
                self._kept.move_to_end(key)
        if matcher is None:
            matcher = self._make(name, value)
            with self._lock:
                self._kept[key] = matcher
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        return TokenGrammar(matcher.deep_copy(), self.vocab_size)

    def _make(self, name: str, value: str | list[str]) -> Any:
        llguidance = _library(name)
        source = _grammar_source(llguidance, name, value)
        if self._tokenizer is None:
            self._tokenizer = self._load(llguidance, name)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
        probe = matcher
        if not matcher.is_error():
            first = _mask(matcher).nonzero()[0][:1].tolist()  # what the first mask costs, copies need not pay again
            probe = matcher.deep_copy()  # the library's limits show at the first token
            probe.try_consume_tokens(first)
        if probe.is_error():
            raise RequestError(f"{name}={value!r:.80} cannot be used: {_reason(probe)}")
        return matcher

    def _load(self, llguidance: Any, name: str) -> Any:
        file = self.folder / "tokenizer.json"
        if not file.exists() or not self.eos_token_ids:
            missing = "tokenizer.json" if not file.exists() else "eos_token_id"
            raise RequestError(f"{name} needs the model's {missing}, which {self.folder.name} lacks")
        return llguidance.LLTokenizer(str(file), n_vocab=self.vocab_size, eos_token=sorted(self.eos_token_ids))


def _mask(matcher: Any) -> np.ndarray:
    """One byte for each id, 1 where it may follow."""
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")


def _reason(matcher: Any) -> str:
    """What the library says, on one line and without its state."""
    return " ".join(matcher.get_error().partition("<state>")[0].split())[:LONGEST_REASON]


def _library(name: str) -> Any:
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError(f"{name} needs the package llguidance; pip install 'skipstone[structured]'") from None
    return llguidance


def _grammar_source(llguidance: Any, name: str, value: Any) -> str:
    """The library's form of a constraint. Raises RequestError for text that is no JSON, or an unusable schema."""
    if name == "json_schema":
        try:
            json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json_schema={value!r:.80} is not valid JSON: {error}") from None
    try:
        if name == "json_schema":
            # Free whitespace lets a model fill its answer with blanks.
            return str(llguidance.LLMatcher.grammar_from_json_schema(value, defaults={"whitespace_flexible": False}))
        if name == "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(value))
        if name == "grammar":
            value = _as_lark(value)
        if name == "choice":
            # As one terminal: a parser's row holds 2,000 alternatives at most.
            value = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(option) for option in value)
        return str(llguidance.LLMatcher.grammar_from_lark(value))
    except ValueError as error:  # text that is no Unicode raises a kind of it as well
        raise RequestError(f"{name}={value!r:.80} cannot be used: {error}") from None


def _as_lark(text: str) -> str:
    """A grammar as Lark; GBNF, which other engines take, is translated. Raises ValueError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # the translator raises nothing more specific
        raise ValueError(f"neither Lark nor GBNF: {error}") from None
