"""Tokenizer folders, chat templates, and incremental text against the text of all tokens at once."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from skipstone.core.request import SamplingParams
from skipstone.errors import CheckpointError, RequestError
from skipstone.text.stream import TextStream
from skipstone.text.tokenizer import MANY_TOKENS, Tokenizer

CORPUS = ["the stone skips over the water, the water keeps the stone", "你好 世界 👋🏽 zażółć", "def f(x): return x"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'bad' %}{{ raise_exception('no role ' + message.role) }}{% endif %}\n"
    "<|turn|>{{ message.role }}:{{ message.content }}{{ eos_token }}{% endfor %}\n"
    "{% if add_generation_prompt %}<|turn|>{% endif %}"
)
CHAT = [{"role": "user", "content": "the <stone>"}]
PART = {"type": "text", "text": "the"}
CALL = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
PIECES = ["the", " stone", "é", "漢字", "👩‍👩‍👧", "👋🏽", "\n", " ", "�", "a", "ab"]


def byte_level_backend() -> Backend:
    """A trained byte-level BPE of 300 or so tokens with special tokens <|bos|> 0, <|eos|> 1, <|turn|> 2."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special: list[str | AddedToken] = ["<|bos|>", "<|eos|>", "<|turn|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


def byte_fallback_backend() -> Backend:
    """Words with ▁ for spaces and one token per byte for the rest, as in Llama 2: the first space is stripped."""
    words = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "▁t", "he", "▁the", "a"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    model = models.BPE({word: i for i, word in enumerate(words)}, merges, byte_fallback=True, fuse_unk=True)
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>"])
    return backend


def write_folder(folder: Path, backend: Backend, template: str | None = TEMPLATE, **config: Any) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    return write_folder(folder, byte_level_backend(), bos_token="<|bos|>", eos_token={"content": "<|eos|>"})


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_folder(tmp_path_factory.mktemp("fallback"), byte_fallback_backend())


def test_ids_and_text_of_a_folder(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    token_ids = tokenizer.encode("the stone 漢字")
    assert max(token_ids) < tokenizer.vocab_size
    assert tokenizer.decode(token_ids) == "the stone 漢字"
    assert tokenizer.decode([2, *token_ids]) == "the stone 漢字"
    assert tokenizer.decode([2, *token_ids], skip_special_tokens=False) == "<|turn|>the stone 漢字"
    assert tokenizer.decode([*token_ids, tokenizer.vocab_size + 5]) == "the stone 漢字"


@pytest.mark.parametrize("text", ["the stone 漢字 👋🏽\n\n  x", "<|bos|>the<|turn|> stone <|eos|>", "", " ", "<s>the"])
@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_the_library(
    tokenizer: Tokenizer, fallback_tokenizer: Tokenizer, text: str, special: bool
) -> None:
    for one in (tokenizer, fallback_tokenizer):
        backend = Backend.from_file(str(one.folder / "tokenizer.json"))
        assert one.encode(text, special) == backend.encode(text, add_special_tokens=special).ids


def test_other_threads_go_on_while_a_large_text_is_encoded(tokenizer: Tokenizer) -> None:
    ticks, ended = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not ended.wait(0.001):
            ticks += 1

    def turns() -> int:
        before = ticks
        tokenizer.encode("the stone skips " * 100_000)
        return ticks - before

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        assert any(turns() >= 5 for _ in range(20))  # a busy machine may let it have fewer, but not always
    finally:
        ended.set()
        thread.join()


def test_text_longer_than_the_context_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    tokenizer = write_folder(tmp_path, byte_level_backend())
    longest = max(map(tokenizer.token_text, range(tokenizer.vocab_size)), key=len)
    assert tokenizer.longest_token >= len(longest)
    tokenizer.context = 20
    fits = (longest * 20)[: 20 * tokenizer.longest_token]
    assert len(tokenizer.encode(longest * 20)) >= 20 and tokenizer.encode(fits)
    long = "a" * (20 * tokenizer.longest_token + 1)
    turn = [{"role": "user", "content": long}]
    short = [{"role": "user", "content": "a"}]
    tokenizer._tokenizer = None  # type: ignore[assignment]  # nothing may be asked of it
    calls: list[Callable[[], Any]] = [
        lambda: tokenizer.encode(long),
        lambda: tokenizer.encode(long, add_special_tokens=False),
        lambda: tokenizer.encode_chat(turn),
        lambda: tokenizer.render_chat(turn),
        lambda: tokenizer.render_chat(short, tools=[{"type": "function", "function": {"name": long}}]),
    ]
    for call in calls:
        with pytest.raises(RequestError, match=r"the text has \d+ characters, but the context holds 20 tokens"):
            call()


def test_many_ids_have_the_text_of_their_pieces(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(CORPUS[0] + " " + CORPUS[2])
    count = MANY_TOKENS // len(token_ids) + 1
    assert tokenizer.decode(token_ids * count) == tokenizer.decode(token_ids) * count


def test_text_of_one_token_keeps_its_space(tokenizer: Tokenizer, fallback_tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(0) == "<|bos|>"
    assert "".join(map(tokenizer.token_text, tokenizer.encode("the stone"))) == "the stone"
    assert "".join(map(fallback_tokenizer.token_text, fallback_tokenizer.encode("the the"))) == " the the"


@pytest.mark.parametrize(
    ("add_bos", "adds_itself", "expected"),
    [(True, False, True), (True, True, True), (None, False, False), (None, True, True), (False, True, False)],
)
def test_begin_of_text_is_added_once(tmp_path: Path, add_bos: bool | None, adds_itself: bool, expected: bool) -> None:
    backend = byte_level_backend()
    if adds_itself:
        backend.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    config: dict[str, Any] = {} if add_bos is None else {"add_bos_token": add_bos}
    tokenizer = write_folder(tmp_path, backend, bos_token="<|bos|>", **config)
    token_ids = tokenizer.encode("the stone")
    assert token_ids.count(0) == token_ids[:1].count(0) == int(expected)
    chat = tokenizer.encode_chat(CHAT)
    assert chat.count(0) == 1 and chat[0] == 0


def test_truncation_left_in_the_file_is_ignored(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = write_folder(tmp_path, backend)
    assert tokenizer.decode(tokenizer.encode("the stone skips over the water")) == "the stone skips over the water"
    assert len(tokenizer.encode("a")) == 1


def test_chat_is_rendered_by_the_template(tokenizer: Tokenizer) -> None:
    def rendered(**options: bool) -> str:
        return tokenizer.decode(tokenizer.encode_chat(CHAT, **options), skip_special_tokens=False)

    assert rendered() == "<|bos|><|turn|>user:the <stone><|eos|><|turn|>"
    assert rendered(add_generation_prompt=False) == "<|bos|><|turn|>user:the <stone><|eos|>"


def test_messages_reach_the_template_in_one_form(tmp_path: Path) -> None:
    tokenizer = write_folder(tmp_path, byte_level_backend(), template="{{ messages | tojson }}")
    parts = {"role": "developer", "content": [PART, PART], "name": "n", "refusal": None}
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    plain = [
        {"role": "system", "content": "the\nthe", "name": "n"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
    ]
    assert json.loads(tokenizer.render_chat([parts, call])) == json.loads(tokenizer.render_chat(plain)) == plain


@pytest.mark.parametrize("entry", ["{{ messages | tojson }}", [{"name": "x", "template": "no"}, {"name": "default"}]])
def test_template_of_the_config(tmp_path: Path, entry: Any) -> None:
    if isinstance(entry, list):
        entry[1]["template"] = "{{ messages | tojson }}"
    tokenizer = write_folder(tmp_path, byte_level_backend(), template=None, chat_template=entry)
    assert tokenizer.decode(tokenizer.encode_chat(CHAT)) == '[{"role": "user", "content": "the <stone>"}]'


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] is a str"),
        ([*CHAT, {"content": "x"}], r"messages\[1\].role is missing"),
        ([*CHAT, {"role": "user"}], r"messages\[1\].content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content=5 must be text"),
        ([{"role": "user", "content": [PART, {"type": "image_url", "image_url": {}}]}], r"content\[1\]=.*image_url"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], r"messages\[0\].content\[0\]=.*not supported"),
        ([{"role": "user", "content": [PART | {"x": 1}]}], r"messages\[0\].content\[0\]=.*not supported"),
        ([{"role": "user", "content": ["a"]}], r"messages\[0\].content\[0\]='a' is not supported"),
        ([{"role": "user", "content": "a", "images": []}], r"messages\[0\].images is no field"),
        ([{"role": "user", "content": "a", "name": 5}], r"messages\[0\].name=5 must be text"),
        ([{"role": "user", "content": "a", "tool_calls": [CALL]}], r"messages\[0\].tool_calls belongs"),
        ([{"role": "user", "content": "a", "tool_call_id": "c"}], r"messages\[0\].tool_call_id belongs"),
        ([{"role": "assistant", "tool_calls": 5}], r"messages\[0\].tool_calls=5 must be a list"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], r"tool_calls\[0\].function.name is missing"),
        (
            [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "["}}]}],
            "arguments is not a JSON",
        ),
        ([{"role": "bad", "content": "x"}], "no role bad"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
    ],
)
def test_bad_messages_are_named(tokenizer: Tokenizer, messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        tokenizer.encode_chat(messages)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "add chat_template.jinja"),
        ("{% if %}", "error in line 1"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
        ("{{ messages[7].content }}", "refused the messages"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_bad_templates_fail_on_chat_only(tmp_path: Path, template: str | None, words: str) -> None:
    tokenizer = write_folder(tmp_path, byte_level_backend(), template=template)
    assert tokenizer.encode("the")
    with pytest.raises(RequestError, match=words):
        tokenizer.encode_chat(CHAT)


def test_a_folder_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing; copy it"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)


def test_a_decoder_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.decoder = decoders.BPEDecoder()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: decoder BPEDecoder .*use a byte-level"):
        write_folder(tmp_path, backend)


class Ending(NamedTuple):
    text: str
    num_tokens: int
    stopped_by: str | None


def whole_text(tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams) -> Ending:
    """What a stream must end with, from the decoded text of every number of tokens."""
    vocabulary = Backend.from_file(str(tokenizer.folder / "tokenizer.json"))
    # Bytes 0x80 and 0xBF: an open character can go on with one of them.
    further = [[], *([vocabulary.token_to_id(name)] * 3 for name in "Ģ¿")]

    def settled(count: int) -> str:
        """What further tokens cannot change."""
        texts = [tokenizer.decode(token_ids[:count] + more, params.skip_special_tokens) for more in further]
        return "".join(
            same[0] for same in itertools.takewhile(lambda same: len(set(same)) == 1, zip(*texts, strict=False))
        )

    text = tokenizer.decode(token_ids, params.skip_special_tokens)
    if len(token_ids) <= params.min_tokens:
        return Ending(text, len(token_ids), None)
    first_end = len(settled(params.min_tokens)) + 1
    matches = [
        (begin + len(stop), begin, stop)
        for stop in params.stop_strings
        for begin in range(len(text))
        if text.startswith(stop, begin) and begin + len(stop) >= first_end
    ]
    if not matches:
        return Ending(text, len(token_ids), None)
    end, begin, stop = min(matches)
    counts = (count for count in range(len(token_ids)) if len(settled(count)) >= end)
    return Ending(text[: end if params.include_stop_str_in_output else begin], next(counts, len(token_ids)), stop)


def stream_all(stream: TextStream, token_ids: list[int], cuts: set[int]) -> list[str]:
    """Push the tokens in runs that end at the cuts, then finish; the texts returned."""
    ends = sorted({cut for cut in cuts if cut < len(token_ids)} | {len(token_ids)})
    pieces = []
    for begin, end in zip([0, *ends], ends, strict=False):
        pieces.append(stream.push(token_ids[begin:end]))
        assert "".join(pieces) == stream.text
    return [*pieces, stream.finish()]


TEXT = st.one_of(st.text(max_size=12), st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
IDS = st.lists(st.integers(0, 319), max_size=16)
CUTS = st.sets(st.integers(0, 40), max_size=12)


@settings(max_examples=400)
@given(data=st.data(), prompt=TEXT, noise=IDS, cuts=CUTS, skip=st.booleans(), include=st.booleans())
def test_stream_equals_the_whole_text(
    tokenizer: Tokenizer, data: st.DataObject, prompt: str, noise: list[int], cuts: set[int], skip: bool, include: bool
) -> None:
    token_ids = data.draw(st.permutations([tokenizer.encode(prompt), noise]), label="order")
    joined = [token for part in token_ids for token in part]
    text = tokenizer.decode(joined, skip)
    parts = [text[i : i + n] for i in range(len(text)) for n in (1, 2, 5)]
    stop_strings = st.one_of(st.text(min_size=1, max_size=3), *([st.sampled_from(parts)] if parts else []))
    params = SamplingParams(
        stop=data.draw(st.lists(stop_strings, max_size=3), label="stop"),
        min_tokens=data.draw(st.integers(0, 6), label="min_tokens"),
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
    )
    stream = TextStream(tokenizer, params)
    stream_all(stream, joined, cuts)
    assert Ending(stream.text, stream.num_tokens, stream.stopped_by) == whole_text(tokenizer, joined, params)
    if stream.stopped_by is not None:
        assert stream.push([5]) == stream.finish() == ""


@settings(max_examples=200)
@given(prompt=TEXT, cuts=CUTS)
def test_stream_of_a_tokenizer_that_strips_the_first_space(
    fallback_tokenizer: Tokenizer, prompt: str, cuts: set[int]
) -> None:
    """The text goes on with the prompt, so its first space is there."""
    before, token_ids = fallback_tokenizer.encode("the"), fallback_tokenizer.encode(prompt + " the 漢字 the")
    stream = TextStream(fallback_tokenizer, SamplingParams())
    text = "".join(stream_all(stream, token_ids, cuts))
    assert "the" + text == fallback_tokenizer.decode(before + token_ids)


@settings(max_examples=200)
@given(token_ids=st.lists(st.integers(0, 264), max_size=20), cuts=CUTS)
def test_invalid_bytes_never_break_a_stream(
    fallback_tokenizer: Tokenizer, token_ids: list[int], cuts: set[int]
) -> None:
    stream = TextStream(fallback_tokenizer, SamplingParams())
    stream_all(stream, token_ids, cuts)
    assert stream.num_tokens == len(token_ids)


@settings(max_examples=200)
@given(prompt=TEXT, stop=st.lists(st.sampled_from(["the stone", "stop", "e漢", "ab"]), max_size=3))
def test_only_what_may_begin_a_stop_string_is_held(tokenizer: Tokenizer, prompt: str, stop: list[str]) -> None:
    prompt = prompt.replace("\ufffd", "")
    stream = TextStream(tokenizer, SamplingParams(stop=stop))
    token_ids = tokenizer.encode(prompt)
    for count, token in enumerate(token_ids, start=1):
        stream.push([token])
        known = tokenizer.decode(token_ids[:count])
        if known.endswith("\ufffd"):
            continue
        if stream.stopped_by is None:
            held = known[len(stream.text) :]
            assert not held or any(text.startswith(held) and text != held for text in stop)


def test_stop_string_across_runs(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("one st"), tokenizer.encode("op two")
    stream = TextStream(tokenizer, SamplingParams(stop=["two", "stop"]))
    assert stream.push(first) == "one "
    assert stream.push(second) == ""
    assert (stream.stopped_by, stream.text) == ("stop", "one ")
    assert stream.num_tokens < len(first) + len(second)


def test_what_was_held_comes_out_when_no_stop_string_follows(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop="stop"))
    assert stream.push(tokenizer.encode("one st")) == "one "
    assert stream.push(tokenizer.encode("art sto")) == "start "
    assert stream.finish() == "sto"


def test_min_tokens_delays_stop_strings(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("ab.ab.ab.")
    assert len(token_ids) == 9
    stream = TextStream(tokenizer, SamplingParams(stop="ab", min_tokens=2))
    assert stream.push(token_ids) == "ab."
    assert stream.num_tokens == 5


def test_a_stop_string_that_came_too_early_is_not_held(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=["ab", "stone"], min_tokens=2))
    assert stream.push(tokenizer.encode("ab")) == "ab"
