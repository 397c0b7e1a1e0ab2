"""How drafts are drawn, and what verification by laws makes of them.

Chances of acceptance are compared with their formulas, over many seeds. Texts whose drafts are verified by rejection
follow the target's law: all continuations of a few tokens are enumerated. Simulated acceptance is what was asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from oracles.speculation import load
from oracles.statistics import chi_square
from oracles.tiny import Tiny, flatten, m3_tensors, m3_text_config, write_folder
from oracles.tiny_heads import with_mtp
from torch import Tensor

from skipstone import LLM, SamplingParams
from skipstone.core.batch import PAD, SamplingRows
from skipstone.core.plan import Admission
from skipstone.core.request import Request
from skipstone.core.sampling_rows import Features, RowFeatures
from skipstone.core.sequence_table import SequenceTable
from skipstone.errors import ConfigError
from skipstone.kernels.ops import load_ops
from skipstone.kernels.reference.decode import Accepted
from skipstone.spec import draft_sampler as draft_module
from skipstone.spec import verify as verify_module
from skipstone.spec.draft_sampler import DraftSampler, DraftSampling
from skipstone.spec.verify import Drafted, Rule, Verifier

UNLIKELY = 1e-4  # seeds are fixed: what passes once passes always
INFINITY = float("inf")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.7, "presence_penalty": 1.5},
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 5.0},
    "top-k": {"top_k": 4, "temperature": 2.0},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.2, "temperature": 3.0},
    "all truncations": {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 4.0},
    "repetition": {"repetition_penalty": 2.0},
    "presence and frequency": {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    "bias": {"logit_bias": {1: 3.0, 2: -INFINITY, 5: 2.5}},
    "min tokens": {"min_tokens": 3, "stop_token_ids": [0, 3, 4, 6]},
}


def a_request(number: int, seed: int, prompt: list[int], **settings: Any) -> Request:
    return Request(f"r{number}", list(prompt), SamplingParams(**settings), seed, 10_000, frozenset({7}))


def random_logits(*shape: int, seed: int, scale: float = 1.5) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class SampledRow(NamedTuple):
    """A token is chosen behind the request's committed ones and `further`."""

    request: Request
    further: list[int]

    @property
    def position(self) -> int:
        return len(self.request.token_ids) + len(self.further)


class Placed:
    """Rows in a sequence table, each in a slot of its own."""

    def __init__(self, rows: list[SampledRow]) -> None:
        self.positions = torch.tensor([row.position for row in rows])
        width = int(self.positions.max()) + 1
        table = SequenceTable(len(rows), width, 1, 0, torch.device("cpu"))
        table.admit([self._admission(slot, *row) for slot, row in enumerate(rows)])
        self.slots = torch.arange(len(rows))
        self.at = table.read(self.slots)
        each = [Features(one.params, one.banned_token_ids, one.num_prompt_tokens) for one, _ in rows]
        self.features = RowFeatures(table, self.slots.numpy(), each, width)

    @staticmethod
    def _admission(slot: int, one: Request, further: list[int]) -> Admission:
        tokens = one.token_ids + further
        settings = (one.seed, one.params, one.banned_token_ids, [])
        return Admission(slot, slot, tokens, one.num_prompt_tokens, 0, one.max_total_tokens, *settings)

    def sampling_rows(self) -> SamplingRows:
        return self.features.rows(self.at, self.slots, self.positions)


def choose(mode: DraftSampling, logits: Tensor, rows: list[SampledRow], probs: Tensor | None = None) -> list[int]:
    """One draft per row of logits [R, V]; what it was drawn from goes to probs [R, 1, V]."""
    placed = Placed(rows)
    committed = torch.tensor([len(row.request.token_ids) for row in rows])
    sampler = DraftSampler(mode, placed.features, committed, load_ops("reference"), probs)
    return sampler.sample(logits, placed.at, placed.slots, placed.positions, 0).tolist()


def draft(mode: DraftSampling, logits: Tensor, requests: list[Request]) -> list[list[int]]:
    """A run of drafts for every request, logits [k, R, V], each depth knowing the drafts before."""
    drafts: list[list[int]] = [[] for _ in requests]
    for rows in logits:
        tokens = choose(mode, rows, [SampledRow(one, list(own)) for one, own in zip(requests, drafts, strict=True)])
        for own, token in zip(drafts, tokens, strict=True):
            own.append(token)
    return drafts


def verified_rows(requests: list[Request], drafts: list[list[int]]) -> list[SampledRow]:
    """Row j of a request has seen j of its drafts."""
    return [SampledRow(one, own[:j]) for one, own in zip(requests, drafts, strict=True) for j in range(len(own) + 1)]


def accept(
    verifier: Verifier, logits: Tensor, requests: list[Request], drafts: list[list[int]], probs: Tensor | None = None
) -> Accepted:
    """What becomes of drafts, logits [L, V] of their rows; probs [R, k, V] is what they were drawn from."""
    counts = torch.tensor([len(own) for own in drafts])
    width = int(counts.max()) + 1
    item = torch.arange(len(drafts)).repeat_interleave(counts + 1)
    before = torch.cat([torch.arange(len(own) + 1) for own in drafts])
    tokens = [[one.token_ids[-1], *own, *[PAD] * width][:width] for one, own in zip(requests, drafts, strict=True)]
    newest = torch.tensor([len(one.token_ids) - 1 for one in requests])
    drafted = Drafted(
        token_ids=torch.tensor(tokens),
        newest=newest,
        end=newest + 1 + counts,
        seed=torch.tensor([one.seed for one in requests]),
        place=None if bool((counts + 1 == width).all()) else (item, before),
        probs=None if probs is None else probs[:, : width - 1],
    )
    rows = Placed(verified_rows(requests, drafts)).sampling_rows()
    return verifier.verify(logits, rows, drafted, load_ops("reference"))


def verify(verifier: Verifier, logits: Tensor, requests: list[Request], drafts: list[list[int]]) -> list[int]:
    """How many drafts are kept, logits [k + 1, R, V]."""
    return accept(verifier, logits.transpose(0, 1).flatten(0, 1), requests, drafts).num_accepted.tolist()


class TestCoupled:
    """Drafts that share the target's noise."""

    @pytest.mark.parametrize("name", SETTINGS)
    def test_equal_logits_never_lose_a_draft(self, name: str) -> None:
        """For every sampling parameter; penalties count the drafts before."""
        k, count = 5, 60
        requests = [a_request(i, i, [3, i % 12, 5][: 1 + i % 3], **SETTINGS[name]) for i in range(count)]
        logits = random_logits(k + 1, count, 12, seed=1)
        drafts = draft("coupled", logits[:k], requests)
        assert verify(Verifier(), logits, requests, drafts) == [k] * count
        assert len({tuple(own) for own in drafts}) > count / 2

    @pytest.mark.parametrize("name", ["greedy with penalties", "repetition", "presence and frequency", "min tokens"])
    def test_drafts_before_matter(self, name: str) -> None:
        """Where they are left out, some drafts are lost: the test above has power."""
        k, count = 5, 60
        requests = [a_request(i, i, [3, i % 12, 5], **SETTINGS[name]) for i in range(count)]
        logits = random_logits(k + 1, count, 12, seed=1)
        blind = [choose("coupled", rows, [SampledRow(one, []) for one in requests]) for rows in logits[:k]]
        drafts = [list(own) for own in zip(*blind, strict=True)]
        assert min(verify(Verifier(), logits, requests, drafts)) < k

    @pytest.mark.parametrize("seed", range(16))
    def test_the_chance_is_that_of_the_papers(self, seed: int) -> None:
        """1 / sum over y of max(p(y) / p(x), q(y) / q(x)), summed over x; it lies above (1 - TV) / (1 + TV)."""
        count, vocab = 3000, 3 + seed % 9
        target = random_logits(vocab, seed=seed, scale=0.5 + seed % 4)
        near = target + random_logits(vocab, seed=seed + 100, scale=[0.3, 1.0, 3.0][seed % 3])
        p, q = target.double().softmax(0), near.double().softmax(0)
        matches = matching("coupled", near, target, count, seed)
        exact = float((1 / torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(dim=1)).sum())
        distance = float((p - q).abs().sum() / 2)
        bound = (1 - distance) / (1 + distance)
        assert bound - 1e-9 <= exact <= 1 - distance + 1e-9
        assert matches / count == pytest.approx(exact, abs=deviations(exact, count))
        assert matches / count > bound - deviations(bound, count)

    def test_noise_depends_on_seed_position_and_token_alone(self) -> None:
        """Not on the text, the split into committed tokens and drafts, the name, the batch or the place in it."""
        logits = random_logits(40, 12, seed=3, scale=0.7)
        requests = [a_request(i, 1000 + i, [1, 2, 3, 4]) for i in range(40)]
        alone = [choose("coupled", logits[i : i + 1], [SampledRow(requests[i], [5])])[0] for i in range(40)]
        assert choose("coupled", logits, [SampledRow(one, [5]) for one in requests]) == alone
        assert choose("coupled", logits.flip(0), [SampledRow(one, [5]) for one in requests[::-1]]) == alone[::-1]
        others = [a_request(99 - i, 1000 + i, [6, 7]) for i in range(40)]
        assert choose("coupled", logits, [SampledRow(one, [8, 9, 10]) for one in others]) == alone
        assert choose("coupled", logits, [SampledRow(one, [5]) for one in requests]) == alone, "no state is kept"
        elsewhere = choose("coupled", logits, [SampledRow(one, [5, 5]) for one in requests])
        assert elsewhere != alone
        strangers = [a_request(i, 2000 + i, [1, 2, 3, 4]) for i in range(40)]
        assert choose("coupled", logits, [SampledRow(one, [5]) for one in strangers]) != alone

    def test_a_token_keeps_its_noise_when_others_are_forbidden(self) -> None:
        """In a smaller vocabulary as well: the choice stays while it is there."""
        logits = random_logits(12, seed=4, scale=0.5).expand(200, 12)
        free = [a_request(i, i, [1]) for i in range(200)]
        chosen = choose("coupled", logits, [SampledRow(one, []) for one in free])
        few = choose("coupled", logits[:, :8], [SampledRow(one, []) for one in free])
        assert all(b == a for a, b in zip(chosen, few, strict=True) if a < 8)
        bans = [{t: -INFINITY for t in range(12) if t != token and (t + i) % 2} for i, token in enumerate(chosen)]
        banned = [a_request(i, i, [1], logit_bias=ban) for i, ban in enumerate(bans)]
        assert choose("coupled", logits, [SampledRow(one, []) for one in banned]) == chosen
        assert len(set(chosen)) == 12


def matching(mode: DraftSampling, logits: Tensor, target: Tensor, count: int, first: int, **settings: Any) -> int:
    """Over `count` seeds: how often a draft from `logits` [V] is the sample from `target` [V]."""
    requests = [a_request(i, first * 10**6 + i, [0], **settings) for i in range(count)]
    drafts = draft(mode, logits.expand(1, count, -1), requests)
    return sum(verify(Verifier(), target.expand(2, count, -1), requests, drafts))


def deviations(chance: float, count: int) -> float:
    """Five standard deviations of a frequency."""
    return 5 * math.sqrt(max(chance * (1 - chance), 1e-4) / count)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 5}, {"top_p": 0.7}])
def test_greedy_and_independent_drafts_have_their_own_chances(settings: dict[str, Any]) -> None:
    """p(favourite), and the sum of p squared, when draft and target agree; both below 1, which coupled drafts reach."""
    count, logits = 6000, random_logits(10, seed=5)
    law = (logits.double() / settings.get("temperature", 1.0)).softmax(0)
    ranked = law.sort(descending=True)
    kept = settings.get("top_k", 10)
    if "top_p" in settings:
        kept = 1 + int((ranked.values.cumsum(0) < settings["top_p"]).sum())
    law = torch.zeros_like(law).index_copy(0, ranked.indices[:kept], ranked.values[:kept])
    law /= law.sum()
    for mode, chance in (("greedy", float(law.max())), ("independent", float((law**2).sum()))):
        matches = matching(mode, logits, logits, count, 7, **settings)
        assert matches / count == pytest.approx(chance, abs=deviations(chance, count)), mode
        assert chance < 0.97
    assert matching("coupled", logits, logits, count, 7, **settings) == count


def test_greedy_drafts_are_the_favourite_of_the_processed_logits() -> None:
    """Bias and penalties count; whatever the temperature, there is no noise."""
    logits = torch.tensor([[3.0, 2.9, 1.0, 0.0]]).expand(3, 4)
    biased = a_request(0, 0, [1], logit_bias={0: -INFINITY}, temperature=9.0)
    penalised = a_request(1, 1, [1], presence_penalty=1.0, temperature=9.0)
    ended = a_request(2, 2, [1], min_tokens=2, stop_token_ids=[0], ignore_eos=True, temperature=9.0)
    rows = [SampledRow(biased, []), SampledRow(penalised, [0]), SampledRow(ended, [3])]
    assert choose("greedy", logits, rows) == [1, 1, 1]
    rows = [SampledRow(biased, []), SampledRow(penalised, []), SampledRow(ended, [3, 3])]
    assert choose("greedy", logits, rows) == [1, 0, 0]


def test_independent_drafts_follow_their_law_and_say_nothing_about_the_sample() -> None:
    """The joint counts of (draft, sample) are those of the product."""
    count, logits = 9000, random_logits(4, seed=6, scale=0.8)
    requests = [a_request(i, i, [0]) for i in range(count)]
    rows = [SampledRow(one, []) for one in requests]
    drafts = choose("independent", logits.expand(count, 4), rows)
    samples = accept(Verifier(), logits.expand(count, 4), requests, [[]] * count).emitted[:, 0].tolist()
    cells = torch.bincount(torch.tensor(drafts) * 4 + torch.tensor(samples), minlength=16)
    law = logits.double().softmax(0)
    assert chi_square(cells, (law[:, None] * law[None]).flatten()) > UNLIKELY
    coupled = choose("coupled", logits.expand(count, 4), rows)
    cells = torch.bincount(torch.tensor(coupled) * 4 + torch.tensor(samples), minlength=16)
    assert chi_square(cells, (law[:, None] * law[None]).flatten()) < 1e-9


def test_independent_drafts_of_one_position_differ_from_step_to_step() -> None:
    """A draft that was dropped tells nothing of the one that is drawn in its place; coupled ones are the same again."""
    logits = torch.zeros(60, 12)
    early = [SampledRow(a_request(i, i, [1, 2]), [3]) for i in range(60)]
    late = [SampledRow(a_request(i, i, [1, 2, 3]), []) for i in range(60)]
    for mode, most in (("coupled", 60), ("independent", 20)):
        first, second = (choose(mode, logits, rows) for rows in (early, late))
        same = sum(a == b for a, b in zip(first, second, strict=True))
        assert same <= most
        assert (same == 60) == (mode == "coupled")


class Game(NamedTuple):
    """Two laws of the next token given the last one, as logits [V, V], and how the text is sampled."""

    target: Tensor
    drafter: Tensor
    settings: dict[str, Any]

    def play(self, rule: Rule, mode: DraftSampling, k: int, count: int, length: int) -> tuple[Tensor, float]:
        """Counts of all texts of `length` tokens over `count` seeds, and the acceptance length; as the engine does."""
        verifier, vocab = Verifier(rule), len(self.target)
        requests = [a_request(i, i, [0], **self.settings) for i in range(count)]
        active, drafts, probs = list(requests), [[] for _ in requests], torch.zeros(count, k, vocab)
        steps = accepted = 0
        while active:
            rows = verified_rows(active, drafts)
            logits = self.target[[[*row.request.token_ids, *row.further][-1] for row in rows]]
            result = accept(verifier, logits, active, drafts, probs)
            kept = result.num_accepted.tolist()
            runs = [own[: n + 1] for own, n in zip(result.emitted.tolist(), kept, strict=True)]
            steps += sum(bool(own) for own in drafts)
            accepted += sum(kept)
            # Drafts are made before the run is committed, and not all of them are verified.
            wanted = [0 if len(one.token_ids) > length else k for one in active]
            drafts, probs = [[] for _ in active], torch.zeros(len(active), k, vocab)
            for depth in range(k):
                chosen = [i for i in range(len(active)) if wanted[i] > depth]
                some = [SampledRow(active[i], runs[i] + drafts[i]) for i in chosen]
                if some:
                    law = torch.zeros(len(some), 1, vocab)
                    found = choose(mode, self.drafter[[row.further[-1] for row in some]], some, law)
                    probs[chosen, depth] = law[:, 0]
                    for i, token in zip(chosen, found, strict=True):
                        drafts[i].append(token)
            for i, (one, run) in enumerate(zip(active, runs, strict=True)):
                one.token_ids += run
                del drafts[i][k - (one.seed + len(one.token_ids)) % 2 :]
            going = [i for i, one in enumerate(active) if len(one.token_ids) <= length]
            active, drafts, probs = [active[i] for i in going], [drafts[i] for i in going], probs[going]
        codes = torch.tensor([one.token_ids[1 : 1 + length] for one in requests])
        weights = vocab ** torch.arange(length - 1, -1, -1)
        return torch.bincount((codes * weights).sum(dim=1), minlength=vocab**length), 1 + accepted / steps

    def exact(self, length: int) -> Tensor:
        """The chance of every text, as `play` counts them."""
        bias = torch.zeros(len(self.target), dtype=torch.float64)
        for token, value in self.settings.get("logit_bias", {}).items():
            bias[token] = value
        law = ((self.target.double() + bias) / self.settings.get("temperature", 1.0)).softmax(dim=1)
        chances = law[0]
        for _ in range(length - 1):
            last = torch.arange(len(chances)) % len(law)
            chances = (chances[:, None] * law[last]).flatten()
        return chances


def game(closeness: str, vocab: int = 3, **settings: Any) -> Game:
    target = random_logits(vocab, vocab, seed=11, scale=0.8)
    noise = random_logits(vocab, vocab, seed=12)
    drafter = {"close": target + 0.4 * noise, "far": 1.5 * noise, "partly blind": target + 0.5 * noise}[closeness]
    if closeness == "partly blind":
        drafter[:, 1] = -INFINITY
    return Game(target, drafter, settings)


GAMES = {
    "close": game("close"),
    "far": game("far", temperature=1.5),
    "partly blind": game("partly blind"),
    "forbidden": game("close", vocab=4, logit_bias={2: -INFINITY}, temperature=0.8),
}


@pytest.mark.parametrize(
    ("name", "mode", "rule"),
    [
        ("close", "independent", "block"),
        ("far", "greedy", "block"),
        ("far", "independent", "rejection"),
        ("partly blind", "independent", "block"),
        ("partly blind", "greedy", "rejection"),
        ("forbidden", "independent", "rejection"),
        ("forbidden", "greedy", "block"),
    ],
)
def test_texts_follow_the_targets_law_whatever_was_drafted(rule: Rule, mode: DraftSampling, name: str) -> None:
    """The joint law of four tokens, over several steps with drafts of different numbers."""
    one, count, length = GAMES[name], 3000, 4
    counts, acceptance = one.play(rule, mode, 3, count, length)
    assert int(counts.sum()) == count
    assert chi_square(counts, one.exact(length)) > UNLIKELY
    assert 1.2 < acceptance < 3.6


@pytest.mark.long
@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("mode", ["independent", "greedy"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_texts_follow_the_targets_law_closely(rule: Rule, mode: DraftSampling, name: str) -> None:
    """As above, with ten times as many texts."""
    one = GAMES[name]
    counts, _ = one.play(rule, mode, 3, 30_000, 4)
    assert chi_square(counts, one.exact(4)) > UNLIKELY


def test_numbers_that_block_verification_has_seen_may_not_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn anew for the same positions they spoil the law, and the comparison notices."""
    for module in (draft_module, verify_module):
        monkeypatch.setattr(module, "fresh_seeds", lambda seeds, rows: seeds)
    one = GAMES["far"]
    assert chi_square(one.play("block", "greedy", 3, 3000, 4)[0], one.exact(4)) < 1e-9


VOCAB, FORBIDDEN = 5, 4
PROMPT = [0, 1, 2, 3, 0, 1, 2, 2, 1, 0]
WAYS = ["mtp:3", "mtp2:2", "draft", "ngram:3"]


def small(seed: int, modules: int) -> Tiny:
    """Two narrow layers, five tokens."""
    text = m3_text_config(
        vocab_size=VOCAB, num_hidden_layers=2, hidden_size=32, moe_layer_freq=[0, 1], num_local_experts=2,
        num_experts_per_tok=1, intermediate_size=16, shared_intermediate_size=16, dense_intermediate_size=32,
        sparse={"sparse_attention_freq": [0, 1], "sparse_disable_index_value": [0, 1]},
    )  # fmt: skip
    config = flatten(text) | {"eos_token_id": FORBIDDEN, "bos_token_id": 0}
    return with_mtp(Tiny("small", config, m3_tensors(seed, text), 24), modules)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """A small checkpoint by the seed of its weights and its number of MTP modules."""
    root = tmp_path_factory.mktemp("small")

    def write(seed: int, modules: int) -> Path:
        path = write_folder(small(seed, modules), root / f"{seed}_{modules}")
        (path / "generation_config.json").unlink()
        return path

    return cache(write)


def start(folder: Callable[[int, int], Path], way: str, **options: Any) -> LLM:
    modules = 2 if way.startswith("mtp2") else 1
    spec = f"draft:{folder(6, 0)}:3" if way == "draft" else way.replace("mtp2", "mtp")
    limits = {"num_blocks": 3000, "max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    return load(folder(5, modules), spec, **(limits | options))


TEMPERATURE, PRESENCE = 4.0, 0.6


def crowd(llm: LLM, count: int, length: int, more: int = 0, **settings: Any) -> list[Request]:
    """One prompt under many seeds, run to the end: `more` tokens follow those that are looked at."""
    common = {"temperature": TEMPERATURE, "presence_penalty": PRESENCE, "ignore_eos": True}
    params = SamplingParams(**(common | {"logit_bias": {FORBIDDEN: -INFINITY}} | settings))
    requests = [Request(f"r{i}", list(PROMPT), params, i, len(PROMPT) + length + more) for i in range(count)]
    for one in requests:
        llm.engine.add(one)
    while llm.engine.has_work:
        llm.engine.step()
    return requests


def law_of_texts(llm: LLM, length: int) -> Tensor:
    """The chance of every text of four tokens' alphabet, from log-probabilities after every beginning."""
    beginnings = [list(text) for size in range(length) for text in itertools.product(range(FORBIDDEN), repeat=size)]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1)
    outs = llm.generate([PROMPT + text for text in beginnings], params, progress=False)
    laws = {}
    for text, out in zip(beginnings, outs, strict=True):
        entry = out.outputs[0].logprobs[0]
        logits = torch.tensor([v for _, v in sorted(zip(entry.top_ids, entry.top_logprobs, strict=True))]).double()
        seen = torch.tensor([token in text for token in range(VOCAB)])
        laws[tuple(text)] = ((logits - PRESENCE * seen)[:FORBIDDEN] / TEMPERATURE).softmax(0)
    chances = [
        math.prod(float(laws[text[:i]][text[i]]) for i in range(length))
        for text in itertools.product(range(FORBIDDEN), repeat=length)
    ]
    return torch.tensor(chances, dtype=torch.float64)


def count_texts(requests: list[Request], length: int) -> Tensor:
    counts = torch.zeros([FORBIDDEN] * length)
    for one in requests:
        counts[tuple(one.output_token_ids[:length])] += 1
    return counts.flatten()


@pytest.fixture(scope="module")
def laws(folder: Callable[[int, int], Path]) -> Tensor:
    """Of three tokens; the texts without drafts follow it."""
    plain = start(folder, "off")
    chances = law_of_texts(plain, 3)
    assert float(chances.sum()) == pytest.approx(1.0)
    assert chi_square(count_texts(crowd(plain, 2000, 3), 3), chances) > UNLIKELY
    return chances


class TestEngines:
    """Real drafters and a real target; the law comes from the log-probabilities of an engine without drafts."""

    COUNT = 1000

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("rule", ["rejection", "block"])
    def test_the_law_is_kept(self, rule: Rule, way: str, folder: Callable[[int, int], Path], laws: Tensor) -> None:
        llm = start(folder, way, verification=rule)
        counts = count_texts(crowd(llm, self.COUNT, 3, more=1), 3)
        assert chi_square(counts, laws) > UNLIKELY
        stats = llm.engine.scheduler.stats.speculation
        assert stats.drafted > self.COUNT / 2
        assert 0.1 < stats.accepted / stats.drafted < 0.95
        assert rule in dict(llm.card)["speculation"]

    @pytest.mark.parametrize("sampling", ["coupled", "greedy", "independent"])
    @pytest.mark.parametrize("way", WAYS)
    def test_exact_verification_keeps_the_texts(
        self, way: str, sampling: DraftSampling, folder: Callable[[int, int], Path]
    ) -> None:
        expected = [one.output_token_ids for one in self.plain(folder)]
        llm = start(folder, way, draft_sampling=sampling)
        assert [one.output_token_ids for one in crowd(llm, 60, 12)] == expected
        assert llm.engine.scheduler.stats.speculation.accepted > 0

    @staticmethod
    def plain(folder: Callable[[int, int], Path]) -> list[Request]:
        return crowd(start(folder, "off"), 60, 12)

    def test_coupled_drafts_are_accepted_most(self, folder: Callable[[int, int], Path]) -> None:
        """Where draft and target are the same model, always; others by their formulas, which are lower."""
        rates = {}
        for mode in ("coupled", "greedy", "independent"):
            llm = load(folder(5, 0), f"draft:{folder(5, 0)}:3", draft_sampling=mode, max_num_seqs=1024, num_blocks=1000)
            crowd(llm, 60, 12)
            stats = llm.engine.scheduler.stats.speculation
            rates[mode] = stats.accepted / stats.drafted
        assert rates["coupled"] == 1.0
        assert rates["independent"] < rates["greedy"] < 0.9

    @pytest.mark.parametrize("rule", ["rejection", "block"])
    def test_equal_laws_never_lose_a_draft(self, rule: Rule, folder: Callable[[int, int], Path]) -> None:
        """The rules are given what drafts were drawn from; as sure ones, many of them would be lost."""
        spec = f"draft:{folder(5, 0)}:3"
        llm = load(folder(5, 0), spec, verification=rule, max_num_seqs=1024, num_blocks=1000)
        crowd(llm, 60, 12)
        stats = llm.engine.scheduler.stats.speculation
        assert stats.accepted / stats.drafted > 0.99

    def test_greedy_requests_are_greedy_under_every_rule(self, folder: Callable[[int, int], Path]) -> None:
        (expected,) = {tuple(one.output_token_ids) for one in crowd(start(folder, "off"), 3, 12, temperature=0.0)}
        for rule, way in itertools.product(("rejection", "block"), WAYS):
            llm = start(folder, way, verification=rule)
            found = crowd(llm, 3, 12, temperature=0.0, logprobs=1)
            assert {tuple(one.output_token_ids) for one in found} == {expected}
            assert all([entry.token_id for entry in one.logprobs] == one.output_token_ids for one in found)
            assert llm.engine.scheduler.stats.speculation.drafted > 0


class TestSimulation:
    """Acceptance by coins."""

    def engine(self, folder: Callable[[int, int], Path], rates: str, k: int = 3) -> LLM:
        return start(folder, f"mtp:{k}", simulate_acceptance=rates)

    @pytest.mark.parametrize(("rates", "length"), [("1,1,1", 4), ("0,0,0", 1), ("0", 1), ("1,1,0", 3), ("1,0,0", 2)])
    def test_certain_rates_are_met_exactly(self, rates: str, length: int, folder: Callable[[int, int], Path]) -> None:
        """`length` tokens in every step; the end leaves room for all drafts."""
        llm, rounds = self.engine(folder, rates), 6
        requests = crowd(llm, 7, 1 + rounds * length + 3)
        for one in requests:
            whole = one.speculation.drafted_per_position[2]  # steps with all three drafts
            assert whole >= rounds
            assert (
                one.speculation.accepted_per_position[: length - 1]
                == one.speculation.drafted_per_position[: length - 1]
            )
            assert not any(one.speculation.accepted_per_position[length - 1 :])
        if length == 4:
            assert llm.engine.stats.steps <= 1 + rounds + 2

    @pytest.mark.parametrize("rates", [(0.8, 0.5, 0.2), (0.9, 0.81, 0.1), (0.35, 0.35, 0.35)])
    def test_given_rates_are_met_on_average(self, rates: tuple[float, ...], folder: Callable[[int, int], Path]) -> None:
        """Of all steps with a draft at a position, the share in which the drafts up to it were kept."""
        llm = self.engine(folder, ",".join(map(str, rates)))
        crowd(llm, 100, 30)
        stats = llm.engine.scheduler.stats.speculation
        for rate, found, drafted in zip(rates, stats.acceptance_rates, stats.drafted_per_position, strict=True):
            assert drafted > 800
            assert found == pytest.approx(rate, abs=deviations(rate, drafted))

    def test_a_given_length_is_met_on_average(self, folder: Callable[[int, int], Path]) -> None:
        """The other engines' option: mean tokens a step, the last one included."""
        spec = (
            '{"method": "mtp", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",'
            ' "synthetic_acceptance_length": 2.6}'
        )
        llm = start(folder, spec)
        crowd(llm, 60, 30)
        stats = llm.engine.scheduler.stats.speculation
        first, second, third = stats.acceptance_rates
        assert (first, third) == (1.0, 0.0)
        assert second == pytest.approx(0.6, abs=deviations(0.6, stats.drafted_per_position[1]))

    def test_coins_depend_on_seed_and_position(self, folder: Callable[[int, int], Path]) -> None:
        """The same counts in another batch, and others for other seeds."""
        shares = [one.speculation for one in crowd(self.engine(folder, "0.7,0.5,0.3"), 12, 30)]
        again = [one.speculation for one in crowd(self.engine(folder, "0.7,0.5,0.3"), 5, 30)]
        assert again == shares[:5]
        assert len({tuple(share.accepted_per_position) for share in shares}) > 3

    @pytest.mark.parametrize("rates", ["1,1,1", "0"])
    def test_everything_says_that_it_is_simulated(self, rates: str, folder: Callable[[int, int], Path]) -> None:
        llm = self.engine(folder, rates)
        assert "SIMULATED" in dict(llm.card)["speculation"]
        outs = llm.generate([PROMPT, PROMPT], SamplingParams(max_tokens=9, n=2), progress=False)
        assert all(choice.speculation.simulated for out in outs for choice in out.outputs)
        real = start(folder, "mtp:3")
        assert "SIMULATED" not in dict(real.card)["speculation"]
        (out,) = real.generate([PROMPT], SamplingParams(max_tokens=9), progress=False)
        assert out.outputs[0].speculation.simulated is False

    @pytest.mark.parametrize("rates", ["0.5,0.6", "1.1", "-0.1", "", "x", "nan"])
    def test_rates_that_make_no_sense_are_refused(self, rates: str, folder: Callable[[int, int], Path]) -> None:
        with pytest.raises(ConfigError, match=r"simulate_acceptance|acceptance rates"):
            self.engine(folder, rates)
