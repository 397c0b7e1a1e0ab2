"""Prompts and chats to token ids, and what each token stands for.

Knows the tokenizer files of a model folder. Does not know requests, queues or HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import datetime
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import msgspec
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders

from skipstone.errors import CheckpointError, RequestError
from skipstone.text.messages import plain_messages

BUILT_IN = {"deepseek_v32": "deepseek_v32.jinja"}  # model type -> chat template
MANY_TOKENS = 1000
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoding gives for bytes that are a part of a character
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# The characters by which byte-level vocabularies write bytes: printable ones themselves, the rest from U+0100 on.
BYTE_LEVEL = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(byte for byte in range(0x100) if byte not in PRINTABLE)
}
CURSOR = "\U0010fffd"  # of private use: put into a content to see where a template writes it
THOUGHT = re.compile(r"<[^<>/\s]*think(?:ing)?>\s*$")  # begins, at the end of a prompt
TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)


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
        self.token_bytes = cache(self._token_bytes)
        """The bytes of a token in the middle of a text, leading space included; none for an id above the vocabulary.

        Those of all its tokens, one behind the other, are a text. A token may begin and end within a character.
        """
        self.context: int | None = None
        """Most tokens that are of use; text that must have more is refused before any work is done on it."""
        self.advice = "or use a model with a longer one"

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
        token_ids, add_bos = self._encode(text, add_special_tokens), self._config.get("add_bos_token")
        if not add_special_tokens or add_bos is None or self.bos_token_id is None:
            return token_ids
        if add_bos:
            return token_ids if token_ids[:1] == [self.bos_token_id] else [self.bos_token_id, *token_ids]
        plain = self._encode(text, add_special_tokens=False)
        added = token_ids[:1] == [self.bos_token_id] and plain[:1] != [self.bos_token_id]
        return token_ids[1:] if added else token_ids

    @cached_property
    def special_names(self) -> dict[int, str]:
        """The tokens that are no text, and how they are written."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that are no text."""
        return {name: token_id for token_id, name in self.special_names.items()}

    def split_at_special_tokens(self, text: str) -> tuple[list[str], frozenset[str]]:
        """The characters of a text, but each special token named in it as one; and which were named."""
        parts = self._special_pattern.split(text)
        symbols = [symbol for i, part in enumerate(parts) for symbol in ([part] if i % 2 else part)]
        return symbols, frozenset(parts[1::2])

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return special_pattern(self.special_tokens)

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
        malformed message (with its index), a variable that the template does not look at, a missing template, or an
        error in the template.
        """
        plain = plain_messages(messages)
        if continue_final_message:
            last = plain[-1]
            if not last["content"] or "tool_calls" in last:
                has = "tool_calls, which end it" if "tool_calls" in last else "no text"
                raise RequestError(
                    f"messages[{len(plain) - 1}] has {has}, so continue_final_message cannot go on with it; leave that "
                    "field out, or end with a message whose text is to be gone on with"
                )
            plain[-1] = last | {"content": last["content"] + CURSOR}
        given = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "tools": list(tools) if tools else None,
            "documents": None,
        }
        further = {name: value for name, value in (variables or {}).items() if value is not None}
        self._check_variables(further, {"messages", "bos_token", "eos_token", *given})
        try:
            spelled = len(msgspec.json.encode(given["tools"]).decode()) if tools else 0
            self._check_length(spelled + sum(len(message["content"]) for message in plain))
            text = self._render(plain, self._takes_parts, **given, **further)
        except TEMPLATE_ERRORS as error:
            raise RequestError(f"the chat template of {self.folder} refused the messages: {error}") from error
        if not continue_final_message:
            return text
        if CURSOR not in text:
            raise RequestError("the chat template does not write the last message's text, so nothing can go on with it")
        return text[: text.rindex(CURSOR)]

    def _render(self, messages: list[dict[str, Any]], as_parts: bool, **variables: Any) -> str:
        if as_parts:
            messages = [one | {"content": [{"type": "text", "text": one["content"]}]} for one in messages]
        tokens = {"bos_token": self.bos_token or "", "eos_token": self.eos_token or ""}
        return self._template.render(messages=messages, **tokens, **variables)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the chat template reads contents by their parts only, and would write nothing of a text."""
        texts = []
        for as_parts in (False, True):
            try:
                texts.append(self._render([{"role": "user", "content": CURSOR}], as_parts, tools=None))
            except TEMPLATE_ERRORS:
                texts.append("")
        return CURSOR not in texts[0] and CURSOR in texts[1]

    def _check_variables(self, variables: Mapping[str, Any], own: Set[str]) -> None:
        """Raise RequestError for a variable that would change nothing, unless it only switches something off."""
        for name, value in variables.items():
            if name in own:
                raise RequestError(f"chat_template_kwargs has {name!r}, which has a field of its own; use that")
            if value is not False and not self.template_takes(name):
                known = ", ".join(sorted(self._variables - own)) or "none"
                raise RequestError(
                    f"chat_template_kwargs has {name!r:.60}, which the chat template does not look at; leave it out. "
                    f"Those it does look at: {known}"
                )

    def template_takes(self, name: str) -> bool:
        """Whether the chat template makes use of something it is given. Raises RequestError as `render_chat` does."""
        return name in self._variables

    @cached_property
    def _variables(self) -> Set[str]:
        return jinja2.meta.find_undeclared_variables(self._template.environment.parse(self.template_source))

    def check_constraint(self, token_ids: Sequence[int], name: str) -> None:
        """Raise RequestError when a chat's prompt ends with the tag that begins a thought.

        The answer only comes behind the thought, so that `name` says what the whole answer is cannot be followed.
        """
        if THOUGHT.search(self.decode(token_ids[-32:], skip_special_tokens=False)):
            raise RequestError(
                f"{name} says what the whole answer is, but this prompt lets the model think before it answers; switch "
                "that off (servers: in chat_template_kwargs), or leave one of them out"
            )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that form no character become U+FFFD; ids above the vocabulary are skipped."""
        if len(token_ids) > MANY_TOKENS:  # `decode` would hold the GIL all the while
            return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def places(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """For the tokens that `encode` made of a text: the place of the character that each begins in.

        Tokens that were added to the text stand before its first character, or behind its last.
        """
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        ids, contents = encoding.ids, [self.token_bytes(token_id) for token_id in encoding.ids]
        places = [min(begin, len(text) - 1) for begin, _ in encoding.offsets]  # a trimmed last space would lie behind
        spaces = b"".join(contents).removesuffix(text.encode())
        if spaces in (b"", b" "):  # nothing was rewritten: bytes tell more, as some offsets are those of several tokens
            length = -len(spaces)
            for i, content in enumerate(contents):
                firsts = [byte & 0xC0 != 0x80 for byte in content]  # bytes that begin a character
                places[i] = max(length - (not firsts[0]), 0)
                length += sum(firsts)
        more = len(token_ids) - len(ids)
        added = next((front for front in range(more, -1, -1) if token_ids[front : front + len(ids)] == ids), 0)
        return [0] * added + places + [len(text)] * (more - added)

    def token_text(self, token_id: int) -> str:
        """Text of one token as it reads in the middle of a text, leading space included; special tokens by name."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _token_bytes(self, token_id: int) -> bytes:
        alone = self.decode([token_id], skip_special_tokens=False)
        # Some decoders strip the space before the first word, so the second of two equal tokens is looked at.
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        text = twice[len(alone) :] if twice.startswith(alone) else alone
        if UNFINISHED in text:  # a part of a character, which only the token's name in the vocabulary tells
            name = self._tokenizer.id_to_token(token_id) or ""
            if re.fullmatch("<0x[0-9A-F]{2}>", name):
                return bytes.fromhex(name[3:5])
            if BYTE_LEVEL.keys() >= set(name):
                return bytes(BYTE_LEVEL[character] for character in name)
        return text.encode()

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _check_length(self, characters: int) -> None:
        most = characters if self.context is None else self.context * self.longest_token
        if characters > most:
            raise RequestError(
                f"the text has {characters} characters, but the context holds {self.context} tokens of at most "
                f"{self.longest_token}; shorten it ({self.advice})"
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
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self.template_source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template of {self.folder} has an error in line {error.lineno}: {error.message}"
            ) from error

    @cached_property
    def template_source(self) -> str:
        """The chat template's text, ours for models that come without. Raises RequestError when there is none."""
        found = find_template(self.folder)
        if found is None:
            raise RequestError(
                f"{self.folder} has no chat template; add chat_template.jinja to the folder, or send a plain prompt"
            )
        return found[1]


def find_template(folder: Path) -> tuple[str, str] | None:
    """Where the chat template of a model comes from, and its text; ours for some models that come without.

    Raises CheckpointError for files that are malformed.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 text: {error}; download it again") from None
    path = folder / "tokenizer_config.json"
    source = _load_config(path).get("chat_template")
    if isinstance(source, list):  # several named templates
        if not all(isinstance(entry, dict) for entry in source):
            raise CheckpointError(f"{path}: chat_template must be text or a list of objects; download it again")
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if isinstance(source, str):
        return path.name, source
    kind = _load_config(folder / "config.json").get("model_type")
    if kind not in BUILT_IN:
        return None
    built_in = files("skipstone.text").joinpath("templates", BUILT_IN[kind])
    return f"built in for {kind}", built_in.read_text(encoding="utf-8")


def special_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Finds any of these names, the longest first, as its only group; nothing where there are none."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True))) or '(?!)'})")


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
    if isinstance(tokenizer.decoder, (decoders.BPEDecoder, decoders.CTC)):
        raise CheckpointError(
            f"{path}: decoder {type(tokenizer.decoder).__name__} makes a token's text depend on the next one, so that "
            "it cannot be sent as it comes; use a byte-level or SentencePiece tokenizer"
        )
    tokenizer.no_truncation()  # left in the file by training; a prompt must never be cut or filled up silently
    tokenizer.no_padding()
    return tokenizer


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


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as prompts contain it: jinja's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
