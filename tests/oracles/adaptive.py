"""For tests of an adaptive k: one that answers at random, and machines whose times and acceptance are made up.

A machine runs the plans of a real scheduler without a model. A step takes the time of its rows and of the proposer's
passes, times noise; the i-th draft is right with a given probability, if all before it were. Drafts of a request whose
rows the proposer missed are never right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from skipstone.core.batch import FIRST_BLOCK
from skipstone.core.plan import PlanItem, StepResult
from skipstone.core.request import Request, SamplingParams
from skipstone.runtime.adaptive import AdaptiveK
from skipstone.runtime.block_pool import BlockPool
from skipstone.runtime.scheduler import Scheduler
from skipstone.spec.proposer import ProposerNeeds

NEEDS = ProposerNeeds("made up", next_tokens=1, uses_caches=True)


class RandomK(AdaptiveK):
    """Answers at random; `calm`: how probably it goes on resting, or not resting, from one question to the next."""

    def __init__(self, most: int, seed: int, calm: float) -> None:
        super().__init__(most)
        self.draw, self.calm = random.Random(seed), calm
        self.resting = False

    def choose(self, num_requests: int) -> int:
        """Any k."""
        return self.draw.randint(0, self.most)

    def rests(self, num_requests: int) -> bool:
        """Now and then, for some time."""
        self.resting ^= self.draw.random() > self.calm
        return self.resting

    def scouted_steps(self) -> int:
        """Mostly none."""
        return self.draw.choice([0, 0, 1, 6])


class GivenK(AdaptiveK):
    """Answers as it is told."""

    def __init__(self, most: int, k: int, resting: bool = False, scouted: int = 0) -> None:
        super().__init__(most)
        self.k, self.resting, self.scouted = k, resting, scouted

    def choose(self, num_requests: int) -> int:
        """The given one."""
        return self.k

    def rests(self, num_requests: int) -> bool:
        """As given."""
        return self.resting

    def scouted_steps(self) -> int:
        """As given."""
        return self.scouted


@dataclass
class Machine:
    """Times in ms, and how often the i-th draft is right."""

    rates: list[float]
    step: float = 10.0
    row: float = 0.5
    follow: float = 1.0  # the proposer's pass over the rows, without which there are no drafts
    draft: float = 0.5  # each further pass
    noise: float = 0.1
    seed: int = 0

    @classmethod
    def random(cls, seed: int, most: int) -> Machine:
        """Anything from free drafts that are all right to dear ones that are all wrong."""
        draw = random.Random(seed)
        first, fade = draw.uniform(0.0, 0.95), draw.uniform(0.5, 1.0)
        costs = [draw.choice([0.0, draw.uniform(0, 1), draw.uniform(0, 4)]) for _ in range(3)]
        return cls([first * fade**i for i in range(most)], 10.0, *costs, noise=draw.uniform(0, 0.15), seed=seed)

    def time(self, items: list[PlanItem]) -> float:
        """Of a step, without noise."""
        asked = max(item.num_next_drafts for item in items)
        works = asked > 0 or any(item.follows for item in items)
        rows = sum(item.num_rows for item in items)
        return self.step + self.row * rows + self.follow * works + self.draft * max(asked - 1, 0)


class Load:
    """So many requests at a time on a machine, a new one where one ends, of 50 to `longest` tokens."""

    def __init__(
        self,
        machine: Machine,
        count: int,
        adaptive: AdaptiveK | None = None,
        fixed: int = 0,
        longest: int = 400,
        asked: list[int | None] | None = None,
    ) -> None:
        self.machine, self.count, self.adaptive, self.longest = machine, count, adaptive, longest
        self.most = adaptive.most if adaptive else fixed
        self.asked = asked or [None]
        pool = BlockPool(FIRST_BLOCK + count * (longest + 32), 16)
        self.scheduler = Scheduler(pool, 512, count, False, NEEDS, None, adaptive)
        self.draw = random.Random(machine.seed)
        self.seconds, self.tokens, self.number = 0.0, 0, 0
        self.worked: list[bool] = []  # of each step, whether the proposer had anything to do
        self.scouts = 0  # requests that were followed from their beginning
        self.answers: set[tuple[int | None, int]] = set()  # drafts that requests ask for themselves, and what they got

    def run(self, steps: int) -> float:
        """Tokens per second in so many steps."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(steps):
            self._step()
        return (self.tokens - tokens) / (self.seconds - seconds)

    def change(self, **machine: object) -> None:
        """Another machine from now on."""
        self.machine = replace(self.machine, **machine)  # type: ignore[arg-type]

    def _step(self) -> None:
        scheduler = self.scheduler
        while len(scheduler.running) + len(scheduler.waiting) < self.count:
            asked = self.asked[self.number % len(self.asked)]
            length = self.draw.randint(50, self.longest)
            params = SamplingParams(num_speculative_tokens=asked, ignore_eos=True)
            request = Request(f"r{self.number}", [1, 2], params, 0, 2 + length)
            request.max_drafts = self.most if asked is None else asked
            self.number += 1
            scheduler.add(request)
        plan = scheduler.schedule()
        assert plan is not None
        results = [self._result(item) for item in plan.items]
        for item in plan.items:
            owner = scheduler.owner(item)
            assert owner is not None
            self.answers.add((owner.params.num_speculative_tokens, item.num_next_drafts))
        noise = self.draw.gauss(1.0, self.machine.noise) * (5 if self.draw.random() < 0.01 else 1)
        seconds = self.machine.time(plan.items) * max(noise, 0.5) / 1000
        if self.adaptive is not None:
            self.adaptive.observe(plan, results, seconds)
        self.tokens += sum(len(tokens) for _, tokens in scheduler.commit(plan, results))
        self.seconds += seconds
        self.worked.append(any(item.follows or item.num_next_drafts for item in plan.items))
        self.scouts += sum(item.follows for item in plan.items if item.num_rows > item.num_drafts + 1)

    def _result(self, item: PlanItem) -> StepResult:
        kept = 0
        while kept < item.num_drafts and item.follows and self.draw.random() < self.machine.rates[kept]:
            kept += 1
        return StepResult([1] * (kept + 1), kept, [1] * item.num_next_drafts)
