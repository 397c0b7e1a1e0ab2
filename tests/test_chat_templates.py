"""The chat template for DeepSeek-V3.2, which is released without: prompts of the form of the release's encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from skipstone.errors import RequestError
from skipstone.serve import text
from skipstone.serve.tool_readers import DSML, DsmlReader

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


def test_tools_come_first(tokenizer: text.Tokenizer) -> None:
    prompt = tokenizer.render_chat([says("system", "Be short."), says("user", "Hi")], tools=[TOOL])
    assert prompt.startswith(f"{BOS}\n\n## Tools\n\n") and prompt.endswith(
        f"</functions>\nBe short.{USER}Hi{ANSWER}</think>"
    )
    assert '<functions>\n{"name": "get", "parameters": {"type": "object"}}\n</functions>' in prompt
    assert f'<{DSML}invoke name="$FUNCTION_NAME">' in prompt
    assert tokenizer.template_takes("tools")


def test_a_template_in_the_folder_wins(tokenizer: text.Tokenizer, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((tokenizer.folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("own")
    assert text.Tokenizer(tmp_path).render_chat([says("user", "a")]) == "own"
