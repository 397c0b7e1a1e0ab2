"""Request bodies. Field names and meanings are OpenAI's, and vLLM's where OpenAI has none.

The structs are the one definition: bodies are decoded by them, strictly, and /openapi.json is made from them. `None`
means that the field was left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from skipstone.core.request import STRUCTURED_FIELDS, SamplingParams

MOST_CHOICES = 16
MOST_STOPS = 4
LONGEST_STOP = 1000  # characters; it is looked for at every token, and so are the ids
MOST_STOP_IDS = 1000
TokenId = Annotated[int, Meta(ge=0)]
Option = Annotated[str, Meta(min_length=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
Content = str | list["TextPart"]
Schema = dict[str, Any]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON object all of whose fields are known."""


class StreamOptions(Body, kw_only=True):
    """`include_usage`: an event with the token counts at the end of a stream."""

    include_usage: bool | None = None


class SpeculationOptions(Body, kw_only=True):
    """Drafts per step, at most the server's; 0: none. `proposer`, if given, must be the server's."""

    k: TokenId | None = None
    proposer: str | None = None


class TextPart(Body, kw_only=True):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Prediction(Body, kw_only=True):
    """What the answer is expected to contain, as when most of a text stays as it is."""

    type: Literal["content"]
    content: Content


class CalledFunction(Body, kw_only=True):
    """Which function an answer called; `arguments`: a JSON object, as text."""

    name: str
    arguments: str


class MadeCall(Body, kw_only=True):
    """A call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class Message(Body, kw_only=True):
    """One turn of a conversation. `content` may be missing beside `tool_calls`.

    Fields that can only be null are what clients send back with an answer.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


class FunctionDefinition(Body, kw_only=True):
    """What the model may call; `parameters`: the schema of an object. `strict`: calls always fit it."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Body, kw_only=True):
    """A function; there are no other tools."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body, kw_only=True):
    """The function to call."""

    name: str


class NamedTool(Body, kw_only=True):
    """The tool to use."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body, kw_only=True):
    """A schema with the name that OpenAI asks for; `strict` or not, the text follows it."""

    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class ResponseFormat(Body, kw_only=True):
    """`json_object`: any JSON object; `json_schema`: JSON by a schema; `text`: no constraint."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body, kw_only=True):
    """What the whole text must be, exactly one of: JSON by a schema, by an expression, one of some texts, by a grammar.

    `json`: a JSON schema, or its text; `grammar`: Lark or GBNF.
    """

    json: Schema | str | None = None
    regex: str | None = None
    choice: Annotated[list[Option], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


# Parameters of the engine that a body asks for in another way, holds to limits of its own, or that are read by name.
OTHERWISE = (
    *("n", "max_tokens", "stop", "stop_token_ids", "logit_bias", "logprobs", "prompt_logprobs", "skip_special_tokens"),
    *("num_speculative_tokens", *STRUCTURED_FIELDS),
)


def body_of(params: type[SamplingParams]) -> type[msgspec.Struct]:
    """The other parameters as optional fields of a body, with their ranges and meanings."""
    kinds = get_type_hints(params, include_extras=True)
    fields = [(name, kind | None, None) for name, kind in kinds.items() if name not in OTHERWISE]
    return msgspec.defstruct("EngineParams", fields, bases=(Body,), kw_only=True)


if TYPE_CHECKING:
    EngineParams = Body
else:
    EngineParams = body_of(SamplingParams)


class Sampling(EngineParams, kw_only=True):
    """What both kinds of completion take."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MOST_STOP_IDS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_token_strs: bool | None = None
    return_token_origins: bool | None = None
    speculation: SpeculationOptions | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    user: str | None = None


class CompletionRequest(Sampling, kw_only=True):
    """A prompt, or several, to go on with: text, token ids, or a list of either."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


class ChatRequest(Sampling, kw_only=True):
    """A conversation to answer."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Schema | None = None


class TemplateRequest(Body, kw_only=True):
    """A conversation to be rendered as a prompt."""

    model: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Schema | None = None


class TokenizeRequest(Body, kw_only=True):
    """Text, or a conversation, to be turned into token ids; exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class AbortRequest(Body, kw_only=True):
    """The X-Request-Id of what shall end."""

    request_id: str


class TraceRequest(Body, kw_only=True):
    """The tokens before the one in question, and how many of the likely ones to name (5)."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(min_length=1)]
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class DetokenizeRequest(Body, kw_only=True):
    """Token ids to be turned into text."""

    model: str | None = None
    tokens: list[TokenId]


# What other servers take and this one does not: the values that ask for nothing, and what to do instead.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "allowed_token_ids": ((), "use logit_bias"),
    "audio": ((), "only text is served"),
    "bad_words": (([],), "use logit_bias"),
    "best_of": ((1,), "use n and choose on your side"),
    "chat_template": ((), "the model's own template is used"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "functions": (([],), "use tools"),
    "guided_choice": ((), "use structured_outputs.choice"),
    "guided_decoding_backend": ((), "llguidance is used"),
    "guided_grammar": ((), "use structured_outputs.grammar"),
    "guided_json": ((), "use structured_outputs.json"),
    "guided_regex": ((), "use structured_outputs.regex"),
    "length_penalty": ((1, 1.0), "there is no beam search"),
    "logprobs_mode": ((), "log-probabilities are the model's own"),
    "lora_request": ((), "adapters are not served"),
    "metadata": (({},), "nothing is stored"),
    "modalities": ((["text"],), "only text is served"),
    "priority": ((0,), "requests are served in the order of their arrival"),
    "prompt_logprobs": ((), "use /v1/completions with echo and logprobs"),
    "reasoning_effort": (("none",), "the models here do not reason apart from the answer"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "nothing is stored"),
    "suffix": (("",), "the models here only go on with a text"),
    "use_beam_search": ((False,), "there is no beam search"),
}
