"""Rejection sampling and block verification: the law of what they emit, how much they keep, and hostile arguments.

The law is tested as a reader of the text sees it. Whatever a rule emits is continued from the target up to k+1 tokens,
and the frequencies of all texts of that length must be those of the target alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from oracles import acceptance
from oracles.acceptance import BLOCK_FLAWS, REJECTION_FLAWS, flawed_rule, recovered_law, survival
from oracles.statistics import chi_square
from torch import Tensor

from skipstone.spec.rejection import block_verify, rejection_sample

PAD = -1
NEARLY_ONE = 1 - 2.0**-24  # the largest float32 below 1
UNLIKELY = 1e-5  # seeds are fixed, so a test fails always or never; a correct one is this unlikely to be written
RULES = {"rejection": rejection_sample, "block": block_verify}
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

both_rules = pytest.mark.parametrize("rule", RULES)


class Tables(NamedTuple):
    """Laws of the next token after every text of 0, 1, .. tokens: entry i is [V**i, V], texts counted in base V."""

    target: list[Tensor]  # k + 1 of them
    draft: list[Tensor]  # k


class Step(NamedTuple):
    """The arguments of a rule."""

    target_probs: Tensor  # [R, k+1, V] float32
    draft_probs: Tensor  # [R, k, V] float32
    draft_token_ids: Tensor  # [R, k] int64
    uniforms: Tensor  # [R, k] float32
    noise: Tensor  # [R, k+1, V] float32


def random_laws(generator: torch.Generator, rows: int, vocab: int, keep: float = 1.0) -> Tensor:
    """Random laws, whose tokens each keep a probability above zero with chance `keep`, and one of them always."""
    laws = (1.5 * torch.randn(rows, vocab, generator=generator)).exp()
    kept = torch.rand(rows, vocab, generator=generator) < keep
    kept[torch.arange(rows), torch.randint(vocab, (rows,), generator=generator)] = True
    return laws * kept / (laws * kept).sum(dim=1, keepdim=True)


def make_tables(kind: str, vocab: int, k: int, seed: int) -> Tables:
    """Laws that depend on all tokens before; `kind` says what is special about them."""
    generator = torch.Generator().manual_seed(seed)
    target_keep = {"zeros in p": 0.6, "zeros in both": 0.6}.get(kind, 1.0)
    draft_keep = {"zeros in q": 0.6, "zeros in both": 0.6}.get(kind, 1.0)
    target = [random_laws(generator, vocab**i, vocab, target_keep) for i in range(k + 1)]
    draft = [random_laws(generator, vocab**i, vocab, draft_keep) for i in range(k)]
    if kind == "one-hot":
        draft = [torch.nn.functional.one_hot(law.argmax(dim=1), vocab).float() for law in draft]
    if kind == "close":
        draft = [0.8 * p + 0.2 * q for p, q in zip(target, draft, strict=False)]
    if kind == "equal":
        draft = [law.clone() for law in target[:k]]
    return Tables(target, draft)


KINDS = ["stochastic", "one-hot", "zeros in q", "zeros in p", "zeros in both", "close", "equal"]


def pick(laws: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row of `laws` [R, V]."""
    total = laws.double().cumsum(dim=1)
    coins = torch.rand(len(laws), 1, generator=generator, dtype=torch.float64) * total[:, -1:]
    return (total <= coins).sum(dim=1)


def gumbel(generator: torch.Generator, *shape: int) -> Tensor:
    uniforms = torch.rand(shape, generator=generator, dtype=torch.float64).clamp_(min=2**-60)
    return -torch.log(-torch.log(uniforms)).float()


def draw_step(tables: Tables, rows: int, seed: int, ragged: bool = False) -> Step:
    """Drafts drawn from their laws. Ragged: only the first 0 to k of each row, while the laws of all stay in place."""
    generator = torch.Generator().manual_seed(seed)
    k, vocab = len(tables.draft), tables.target[0].shape[-1]
    text = torch.zeros(rows, dtype=torch.int64)
    target, draft, drafts = [tables.target[0][text]], [], []
    for i in range(k):
        draft.append(tables.draft[i][text])
        drafts.append(pick(draft[i], generator))
        text = text * vocab + drafts[i]
        target.append(tables.target[i + 1][text])
    target_probs, draft_probs, draft_token_ids = torch.stack(target, 1), torch.stack(draft, 1), torch.stack(drafts, 1)
    if ragged:
        lengths = torch.randint(k + 1, (rows, 1), generator=generator)
        missing = torch.arange(k) >= lengths
        draft_token_ids = draft_token_ids.masked_fill(missing, PAD)
    uniforms = torch.rand(rows, k, generator=generator)
    return Step(target_probs, draft_probs, draft_token_ids, uniforms, gumbel(generator, rows, k + 1, vocab))


def text_counts(tables: Tables, verified: tuple[Tensor, Tensor], seed: int) -> Tensor:
    """How often each text of k+1 tokens results when what was emitted is continued from the target."""
    generator = torch.Generator().manual_seed(seed)
    token_ids, accepted = verified
    vocab = tables.target[0].shape[-1]
    text = torch.zeros(len(token_ids), dtype=torch.int64)
    for i, laws in enumerate(tables.target):
        text = text * vocab + torch.where(i <= accepted, token_ids[:, i].long(), pick(laws[text], generator))
    return torch.bincount(text, minlength=vocab ** len(tables.target))


def text_law(tables: Tables) -> Tensor:
    """Probability of each text of k+1 tokens under the target alone."""
    law = torch.ones(1, dtype=torch.float64)
    for laws in tables.target:
        laws = laws.double()
        law = (law[:, None] * (laws / laws.sum(dim=1, keepdim=True))).flatten()
    return law


def law_p_value(rule: Rule, tables: Tables, rows: int, seed: int, ragged: bool) -> float:
    """The chi-square test of the texts under `rule`."""
    return chi_square(text_counts(tables, rule(*draw_step(tables, rows, seed, ragged)), seed + 1), text_law(tables))


@both_rules
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "k"), [(5, 1), (4, 2), (3, 3)])
def test_texts_have_the_law_of_the_target(rule: str, kind: str, vocab: int, k: int) -> None:
    tables = make_tables(kind, vocab, k, 10 * KINDS.index(kind) + k)
    assert law_p_value(RULES[rule], tables, 60_000, 7 * k, ragged=False) > UNLIKELY


@both_rules
@pytest.mark.parametrize("kind", KINDS)
def test_texts_have_the_law_of_the_target_when_drafts_are_few(rule: str, kind: str) -> None:
    tables = make_tables(kind, 4, 3, 100 + KINDS.index(kind))
    assert law_p_value(RULES[rule], tables, 80_000, 8, ragged=True) > UNLIKELY


def sharp_p_value(rule: Rule) -> float:
    """The law test on laws chosen so that small mistakes show."""
    return law_p_value(rule, make_tables("stochastic", 3, 3, 50), 80_000, 9, ragged=True)


@both_rules
def test_texts_have_the_law_of_the_target_where_flaws_would_show(rule: str) -> None:
    assert sharp_p_value(lambda *step: flawed_rule(rule, "", *step)) > UNLIKELY
    assert sharp_p_value(RULES[rule]) > UNLIKELY


@pytest.mark.parametrize(
    ("rule", "flaw"), [*(("rejection", flaw) for flaw in REJECTION_FLAWS), *(("block", flaw) for flaw in BLOCK_FLAWS)]
)
def test_the_law_test_notices_a_flaw(rule: str, flaw: str) -> None:
    assert sharp_p_value(lambda *step: flawed_rule(rule, flaw, *step)) < UNLIKELY


@both_rules
@pytest.mark.parametrize("kind", ["stochastic", "one-hot", "zeros in both", "close"])
def test_the_first_draft_is_kept_as_often_as_the_laws_overlap(rule: str, kind: str) -> None:
    """Exact: one draft, coins on a grid. Its acceptance is 1 minus the total variation distance."""
    vocab, grid = 5, 20_000
    tables = make_tables(kind, vocab, 1, 5)
    target, draft = tables.target[0][0], tables.draft[0][0]
    coins = ((torch.arange(grid) + 0.5) / grid).repeat(vocab)[:, None]
    drafts = torch.arange(vocab).repeat_interleave(grid)[:, None]
    after = tables.target[1][drafts[:, 0]]
    target_probs = torch.stack([target.expand(len(drafts), -1), after], dim=1)
    noise = gumbel(torch.Generator().manual_seed(1), len(drafts), 2, vocab)
    _, accepted = RULES[rule](target_probs, draft.expand(len(drafts), 1, -1), drafts, coins, noise)
    kept = (accepted.view(vocab, grid).double().mean(dim=1) * draft).sum()
    distance = (target.double() - draft.double()).abs().sum() / 2
    assert float(kept) == pytest.approx(1 - float(distance), abs=1e-4)


@both_rules
@pytest.mark.parametrize("kind", ["stochastic", "one-hot", "zeros in both", "close"])
def test_as_many_drafts_are_kept_as_the_rule_promises(rule: str, kind: str) -> None:
    tables, rows = make_tables(kind, 4, 3, 77), 100_000
    _, accepted = RULES[rule](*draw_step(tables, rows, 3))
    for i, exact in enumerate(survival(rule, *tables), start=1):
        deviation = math.sqrt(exact * (1 - exact) / rows)
        assert float((accepted >= i).double().mean()) == pytest.approx(exact, abs=5 * deviation + 1e-6)


@pytest.mark.parametrize("kind", ["stochastic", "zeros in q", "close"])
def test_block_verification_keeps_more(kind: str) -> None:
    """By the exact margin, and by far more than chance."""
    tables, rows = make_tables(kind, 4, 3, 78), 100_000
    step = draw_step(tables, rows, 4)
    gain = block_verify(*step)[1].double() - rejection_sample(*step)[1].double()
    deviation = float(gain.std()) / math.sqrt(rows)
    exact = sum(survival("block", *tables)) - sum(survival("rejection", *tables))
    assert exact > 10 * deviation
    assert float(gain.mean()) == pytest.approx(exact, abs=5 * deviation)


@both_rules
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_equals_the_loops(rule: str, kind: str) -> None:
    """The number kept, the drafts kept, and the last token, which wins the race of the residual and its own noise."""
    vocab, k = 5, 4
    step = draw_step(make_tables(kind, vocab, k, 31), 2000, 32, ragged=True)
    compared = 0
    token_ids, accepted = RULES[rule](*step)
    assert tuple(token_ids.shape) == (2000, k + 1)
    assert tuple(accepted.shape) == (2000,)
    thresholds_of = getattr(acceptance, f"{rule}_thresholds")
    accepts = getattr(acceptance, f"{rule}_accepts")
    for row, (target, draft, padded, coins) in enumerate(zip(*(part.tolist() for part in step[:4]), strict=True)):
        drafts = [token for token in padded if token != PAD]
        thresholds = thresholds_of(target, draft, drafts)
        if any(abs(a - b) < 1e-5 for a, b in zip(coins, thresholds, strict=False) if b < 1 - 1e-4):
            continue  # a coin on the edge may fall either way
        kept = int(accepted[row])
        assert kept == accepts([t if t < 1 - 1e-4 else 1.0 for t in thresholds], coins)
        assert token_ids[row, :kept].tolist() == drafts[:kept]
        weights = recovered_law(rule, target, draft, drafts, kept)
        noise = step.noise[row, kept].tolist()
        scores = [math.log(w) + g if w > 0 else -math.inf for w, g in zip(weights, noise, strict=True)]
        assert scores[int(token_ids[row, kept])] > max(scores) - 1e-3
        assert token_ids[row, kept + 1 :].tolist() == [PAD] * (k - kept)
        compared += 1
    assert compared > 1900


@both_rules
def test_equal_laws_keep_every_draft(rule: str) -> None:
    step = draw_step(make_tables("equal", 5, 3, 1), 2000, 2, ragged=True)
    for coin in (0.0, 0.5, NEARLY_ONE):
        token_ids, accepted = RULES[rule](*step._replace(uniforms=torch.full_like(step.uniforms, coin)))
        assert torch.equal(accepted.long(), (step.draft_token_ids != PAD).sum(dim=1))
        kept = token_ids[:, :3] == step.draft_token_ids
        assert bool((kept | (step.draft_token_ids == PAD)).all())


@both_rules
@pytest.mark.parametrize("kind", ["zeros in p", "zeros in both"])
@pytest.mark.parametrize("coin", [0.0, 2.0**-24, NEARLY_ONE, None])
def test_a_token_that_the_target_forbids_is_never_emitted(rule: str, kind: str, coin: float | None) -> None:
    step = draw_step(make_tables(kind, 5, 3, 11), 20_000, 12, ragged=True)
    if coin is not None:
        step = step._replace(uniforms=torch.full_like(step.uniforms, coin))
    token_ids, accepted = RULES[rule](*step)
    emitted = torch.arange(4) <= accepted[:, None]
    probabilities = step.target_probs.gather(2, token_ids.long().clamp(min=0)[:, :, None])[:, :, 0]
    assert bool((probabilities[emitted] > 0).all())
    assert bool(((token_ids >= 0) == emitted).all())


@both_rules
def test_a_coin_of_zero_keeps_all_that_is_possible(rule: str) -> None:
    step = draw_step(make_tables("zeros in p", 5, 3, 13), 5000, 14)
    drawn = step.target_probs[:, :3].gather(2, step.draft_token_ids[:, :, None])[:, :, 0]
    possible = (drawn > 0).int().cumprod(dim=1).sum(dim=1)
    _, accepted = RULES[rule](*step._replace(uniforms=torch.zeros(5000, 3)))
    assert set(possible.tolist()) == {0, 1, 2, 3}
    assert bool((accepted <= possible).all())
    certain = possible == 3 if rule == "block" else possible >= 0  # a block ends only where its residual is not empty
    assert torch.equal(accepted[certain].long(), possible[certain])


@both_rules
def test_a_coin_near_one_drops_what_the_target_likes_less(rule: str) -> None:
    target = torch.tensor([[0.2, 0.8], [0.5, 0.5]]).expand(2, 2, 2)
    draft = torch.tensor([[[0.6, 0.4]]]).expand(2, 1, 2)
    coins = torch.full((2, 1), NEARLY_ONE)
    token_ids, accepted = RULES[rule](target, draft, torch.tensor([[0], [1]]), coins, torch.zeros(2, 2, 2))
    assert accepted.tolist() == [0, 1]
    assert token_ids[0].tolist() == [1, PAD]
    assert int(token_ids[1, 0]) == 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_whole_block_is_kept_below_its_joint_probability(count: int) -> None:
    """All of m drafts pass when the last one's coin is below the capped product of the ratios, whatever the others."""
    drafts = draw_step(make_tables("stochastic", 4, 3, 91), 400, 92)
    step = drafts._replace(draft_token_ids=drafts.draft_token_ids.masked_fill(torch.arange(3) >= count, PAD))
    joint = torch.ones(400, dtype=torch.float64)
    for place in range(count):
        laws = (step.target_probs[:, place].double(), step.draft_probs[:, place].double())
        target, draft = (law.gather(1, drafts.draft_token_ids[:, place, None])[:, 0] for law in laws)
        joint = (joint * target / draft).clamp(max=1.0)
    assert 0.2 < float((joint < 1).double().mean()) < 1
    for factor, kept in ((1 - 1e-5, True), (1 + 1e-5, False)):
        coins = torch.ones(400, 3, dtype=torch.float64)
        coins[:, count - 1] = joint * factor
        accepted = block_verify(*step._replace(uniforms=coins))[1]
        uncertain = joint < 1 if not kept else joint > 0
        assert bool(((accepted == count) == kept)[uncertain].all())


@both_rules
def test_a_residual_lost_to_rounding_still_gives_a_possible_token(rule: str) -> None:
    """The laws differ by less than they should, so that a draft can be rejected with nothing left to draw from."""
    draft = torch.tensor([0.0, 0.25, 0.75, 0.0])
    target = draft * (1 - 2.0**-20)
    noise = gumbel(torch.Generator().manual_seed(3), 200, 2, 4)
    drafts = torch.tensor([1, 2]).repeat(100)[:, None]
    coins = torch.full((200, 1), NEARLY_ONE)
    token_ids, accepted = RULES[rule](target.expand(200, 2, 4), draft.expand(200, 1, 4), drafts, coins, noise)
    assert not accepted.any()
    assert set(token_ids[:, 0].tolist()) <= {1, 2}


@both_rules
def test_without_drafts_the_next_token_is_the_target_s(rule: str) -> None:
    tables = make_tables("stochastic", 5, 2, 15)
    step = draw_step(tables, 50_000, 16)
    step = step._replace(draft_token_ids=torch.full_like(step.draft_token_ids, PAD))
    token_ids, accepted = RULES[rule](*step)
    assert not accepted.any()
    assert bool((token_ids[:, 1:] == PAD).all())
    assert chi_square(torch.bincount(token_ids[:, 0].long(), minlength=5), tables.target[0][0]) > UNLIKELY


@both_rules
def test_what_lies_behind_the_drafts_changes_nothing(rule: str) -> None:
    step = draw_step(make_tables("stochastic", 5, 3, 17), 500, 18, ragged=True)
    expected = RULES[rule](*step)
    missing = step.draft_token_ids == PAD
    behind = torch.arange(4) > (~missing).sum(dim=1, keepdim=True)
    for value in (math.nan, math.inf, 0.0, 1.0):
        poisoned = Step(
            step.target_probs.masked_fill(behind[:, :, None], value),
            step.draft_probs.masked_fill(missing[:, :, None], value),
            step.draft_token_ids,
            step.uniforms.masked_fill(missing, value),
            step.noise.masked_fill(behind[:, :, None], value),
        )
        for got, whole in zip(RULES[rule](*poisoned), expected, strict=True):
            assert torch.equal(got, whole), value


@both_rules
def test_a_row_does_not_depend_on_the_others(rule: str) -> None:
    step = draw_step(make_tables("close", 5, 3, 19), 64, 20, ragged=True)
    whole = RULES[rule](*step)
    for first, count in itertools.product((0, 17, 40), (1, 3, 24)):
        part = slice(first, first + count)
        for got, expected in zip(RULES[rule](*(values[part] for values in step)), whole, strict=True):
            assert torch.equal(got, expected[part])


@both_rules
def test_arguments_are_left_alone(rule: str) -> None:
    step = draw_step(make_tables("stochastic", 4, 2, 21), 50, 22, ragged=True)
    before = [values.clone() for values in step]
    RULES[rule](*step)
    assert all(torch.equal(a, b) for a, b in zip(step, before, strict=True))


def test_results_have_names() -> None:
    step = draw_step(make_tables("stochastic", 4, 2, 23), 9, 24)
    for rule in RULES.values():
        verified = rule(*step)
        assert verified.token_ids is verified[0]
        assert verified.num_accepted is verified[1]
