"""Committed tokens to text as they arrive: characters that come in pieces, stop strings, hidden tokens.

Does not know requests, queues or HTTP.
"""

from __future__ import annotations

import codecs
import itertools

from skipstone.core.request import SamplingParams
from skipstone.text.tokenizer import Tokenizer


class Detokenizer:
    """Tokens to text, one at a time, each at the same cost whatever came before.

    Special tokens that are hidden, and ids above the vocabulary, are no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.hidden = tokenizer.special_names if skip_special_tokens else {}
        self.length = 0
        """Characters so far."""
        self.begin = 0
        """Place of the character that the latest token begins or goes on with."""
        self._bytes_of = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that are whole with this token. Bytes that can form none any longer are U+FFFD."""
        content = b"" if token_id in self.hidden else self._bytes_of(token_id)
        text = self._decoder.decode(content[:1])
        ended = bool(content) and not self._decoder.getstate()[0]  # its first byte is the last of a character
        self.begin = self.length + len(text) - ended
        text += self._decoder.decode(content[1:])
        self.length += len(text)
        return text

    def finish(self) -> str:
        """An incomplete character at the end, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class TextStream:
    """The text of one choice: takes the committed tokens run by run, gives the text that is certain.

    Held back are an incomplete character, and an ending that may turn out to begin a stop string. All text given out
    adds up to the decoded tokens, cut at the first stop string, however the tokens were split into runs.

    The stop string that is complete first ends the text, whatever its place in the list; of two that are complete at
    the same character, the longer one. It must be completed by a token after the first `min_tokens`. The name of a
    special token in a stop string also stands for the token itself where that is hidden.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = [_Stop(list(stop), frozenset()) for stop in params.stop_strings]
        if params.skip_special_tokens:
            parts = [tokenizer.split_at_special_tokens(stop) for stop in params.stop_strings]
            self._stops += [_Stop(symbols, names) for symbols, names in parts if names]
        self._held = ""  # what may begin a stop string
        self._given: list[str] = []
        self.num_tokens = 0
        """How many of the pushed tokens belong to the text; the one that completes a stop string is the last."""
        self.stopped_by: str | None = None
        """The stop string that ended the text."""

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._given)

    def push(self, token_ids: list[int]) -> str:
        """Add a run of committed tokens; return the newly certain text. Tokens after a stop string are ignored."""
        first = len(self._given)
        for token in token_ids:
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            self._add(self._detokenizer.push(token), self._detokenizer.hidden.get(token))
        return "".join(self._given[first:])

    def finish(self) -> str:
        """Return what was held back, an incomplete character as U+FFFD. To be called when no more tokens come."""
        first = len(self._given)
        if self.stopped_by is None:
            self._add(self._detokenizer.finish())
        self._give(len(self._held))
        return "".join(self._given[first:])

    def _add(self, text: str, name: str | None = None) -> None:
        """Add a token's text, or a hidden one's name, and give out what no stop string can begin in any more."""
        end = len(self._held)
        self._held += text
        for symbol in text if name is None else [name]:
            end = min(end + 1, len(self._held))
            complete = [stop for stop in self._stops if stop.push(symbol, name is not None)]
            if complete and self.num_tokens > self._params.min_tokens:
                longest = max(complete, key=lambda stop: stop.width)
                self.stopped_by = longest.text
                self._held = self._held[: end if self._params.include_stop_str_in_output else end - longest.width]
                self._give(len(self._held))
                return
        begun = 0 if self._params.include_stop_str_in_output else max((stop.begun for stop in self._stops), default=0)
        self._give(len(self._held) - begun)

    def _give(self, end: int) -> None:
        self._given.append(self._held[:end])
        self._held = self._held[end:]


class _Stop:
    """A stop string, looked for symbol by symbol in a text: characters, and names of hidden tokens.

    `names`: the symbols that are such names; other hidden tokens are passed over. A symbol costs the same, on average,
    however long the stop string is.
    """

    def __init__(self, symbols: list[str], names: frozenset[str]) -> None:
        self.text = "".join(symbols)
        self._symbols, self._names = symbols, names
        self._widths = [0, *itertools.accumulate(symbol not in names for symbol in symbols)]
        self._borders = [0] * len(symbols)  # of each beginning: the length of the longest shorter one that it ends with
        for i in range(1, len(symbols)):
            self._borders[i] = self._longer(self._borders[i - 1], symbols[i])
        self._matched = 0

    @property
    def width(self) -> int:
        """Characters of the text that a match takes up."""
        return self._widths[-1]

    @property
    def begun(self) -> int:
        """Characters at the end of the text that may begin a match."""
        return self._widths[self._matched]

    def push(self, symbol: str, hidden: bool) -> bool:
        """Whether this symbol completes a match."""
        if hidden and symbol not in self._names:
            return False
        self._matched = self._longer(self._matched, symbol)
        complete = self._matched == len(self._symbols)
        if complete:
            self._matched = self._borders[-1]
        return complete

    def _longer(self, matched: int, symbol: str) -> int:
        """How many symbols match at the end of the text when one more comes."""
        while matched and self._symbols[matched] != symbol:
            matched = self._borders[matched - 1]
        return matched + (self._symbols[matched] == symbol)
