"""Text on both sides of the engine: prompts and chats to token ids, committed tokens back to text as they arrive.

Knows the tokenizer files of a model folder. Does not know requests, queues or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import msgspec
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skipstone.core.request import SamplingParams
from skipstone.errors import CheckpointError, RequestError
from skipstone.serve.messages import plain_messages

BUILT_IN = {"deepseek_v32": "deepseek_v32.jinja"}  # model type -> chat template
MANY_TOKENS = 1000
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoding gives for the first bytes of a character


class Tokenizer:
    """The tokenizer of a model folder: `tokenizer.json`, `tokenizer_config.json` and the chat template.

    Raises CheckpointError when `tokenizer.json` is missing, or when a file is malformed. A chat template is needed
    by `encode_chat` only, and compiled there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._tokenizer = _load_tokenizer(self.folder / "tokenizer.json")
        self._config = _load_config(self.folder / "tokenizer_config.json")
        self.bos_token = _token_content(self._config.get("bos_token"))
        self.eos_token = _token_content(self._config.get("eos_token"))
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        self.context: int | None = None
        """Most tokens that are of use; text that must have more is refused before any work is done on it."""

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, or more where the vocabulary spells bytes."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id. The model may have more ids; they decode to nothing."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt, special tokens written in the text included.

        Without `add_special_tokens` the text alone, as for a piece of a longer text.

        With `add_bos_token` in tokenizer_config.json the ids start with one begin-of-text token (true) or with none
        that the text does not contain (false); without the key the tokenizer's own post-processor decides. Raises
        RequestError for text that is not valid Unicode, or longer than any that `context` tokens can hold.
        """
        token_ids = self._encode(text, add_special_tokens)
        if not add_special_tokens:
            return token_ids
        add_bos = self._config.get("add_bos_token")
        if add_bos is None or self.bos_token_id is None:
            return token_ids
        if add_bos:
            return token_ids if token_ids[:1] == [self.bos_token_id] else [self.bos_token_id, *token_ids]
        plain = self._encode(text, add_special_tokens=False)
        added = token_ids[:1] == [self.bos_token_id] and plain[:1] != [self.bos_token_id]
        return token_ids[1:] if added else token_ids

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that are no text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat, as `render_chat` words it."""
        text = self.render_chat(messages, add_generation_prompt, tools, continue_final_message, variables)
        return self._encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A chat as the model's template renders it, which alone decides on special tokens.

        The messages are what `plain_messages` takes. `continue_final_message`: the text ends with the last message's
        content, to be gone on with. `variables`: what else the template may look at. Raises RequestError for a
        malformed message (with its index), a missing template, or an error in the template.
        """
        plain = plain_messages(messages)
        given = {
            "messages": plain,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "bos_token": self.bos_token or "",
            "eos_token": self.eos_token or "",
            "tools": list(tools) if tools else None,
            "documents": None,
        }
        spelled = len(msgspec.json.encode(given["tools"]).decode()) if tools else 0
        self._check_length(spelled + sum(len(message["content"]) for message in plain))
        taken = given.keys() & (variables or {}).keys()
        if taken:
            raise RequestError(f"chat_template_kwargs has {min(taken)!r}, which has a field of its own; use that")
        try:
            text = self._template.render(**given, **(variables or {}))
            return _cut_behind(text, plain[-1]["content"]) if continue_final_message else text
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template of {self.folder} refused the messages: {error}") from error

    def template_takes(self, name: str) -> bool:
        """Whether the chat template makes use of something it is given. Raises RequestError as `render_chat` does."""
        tree = self._template.environment.parse(self.template_source)
        return name in jinja2.meta.find_undeclared_variables(tree)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that form no character become U+FFFD; ids above the vocabulary are skipped."""
        if len(token_ids) > MANY_TOKENS:  # `decode` would hold the GIL all the while
            return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token as it reads in the middle of a text, leading space included; special tokens by name."""
        alone = self.decode([token_id], skip_special_tokens=False)
        # Some decoders strip the space before the first word, so the second of two equal tokens is looked at.
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(alone) :] if twice.startswith(alone) else alone

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _check_length(self, characters: int) -> None:
        most = characters if self.context is None else self.context * self.longest_token
        if characters > most:
            raise RequestError(
                f"the text has {characters} characters, but the context holds {self.context} tokens of at most "
                f"{self.longest_token}; shorten it"
            )

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self._check_length(len(text))
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode at character {error.start}; remove it") from error
        # `encode` would hold the GIL all the while, and a server's other threads with it.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    @cached_property
    def _template(self) -> jinja2.Template:
        """The compiled chat template. Raises RequestError when the model has none, or when it cannot be compiled."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = _format_now
        try:
            return environment.from_string(self.template_source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template of {self.folder} has an error in line {error.lineno}: {error.message}"
            ) from error

    @property
    def template_source(self) -> str:
        """The chat template's text, ours for models that come without. Raises RequestError when there is none."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        source = self._config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
        if not isinstance(source, str):
            source = _built_in_template(self.folder)
        if source is None:
            raise RequestError(
                f"{self.folder} has no chat template; add chat_template.jinja to the folder, or send a plain prompt"
            )
        return source


class TextStream:
    """Detokenizer of one choice: takes the committed tokens run by run, gives the text that is certain.

    Held back are an incomplete character, and an ending that may turn out to begin a stop string. All text given out
    adds up to the decoded tokens, cut at the first stop string, however the tokens were split into runs.

    The stop string that is complete first ends the text, whatever its place in the list; of two that are complete at
    the same character, the longer one. It must be completed by a token after the first `min_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._stop_strings = params.stop_strings
        self._text = ""  # everything decoded, cut at the stop string
        self._num_emitted = 0  # characters of it given out
        self._context: list[int] = []  # the tokens of the last piece: spaces depend on what stands before
        self._context_text = ""
        self._pending: list[int] = []  # tokens after them, without text yet: they end within a character
        self.num_tokens = 0
        """How many of the pushed tokens belong to the text; the one that completes a stop string is the last."""
        self.stopped_by: str | None = None
        """The stop string that ended the text."""

    @property
    def text(self) -> str:
        """All text given out so far."""
        return self._text[: self._num_emitted]

    def push(self, token_ids: list[int]) -> str:
        """Add a run of committed tokens; return the newly certain text. Tokens after a stop string are ignored."""
        for token in token_ids:
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            self._pending.append(token)
            self._append(self._decode_pending(final=False))
        return self._emit(len(self._text) - self._num_held())

    def finish(self) -> str:
        """Return what was held back, an incomplete character as U+FFFD. To be called when no more tokens come."""
        if self.stopped_by is None and self._pending:
            self._append(self._decode_pending(final=True))
        return self._emit(len(self._text))

    def _decode_pending(self, final: bool) -> str:
        """Text of the pending tokens; nothing while they end within a character, unless they are the final ones."""
        skip = self._params.skip_special_tokens
        text = self._tokenizer.decode(self._context + self._pending, skip)
        incomplete = text.endswith(UNFINISHED) or len(text) <= len(self._context_text)
        if incomplete and not final:
            return ""
        if text.startswith(self._context_text):
            piece = text[len(self._context_text) :]
        else:  # after invalid bytes some decoders take back the characters before them, which were given out already
            piece = self._tokenizer.decode(self._pending, skip)
        self._context, self._pending = self._pending, []
        self._context_text = self._tokenizer.decode(self._context, skip)
        return piece

    def _append(self, piece: str) -> None:
        """Add decoded text and cut it at a stop string that ends within it."""
        start = len(self._text)
        self._text += piece
        if not piece or self.num_tokens <= self._params.min_tokens:
            return
        matches = []  # (end, begin, stop string)
        for stop in self._stop_strings:
            begin = self._text.find(stop, max(0, start - len(stop) + 1))
            if begin >= 0:
                matches.append((begin + len(stop), begin, stop))
        if matches:
            end, begin, self.stopped_by = min(matches)
            self._text = self._text[: end if self._params.include_stop_str_in_output else begin]

    def _num_held(self) -> int:
        """Length of the longest ending of the text that begins a stop string."""
        if not self._stop_strings or self.stopped_by is not None or self._params.include_stop_str_in_output:
            return 0
        longest = max(len(stop) for stop in self._stop_strings) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            ending = self._text[-length:]
            if any(len(stop) > length and stop.startswith(ending) for stop in self._stop_strings):
                return length
        return 0

    def _emit(self, end: int) -> str:
        piece = self._text[self._num_emitted : end]
        self._num_emitted = end
        return piece


def _load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing; copy it from where the model comes from, or write it with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{path} cannot be read: {error}; download it again") from error
    tokenizer.no_truncation()  # left in the file by training; a prompt must never be cut or filled up silently
    tokenizer.no_padding()
    return tokenizer


def _built_in_template(folder: Path) -> str | None:
    """The template for models of this kind, if we have one."""
    model_type = _load_config(folder / "config.json").get("model_type")
    if model_type not in BUILT_IN:
        return None
    return files("skipstone.serve").joinpath("templates", BUILT_IN[model_type]).read_text(encoding="utf-8")


def _load_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; download it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}, expected an object; download it again")
    return config


def _token_content(entry: Any) -> str | None:
    """A special token of tokenizer_config.json, which is a string or an object with `content`."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _cut_behind(text: str, content: Any) -> str:
    """The text up to the end of the last message's content."""
    last = content.rstrip() if isinstance(content, str) else ""
    begin = text.rfind(last) if last else -1
    if begin < 0:
        raise ValueError("the last message has no text that could be gone on with")
    return text[: begin + len(last)]


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as prompts contain it: jinja's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _format_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)
