"""What lies in the caches of drafters, and which metadata reads it.

After runs in which any number of drafts was kept, in chunks, after preemption and after prefix hits, the entries that
count as valid equal those of the same tokens run in one chunk by a new engine. The metadata of every draft step equals
metadata built from scratch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from oracles.host_batch import QueryRows, build_batch
from oracles.speculation import CACHED, FEW, LEAN, WAYS, Folders, load, pairs, run, tiny_jobs, tokens, watch
from oracles.tiny import TINY, Tiny, write_folder
from oracles.tiny_heads import with_mtp
from oracles.verifiers import RandomVerifier
from torch import Tensor

from skipstone import LLM, SamplingParams
from skipstone.attention.backend import IndexQuery, check_groups
from skipstone.attention.dsa import TokenIndexBackend
from skipstone.attention.msa import BlockIndexBackend
from skipstone.core.batch import FIRST_BLOCK, PAD, ZERO_BLOCK, Batch, Selection
from skipstone.core.kv_cache import CacheSpec, KVCache
from skipstone.core.plan import PlanItem, StepPlan, StepResult
from skipstone.core.request import Request
from skipstone.errors import UnsupportedError
from skipstone.models.deepseek_v32 import DeepseekV32
from skipstone.models.minimax_m3 import MiniMaxM3
from skipstone.models.mtp import MtpHead
from skipstone.registry import ATTENTION
from skipstone.runtime.block_pool import BlockPool
from skipstone.runtime.scheduler import Scheduler
from skipstone.runtime.step import Step
from skipstone.spec.proposer import DraftStep, ProposerNeeds

TARGETS = ["m3", "dsa"]
BLOCK = 8
Caches = dict[tuple[int, str], Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("caches"))


def engine(folders: Folders, name: str, proposer: str, k: int, **options: Any) -> LLM:
    """An engine with poisoned caches."""
    way = WAYS[proposer]
    llm = load(folders.target(name, way.modules), folders.spec(way, name, k), **options)
    watch(llm)
    return llm


def request(prompt: list[int], seed: int, count: int = 20, drafts: int | None = None) -> Request:
    """A request for `count` tokens at a temperature where few drafts are right, or none but few tokens are likely."""
    params = SamplingParams(
        temperature=1.0, logit_bias=LEAN if seed % 2 else {}, ignore_eos=True, num_speculative_tokens=drafts
    )
    return Request(f"r{seed}", list(prompt), params, seed, len(prompt) + count)


class Snapshot(NamedTuple):
    """A request between two steps."""

    token_ids: list[int]
    num_valid: int
    caches: Caches


def draft_caches(llm: LLM, one: Request, num_valid: int) -> Caches:
    """[heads, num_valid, width] of every draft layer and tensor."""
    blocks = torch.tensor(one.block_ids)
    return {
        (layer, name): tensor[blocks].transpose(0, 1).flatten(1, 2)[:, :num_valid].clone()
        for layer, tensors in llm.engine.runner.proposer.cache.layers.items()
        for name, tensor in tensors.items()
    }


def snapshot(llm: LLM, one: Request) -> Snapshot:
    """What is valid of a request's draft caches. A draft model counts entries of unverified drafts too."""
    num_valid = min(one.num_draft_computed, len(one.token_ids) - 1)
    return Snapshot(list(one.token_ids), num_valid, draft_caches(llm, one, num_valid))


class Fresh:
    """Draft caches of given tokens, run as a prompt, in one chunk, in caches that nobody used before."""

    def __init__(self, folders: Folders, name: str, proposer: str, k: int) -> None:
        self.llm = engine(folders, name, proposer, k)

    def caches(self, token_ids: list[int]) -> tuple[Caches, int]:
        """All that is valid, and for how many positions."""
        self.llm.engine.runner.proposer.cache.fill(float("nan"))
        one = Request("fresh", list(token_ids), SamplingParams(temperature=0.0), 0, len(token_ids) + 30)
        self.llm.engine.add(one)
        self.llm.engine.step()
        covered = min(one.num_draft_computed, len(token_ids))
        found = draft_caches(self.llm, one, covered)
        self.llm.engine.abort(one)
        return found, covered

    def check(self, part: Snapshot) -> None:
        """Compare a snapshot with them."""
        expected, covered = self.caches(part.token_ids)
        assert covered >= part.num_valid
        for key, tensor in part.caches.items():
            wanted = expected[key][:, : part.num_valid]
            assert wanted.isfinite().all()
            close = torch.isclose(tensor, wanted, rtol=1e-4, atol=1e-4).all(dim=-1).all(dim=0)
            wrong = (~close).nonzero().flatten().tolist()
            assert not wrong, f"{key} differs at positions {wrong} of {part.num_valid}"


def modules(proposer: str) -> int:
    """Tokens behind a position that the draft caches there depend on."""
    return {"mtp": 1, "mtp3": 3, "eagle3": 1}.get(proposer, 0)


@pytest.mark.parametrize(
    ("chunk", "tight", "overlap"), [(11, False, False), (20, True, False), (20, True, True)],
    ids=["roomy", "tight", "overlapped"],
)  # fmt: skip
@pytest.mark.parametrize(("name", "proposer"), pairs(CACHED))
def test_valid_entries_equal_those_computed_from_scratch(
    name: str, proposer: str, chunk: int, tight: bool, overlap: bool, folders: Folders
) -> None:
    """After any number of kept drafts, in every step of every request, whatever happened to it before."""
    k = 3
    few = {"num_blocks": 13, "max_model_len": 80} if tight else {"max_num_seqs": 3}
    llm = engine(folders, name, proposer, k, max_num_batched_tokens=chunk, prefix_caching=True, **few)
    llm.engine.overlap = overlap
    verifier = llm.engine.runner.step.verifier = RandomVerifier(chunk)
    shared = tokens(30, 4)
    prompts = [[*shared[:24], 7], tokens(9, 1), shared, tokens(16, 2), shared[:17], [*shared[:24], 8], tokens(1, 3)]
    some = [request(prompt, i, drafts={2: 0, 3: 2}.get(i)) for i, prompt in enumerate(prompts)]
    for one in some:
        llm.engine.add(one)
    taken: list[Snapshot] = []
    draw = random.Random(1)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.scheduler.check()
        for one in llm.engine.scheduler.running:
            behind = one.num_computed_tokens - one.num_draft_computed
            if one.max_drafts == 0:
                assert one.num_draft_computed == 0
                continue
            near_the_end = one.num_computed_tokens + k + 1 >= one.max_total_tokens
            assert behind <= max(modules(proposer) - 1, 0) or near_the_end, "valid entries fell behind"
            if one.num_draft_computed > 0 and draw.random() < 0.12:
                taken.append(snapshot(llm, one))
    kept = {count for count in verifier.counts if count[0] == k}
    assert kept == {(k, accepted) for accepted in range(k + 1)}
    stats = llm.engine.scheduler.stats
    assert (stats.preemptions > 0) == tight
    assert stats.prefix_hit_tokens > 0
    assert len(taken) > 5
    fresh = Fresh(folders, name, proposer, k)
    for part in taken:
        fresh.check(part)


def test_a_wrong_entry_would_be_found(folders: Folders) -> None:
    """The comparison has power: entries are far from each other and from those after another token."""
    fresh = Fresh(folders, "dsa", "mtp", 3)
    text = tokens(20, 1)
    caches, covered = fresh.caches(text)
    assert covered >= 19
    changed = {key: tensor.clone() for key, tensor in caches.items()}
    for tensor in changed.values():
        tensor[:, 18] = tensor[:, 17]
    with pytest.raises(AssertionError, match=r"differs at positions \[18\]"):
        fresh.check(Snapshot(text, 19, {key: tensor[:, :19] for key, tensor in changed.items()}))
    other, _ = fresh.caches([*text[:10], (text[10] + 1) % 100, *text[11:]])
    for key, tensor in caches.items():
        differs = (tensor - other[key]).abs().amax(dim=-1).amax(dim=0) > 1e-2
        assert not differs[:9].any()
        assert differs[9:11].all(), f"{key}: position 9 depends on the token at 10"


class DraftRows:
    """Compares every batch of rows that a draft step makes with one that is built from scratch."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.llm = llm
        self.count = self.borders = self.several = self.padding = 0
        self.groups = llm.engine.runner.proposer.groups
        self.plan = self.groups.plan
        self._last: tuple[Batch, list[Request], list[list[int]], list[int]] | None = None
        original = DraftStep.rows

        def made(step: DraftStep, token_ids: Tensor, start: Tensor, end: Tensor, see_ahead: bool = False) -> Batch:
            batch = original(step, token_ids, start, end, see_ahead)
            owners = {place.slot: one for one, place in llm.engine.scheduler.places.items()}
            real = [ids[: max(int(e - s), 0)] for ids, s, e in zip(token_ids.tolist(), start, end, strict=True)]
            self._last = batch, [owners[slot] for slot in step.draft_slots.tolist()], real, start.tolist()
            return batch

        def checked(batch: Batch, kept: Any = None) -> Any:
            if self._last is not None:
                assert batch is self._last[0], "the batch that was made is the one that is planned"
                self.compare(*self._last)
                self._last = None
            return self.plan(batch, kept)

        monkeypatch.setattr(DraftStep, "rows", made)
        self.groups.plan = checked

    def compare(self, batch: Batch, requests: list[Request], real: list[list[int]], start: list[int]) -> None:
        """In every field. Block tables may be wider, by blocks of the request or none."""
        (span,) = batch.spans
        n = span.query_len
        assert (span.requests, span.rows) == (slice(0, len(requests)), slice(0, len(requests) * n))
        for i, (one, ids, first) in enumerate(zip(requests, real, start, strict=True)):
            rows = slice(i * n, i * n + len(ids))
            rest = slice(rows.stop, (i + 1) * n)
            assert set(span.positions[i, len(ids) :].tolist()) <= {PAD}
            assert set(batch.positions[rest].tolist()) | set(batch.slot_block[rest].tolist()) <= {0}
            self.padding += n - len(ids)
            if not ids:
                assert int(batch.seq_lens[i]) == 0
                continue
            fresh = build_batch([QueryRows(ids, first, one.block_ids)], BLOCK)
            for field in ("input_ids", "positions", "slot_block", "slot_offset"):
                assert torch.equal(getattr(batch, field)[rows], getattr(fresh, field)), field
            assert torch.equal(span.positions[i, : len(ids)], fresh.positions)
            assert int(batch.seq_lens[i]) == int(fresh.seq_lens) <= batch.max_seq_len
            for table in (batch.block_table[i].tolist(), span.block_table[i].tolist()):
                seen = fresh.block_table[0].tolist()
                assert table[: len(seen)] == seen
                assert set(table[len(seen) :]) <= {ZERO_BLOCK, *one.block_ids}
        self.compare_metadata(batch, requests, real, start)
        self.count += 1
        self.several += len(requests) > 1
        self.borders += any(first % BLOCK == 0 for first in start)

    def compare_metadata(self, batch: Batch, requests: list[Request], real: list[list[int]], start: list[int]) -> None:
        """What all layers of a group share, for batches without padding."""
        (span,) = batch.spans
        if any(len(ids) < span.query_len for ids in real):
            return
        rows = [QueryRows(*row) for row in zip(real, start, (one.block_ids for one in requests), strict=True)]
        step, again = self.plan(batch), self.plan(build_batch(rows, BLOCK))
        assert step.keys() == again.keys()
        for layer, attend in step.items():
            metadata = (attend.indexer_metadata, again[layer].indexer_metadata)
            mine, other = (getattr(m, "everything", None) for m in metadata)
            if mine is not None:  # lengths are bounds from above, so it may be None where it need not
                assert other is not None and torch.equal(mine.indices, other.indices)


@pytest.mark.parametrize(("name", "proposer"), pairs(["mtp", "eagle3", "draft"]))
def test_metadata_of_draft_steps_equals_fresh_metadata(
    name: str, proposer: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every draft step, for requests of different lengths and with different k, over the borders of blocks."""
    llm = engine(folders, name, proposer, 8)
    llm.engine.runner.step.verifier = RandomVerifier(5)
    rows = DraftRows(llm, monkeypatch)
    for i, length in enumerate((1, 7, 8, 15, 16, 23)):
        llm.engine.add(request(tokens(length, i), i, count=40, drafts=[8, 5][i % 2]))
    while llm.engine.has_work:
        llm.engine.step()
    assert rows.count > 30
    assert rows.borders > 10
    assert rows.several > 10
    assert rows.padding > 10


@pytest.mark.parametrize(("name", "proposer"), pairs(CACHED))
def test_a_drafter_made_for_fewer_positions_stops_in_time(name: str, proposer: str, folders: Folders) -> None:
    """Nothing is run at positions that it does not know; the text goes on without drafts."""
    most, jobs = 37, tiny_jobs()[10:28:3]
    llm = engine(folders, name, proposer, 3, max_num_batched_tokens=24)
    drafter = llm.engine.runner.proposer
    drafter.needs = drafter.needs._replace(max_position=most)
    if proposer != "draft":
        drafter.head.max_position = most
    plan, highest = drafter.groups.plan, [0]

    def checked(batch: Batch, kept: Any = None) -> Any:
        highest[0] = max(highest[0], int(batch.positions.max()))
        return plan(batch, kept)

    drafter.groups.plan = checked
    found = run(llm, jobs)
    assert most - 5 < highest[0] < most
    assert found.results == folders.plain(name, jobs).results
    assert max(map(len, (prompt for prompt, _ in jobs))) > most
    assert found.accepted > 0


def permuted(specs: list[CacheSpec], order: int) -> list[CacheSpec]:
    """One of the orders of a list."""
    if order == 1:
        return specs[::-1]
    return sorted(specs, key=lambda spec: (spec.group[::-1], -spec.layer))


@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "proposer"), pairs(["mtp", "mtp3", "draft"]))
def test_the_order_of_cache_groups_means_nothing(
    name: str, proposer: str, order: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target and draft layers list their groups in another order: same text, same drafts, same counters."""
    jobs = tiny_jobs()[10:24:3]
    expected = run(engine(folders, name, proposer, 3), jobs)
    for kind in (DeepseekV32, MiniMaxM3, MtpHead):
        original = kind.cache_specs
        monkeypatch.setattr(kind, "cache_specs", lambda self, original=original: permuted(original(self), order))
    llm = engine(folders, name, proposer, 3)
    specs = llm.engine.runner.proposer.cache_specs()
    assert len({spec.group for spec in specs}) > 1, "one group has one order"
    found = run(llm, jobs)
    assert found.results == expected.results
    assert found.shares == expected.shares


class Able:
    """A backend that follows draft steps."""

    features: ClassVar[frozenset[str]] = frozenset({"advance"})


class Unable:
    """One that does not."""

    features: ClassVar[frozenset[str]] = frozenset({"in_block"})


@pytest.mark.parametrize("offending", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}, set()])
def test_every_group_that_cannot_follow_is_named(offending: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """First, last or in the middle, in every order of the layers; the message is always the same."""
    kinds = {"able": Able, "unable": Unable}
    monkeypatch.setattr(ATTENTION, "entries", dict.fromkeys(kinds, ""))
    monkeypatch.setattr(ATTENTION, "load", kinds.__getitem__)
    names = ["alpha", "beta", "gamma"]
    specs = [
        CacheSpec(layer, group, "unable" if i in offending else "able", ())
        for i, group in enumerate(names)
        for layer in (i, i + 3)
    ]
    messages = set()
    for order in itertools.islice(itertools.permutations(specs), 0, None, 7):
        if not offending:
            check_groups(order, "advance", "fake")
            continue
        with pytest.raises(UnsupportedError) as caught:
            check_groups(order, "advance", "fake")
        messages.add(str(caught.value))
    if offending:
        (message,) = messages
        for i, group in enumerate(names):
            assert (f"group '{group}' with backend 'unable'" in message) == (i in offending)
        assert "'fake'" in message
        assert "'advance'" in message
        assert "backends that have it: able." in message


def cached_tokens(llm: LLM, prompts: list[list[int]], check: Callable[[Request], None] | None = None) -> list[int]:
    """Run one after the other; how many tokens of each prompt were found. `check` sees each after its first step."""
    found = []
    for i, prompt in enumerate(prompts):
        one = request(prompt, i, count=3)
        llm.engine.add(one)
        while one.num_output_tokens == 0:
            llm.engine.step()
        if check is not None:
            check(one)
        while llm.engine.has_work:
            llm.engine.step()
        found.append(one.num_cached_tokens)
    return found


@pytest.mark.parametrize(("shared", "tail"), [(2, 3), (1, 0)])
@pytest.mark.parametrize(("name", "proposer"), pairs(CACHED))
def test_prompts_that_part_at_a_block_border(
    name: str, proposer: str, shared: int, tail: int, folders: Folders
) -> None:
    """Only the positions whose draft entries depend on the other next tokens are computed again, in a copy.

    A, then B that forks from it behind a block, then C and D that go on as B and A did, and E with a third way.
    """
    begin, depth = tokens(shared * BLOCK, 1), modules(proposer)
    ways = [tokens(2 * BLOCK + tail, 20 + i) for i in range(3)]
    assert len({way[0] for way in ways}) == 3
    prompts = [begin + ways[i] for i in (0, 1)]
    prompts += [prompts[1] + [5, 6], prompts[0] + [5, 6], begin + ways[2], begin + ways[1][:1]]
    llm, fresh = engine(folders, name, proposer, 3, prefix_caching=True), Fresh(folders, name, proposer, 3)

    def check(one: Request) -> None:
        part = snapshot(llm, one)
        assert part.num_valid >= one.num_prompt_tokens - depth
        fresh.check(part)

    found = cached_tokens(llm, prompts, check)
    plain = cached_tokens(load(folders.target(name), prefix_caching=True), prompts)
    begun = shared * BLOCK
    assert plain == [0, begun, begun + 2 * BLOCK, begun + 2 * BLOCK, begun, begun]
    lost = [p - f for p, f in zip(plain, found, strict=True)]
    assert lost[0] == 0
    assert lost[1] == lost[4] == depth
    # C and D find the very blocks of B and A; without a tail these went on with other tokens behind the last one.
    assert lost[2] == lost[3] == (0 if tail else depth)
    assert 0 <= lost[5] <= depth
    llm.engine.scheduler.check()


@pytest.mark.parametrize(("name", "proposer"), pairs(CACHED))
def test_blocks_whose_draft_entries_were_never_written(name: str, proposer: str, folders: Folders) -> None:
    """Written by a request without drafts. No NaN is read, and drafts are as good as in a cold engine."""
    prompt = tokens(45, 3)
    cold, warm = (engine(folders, name, proposer, 3, prefix_caching=True) for _ in range(2))
    params = {"temperature": 5.0, "logit_bias": LEAN, "seed": 3, "max_tokens": 24, "ignore_eos": True, "logprobs": 2}
    silent = SamplingParams(**params, num_speculative_tokens=0)
    drafting = SamplingParams(**params)
    first = run(warm, [(prompt, silent)])
    assert first.shares == [None]
    expected, found = (run(llm, [(prompt, drafting)]) for llm in (cold, warm))
    assert found.results == expected.results == first.results
    assert found.shares == expected.shares
    assert found.accepted > 0
    session = warm.add(prompt, silent)  # what the target wrote is of use to it, whoever drafted
    while warm.engine.has_work:
        warm.step()
    assert session.output().num_cached_tokens == 40
    session = warm.add([*prompt, 1], drafting)
    while warm.engine.has_work:
        warm.step()
    assert session.output().num_cached_tokens == 40


def test_a_fork_without_room_for_a_copy_computes_the_block_again() -> None:
    """No block is free for it when the prompt is matched; the matched one is right after."""
    needs = ProposerNeeds("fake", next_tokens=1, uses_caches=True)
    scheduler = Scheduler(BlockPool(FIRST_BLOCK + 2, 4), 4, 4, True, needs)

    def add(prompt: list[int]) -> Request:
        one = Request("r", prompt, SamplingParams(), 0, len(prompt) + 1, max_drafts=1)
        scheduler.add(one)
        return one

    def step() -> StepPlan:
        plan = scheduler.schedule()
        assert plan is not None
        owners = [scheduler.owner(item) for item in plan.items]
        scheduler.commit(plan, [StepResult([6] if item.samples else []) for item in plan.items])
        scheduler.check()
        rows.extend(zip(owners, plan.items, strict=True))
        return plan

    rows: list[tuple[Request | None, PlanItem]] = []
    first = add([1, 2, 3, 4, 9])
    while not first.finished:
        step()
    scheduler.add(Request("other", [7], SamplingParams(), 0, 4, max_drafts=1))
    step()
    fork = add([1, 2, 3, 4, 8])
    plan = step()
    (item,) = [item for owner, item in rows if owner is fork]
    assert (item.start, item.num_rows, plan.block_copies, len(fork.block_ids)) == (0, 3, [], 1)


class Selections:
    """What every position of the only request selected at last, by cache, layer and position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[tuple[str, int, int], list] = {}
        self.rows: set[int] = set()
        self.target: KVCache | None = None
        for kind in (TokenIndexBackend, BlockIndexBackend):
            original = kind.select

            def select(
                backend: Any,
                metadata: Any,
                layer: int,
                index: IndexQuery,
                cache: KVCache,
                original: Callable = original,
            ) -> Selection:
                selection = original(backend, metadata, layer, index, cache)
                positions = metadata.batch.positions.tolist()
                if cache is self.target:
                    self.rows.add(len(positions))
                    for position, chosen in zip(positions, selection.indices.tolist(), strict=True):
                        self.seen[layer, position] = chosen
                return selection

            monkeypatch.setattr(kind, "select", select)


@pytest.mark.parametrize(("name", "proposer"), pairs(["mtp", "dflash"]))
def test_rows_select_alone_what_they_select_among_drafts(
    name: str, proposer: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts are far longer than the budget; every position of the text was a row of its own and one of k + 1."""
    selections = Selections(monkeypatch)
    monkeypatch.setattr(Step, "needs_every_row", True)
    job = (tokens(70, 2), SamplingParams(temperature=5.0, logit_bias=LEAN, seed=4, max_tokens=50, ignore_eos=True))
    seen = []
    for way in ("off", proposer):
        llm = load(folders.target(name)) if way == "off" else engine(folders, name, way, 4)
        selections.target = llm.engine.runner.cache
        found = run(llm, [job])
        seen.append({key: chosen for key, chosen in selections.seen.items() if key[1] < 119})
        assert selections.rows >= ({1, 70} if way == "off" else {5, 70})
        selections.seen, selections.rows = {}, set()
    assert found.accepted > 5
    layers = {layer for layer, _ in seen[0]}
    assert len(layers) == {"m3": 3, "dsa": 4}[name]
    assert set(seen[0]) == {(layer, position) for layer in layers for position in range(119)}
    assert seen[0] == seen[1]
    assert len({tuple(map(tuple, chosen)) for chosen in seen[0].values()}) > 200


def with_budget(tiny: Tiny, units: int) -> Tiny:
    """The checkpoint with another budget of its sparse layers."""
    if tiny.name.startswith("m3"):
        tiny.text["sparse_attention_config"]["sparse_topk_blocks"] = units
    else:
        tiny.config["index_topk"] = units
    return tiny


@pytest.mark.parametrize("name", TARGETS)
def test_contexts_within_the_budget_are_dense(name: str, tmp_path: Path) -> None:
    """Target and draft layers: as with a budget that no context reaches; beyond the budget it shows."""
    everything = with_budget(with_mtp(TINY[name](), 1), {"m3": 80, "dsa": 640}[name])
    folders = [write_folder(with_mtp(TINY[name](), 1), tmp_path / "a"), write_folder(everything, tmp_path / "b")]
    budget = TINY[name]().budget
    for length, equal in ((budget, True), (budget + 40, False)):
        params = SamplingParams(temperature=5.0, seed=1, max_tokens=10, ignore_eos=True, logprobs=3, logit_bias=LEAN)
        runs = [run(load(folder, "mtp:4"), [(tokens(length - 10, 1), params)]) for folder in folders]
        assert (runs[0].results == runs[1].results) == equal
        if equal:
            assert runs[0].shares == runs[1].shares


class TestStaleResults:
    """A result that comes back after its request was aborted or preempted changes nothing, drafts included."""

    @pytest.mark.parametrize(
        ("how", "proposer"), [("abort", "mtp"), ("preempt", "mtp3"), ("abort", "dflash"), ("preempt", "draft")]
    )
    def test_with_drafts_under_way(self, proposer: str, how: str, folders: Folders) -> None:
        llm = engine(folders, "m3", proposer, 3, prefix_caching=True)
        core = llm.engine
        prompts = [tokens(20, 1), FEW * 6, FEW * 5]
        some = [request(list(prompt), 2 * i + 1, count=25) for i, prompt in enumerate(prompts)]
        for one in some:
            core.add(one)
        victim = some[2]
        while not victim.drafts or victim.num_output_tokens < 3:
            core.step()
        handle = core._start(ahead=False)
        assert handle is not None
        owners = [core.scheduler.owner(item) for item in handle.plan.items]
        assert handle.plan.items[owners.index(victim)].num_drafts > 0
        results = handle.wait()
        before = (list(victim.token_ids), victim.speculation.steps)
        if how == "abort":
            core.abort(victim)
        else:
            assert core.scheduler._preempt_youngest() is victim
        committed = core.scheduler.commit(handle.plan, results)
        assert victim not in [one for one, _ in committed]
        assert (victim.token_ids, victim.speculation.steps) == before
        assert (victim.block_ids, victim.num_computed_tokens, victim.num_draft_computed) == ([], 0, 0)
        assert victim.drafts == [] or victim.finished
        core.scheduler.check()
        while core.has_work:
            core.step()
            core.scheduler.check()
        assert core.pool.num_used == 0
        plain = load(folders.target("m3"))
        for one in some:
            again = Request("again", one.token_ids[: one.num_prompt_tokens], one.params, one.seed, one.max_total_tokens)
            plain.engine.add(again)
            while plain.engine.has_work:
                plain.engine.step()
            if how == "abort" and one is victim:
                assert one.token_ids == before[0] == again.token_ids[: len(before[0])]
            else:
                assert one.token_ids == again.token_ids
