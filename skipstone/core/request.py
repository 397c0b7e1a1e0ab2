"""What a caller asks for and what one request has become: sampling parameters, committed tokens, finish reason.

Knows host integers only. Does not know tensors, blocks' contents or ranks.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from skipstone.config import PositiveInt, options_of
from skipstone.core.grammar import Grammar
from skipstone.core.speculation import SpeculationStats
from skipstone.errors import RequestError

LARGEST = 2**63 - 1
Count = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=LARGEST)]
NumLogprobs = Annotated[int, Meta(ge=-1, le=20)]
STRUCTURED_FIELDS = ("json_schema", "regex", "grammar", "choice")


class FinishReason(enum.Enum):
    """Why a request ended. STOP: end-of-text or a stop id or string; LENGTH: max_tokens or the context."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen. Names and meanings are those of the OpenAI API and vLLM.

    Ranges and meanings stand here alone: flags, messages and the API's fields are made from them. `seed` None: a random
    one is drawn. `logprobs` n: the chosen token and the n likeliest per position; the distribution is the model's own
    (before temperature, penalties and truncation). `num_speculative_tokens` None: the engine's choice. At most one of
    `json_schema`, `regex`, `grammar` and `choice` constrains the whole text.
    """

    n: Annotated[int, Meta(ge=1, le=128, description="answers per prompt")] = 1
    temperature: Annotated[
        float, Meta(ge=0, le=100, description="0: always the likeliest token; 1: the model's own distribution")
    ] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=LARGEST, description="only the k likeliest tokens; 0 or -1: all")] = 0
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="only the likeliest tokens that hold this probability together")
    ] = 1.0
    min_p: Annotated[
        float, Meta(ge=0, le=1, description="only tokens with at least this share of the likeliest one's probability")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(gt=0, description="divides the scores of tokens already seen, prompt included")
    ] = 1.0
    presence_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="subtracted once from tokens already generated")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="subtracted for every time a token was generated")
    ] = 0.0
    logit_bias: Annotated[
        dict[int, float], Meta(description="ID=BIAS, added to the score of a token; may be repeated")
    ] = {}
    max_tokens: Annotated[
        PositiveInt | None, Meta(description="most tokens of an answer; none: up to the context length")
    ] = None
    min_tokens: Annotated[Count, Meta(description="no end of text before this many tokens")] = 0
    stop: Annotated[str | list[str], Meta(description="end at this text; may be repeated")] = []
    stop_token_ids: Annotated[list[int], Meta(description="end at these token ids, as 5,6; may be repeated")] = []
    include_stop_str_in_output: Annotated[bool, Meta(description="keep the stop text in the answer")] = False
    ignore_eos: Annotated[bool, Meta(description="go on after an end-of-text token")] = False
    logprobs: Annotated[
        NumLogprobs | None, Meta(description="log-probabilities of each token and of the N likeliest; -1: all")
    ] = None
    prompt_logprobs: Annotated[NumLogprobs | None, Meta(description="the same for the tokens of the prompt")] = None
    seed: Annotated[Seed | None, Meta(description="equal seeds give equal answers")] = None
    skip_special_tokens: Annotated[bool, Meta(description="leave special tokens out of the text")] = True
    num_speculative_tokens: Annotated[
        Count | None,
        Meta(description="drafts per step, at most the engine's; 0: none. Changes the speed, never the text"),
    ] = None
    json_schema: Annotated[str | None, Meta(description="the text is JSON that fits this schema (JSON text)")] = None
    regex: Annotated[str | None, Meta(description="the text matches this regular expression")] = None
    grammar: Annotated[str | None, Meta(description="the text fits this Lark grammar")] = None
    choice: Annotated[str | list[str], Meta(description="the text is one of these; may be repeated")] = []

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def structured_output(self) -> tuple[str, str | list[str]] | None:
        """The field that constrains the text, and its value."""
        fields = {name: getattr(self, name) for name in STRUCTURED_FIELDS}
        if isinstance(self.choice, str):
            fields["choice"] = [self.choice]
        return next(((name, value) for name, value in fields.items() if value not in (None, [])), None)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0.0 or self.top_k == 1

    def validate(self, vocab_size: int) -> None:
        """Raise RequestError naming the first bad field, its value and what is allowed."""
        self._check_values()
        if any(not text for text in self.stop_strings):
            raise RequestError("stop contains an empty string, which would end every text at once; remove it")
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name):
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        f"{name} contains token id {token}, but the vocabulary has ids 0 to {vocab_size - 1}"
                    )
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise RequestError(f"logit_bias[{token}]={bias} must be a number, or -inf to forbid the token")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}; raise max_tokens"
            )

        self._check_structured_output()

    def _check_structured_output(self) -> None:
        given = [name for name in STRUCTURED_FIELDS if getattr(self, name) not in (None, [])]
        if len(given) > 1:
            raise RequestError(f"{given[0]} and {given[1]} cannot be combined; keep one of them")
        if given and self.min_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} and {given[0]} cannot be combined, as the grammar decides where the "
                "text ends; remove min_tokens"
            )
        if self.choice == "" or any(not option for option in self.choice):
            raise RequestError("choice contains an empty string; remove it")

    def _check_values(self) -> None:
        """A struct made in Python holds whatever it was given; hold it to the annotations, as decoded JSON is."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        name, problem = "", ""
        try:
            msgspec.convert(values, type(self))
            name = next((name for name, x in values.items() if isinstance(x, float) and not math.isfinite(x)), "")
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at ")
            name = path.partition("$.")[2].rstrip("`").split("[")[0]
            if ", got " in text:
                problem = f"has the wrong type: {text}" + (" as a key" if path.startswith("`key`") else "")
        if name:
            allowed = f"is out of range; it must be {options_of(type(self))[name].allowed}"
            raise RequestError(f"{name}={getattr(self, name)!r} {problem or allowed}")


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: of the token there, its rank (1 = likeliest), and of the likeliest ids."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(eq=False)
class Request:
    """One choice of one prompt on its way through the engine.

    `token_ids` holds the prompt and every committed token. KV is valid at positions below `num_computed_tokens`.
    `drafts` are unverified guesses for the positions after the last committed token, at most `max_drafts` of them; the
    proposer's own caches are valid below `num_draft_computed`.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    max_drafts: int = 0
    drafts: list[int] = field(default_factory=list)
    prediction: list[int] = field(default_factory=list)  # what the caller expects in the output
    num_draft_computed: int = 0
    num_accepted: int = 0  # in its latest step
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    first_parent: bytes = b""  # what the hash of the first block goes on from: equal for those who share cached blocks
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None  # why nothing could follow, where that ended the request
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens committed after the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were committed after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        """Whether nothing more will be computed for this request."""
        return self.finish_reason is not None

    def commit(self, token_ids: list[int]) -> list[int]:
        """Append a verified run, cut at the first token that ends the request; return what was appended.

        The cut is at the earliest of end-of-text, a stop id, the end of the grammar and the length limit. A stop id
        that ends the request is committed (it was sampled) and recorded in `stop_token_id`. A token that is forbidden
        came out because no token was possible: it ends the request before it, and `error` says why.
        """
        appended: list[int] = []
        for token in token_ids:
            if not self._permits(token):
                self.finish_reason, self.error = FinishReason.ABORT, self._nothing_possible()
                break
            self.token_ids.append(token)
            appended.append(token)
            if self.num_output_tokens >= self.params.min_tokens and self.ends_with(token):
                self.finish_reason, self.stop_token_id = FinishReason.STOP, token
                break
            if self.grammar is not None and self.grammar.ended:
                self.finish_reason = FinishReason.STOP
                break
            if len(self.token_ids) >= self.max_total_tokens:
                self.finish_reason = FinishReason.LENGTH
                break
        return appended

    def _permits(self, token: int) -> bool:
        """Whether the token may follow; if so, the grammar takes it over."""
        if self.params.logit_bias.get(token) == -math.inf:
            return False
        if self.num_output_tokens < self.params.min_tokens and token in self.banned_token_ids:
            return False
        return self.grammar is None or self.grammar.advance(token)

    def _nothing_possible(self) -> str:
        kind = self.params.structured_output[0] if self.params.structured_output else None
        after = f"cannot be used: after {self.num_output_tokens} tokens of output"
        if self.grammar is not None and self.grammar.failure is not None:
            return f"{kind} {after} its grammar was given up: {self.grammar.failure}"
        biased = -math.inf in self.params.logit_bias.values()
        early = self.num_output_tokens < self.params.min_tokens
        whose = [kind] * (kind is not None) + ["logit_bias"] * biased + ["min_tokens"] * early
        hint = "; an end token cannot be part of the text" if kind else ""
        way_out = "; relax one of them" if len(whose) > 1 else ""
        return f"{whose[0]} {after} no token is allowed by {' and '.join(map(str, whose))}{hint}{way_out}"

    def ends_with(self, token: int) -> bool:
        """Whether this token ends the text, once `min_tokens` are out."""
        if token in self.params.stop_token_ids:
            return True
        return token in self.eos_token_ids and not self.params.ignore_eos

    @property
    def banned_token_ids(self) -> list[int]:
        """Ids that may not be chosen while fewer than `min_tokens` tokens are out: every id that would end the text."""
        ends = set(self.params.stop_token_ids)
        return sorted(ends if self.params.ignore_eos else ends | self.eos_token_ids)
