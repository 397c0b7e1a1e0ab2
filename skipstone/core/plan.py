"""What one step runs and what came back: host integers only, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from skipstone.core.request import Request, TokenLogprobs


@dataclass(frozen=True)
class ScheduledRequest:
    """`query_len` rows of one request, starting at its first position without valid KV.

    `num_drafts` of the rows are unverified drafts. `samples` is False for a chunk that ends inside the prompt.
    """

    request: Request
    epoch: int
    start: int  # num_computed_tokens before the step
    query_len: int
    num_drafts: int
    num_next_drafts: int = 0  # most drafts to make after this step

    @property
    def samples(self) -> bool:
        """Whether the step yields a token: its rows reach the last committed token."""
        return self.start + self.query_len - self.num_drafts >= len(self.request.token_ids)


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, requests of equal query_len next to each other.

    `block_copies` (source, destination) come first: requests that share a block up to its end get a copy to change.
    """

    scheduled: list[ScheduledRequest]
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """T, the rows of the step."""
        return sum(item.query_len for item in self.scheduled)


@dataclass
class StepResult:
    """What one scheduled request got: emitted tokens (drafts kept plus one), their log-probabilities if asked.

    `drafts` are guesses for the positions behind the emitted tokens; draft caches now cover `num_draft_computed`.
    """

    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    drafts: list[int] = field(default_factory=list)
    num_draft_computed: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class StepOutput:
    """Results of a step, one entry per scheduled request in plan order."""

    results: list[StepResult]
