"""What can be watched of an engine's steps: selections, emitted tokens with their logits, and when each part ended.

An engine without an observer does none of this work.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from skipstone.core.batch import Selection
from skipstone.core.request import Request

Phase = Literal["target", "verify", "draft"]


class EmittedRun(NamedTuple):
    """What one request emits in a step: accepted drafts, then one more token. Rows of rejected drafts are left out.

    The request has not taken over the tokens yet, and may cut the run at an end of text or at its length limit.
    """

    request: Request
    start: int  # position of the first emitted token
    token_ids: list[int]
    drafts: list[int]  # all that were verified
    num_accepted: int
    rows: list[int]  # the row of the step's batch behind each token
    logits: Tensor  # [len(token_ids), V] float32, as the model gave them
    scores: Tensor  # [len(token_ids), V] float32, what the sampler takes the maximum of


class Observer:
    """Watches an engine; override what is of interest. Called within the step, so tensors must be copied to be kept."""

    wants_runs = True
    """Whether `on_runs` is to be called; the scores it is given cost a pass over the logits.

    May change between steps. While it holds, no step is a graph or started early; while not, selections of the last
    layer may be those of the rows with logits only, and steps that are graphs tell nothing.
    """
    wants_phases = True
    """Whether a GPU is waited for at the end of each part, as its time is not known otherwise."""

    def on_selection(self, layer: int, selection: Selection) -> None:
        """A sparse layer of the target has chosen the keys of every row of the step's batch."""

    def on_runs(self, runs: list[EmittedRun]) -> None:
        """The step's tokens are decided."""

    def on_phase(self, phase: Phase) -> None:
        """A part of the step has ended: "target" includes the scheduler's work, "draft" is absent without drafting."""
