"""Chat templates: the one for DeepSeek-V3.2, which is released without, and what any template is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from skipstone.errors import CheckpointError, RequestError
from skipstone.text import tokenizer as text
from skipstone.text.tool_readers import DSML, DsmlReader

BAR = "\N{FULLWIDTH VERTICAL LINE}"
BOS, EOS = (
    f"<{BAR}{word}\N{LOWER ONE EIGHTH BLOCK}of\N{LOWER ONE EIGHTH BLOCK}sentence{BAR}>" for word in ("begin", "end")
)
USER, ANSWER = f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>"
CALL = {"id": "c", "type": "function", "function": {"name": "get", "arguments": {"city": "Paris", "days": 3}}}
BARE = {"id": "d", "type": "function", "function": {"name": "now", "arguments": {}}}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
WRITTEN = (
    f'\n\n<{DSML}function_calls>\n<{DSML}invoke name="get">\n'
    f'<{DSML}parameter name="city" string="true">Paris</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n<{DSML}invoke name="now">\n\n'
    f"</{DSML}invoke>\n</{DSML}function_calls>"
)


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> text.Tokenizer:
    """A folder as it is released: a tokenizer, its special tokens, no template."""
    folder = tmp_path_factory.mktemp("deepseek")
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    model = Tokenizer(BPE(vocab=letters, merges=[]))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model.add_special_tokens([AddedToken(one, special=True) for one in (BOS, EOS, USER, ANSWER, DSML)])
    model.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": BOS}, "eos_token": {"content": EOS}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "deepseek_v32"}')
    return text.Tokenizer(folder)


def test_conversations(tokenizer: text.Tokenizer) -> None:
    talk = [says("system", "Be short."), says("user", "Hi"), says("assistant", "Hello."), says("user", "Bye")]
    start = f"{BOS}Be short.{USER}Hi{ANSWER}</think>Hello.{EOS}{USER}Bye"
    assert tokenizer.render_chat(talk) == f"{start}{ANSWER}</think>"
    assert tokenizer.render_chat(talk, variables={"thinking": True}) == f"{start}{ANSWER}<think>"
    assert tokenizer.render_chat(talk, add_generation_prompt=False) == start
    ids = tokenizer.encode_chat(talk)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(talk)
    assert ids.count(tokenizer.special_tokens[BOS]) == 1


@pytest.mark.parametrize("thinking", [False, True])
def test_calls_and_results(tokenizer: text.Tokenizer, thinking: bool) -> None:
    calling = says("assistant", "Look.", tool_calls=[CALL, BARE])
    talk = [says("user", "Weather?"), calling, says("tool", "Rain."), says("tool", "Noon.")]
    opens, closed = ("<think>", "</think>") if thinking else ("</think>", "")
    expected = (
        f"{BOS}{USER}Weather?{ANSWER}{opens}{closed}Look.{WRITTEN}{EOS}"
        f"\n\n<function_results>\n<result>Rain.</result>\n<result>Noon.</result>\n</function_results>\n\n{opens}"
    )
    assert tokenizer.render_chat(talk, variables={"thinking": thinking}) == expected
    going_on = [*talk, says("assistant", "It rains."), says("user", "Thanks")]
    text_of = tokenizer.render_chat(going_on, variables={"thinking": thinking})
    # What was thought before the latest question is left out.
    assert (
        f"{ANSWER}</think>Look." in text_of and f"</function_results>\n\n</think>It rains.{EOS}{USER}Thanks" in text_of
    )
    with pytest.raises(RequestError, match="more results than calls"):
        tokenizer.render_chat([says("user", "a"), says("tool", "b")])


def test_what_it_writes_is_what_is_read(tokenizer: text.Tokenizer) -> None:
    reader = DsmlReader({})
    pieces = [*reader.feed(WRITTEN), *reader.finish()]
    said = [part for piece in pieces for part in piece if part.strip()]
    assert said == ["get", '{"city": "Paris", "days": 3}', "now", "{}"]


def test_tools_stand_behind_the_system_text(tokenizer: text.Tokenizer) -> None:
    """As the release's encoder has it; without such a text at the front they come first."""
    hi, system = says("user", "Hi"), says("system", "Be short.")
    alone = tokenizer.render_chat([hi], tools=[TOOL])
    assert alone.startswith(f"{BOS}\n\n## Tools\n\n") and alone.endswith(f"</functions>\n{USER}Hi{ANSWER}</think>")
    assert '<functions>\n{"name": "get", "parameters": {"type": "object"}}\n</functions>' in alone
    assert f'<{DSML}invoke name="$FUNCTION_NAME">' in alone
    tools = alone.removeprefix(BOS).removesuffix(f"{USER}Hi{ANSWER}</think>")
    for role in ("system", "developer"):
        prompt = tokenizer.render_chat([system | {"role": role}, hi], tools=[TOOL])
        assert prompt == f"{BOS}Be short.{tools}{USER}Hi{ANSWER}</think>"
    later = tokenizer.render_chat([hi, system, system], tools=[TOOL])
    assert later == f"{BOS}{tools}{USER}Hi{ANSWER}</think>Be short.Be short."
    assert tokenizer.render_chat([system, system, hi], tools=[TOOL]).count("## Tools") == 1
    assert tokenizer.template_takes("tools")


def test_both_names_of_thinking(tokenizer: text.Tokenizer) -> None:
    def ending(**variables: Any) -> str:
        return tokenizer.render_chat([says("user", "Hi")], variables=variables).rpartition(ANSWER)[2]

    for name in ("thinking", "enable_thinking"):
        assert [ending(**{name: value}) for value in (True, False, None)] == ["<think>", "</think>", "</think>"]
    assert ending(thinking=True, enable_thinking=True) == ending(thinking=True, enable_thinking=None) == "<think>"
    with pytest.raises(RequestError, match="thinking and enable_thinking differ"):
        ending(thinking=True, enable_thinking=False)


def folder_with(tokenizer: text.Tokenizer, folder: Path, template: str) -> text.Tokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_bytes((tokenizer.folder / name).read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return text.Tokenizer(folder)


def test_variables_that_change_nothing_are_refused(tokenizer: text.Tokenizer, tmp_path: Path) -> None:
    """Unless they only switch off what the template does not do."""
    own = folder_with(tokenizer, tmp_path, "{% if mood is defined %}{{ mood }}{% endif %}{{ messages[0].content }}")
    for one, known in ((tokenizer, "enable_thinking, thinking"), (own, "mood")):
        with pytest.raises(RequestError, match=rf"^chat_template_kwargs has 'reason', .* look at: {known}$"):
            one.render_chat([says("user", "a")], variables={"reason": True})
        plain = one.render_chat([says("user", "a")])
        for value in (False, None):
            assert one.render_chat([says("user", "a")], variables={"reason": value}) == plain
    assert own.render_chat([says("user", "a")], variables={"mood": "b"}) == "ba"
    with pytest.raises(RequestError, match="'messages', which has a field of its own"):
        own.render_chat([says("user", "a")], variables={"messages": [1]})


PARTS = {
    "loop": "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}",
    "first": "{{ message.content[0].text }}",
    "filter": "{{ message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}",
    "refuses texts": "{% if message.content is string %}{{ raise_exception('parts only') }}{% endif %}"
    "{{ message['content'][0]['text'] }}",
    "both": "{% if message.content is string %}{{ message.content }}{% else %}parts{% endif %}",
    "text": "{{ message.content }}",
    "trimmed": "{{ message.content | trim }}",
}
TURN = "{{{{ bos_token }}}}{{% for message in messages %}}<{{{{ message.role }}}}>{}<end>{{% endfor %}}"


@pytest.mark.parametrize("name", PARTS)
class TestTemplatesByHowTheyReadContents:
    def test_no_content_is_lost(self, tokenizer: text.Tokenizer, tmp_path: Path, name: str) -> None:
        one = folder_with(tokenizer, tmp_path, TURN.format(PARTS[name]))
        parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
        talk = [says("system", "e"), says("user", "Bye"), {"role": "assistant", "content": parts}]
        assert one.render_chat(talk) == f"{BOS}<system>e<end><user>Bye<end><assistant>Hi\nyou<end>"

    @pytest.mark.parametrize("content", ["e", "end", "<end>", "a", "It  ", "a\n\n", " ", "<end", text.CURSOR, "s>"])
    def test_it_is_gone_on_with_behind_the_content(
        self, tokenizer: text.Tokenizer, tmp_path: Path, name: str, content: str
    ) -> None:
        one = folder_with(tokenizer, tmp_path, TURN.format(PARTS[name]))
        said = content.lstrip() if name == "trimmed" else content
        talk = [says("user", content), says("assistant", content)]
        assert one.render_chat(talk, continue_final_message=True).endswith(f"<end><assistant>{said}")
        assert one.render_chat(talk[:1], continue_final_message=True) == f"{BOS}<user>{said}"


def test_what_cannot_be_gone_on_with(tokenizer: text.Tokenizer, tmp_path: Path) -> None:
    def go_on(one: text.Tokenizer, message: dict[str, Any]) -> str:
        return one.render_chat([says("user", "a"), message], continue_final_message=True)

    for message, word in (
        (says("assistant", "Look.", tool_calls=[CALL]), "tool_calls"),
        (says("assistant", ""), "no text"),
    ):
        with pytest.raises(RequestError, match=rf"^messages\[1\] has {word}.*continue_final_message"):
            go_on(tokenizer, message)
    silent = folder_with(tokenizer, tmp_path, "{{ messages[0].content }}")
    with pytest.raises(RequestError, match="does not write the last message's text"):
        go_on(silent, says("assistant", "b"))
    for thinking in (True, False):
        made = tokenizer.render_chat(
            [says("user", "a"), says("assistant", "b ")], continue_final_message=True, variables={"thinking": thinking}
        )
        assert made.endswith("</think>b ")


def test_tools_too_deep_for_the_template(tokenizer: text.Tokenizer) -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(RequestError, match="refused the messages: maximum recursion depth"):
        tokenizer.render_chat([says("user", "a")], tools=[{"type": "function", "function": deep}])


def test_prompts_that_open_a_thought(tokenizer: text.Tokenizer) -> None:
    def refused(token_ids: list[int]) -> bool:
        try:
            tokenizer.check_constraint(token_ids, "regex")
        except RequestError as error:
            return str(error).startswith("regex says what the whole answer is")
        return False

    def opens(written: str) -> bool:
        return refused(tokenizer.encode(written))

    for written in ("<think>", "a<think>\n", "<mm:think>", "<seed:think>\n\n", "<thinking> "):
        assert opens(written)
    for written in ("</think>", "<think></think>", "<think>a", "<think>\n\n</think>\n\n", "a <b> think>", "< think>"):
        assert not opens(written)
    for thinking in (True, False):
        ids = tokenizer.encode_chat([says("user", "What is <think>?")], variables={"thinking": thinking})
        assert refused(ids) == thinking


def test_a_template_in_the_folder_wins(tokenizer: text.Tokenizer, tmp_path: Path) -> None:
    assert folder_with(tokenizer, tmp_path, "own").render_chat([says("user", "a")]) == "own"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("chat_template.jinja", b"{{ messages }}\xff", "chat_template.jinja is not UTF-8 text"),
        ("tokenizer_config.json", b'{"chat_template": ["a"]}', "chat_template must be text or a list of objects"),
    ],
)
def test_a_template_that_cannot_be_read(
    tokenizer: text.Tokenizer, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    for file in ("tokenizer.json", "config.json"):
        (tmp_path / file).write_bytes((tokenizer.folder / file).read_bytes())
    (tmp_path / name).write_bytes(content)
    broken, message = text.Tokenizer(tmp_path), [{"role": "user", "content": "hello"}]
    for ask in (lambda: broken.render_chat(message), lambda: broken.template_takes("tools")):
        with pytest.raises(CheckpointError, match=words):
            ask()
