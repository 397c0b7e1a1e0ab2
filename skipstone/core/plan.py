"""What one step runs and what came back: integers and sampling parameters only, the same on all ranks.

A plan may be made while the step before it is under way. Nobody knows then how many drafts that one keeps, so positions
on the host are upper bounds, as if all were; the device's `SequenceTable` holds the true ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from skipstone.core.request import SamplingParams, TokenLogprobs


class PlanItem(NamedTuple):
    """`num_rows` rows of the request in `slot`, the last `num_drafts` of which are unverified drafts.

    `admission` numbers the request's stay in its slot, so that results of an earlier one can be told apart.
    `samples` is False for a chunk that ends inside the prompt. `follows`: the proposer keeps its caches up to date.
    """

    admission: int
    slot: int
    start: int  # position of the first row; an upper bound while the step before is under way
    num_rows: int
    num_drafts: int
    samples: bool
    num_next_drafts: int = 0  # most drafts to make after this step
    follows: bool = False
    prompt_rows: tuple[int, int] = (0, 0)  # of its rows, those whose next token's log-probability is wanted

    @property
    def end(self) -> int:
        """Position behind the last row."""
        return self.start + self.num_rows


class Admission(NamedTuple):
    """A request that takes a slot: all that a step must know of it."""

    slot: int
    number: int  # the items' `admission`
    token_ids: list[int]
    num_prompt_tokens: int
    start: int
    max_total_tokens: int
    seed: int
    params: SamplingParams
    end_token_ids: list[int]  # may not be chosen before min_tokens are out
    prediction: list[int]


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, requests of equal `num_rows` next to each other.

    `admissions` come first, then `new_blocks` (slot, place in its block table, block) and `block_copies` (source,
    destination): requests that share a block up to its end get a copy to change.
    """

    items: list[PlanItem]
    admissions: list[Admission] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """T, the rows of the step."""
        return sum(item.num_rows for item in self.items)


@dataclass
class StepResult:
    """What one item got: emitted tokens (drafts kept plus one), their log-probabilities if asked.

    `drafts` are guesses for the positions behind the emitted tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    drafts: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
