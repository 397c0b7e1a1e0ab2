"""How many drafts pay right now: k from measured times of steps and from what drafts were worth, 0 included.

As the text does not depend on drafts, k may change in every step. A number of drafts k is worth A(k) / T(k): A, tokens
that a step of a request yields, from how often its first 1, 2, ... drafts were kept; T, the time of a step with as many
requests. No drafts, the most, and one more or fewer than the best are tried for a few steps at every size of batch, and
again from time to time.

Where no drafts are best the proposer rests, so that nothing is paid for it. A request whose rows it missed drafts no
more, and a new one not at all, but for a scout now and then that shows what drafts would be worth.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from skipstone.core.plan import StepPlan, StepResult

TRIAL = 6  # steps of a kind that are timed before it is judged
FEWEST = 64  # steps of requests with drafts before these are judged
FIRST_PERIOD, LONGEST_PERIOD = 250, 2000  # steps until what is not done is tried again; twice as many each time
KEPT_TIMES = 16  # of a kind; the median counts
FADE = 0.5 ** (1 / 500)  # after 500 steps of requests older acceptance counts half
WORTH = 1.03  # times as good, or nothing changes
SCOUTED_STEPS, REST = 16, 1500  # while the proposer rests a new request drafts for so many steps after so many
AWAKE, RESTED = -1, 0.75  # steps without drafts with the proposer at work, and what they take without it, as a guess
SIZES = (*range(1, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)


class Size:
    """What was seen with about so many requests, and what follows from it."""

    def __init__(self, most: int, best: int) -> None:
        self.times: dict[int, deque[float]] = {k: deque(maxlen=KEPT_TIMES) for k in range(AWAKE, most + 1)}  # of a step
        self.best = self.current = best  # the latter is on trial where they differ
        self.left, self.wait = TRIAL, 0  # steps until a trial ends, and until there is one again
        self.period, self.trials = FIRST_PERIOD, 0

    def seconds(self) -> dict[int, float]:
        """T(k) of all k between two that were timed."""
        timed = {k: statistics.median(times) for k, times in self.times.items() if times}
        if AWAKE in timed:
            awake = timed.pop(AWAKE)
            timed[0] = min(timed.get(0, RESTED * awake), awake)
        found = {}
        for k in range(len(self.times) - 1):
            low, high = max((t for t in timed if t <= k), default=None), min((t for t in timed if t >= k), default=None)
            if low is not None and high is not None:
                found[k] = timed[low] + (timed[high] - timed[low]) * (k - low) / max(high - low, 1)
        return found


class AdaptiveK:
    """Chooses k from 0 to `most`. Begins with `prior` of the number of requests, else with the most."""

    def __init__(self, most: int, prior: Callable[[int], int] | None = None) -> None:
        self.most, self.prior = most, prior
        self.sizes: dict[int, Size] = {}
        # How often a request had its i-th draft asked for, and kept together with all before it.
        self.asked, self.kept = [0.0] * self.most, [0.0] * self.most
        self._asked_of: dict[int, int] = {}  # drafts that requests with whole draft caches want, by admission
        self._rested = 0  # steps since the last scout
        self._last: tuple[int, int] | None = None  # requests and kind of the last step that only decoded

    def choose(self, num_requests: int) -> int:
        """Drafts to make for each of the requests of a step."""
        return self._size(num_requests).current

    def rests(self, num_requests: int) -> bool:
        """Whether the proposer has nothing to do."""
        return self._size(num_requests).best == 0

    def scouted_steps(self) -> int:
        """In how many steps a new request drafts although the proposer rests."""
        if self._rested < REST:
            return 0
        self._rested = 0
        share = FEWEST / max(self.asked[0], FEWEST)  # that scouts outweigh what was seen before the rest
        self.asked, self.kept = [share * x for x in self.asked], [share * x for x in self.kept]
        return SCOUTED_STEPS

    def _size(self, num_requests: int) -> Size:
        about = next((size for size in SIZES if size >= num_requests), SIZES[-1])
        if about not in self.sizes:
            nearest = min(self.sizes, key=lambda size: max(size, about) / min(size, about), default=None)
            known = self.most if nearest is None else self.sizes[nearest].best
            self.sizes[about] = Size(self.most, min(self.prior(num_requests) if self.prior else known, self.most))
        return self.sizes[about]

    def tokens(self, k: int) -> float:
        """A(k), tokens per step of a request."""
        return 1.0 + sum(kept / asked for kept, asked in zip(self.kept[:k], self.asked, strict=False) if asked)

    def observe(self, plan: StepPlan, results: list[StepResult], seconds: float) -> None:
        """Learn from a step. Its time counts where it decodes as many requests and drafts as the one before."""
        for item, result in zip(plan.items, results, strict=True):
            for i in range(self._asked_of.get(item.admission, 0)):
                self.asked[i] = self.asked[i] * FADE + 1
                self.kept[i] = self.kept[i] * FADE + (result.num_accepted > i)
        self._asked_of = {item.admission: item.num_next_drafts for item in plan.items if item.follows}
        count, drafts = len(plan.items), [item.num_next_drafts for item in plan.items]
        k = max(set(drafts), key=drafts.count)  # some may have a k of their own, or be near their end
        alike = all(item.samples and item.num_rows == item.num_drafts + 1 for item in plan.items)
        alike = alike and drafts.count(k) > 0.7 * count
        kind = AWAKE if k == 0 and self._asked_of else k
        self._rested += kind == 0
        if alike and (count, kind) == self._last:
            self._learn(self._size(count), kind, seconds)
        self._last = (count, kind) if alike else None

    def _learn(self, size: Size, kind: int, seconds: float) -> None:
        if kind in size.times:  # a request may ask for fewer drafts
            size.times[kind].append(seconds)
        if kind == 0:
            size.times[AWAKE].clear()  # a guess is needed no more, and would be out of date one day
        size.wait -= 1
        size.left -= max(kind, 0) == size.current
        if size.left > 0 or 0 < self.asked[0] < FEWEST:
            return
        if size.wait <= 0 and size.current == size.best:
            near = (0, size.best - 1, size.best + 1, self.most)  # between what was timed, times are guesses
            others = [k for k in range(self.most + 1) if k in near and k != size.best]
            size.current, size.left = others[size.trials % len(others)], TRIAL
            size.times[size.current or AWAKE].clear()
            return
        if size.wait <= 0:
            size.wait, size.period, size.trials = size.period, min(2 * size.period, LONGEST_PERIOD), size.trials + 1
        worth = {k: self.tokens(k) / seconds for k, seconds in size.seconds().items()}
        best = max(worth, key=lambda k: worth[k])
        if worth[best] > WORTH * worth.get(size.best, 0.0):
            size.best, size.period = best, FIRST_PERIOD
        size.current = size.best
