"""Corners that once broke: drafts at the length limit, and bfloat16 on CPUs without packed bfloat16 products."""

from __future__ import annotations

from skipstone import LLM, SamplingParams
from skipstone.core.batch import FIRST_BLOCK
from skipstone.core.plan import StepPlan, StepResult
from skipstone.core.request import Request
from skipstone.runtime.block_pool import BlockPool
from skipstone.runtime.scheduler import Scheduler


def second_plan(scheduler: Scheduler, requests: list[Request]) -> StepPlan:
    """The step after the prompts, where the first request has drafts [1, 2, 3]."""
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, [StepResult([9], 0, [1, 2, 3])] + [StepResult([9])] * (len(requests) - 1))
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def test_drafts_past_the_length_limit_take_no_blocks() -> None:
    """The pool holds just the longest sequence; drafts past its end must neither be run nor cause a preemption."""
    scheduler = Scheduler(BlockPool(FIRST_BLOCK + 3, 4), max_rows=64, max_requests=4, prefix_caching=False)
    request = Request("r", list(range(9)), SamplingParams(max_tokens=3), seed=0, max_total_tokens=12)
    plan = second_plan(scheduler, [request])
    assert [(item.num_rows, item.num_drafts) for item in plan.items] == [(2, 1)]
    assert request.drafts == [1]
    assert scheduler.stats.preemptions == 0


def test_drafts_are_dropped_before_a_request_is_preempted() -> None:
    """Two requests fill the pool; the older one's drafts would need a block of the younger one."""
    scheduler = Scheduler(BlockPool(FIRST_BLOCK + 4, 4), max_rows=64, max_requests=4, prefix_caching=False)
    requests = [Request(str(i), [7] * 7, SamplingParams(), seed=0, max_total_tokens=16) for i in range(2)]
    plan = second_plan(scheduler, requests)
    assert [item.num_rows for item in plan.items] == [1, 1]
    assert scheduler.stats.preemptions == 0


def test_bfloat16_is_exact_too() -> None:
    """The same bits alone and in a batch, with the demo's weights in the dtype they are stored in."""
    llm = LLM("demo", dtype="bfloat16", num_blocks=64, max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    texts = ["The SQLite library", "def main(", "In the beginning"]
    together = [out.outputs[0] for out in llm.generate(texts, params, progress=False)]
    for text, expected in zip(texts, together, strict=True):
        alone = llm.generate(text, params, progress=False)[0].outputs[0]
        assert alone.token_ids == expected.token_ids
        assert alone.logprobs == expected.logprobs
