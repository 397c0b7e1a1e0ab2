"""Tools of a chat request: what the prompt says of them, what the text must be, and how its calls are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from skipstone.errors import RequestError
from skipstone.server.api.errors import bad_request
from skipstone.server.api.requests import ChatRequest, NamedTool, TemplateRequest, Tool
from skipstone.server.api.structured import Constraint
from skipstone.text.tokenizer import Tokenizer
from skipstone.text.tool_grammars import Calls, GrammarText, dsml_calls, json_calls, minimax_calls
from skipstone.text.tool_readers import DSML, MINIMAX, DsmlReader, JsonReader, MinimaxReader, Reader, Schemas
from skipstone.text.tool_schemas import Schema

NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolFormat(NamedTuple):
    """How a model writes its calls. Its chat template contains `sign`."""

    sign: str
    reader: Callable[[Schemas], Reader]
    calls: Calls


FORMATS = (
    ToolFormat(MINIMAX, MinimaxReader, minimax_calls),
    ToolFormat(DSML, DsmlReader, dsml_calls),
    ToolFormat("<|tool_call|>", lambda _: JsonReader("<|tool_call|>"), json_calls("<|tool_call|>")),
)


class ToolUse:
    """The tools of one request, which has some and does not forbid them."""

    def __init__(self, body: ChatRequest | TemplateRequest, tools: list[Tool], tokenizer: Tokenizer) -> None:
        """Raises ApiError naming the field when something cannot be done."""
        self.several = body.parallel_tool_calls is not False
        self.prompt_tools: list[dict[str, Any]] = [_plain(tool) for tool in tools]
        """What the chat template gets."""
        self._format = _format_of(tokenizer)
        self._schemas = {tool.function.name: _schema(tool, i) for i, tool in enumerate(tools)}
        if len(self._schemas) < len(tools):
            raise bad_request("tools has two functions of the same name", "tools")
        self._special = tokenizer.special_tokens
        choice = body.tool_choice
        self.must_call = choice == "required" or isinstance(choice, NamedTool)
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in self._schemas:
                raise bad_request(
                    f"tool_choice.function.name={name!r:.80} is not among the tools", "tool_choice.function.name"
                )
            self._schemas = {name: self._schemas[name]}
            self.several = False
        marker = self.reader().marker
        self.special_marks = [name for name in self._special if name in marker]
        """Special tokens that calls are recognised by."""
        self._strict = any(tool.function.strict for tool in tools)

    def reader(self) -> Reader:
        """A reader for one answer."""
        return self._format.reader(self._schemas)

    def constraint(self, asked: Constraint | None) -> Constraint | None:
        """What the text must be; `asked`: what the request wants of an answer that calls nothing.

        Where calls are required they and nothing else may be written. Otherwise a grammar is only needed for strict
        functions, and for answers that must be JSON. Raises ApiError for other combinations.
        """
        if not (self.must_call or self._strict or asked):
            return None
        grammar, marker = GrammarText(self._special), self.reader().marker
        calls = self._format.calls(grammar, self._schemas, self.several)
        if self.must_call:
            if asked is not None:
                raise bad_request(f"{asked.path} and tool_choice cannot be combined; keep one of them", asked.path)
            start = f"{grammar.literal(marker)} {calls}"
        elif asked is not None:
            start = f"{grammar.literal(marker)} {calls} | {grammar.json(_json_schema(asked))}"
        else:
            start = f"{grammar.without(marker)} | {grammar.until(marker)} {calls}"
        return Constraint("grammar", grammar.text(start), "tools")


def _json_schema(asked: Constraint) -> Schema:
    """The schema of an answer. Raises ApiError for constraints of another kind."""
    if asked.field == "json_schema":
        try:
            return msgspec.json.decode(str(asked.value), type=Schema)
        except (msgspec.MsgspecError, RecursionError):
            raise bad_request(
                f"{asked.path} is not a JSON object, as it must be together with tools", asked.path
            ) from None
    raise bad_request(f"{asked.path} and tools cannot be combined; keep one of them", asked.path)


def tool_use(body: ChatRequest | TemplateRequest, tokenizer: Tokenizer) -> ToolUse | None:
    """The request's tools, if it has some and does not forbid them. Raises ApiError."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return None
    return None if choice == "none" else ToolUse(body, body.tools, tokenizer)


def _format_of(tokenizer: Tokenizer) -> ToolFormat:
    try:
        template = tokenizer.template_source if tokenizer.template_takes("tools") else None
        reason = "says nothing of tools"
    except RequestError:
        template, reason = None, "is missing or broken"
    if template is not None:
        for one in FORMATS:
            if one.sign in template:
                return one
        reason = "writes calls in a way that is not known here"
    raise bad_request(f"tools cannot be used: the model's chat template {reason}", "tools", "unsupported_parameter")


def _schema(tool: Tool, index: int) -> Schema:
    schema = tool.function.parameters
    if schema is None:
        return NO_PARAMETERS
    path = f"tools[{index}].function.parameters"
    if schema.get("type", "object") != "object" or not isinstance(schema.get("properties", {}), dict):
        raise bad_request(f"{path} must be the schema of an object", path)
    return {"type": "object"} | schema


def _plain(tool: Tool) -> dict[str, Any]:
    """A tool as templates know it."""
    fields = {name: getattr(tool.function, name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}
