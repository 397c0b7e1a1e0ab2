"""How many rows of prompts may run beside requests that decode, so that these get their next tokens in time."""

from __future__ import annotations

from skipstone.core.plan import PlanItem, StepPlan

FIRST, FEWEST = 64, 16  # rows, before anything is known and at the least


class ChunkLimit:
    """Follows what steps take: `rows` shrinks after a step of more than `seconds`, and grows after shorter ones."""

    def __init__(self, seconds: float, most: int) -> None:
        self.seconds, self.most = seconds, most
        self.rows = min(FIRST, most)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step, if it runs rows of prompts beside others."""
        chunks = sum(item.num_rows for item in plan.items if is_chunk(item))
        if chunks and not all(map(is_chunk, plan.items)):
            change = min(max(self.seconds / seconds, 0.5), 1.25)
            if change < 1 or chunks > 0.9 * self.rows:
                self.rows = min(max(int(self.rows * change), FEWEST), self.most)


def is_chunk(item: PlanItem) -> bool:
    """Whether an item is a piece of a prompt, of more than one row."""
    return item.num_rows > item.num_drafts + 1
