"""A proposer that is loaded but not asked costs nothing, and rows that carry drafts cost no bits.

With num_speculative_tokens=0 the proposer is never called, its caches stay as they were, and the target runs the same
rows in the same steps as an engine without one. In exact mode the logits of every row, accepted or not, in batches of
any size with drafts of any number, have the bits that the row has when it runs alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from oracles.host_batch import QueryRows, build_batch
from oracles.speculation import LEAN, WAYS, Folders, Job, load, run, tokens, watch
from torch import Tensor

from skipstone import LLM, SamplingParams
from skipstone.attention.backend import AttentionGroups
from skipstone.core.batch import FIRST_BLOCK, Batch, SamplingRows
from skipstone.core.kv_cache import CacheMemory, KVCache
from skipstone.core.request import Request
from skipstone.kernels.ops import Ops
from skipstone.kernels.reference.decode import Accepted
from skipstone.spec.verify import Drafted, Verifier

TARGETS = ["m3", "dsa"]
CACHED = ["mtp", "mtp3", "eagle3", "dflash", "draft"]
BLOCK = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("costs"))


def start(folders: Folders, name: str, proposer: str, k: int, **options: Any) -> LLM:
    if proposer == "off":
        return load(folders.target(name), **options)
    way = WAYS[proposer]
    return load(folders.target(name, way.modules), folders.spec(way, name, k), **options)


class Calls(NamedTuple):
    """What the target was asked to run: rows, requests, rows with logits, tokens and positions of every step."""

    steps: list[tuple]
    logits: list[int]

    @classmethod
    def of(cls, llm: LLM) -> Calls:
        calls, model = cls([], []), llm.engine.model
        forward, compact_logits = model.forward, model.compact_logits

        def counted(batch: Batch, *rest: Any) -> Any:
            shape = (len(batch.input_ids), len(batch.seq_lens), batch.max_seq_len)
            calls.steps.append((*shape, tuple(batch.input_ids.tolist()), tuple(batch.positions.tolist())))
            return forward(batch, *rest)

        def counted_logits(states: Tensor) -> Tensor:
            calls.logits.append(len(states))
            return compact_logits(states)

        model.forward, model.compact_logits = counted, counted_logits
        return calls


def jobs_without_drafts() -> list[Job]:
    """Of all lengths, some of which share beginnings; sampled and greedy."""
    shared = tokens(30, 1)
    prompts = [tokens(1, 2), shared, shared[:17] + tokens(5, 3), tokens(20, 4), shared[:8] + tokens(2, 5)]
    return [
        (prompt, SamplingParams(temperature=i % 3 * 1.0, seed=i, max_tokens=12, ignore_eos=True, logprobs=1,
                                num_speculative_tokens=0))
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def plainly(jobs: list[Job]) -> list[Job]:
    """The same jobs for an engine without a proposer."""
    keep = ("temperature", "seed", "max_tokens", "ignore_eos", "logprobs")
    return [(prompt, SamplingParams(**{name: getattr(params, name) for name in keep})) for prompt, params in jobs]


TIGHT = {"num_blocks": 9, "max_model_len": 64, "max_num_batched_tokens": 9}
POINTS = list(itertools.product(TARGETS, [*CACHED, "ngram"], [{}, TIGHT]))
USUAL = (1, 2, 5, 6, 9, 10, 13, 18, 21)  # every proposer, both targets, both sizes


@pytest.mark.parametrize(
    ("name", "proposer", "limits"),
    [point if number in USUAL else pytest.param(*point, marks=pytest.mark.long) for number, point in enumerate(POINTS)],
    ids=lambda value: "tight" if value == TIGHT else str(value or "roomy"),
)
def test_a_proposer_that_is_not_asked_does_nothing(
    name: str, proposer: str, limits: dict[str, int], folders: Folders
) -> None:
    """Never called, nothing written, the target's calls the same; prefix cache and preemption included."""
    options = {"prefix_caching": True} | limits
    jobs = jobs_without_drafts()
    plain = start(folders, name, "off", 0, **options)
    expected_calls = Calls.of(plain)
    expected = run(plain, plainly(jobs))

    llm = start(folders, name, proposer, 2, **options)
    chooser = watch(llm)
    drafter = llm.engine.runner.proposer
    caches = getattr(drafter, "cache", None)
    if caches is not None:
        before = {key: t.clone() for key, t in tensors_of(caches)}
    asked: list[Any] = []
    drafter.propose = asked.append
    calls = Calls.of(llm)
    found = run(llm, jobs)
    assert found.results == expected.results
    assert found.shares == [None] * len(jobs)
    assert calls == expected_calls
    assert len(calls.steps) == llm.engine.stats.steps == plain.engine.stats.steps
    assert llm.engine.stats.rows == plain.engine.stats.rows
    for stats in (llm.engine.scheduler.stats, plain.engine.scheduler.stats):
        assert (stats.preemptions > 0) == bool(limits)
        assert stats.prefix_hit_tokens > 0 or not limits
    assert not asked
    assert chooser.count == 0
    if caches is not None:
        assert sum(int(t[FIRST_BLOCK:].isnan().all()) for _, t in tensors_of(caches)) == len(before)
        assert all(torch.equal(t.nan_to_num(7.0), before[key].nan_to_num(7.0)) for key, t in tensors_of(caches))


def tensors_of(caches: KVCache) -> Iterator[tuple[tuple[int, str], Tensor]]:
    for layer, tensors in caches.layers.items():
        for name, tensor in tensors.items():
            yield (layer, name), tensor


@pytest.mark.parametrize("proposer", [*CACHED, "ngram"])
def test_k_of_zero_is_no_speculation(proposer: str, folders: Folders) -> None:
    """No head is loaded and no memory is set aside."""
    way = WAYS[proposer]
    llm = load(folders.target("m3", way.modules), folders.spec(way, "m3", 1).rpartition(":")[0] + ":0")
    plain = load(folders.target("m3", way.modules))
    assert llm.engine.runner.proposer is None
    assert llm.engine.caches.bytes_per_token == plain.engine.caches.bytes_per_token
    asked = load(folders.target("m3", way.modules), folders.spec(way, "m3", 1))
    assert (asked.engine.caches.bytes_per_token > plain.engine.caches.bytes_per_token) == (proposer in CACHED)


@pytest.mark.parametrize("proposer", CACHED)
def test_requests_without_drafts_beside_others(proposer: str, folders: Folders) -> None:
    """They get none, nobody relies on what their draft caches hold, and nothing is written but in owned blocks."""
    llm = start(folders, "m3", proposer, 2, prefix_caching=True)
    watch(llm)
    some = []
    for i, asked in enumerate((2, 0, 1, 0)):
        params = SamplingParams(temperature=5.0, logit_bias=LEAN, ignore_eos=True, num_speculative_tokens=asked)
        some.append(Request(f"r{i}", tokens(9 + 6 * i, i), params, i, 40))
        llm.engine.add(some[-1])
    drafted = set()
    for _ in range(6):
        llm.engine.step()
        owned = {block for one in some for block in one.block_ids}
        others = [block for block in range(FIRST_BLOCK, llm.engine.caches.num_blocks) if block not in owned]
        assert all(tensor[others].isnan().all() for _, tensor in tensors_of(llm.engine.runner.proposer.cache))
        for one in some:
            assert (one.num_draft_computed > 0) == (one.max_drafts > 0)
            drafted |= {one.seed} if one.drafts else set()
            written = [not t[one.block_ids].isnan().all() for _, t in tensors_of(llm.engine.runner.proposer.cache)]
            assert all(written) or one.max_drafts == 0
    assert drafted == {0, 2}
    for one in some:
        llm.engine.abort(one)


class Recorder(Verifier):
    """Verifies as ever, and remembers every row with its logits."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.engine = llm.engine
        self.rows: list[tuple[Request, tuple[int, ...], int, Tensor]] = []  # request, text so far, drafts in it

    def verify(self, logits: Tensor, rows: SamplingRows, drafted: Drafted, ops: Ops) -> Accepted:
        """As the engine's own."""
        of_seed = {one.seed: (one, place.slot) for one, place in self.engine.scheduler.places.items()}
        for seed, position, values in zip(rows.seed.tolist(), rows.position.tolist(), logits, strict=True):
            one, slot = of_seed[seed]
            text = tuple(self.engine.runner.table.tokens[slot, :position].tolist())
            assert text[: len(one.token_ids)] == tuple(one.token_ids)
            self.rows.append((one, text, position - len(one.token_ids), values.clone()))
        return super().verify(logits, rows, drafted, ops)


class Alone:
    """Logits after a text when every row runs in a step of its own, in caches that nobody else uses."""

    def __init__(self, llm: LLM) -> None:
        self.model = llm.engine.model
        specs, config = self.model.cache_specs(), self.model.config
        caches = KVCache(specs, CacheMemory(30, BLOCK, torch.float32, torch.device("cpu")))
        caches.fill(float("nan"))
        ops = llm.engine.kernels.ops
        self.groups = AttentionGroups(specs, caches, config.softmax_scale, config.sparse, True, ops)
        self.blocks = list(range(FIRST_BLOCK, 30))
        self.valid: list[int] = []  # tokens whose entries are in the caches
        self.known: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def logits(self, text: tuple[int, ...]) -> Tensor:
        """[V]; runs what the caches do not hold."""
        if text not in self.known:
            same = 0
            while same < min(len(self.valid), len(text) - 1) and self.valid[same] == text[same]:
                same += 1
            for position in range(same, len(text)):
                batch = build_batch([QueryRows([text[position]], position, self.blocks)], BLOCK)
                hidden = self.model(batch, self.groups.plan(batch))
            self.valid = list(text)
            self.known[text] = self.model.logits(hidden.final)[0]
        return self.known[text]


@pytest.mark.parametrize(
    ("name", "proposer"),
    [
        ("m3", "mtp"),
        ("dsa", "eagle3"),
        pytest.param("m3", "eagle3", marks=pytest.mark.long),
        pytest.param("dsa", "mtp", marks=pytest.mark.long),
    ],
)
def test_rows_have_the_bits_that_they_have_alone(name: str, proposer: str, folders: Folders) -> None:
    """Batches of 1 to 9 requests, each with another number of drafts, in poisoned caches; rejected rows as well."""
    alone = Alone(start(folders, name, "off", 0))
    lengths = [13, 30, 1, 8, 22, 5, 16, 27, 9]
    drafted: set[int] = set()
    for size in range(1, 10):
        llm = start(folders, name, proposer, 4)
        watch(llm)
        recorder = llm.engine.runner.step.verifier = Recorder(llm)
        for i in range(size):
            settings = {"temperature": [5.0, 0.0, 1.0][i % 3], "logit_bias": LEAN if i % 2 else {}}
            params = SamplingParams(**settings, ignore_eos=True, num_speculative_tokens=(i + size) % 5)
            llm.engine.add(Request(f"r{i}", tokens(lengths[i], i), params, i, lengths[i] + 7))
        while llm.engine.has_work:
            llm.engine.step()
        assert len({one.request_id for one, *_ in recorder.rows}) == size
        for one, text, count, values in sorted(recorder.rows, key=lambda row: row[1]):
            assert torch.equal(values, alone.logits(text)), f"{one.request_id} after {len(text)} tokens, {count} drafts"
            drafted.add(count)
    assert drafted == set(range(5))
    assert len(alone.known) > 100


@pytest.mark.parametrize("name", TARGETS)
def test_the_comparison_of_bits_has_power(name: str, folders: Folders) -> None:
    """It sees one unit in the last place, and another last token; and it gives the same twice."""
    alone = Alone(start(folders, name, "off", 0))
    text = tuple(tokens(20, 1))
    logits = alone.logits(text)
    assert not torch.equal(logits, torch.nextafter(logits, logits + 1))
    assert not torch.equal(logits, alone.logits((*text[:-1], text[-1] ^ 1)))
    assert torch.equal(alone.logits(text), Alone(start(folders, name, "off", 0)).logits(text))


def shape_of_work(llm: LLM, measure: Callable[[], object]) -> int:
    """Attention plans made during a call: one per target step, and one per pass of a drafter."""
    count = 0
    groups = [llm.engine.runner.groups, getattr(llm.engine.runner.proposer, "groups", None)]
    for part in filter(None, groups):
        plan = part.plan

        def counted(batch: Batch, kept: Any = None, plan: Callable = plan) -> Any:
            nonlocal count
            count += 1 if kept is None else 2
            return plan(batch, kept)

        part.plan = counted
    measure()
    return count


@pytest.mark.parametrize("proposer", CACHED)
def test_passes_are_those_of_the_target_alone(proposer: str, folders: Folders) -> None:
    """And more of them as soon as drafts are asked for."""
    (prompt, quiet), *_ = jobs_without_drafts()
    loud = SamplingParams(max_tokens=12, ignore_eos=True, seed=0, temperature=0.0)
    passes = []
    for params, way in ((quiet, "off"), (quiet, proposer), (loud, proposer)):
        llm = start(folders, "dsa", way, 2)
        (job,) = [(prompt, params)] if way != "off" else plainly([(prompt, params)])
        passes.append(shape_of_work(llm, lambda llm=llm, job=job: run(llm, [job])))
    assert passes[0] == passes[1] == 12
    assert passes[2] > 12
