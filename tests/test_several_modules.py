"""Several MTP modules: caches and drafts against the definition, whatever was accepted, preempted, shared or cut.

Module m at position p is fed the token at p + m + 1 and the state that module m - 1 gives at p; module 0 the target's
final state. Draft m + 1 is what module m prefers at the last position that the target has computed. A run of all
modules over a known text, in one go and in caches that nobody else uses, says what every entry and every draft must be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from oracles.host_batch import QueryRows, build_batch
from oracles.rows import to_rows
from oracles.sampling import Row
from oracles.speculation import LEAN, Job, letters, load, run, tokens, watch
from oracles.tiny import TINY, write_folder
from oracles.tiny_heads import with_mtp
from oracles.verifiers import RandomVerifier
from torch import Tensor

from skipstone import LLM, SamplingParams
from skipstone.attention.backend import AttentionGroups
from skipstone.core.batch import FIRST_BLOCK
from skipstone.core.kv_cache import CacheMemory, KVCache
from skipstone.core.request import Request
from skipstone.errors import ConfigError
from skipstone.kernels.reference.sampling import decision_scores
from skipstone.spec import several_modules
from skipstone.spec.several_modules import SeveralModulesProposer

TARGETS = ["m3", "dsa"]
MODULES = [2, 3, 4]
BLOCK = 8
Folder = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The tiny checkpoint with this many modules, and a tokenizer."""
    root = tmp_path_factory.mktemp("modules")

    def write(name: str, modules: int) -> Path:
        folder = write_folder(with_mtp(TINY[name](), modules), root / f"{name}{modules}")
        letters().save(str(folder / "tokenizer.json"))
        return folder

    return cache(write)


class Moment(NamedTuple):
    """A request between two steps: its text, its drafts, and the entries that count as valid."""

    request: Request
    token_ids: list[int]
    drafts: list[int]
    num_valid: int
    entries: dict[tuple[int, str], Tensor]  # (module, tensor) -> [heads, num_valid, width]


@dataclass
class Watched:
    """An engine with poisoned caches whose requests are looked at after every step."""

    llm: LLM
    moments: list[Moment] = field(default_factory=list)

    def finish(self, requests: list[Request]) -> None:
        """Run these to their end."""
        engine = self.llm.engine
        for one in requests:
            engine.add(one)
        while engine.has_work:
            engine.step()
            engine.scheduler.check()
            self.moments += [self.moment(one) for one in engine.scheduler.running if one.num_draft_computed > 0]

    def moment(self, one: Request) -> Moment:
        caches = self.llm.engine.runner.proposer.cache
        blocks, count = torch.tensor(one.block_ids), one.num_draft_computed
        entries = {
            (module, name): tensor[blocks].transpose(0, 1).flatten(1, 2)[:, :count].clone()
            for module, tensors in caches.layers.items()
            for name, tensor in tensors.items()
        }
        return Moment(one, list(one.token_ids), list(one.drafts), count, entries)


class Definition:
    """All modules over known texts, in one go: what they store, and what they would draft."""

    def __init__(self, llm: LLM) -> None:
        self.model = llm.engine.model
        self.head = llm.engine.runner.proposer.head
        self.modules = self.head.num_modules

    @torch.inference_mode()
    def run(self, texts: list[list[int]], counts: list[int]) -> tuple[KVCache, list[list[int]], list[list[Tensor]]]:
        """Caches, the blocks of each text in them, and module m's logits at each text's last computed position.

        Of each text, the first `counts` tokens are committed; the others are drafts.
        """
        sizes = [-(-count // BLOCK) for count in counts]
        firsts = [FIRST_BLOCK + sum(sizes[:i]) for i in range(len(sizes))]
        blocks = [list(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True)]
        space = FIRST_BLOCK + sum(sizes)
        config = self.model.config
        hidden = self._forward(self.model, config, texts, counts, blocks, space)
        specs = self.head.cache_specs()
        caches = KVCache(specs, CacheMemory(space, BLOCK, torch.float32, torch.device("cpu")))
        caches.fill(float("nan"))
        groups = AttentionGroups(specs, caches, self.head.attention_scale, self.head.sparse, exact=False)
        ends = [sum(count - 1 for count in counts[: i + 1]) - 1 for i in range(len(counts))]
        logits: list[list[Tensor]] = [[] for _ in texts]
        for module in range(self.modules):
            rows = []
            for text, count, own in zip(texts, counts, blocks, strict=True):
                fed = text[module + 1 : module + count]
                # Rows whose token is not known yet: nothing that is compared depends on them.
                rows.append(QueryRows(fed + [0] * (count - 1 - len(fed)), 0, own))
            batch = build_batch(rows, BLOCK)
            states = self.head(hidden, batch, groups.plan(batch), module)
            for i, row in enumerate(self.head.outputs(states[ends], module).logits):
                logits[i].append(row)
            hidden = self.head.recycled(states, module)
        return caches, blocks, logits

    def _forward(
        self, model: Any, config: Any, texts: list[list[int]], counts: list[int], blocks: list[list[int]], space: int
    ) -> Tensor:
        """The target's final states at all positions but the last committed one."""
        specs = model.cache_specs()
        caches = KVCache(specs, CacheMemory(space, BLOCK, torch.float32, torch.device("cpu")))
        groups = AttentionGroups(specs, caches, config.softmax_scale, config.sparse, exact=False)
        rows = [QueryRows(text[: n - 1], 0, own) for text, n, own in zip(texts, counts, blocks, strict=True)]
        batch = build_batch(rows, BLOCK)
        return model(batch, groups.plan(batch)).final

    def check(self, moments: list[Moment]) -> tuple[int, int]:
        """Compare everything; returns how many entries and drafts were compared."""
        moments = sorted((m for m in moments if len(m.token_ids) > 1), key=lambda m: len(m.token_ids))
        texts = [moment.token_ids + moment.drafts for moment in moments]
        caches, blocks, logits = self.run(texts, [len(moment.token_ids) for moment in moments])
        num_entries = num_drafts = 0
        for moment, own, rows in zip(moments, blocks, logits, strict=True):
            assert moment.num_valid <= len(moment.token_ids) - self.modules
            for (module, name), entries in moment.entries.items():
                wanted = caches.get(module, name)[torch.tensor(own)].transpose(0, 1).flatten(1, 2)
                wanted = wanted[:, : moment.num_valid]
                assert wanted.isfinite().all()
                close = torch.isclose(entries, wanted, rtol=1e-4, atol=1e-4).all(dim=-1).all(dim=0)
                wrong = (~close).nonzero().flatten().tolist()
                assert not wrong, f"module {module}, {name}: positions {wrong} of {moment.num_valid}"
                num_entries += moment.num_valid
            for module, draft in enumerate(moment.drafts):
                one, position = moment.request, len(moment.token_ids) + module
                row = to_rows([Row(one.params.temperature)], torch.tensor([one.seed]), torch.tensor([position]))
                scores = decision_scores(rows[module][None], row)[0]
                assert float(scores[draft]) > float(scores.max()) - 1e-3, f"draft {module + 1}"
                num_drafts += 1
        return num_entries, num_drafts


def request(prompt: list[int], seed: int, count: int = 14, **settings: Any) -> Request:
    """Greedy or with the target's noise, in turns."""
    temperature = [0.0, 5.0][seed % 2]
    params = SamplingParams(**{"temperature": temperature, "ignore_eos": True} | settings)
    return Request(f"r{seed}", list(prompt), params, seed, len(prompt) + count)


def watched(folder: Path, k: int, seed: int | None = 0, **options: Any) -> Watched:
    """An engine that drafts with all modules; with a seed, drafts are kept by chance."""
    llm = load(folder, f"mtp:{k}", **options)
    assert isinstance(llm.engine.runner.proposer, SeveralModulesProposer)
    watch(llm)
    if seed is not None:
        llm.engine.runner.step.verifier = RandomVerifier(seed)
    return Watched(llm)


def around_chunks(chunk: int, modules: int) -> list[int]:
    """Prompt lengths whose last chunk ends at, or has one to `modules` + 1 tokens behind, a chunk's border."""
    whole = 2 * chunk if chunk < 9 else chunk
    return [whole + extra for extra in range(modules + 2)]


def always(points: list[tuple], *usual: tuple) -> list[Any]:
    """All of them, those that are not usual marked as long."""
    return [point if point in usual else pytest.param(*point, marks=pytest.mark.long) for point in points]


@pytest.mark.parametrize(
    ("name", "modules", "chunk"),
    always(
        list(itertools.product(TARGETS, MODULES, [1, 3, 9, 512])),
        ("m3", 3, 1), ("dsa", 4, 1), ("m3", 4, 3), ("dsa", 2, 3), ("dsa", 3, 3), ("m3", 2, 9), ("m3", 3, 9),
        ("dsa", 4, 9), ("m3", 4, 512), ("dsa", 2, 512), ("dsa", 3, 512),
    ),
)  # fmt: skip
def test_entries_and_drafts_are_those_of_the_definition(name: str, modules: int, chunk: int, target: Folder) -> None:
    """After any number of kept drafts, and chunks that end close to the prompt's end."""
    lengths = [1, 2, 9, 17, 24] if chunk > 100 else around_chunks(chunk, modules)
    # One row a step leaves none for drafts, so one request at a time; several otherwise.
    there = watched(target(name, modules), modules, seed=chunk, max_num_batched_tokens=chunk)
    groups = [[length] for length in lengths[::2]] if chunk < 9 else [lengths]
    count = 12 if chunk == 1 else 14
    for number, group in enumerate(groups):
        there.finish([request(tokens(n, n), n + number, count) for n in group])
    verifier = there.llm.engine.runner.step.verifier
    if chunk > modules:
        assert set(verifier.counts) >= {(modules, kept) for kept in range(modules + 1)}
    num_entries, num_drafts = Definition(there.llm).check(thinned(there.moments, 25))
    assert num_entries > 500
    assert num_drafts > 20 or chunk == 1


def thinned(moments: list[Moment], count: int) -> list[Moment]:
    """About so many of them, of every request."""
    return moments[:: max(1, len(moments) // count)] if len(moments) > count else moments


@pytest.mark.parametrize(
    ("name", "modules", "fewer"), [("m3", 2, 1), ("dsa", 3, 1), ("m3", 4, 3), ("dsa", 4, 2), ("m3", 3, 2)]
)
def test_fewer_drafts_than_modules_fill_all_caches(name: str, modules: int, fewer: int, target: Folder) -> None:
    """By the engine's k, and by the requests' own in an engine with more."""
    prompts = [tokens(n, n) for n in (1, 7, 16, 25)]
    for k, asked in ((fewer, None), (modules, fewer)):
        there = watched(target(name, modules), k, seed=k)
        there.finish([request(p, i, num_speculative_tokens=asked if i else None) for i, p in enumerate(prompts)])
        sizes = {len(moment.drafts) for moment in there.moments if moment.request.seed}
        assert max(sizes) == fewer
        num_entries, num_drafts = Definition(there.llm).check(thinned(there.moments, 30))
        assert min(num_entries // 100, num_drafts // 10) > 1


@pytest.mark.parametrize(("name", "modules", "chunk"), [("m3", 4, 12), ("dsa", 3, 512), ("m3", 2, 512)])
def test_preempted_requests_are_filled_anew(name: str, modules: int, chunk: int, target: Folder) -> None:
    limits = {"num_blocks": 8, "max_model_len": 64, "max_num_batched_tokens": chunk}
    there = watched(target(name, modules), modules, seed=1, **limits)
    there.finish([request(tokens(5 + 4 * i, i), i, count=24) for i in range(5)])
    assert there.llm.engine.scheduler.stats.preemptions > 1
    again = [moment for moment in there.moments if moment.request.num_preemptions]
    num_entries, _ = Definition(there.llm).check(thinned(again, 25))
    assert num_entries > 500


@pytest.mark.parametrize(("name", "modules"), [("m3", 2), ("dsa", 3), ("m3", 4)])
def test_shared_blocks_serve_texts_that_agree_far_enough(name: str, modules: int, target: Folder) -> None:
    """A block is shared whole when the next `modules` tokens are the same, else all but its last positions."""
    there = watched(target(name, modules), modules, seed=2, prefix_caching=True, num_blocks=300)
    assert there.llm.engine.scheduler.needs.next_tokens == modules
    base = tokens(30, 7)
    there.finish([request(base, 0)])
    there.moments.clear()
    later = []
    for same in range(modules + 2):  # tokens behind the second block that are the same
        prompt = [*base[: 16 + same], (base[16 + same] + 1) % 100, *tokens(4, same)]
        later.append(request(prompt, same + 1))
    later.append(request(base[:16] + base[16 : 16 + modules], 20))  # ends right where the key does
    later.append(request(base[:17], 21))  # and before
    for one in later:
        there.finish([one])
    cached = [one.num_cached_tokens for one in later]
    assert cached == [16 if same >= modules else 16 - modules for same in range(modules + 2)] + [16, 16 - modules]
    num_entries, num_drafts = Definition(there.llm).check(thinned(there.moments, 40))
    assert num_entries > 1000
    assert num_drafts > 50


@pytest.mark.parametrize("overlap", [False, True])
def test_a_slot_taken_over_has_none_of_the_states_before(overlap: bool, target: Folder) -> None:
    """A request begins, behind blocks that it shares, at the very position where the slot's last one ended."""
    modules = 3
    there = watched(target("m3", modules), modules, None, prefix_caching=True, max_num_seqs=1)
    there.llm.engine.overlap = overlap
    base = tokens(30, 7)
    there.finish([request(base, 0)])
    there.finish([request(tokens(10, 8), 2, count=7)])
    there.moments.clear()
    later = request([*base[: 16 + modules], 1, 2], 4)
    there.finish([later])
    assert later.num_cached_tokens == 16
    num_entries, num_drafts = Definition(there.llm).check(there.moments)
    assert num_entries > 500 and num_drafts > 10


@pytest.mark.parametrize(("name", "chunk"), [("m3", 5), ("dsa", 512)])
def test_forks_of_a_running_text_keep_their_own_entries(name: str, chunk: int, target: Folder) -> None:
    """Several requests of one prompt, and others that go on where its outputs part, all at the same time."""
    modules = 3
    there = watched(
        target(name, modules), modules, seed=3, prefix_caching=True, num_blocks=300, max_num_batched_tokens=chunk
    )
    base = tokens(21, 9)
    first = [request(base, seed) for seed in range(3)]
    there.finish(first)
    there.finish([request(one.token_ids[:-4], 10 + one.seed, count=10) for one in first for _ in range(2)])
    assert there.llm.engine.scheduler.stats.prefix_hit_tokens > 60
    num_entries, _ = Definition(there.llm).check(thinned(there.moments, 40))
    assert num_entries > 1000


@pytest.mark.parametrize("block", [1, 2, 3])
def test_blocks_shorter_than_the_modules_look_ahead_are_not_shared(block: int, target: Folder) -> None:
    """Positions to compute again would reach over several blocks, or before the beginning: refused, by both numbers."""
    with pytest.raises(ConfigError, match=rf"block_size={block}\b.*\b4 MTP modules.*prefix_caching"):
        load(target("dsa", 4), "mtp:2", block_size=block, prefix_caching=True)
    check_short_blocks(target, 4, block, prefix_caching=False)


@pytest.mark.parametrize(("modules", "block"), [(2, 2), (4, 4), (3, 5)])
def test_the_shortest_blocks_that_can_be_shared(modules: int, block: int, target: Folder) -> None:
    """A block that was filled for other tokens is then computed again from its first position on."""
    llm = check_short_blocks(target, modules, block, prefix_caching=True)
    assert llm.engine.scheduler.stats.prefix_hit_tokens > 10


def check_short_blocks(target: Folder, modules: int, block: int, prefix_caching: bool) -> LLM:
    """Prompts that part at every place of the first blocks give the texts without drafts."""
    folder, base = target("dsa", modules), tokens(24, 5)
    prompts = [base, *(base[:n] + tokens(3, n) for n in (1, 2, 3, 4, 5, 6, 9, 12)), base]
    params = SamplingParams(temperature=5.0, seed=3, logit_bias=LEAN, max_tokens=8, ignore_eos=True)
    expected = run(load(folder), [(prompt, params) for prompt in prompts]).results
    llm = load(folder, f"mtp:{modules}", block_size=block, prefix_caching=prefix_caching, num_blocks=400)
    watch(llm)
    assert [run(llm, [(prompt, params)]).results[0] for prompt in prompts] == expected
    return llm


def text_jobs() -> list[Job]:
    """Every kind of sampling; prompts with equal beginnings, around blocks and chunks."""
    shared, jobs = tokens(26, 3), []
    for number in range(8):
        prompt = [tokens(number + 1, number), shared[: 15 + number], tokens(24 - number, 1)][number % 3]
        settings = [{}, {"logit_bias": LEAN}, {"repetition_penalty": 1.3, "logit_bias": LEAN}, {"top_p": 0.9}]
        temperature = [0.0, 1.0, 5.0][number % 3]
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=14, ignore_eos=True, logprobs=1, **settings[number % 4]
        )
        jobs.append((prompt, params))
    return jobs


@pytest.mark.parametrize(
    ("name", "chunk"), always(list(itertools.product(TARGETS, [1, 3, 512])), ("m3", 512), ("dsa", 1), ("dsa", 3))
)
def test_the_text_is_that_without_drafts(name: str, chunk: int, target: Folder) -> None:
    """For every number of modules and every k, with few blocks that are shared."""
    jobs = text_jobs() if chunk > 1 else text_jobs()[:4]
    expected = run(load(target(name, 2)), jobs)
    for modules, k in {1: [(3, 3)], 3: [(2, 2), (4, 4)], 512: [(3, 3), (4, 2), (4, 4)]}[chunk]:
        limits = {"num_blocks": 13, "max_model_len": 64, "max_num_batched_tokens": chunk}
        llm = load(target(name, modules), f"mtp:{k}", prefix_caching=True, **limits)
        watch(llm)
        found = run(llm, jobs)
        assert found.results == expected.results
        if chunk > 1:
            assert found.drafted > found.accepted > 0
            assert max(len(share.drafted_per_position) for share in found.shares) == min(k, chunk - 1)


@pytest.mark.parametrize(("modules", "k"), [(2, 3), (3, 4), (4, 9)])
@pytest.mark.parametrize("name", TARGETS)
def test_more_drafts_than_modules_are_refused(name: str, modules: int, k: int, target: Folder) -> None:
    with pytest.raises(ConfigError, match=rf"mtp.*k={k}\b.*\b{modules}\b"):
        load(target(name, modules), f"mtp:{k}")


@pytest.mark.parametrize("modules", MODULES)
@pytest.mark.parametrize("name", TARGETS)
def test_auto_finds_all_modules(name: str, modules: int, target: Folder) -> None:
    """As many as the files hold, and no more drafts than they can make."""
    llm = load(target(name, modules), "auto")
    assert isinstance(llm.engine.runner.proposer, SeveralModulesProposer)
    needs = llm.engine.runner.proposer.needs
    assert (needs.next_tokens, needs.max_k) == (modules, modules)
    assert llm.engine.speculation.k == min(3, modules)
    card = dict(llm.card)["speculation"]
    assert f"{modules} MTP modules" in card
    assert "mtp" in card


class TestPower:
    """The comparison notices what could go wrong: mistakes made on purpose must be found."""

    def run(self, target: Folder) -> None:
        there = watched(target("m3", 3), 3, seed=5)
        there.finish([request(tokens(n, n), n) for n in (3, 12, 20)])
        Definition(there.llm).check(there.moments)

    @pytest.fixture(autouse=True)
    def works_without(self, target: Folder) -> Iterator[None]:
        yield
        self.run(target)

    def test_stale_entries(self, target: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SeveralModulesProposer, "_keep", lambda *_: None)
        with pytest.raises(AssertionError, match="positions"):
            self.run(target)
        monkeypatch.undo()

    def test_modules_in_another_order(self, target: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        there = watched(target("m3", 3), 3, seed=5)
        head = there.llm.engine.runner.proposer.head
        forward = head.forward
        definition = Definition(there.llm)
        swapped = {0: 0, 1: 2, 2: 1}
        monkeypatch.setattr(head, "forward", lambda h, b, a, module=0: forward(h, b, a, swapped[module]))
        there.finish([request(tokens(12, 1), 1)])
        monkeypatch.undo()
        with pytest.raises(AssertionError, match="module"):
            definition.check(there.moments)

    def test_drafts_from_the_row_before(self, target: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        row_of = several_modules._Window.row_of
        monkeypatch.setattr(several_modules._Window, "row_of", lambda self, at, items: row_of(self, at - 1, items))
        with pytest.raises(AssertionError, match="draft"):
            self.run(target)
        monkeypatch.undo()
