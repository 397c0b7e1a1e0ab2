"""Whether an engine that drafts emits the tokens of one that does not, and from the same logits.

A row is compared as long as both runs have emitted the same tokens before it: then both saw the same context. At the
first other token a row's own sample tells who is at fault: if the token is not what the row's logits give, the
acceptance rule is. Otherwise the logits are, and the difference is either within what rounding does or not.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec
import torch
from torch import Tensor

from skipstone.core.observer import EmittedRun, Observer
from skipstone.outputs import RequestOutput

# Largest difference that rounding can make of logits, as a share of the largest logit.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.1}
NEAR_TIE, LOGIC_ERROR = "near tie", "logic error"


class Difference(msgspec.Struct, kw_only=True):
    """The first place at which a text differs. Positions count from the text's first token."""

    request_id: str
    position: int
    expected: int | None  # None: the text has ended
    got: int | None
    origin: str  # of the token: draft accepted, recovered, bonus, sampled, end
    expected_top: list[tuple[int, float]] = []
    got_top: list[tuple[int, float]] = []
    logit_difference: float = 0.0  # of this row
    gap: float = 0.0  # by how much the other token won, in logits; negative: it did not
    own_sample: bool = True  # whether the token is what the row's own logits and noise give
    kind: str = ""
    why: str = ""


class Comparison(msgspec.Struct, kw_only=True):
    """One engine against the reference."""

    texts: int = 0
    equal_texts: int = 0
    rows: int = 0  # emitted rows with equal contexts in both runs
    equal_rows: int = 0  # those with bit-equal logits
    largest_logit: float = 0.0
    max_logit_difference: float = 0.0  # over rows that emitted the same token
    differences: list[Difference] = []


class Reference(Observer):
    """Keeps tokens and logits of every emitted row."""

    def __init__(self) -> None:
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.logits: defaultdict[str, list[Tensor]] = defaultdict(list)

    def on_runs(self, runs: list[EmittedRun]) -> None:
        """Keep tokens and logits of a step's rows."""
        for run in runs:
            self.tokens[run.request.request_id] += run.token_ids
            self.logits[run.request.request_id] += run.logits.clone()

    def close(self, outputs: list[RequestOutput]) -> None:
        """Forget what was emitted past the ends of the texts."""
        for output in outputs:
            kept = len(output.outputs[0].token_ids)
            del self.tokens[output.request_id][kept:], self.logits[output.request_id][kept:]


class Comparer(Observer):
    """Compares every emitted row with the reference, as it comes."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.result = Comparison()
        self.differing: dict[str, Difference] = {}

    def on_runs(self, runs: list[EmittedRun]) -> None:
        """Compare a step's rows, up to the first other token of each text."""
        for run in runs:
            first = run.start - run.request.num_prompt_tokens
            tokens = self.reference.tokens[run.request.request_id]
            for i, token in enumerate(run.token_ids):
                # Tokens past the end of the reference are judged by `close`: the engine may cut them off.
                if run.request.request_id in self.differing or first + i >= len(tokens):
                    break
                self._compare(run, i, first + i, token)

    def _compare(self, run: EmittedRun, i: int, position: int, token: int) -> None:
        request_id, result = run.request.request_id, self.result
        expected, theirs = self.reference.tokens[request_id][position], self.reference.logits[request_id][position]
        ours = run.logits[i]
        equal = torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
        difference = 0.0 if equal else float((ours - theirs).nan_to_num(torch.inf).abs().max())
        result.rows += 1
        result.equal_rows += equal
        if token == expected:
            result.largest_logit = max(result.largest_logit, float(theirs.abs().max()))
            result.max_logit_difference = max(result.max_logit_difference, difference)
            return
        scores, temperature = run.scores[i], run.request.params.temperature
        self.differing[request_id] = Difference(
            request_id=request_id,
            position=position,
            expected=expected,
            got=token,
            origin=origin(run, i),
            expected_top=top_two(theirs),
            got_top=top_two(ours),
            logit_difference=difference,
            gap=float(scores[token] - scores[expected]) * (temperature or 1.0),
            own_sample=bool(scores[token] == scores.max()),
        )

    def close(self, outputs: list[RequestOutput], exact: bool, dtype: str) -> Comparison:
        """The result, once the texts are complete."""
        for output in outputs:
            expected, got = self.reference.tokens[output.request_id], output.outputs[0].token_ids
            if output.request_id not in self.differing and expected != got:
                place = min(len(expected), len(got))
                ends = [tokens[place] if place < len(tokens) else None for tokens in (expected, got)]
                self.differing[output.request_id] = Difference(
                    request_id=output.request_id, position=place, expected=ends[0], got=ends[1], origin="end"
                )
        for difference in self.differing.values():
            difference.kind, difference.why = self._judge(difference, exact, dtype)
        self.result.texts = len(outputs)
        self.result.equal_texts = len(outputs) - len(self.differing)
        self.result.differences = list(self.differing.values())
        return self.result

    def _judge(self, found: Difference, exact: bool, dtype: str) -> tuple[str, str]:
        """Near tie or logic error, and why."""
        if found.origin == "end":
            return LOGIC_ERROR, "one text ends where the other goes on"
        if not found.own_sample:
            return LOGIC_ERROR, "the token is not the one that the row's own logits give"
        noise, limit = self.result.max_logit_difference, ROUNDING[dtype] * self.result.largest_logit
        noise = noise or found.logit_difference  # no earlier row differs
        if noise > limit:
            return LOGIC_ERROR, f"logits differ by {noise:.2g}, more than rounding can ({limit:.2g})"
        if found.gap > 2 * noise:
            return LOGIC_ERROR, f"the gap of {found.gap:.2g} is more than logits of equal contexts differ ({noise:.2g})"
        why = f"the gap of {found.gap:.2g} is within the difference of logits ({noise:.2g})"
        return NEAR_TIE, why + ("; in exact mode there should be none" if exact else "")


def origin(run: EmittedRun, i: int) -> str:
    """How token i of a run came about."""
    if not run.drafts:
        return "sampled"
    if i < run.num_accepted:
        return "accepted"
    return "bonus" if i == len(run.drafts) else "recovered"


def top_two(logits: Tensor) -> list[tuple[int, float]]:
    """The two likeliest tokens and their logits."""
    values, ids = logits.topk(2)
    return list(zip(ids.tolist(), values.tolist(), strict=True))
