"""Steps that nobody asked for, before the first request: what a GPU compiles and captures is made by them.

They run in slots that no request has, over blocks that nobody owns, so nothing of them is left but kernels and graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from skipstone.core.plan import Admission, PlanItem, StepPlan
from skipstone.core.request import SamplingParams
from skipstone.runtime.graphs import BUCKETS
from skipstone.runtime.masks import GrammarMasks
from skipstone.runtime.runner import ModelRunner

Tick = Callable[[int, int], None]  # pieces done, of how many
# What sampling may need beside a temperature; each has kernels of its own.
FEATURES = (
    SamplingParams(temperature=0),
    SamplingParams(top_p=0.9, min_p=0.05),
    SamplingParams(presence_penalty=0.5, repetition_penalty=1.1, logprobs=1),
    SamplingParams(logit_bias={0: 1.0}, min_tokens=2),
)


class Part(NamedTuple):
    """Rows of one made-up request."""

    start: int
    num_rows: int
    decodes: bool = False
    params: SamplingParams = FEATURES[0]


def warm_up(runner: ModelRunner, max_rows: int, tick: Tick | None = None) -> None:
    """Run every kind of step once, and capture every graph."""
    plans = list(_plans(runner, max_rows))
    for done, parts in enumerate(plans, start=1):
        _run(runner, parts)
        if tick is not None:
            tick(done, len(plans))


def _plans(runner: ModelRunner, max_rows: int) -> Iterator[list[Part]]:
    """The steps: prompts of many lengths, alone and beside requests that decode; contexts; features; all graphs."""
    most, longest, n = runner.table.padding_slot, runner.max_tokens, runner.most_drafts + 1
    largest = min(max_rows, longest - n - 1)
    sizes = {min(size + more, largest) for size in _powers(largest) for more in (-1, 0, 1, 7)}
    lengths = sorted((sizes | {largest}) - {0})
    for length in lengths:
        yield [Part(0, length)]
        yield [Part(9, n, True), Part(0, length)][: most + 1]
    for context in _powers(longest - n - 1):
        yield [Part(context - n, n, True)] if context > n else [Part(1, n, True)]
        yield [Part(context - n, n, True), Part(max(context - 64, 0), min(63, largest))][:most]
    for size in [size for size in BUCKETS if size < most] + [most]:
        for params in FEATURES:
            yield [Part(7, n, True, params)] * size


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())] if most > 0 else []


def _run(runner: ModelRunner, parts: list[Part]) -> None:
    """One step of these parts, in the first slots."""
    items, admissions, k = [], [], runner.most_drafts
    for slot, (start, num_rows, decodes, params) in enumerate(sorted(parts, key=lambda part: part.num_rows)):
        length = min(start + num_rows + k + 2, runner.max_tokens)
        admissions.append(Admission(slot, slot, [0], 1, start, length, slot, params, [1], []))
        drafts = num_rows - 1 if decodes else 0
        items.append(PlanItem(slot, slot, start, num_rows, drafts, True, k, runner.proposer is not None))
    plan = StepPlan(items, admissions)
    handle = runner.start(plan)
    runner.finish(handle, GrammarMasks(plan, [None] * len(items)))
    handle.wait()
