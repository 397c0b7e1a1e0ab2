"""Sampling against plain loops, against the processors of another library, and against the exact distribution."""

from __future__ import annotations

import math
import random

import pytest
import torch
from oracles.rows import to_rows
from oracles.sampling import NEVER, Row, process, ranking, softmax
from oracles.statistics import chi_square
from torch import Tensor
from transformers.generation import logits_process as hf

from skipstone.kernels.reference.sampling import gumbel_noise, process_logits, sample, token_logprobs

VOCAB = 57
UNLIKELY = 1e-5  # seeds are fixed, so a test fails always or never; a correct one is this unlikely to be written


def random_logits(seed: int, count: int, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    """[count, vocab] Gaussian logits."""
    return scale * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))


def random_row(rng: random.Random) -> Row:
    """Every feature on in about half of the rows."""

    def maybe(value: float, off: float) -> float:
        return value if rng.random() < 0.5 else off

    tokens = rng.choices(range(VOCAB), k=rng.randrange(12)), rng.choices(range(VOCAB // 3), k=rng.randrange(20))
    bias = {t: rng.uniform(-9, 9) for t in rng.sample(range(VOCAB), k=rng.randrange(5))}
    bans = dict.fromkeys(rng.sample(range(VOCAB), k=rng.randrange(4)), NEVER)
    return Row(
        temperature=maybe(rng.uniform(0.1, 3), 1.0),
        top_k=int(maybe(rng.randrange(1, VOCAB + 5), 0)),
        top_p=maybe(rng.uniform(0.01, 0.999), 1.0),
        min_p=maybe(rng.uniform(0.001, 0.5), 0.0),
        repetition=maybe(rng.uniform(0.3, 2), 1.0),
        presence=maybe(rng.uniform(-2, 2), 0.0),
        frequency=maybe(rng.uniform(-2, 2), 0.0),
        bias=bias | bans if rng.random() < 0.5 else {},
        prompt=tokens[0],
        output=tokens[1],
    )


def check_processed(logits: Tensor, rows: list[Row]) -> None:
    """process_logits keeps the same tokens as the loops, at the same values."""
    got = process_logits(logits, to_rows(rows))
    for row, values, result in zip(rows, logits.double().tolist(), got, strict=True):
        expected = torch.tensor(process(values, row))
        assert torch.equal(result > NEVER, expected > NEVER), row
        kept = expected > NEVER
        torch.testing.assert_close(result[kept].double(), expected[kept].double(), rtol=2e-5, atol=2e-5)


def test_all_features_at_once() -> None:
    rng = random.Random(1)
    rows = [random_row(rng) for _ in range(300)]
    check_processed(random_logits(2, 300), rows)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1}, {"top_k": 9}, {"top_k": VOCAB}, {"top_k": VOCAB + 30}, {"top_p": 0.3}, {"top_p": 0.9},
        {"min_p": 0.2}, {"min_p": 1.0}, {"temperature": 0.3}, {"temperature": 5.0}, {"presence": 1.5},
        {"frequency": -1.2}, {"repetition": 1.4}, {"repetition": 0.6}, {"bias": {3: 4.0, 50: NEVER}},
        {"temperature": 0.5, "top_p": 0.8}, {"temperature": 2.0, "min_p": 0.3}, {"top_k": 5, "top_p": 0.7},
        {"top_k": 8, "min_p": 0.2}, {"top_p": 0.6, "min_p": 0.4}, {"repetition": 1.3, "presence": 0.7},
        {"bias": {1: -3.0, 4: 2.0}, "repetition": 2.0}, {"bias": {6: NEVER}, "repetition": 1.5, "frequency": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_one_feature(settings: dict) -> None:
    history = {"prompt": [0, 1, 2, 2, 5], "output": [2, 3, 4, 4, 4, 6]}
    check_processed(random_logits(3, 20), [Row(**settings, **history)] * 20)


def test_a_feature_of_one_row_leaves_the_others_alone() -> None:
    """Rows without a feature give the same bits whether or not another row of the call uses it."""
    rng = random.Random(4)
    logits = random_logits(5, 40)
    plain = [Row(temperature=0.7)] * 40
    alone = process_logits(logits, to_rows(plain))
    mixed = [random_row(rng) if i % 2 else plain[i] for i in range(40)]
    assert torch.equal(process_logits(logits, to_rows(mixed))[::2], alone[::2])


def test_equal_logits_keep_the_lowest_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0, -0.0]])
    kept = process_logits(logits, to_rows([Row(top_k=2)]))[0] > NEVER
    assert kept.nonzero().flatten().tolist() == [1, 2]
    kept = process_logits(torch.zeros(1, 10), to_rows([Row(top_k=4)]))[0] > NEVER
    assert kept.nonzero().flatten().tolist() == [0, 1, 2, 3]
    kept = process_logits(torch.zeros(1, 8), to_rows([Row(top_p=0.5)]))[0] > NEVER
    assert kept.nonzero().flatten().tolist() == [0, 1, 2, 3]
    rng = random.Random(6)
    coarse = torch.randint(-3, 4, (60, VOCAB), generator=torch.Generator().manual_seed(6)).float()
    check_processed(coarse, [Row(top_k=rng.randrange(1, VOCAB)) for _ in range(60)])


def test_top_p_reaches_the_mass_with_the_fewest_tokens() -> None:
    logits = random_logits(7, 50)
    for p in (1e-6, 0.1, 0.5, 0.9, 0.99, 1 - 1e-4):
        kept = process_logits(logits, to_rows([Row(top_p=p)] * 50)) > NEVER
        probabilities = logits.double().softmax(-1)
        mass = (probabilities * kept).sum(-1)
        weakest = probabilities.masked_fill(~kept, 2.0).amin(-1)
        assert (kept.sum(-1) >= 1).all()
        assert (mass >= p - 1e-6).all()
        assert ((mass - weakest < p + 1e-6) | (kept.sum(-1) == 1)).all()


def test_a_wide_vocabulary() -> None:
    """Flat and peaked distributions over many tokens: top-p may need nearly all of them, or one."""
    logits = torch.cat([random_logits(8, 3, 5000, scale=s) for s in (0.01, 1.0, 4.0)])
    rows = [Row(top_p=p) for p in (0.2, 0.7, 0.95)] * 3
    check_processed(logits, rows)
    check_processed(logits, [Row(top_k=k, top_p=0.9) for k in (0, 40, 4999)] * 3)


@pytest.mark.parametrize("seed", range(3))
def test_against_another_library(seed: int) -> None:
    """Where the rules are the same. Not compared: top-k among equal logits, where that library keeps more than k."""
    logits = random_logits(10 + seed, 30)
    tokens = torch.randint(0, VOCAB, (30, 9), generator=torch.Generator().manual_seed(seed))
    rows = to_rows([
        Row(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05, repetition=1.3, prompt=t[:4], output=t[4:])
        for t in tokens.tolist()
    ])  # fmt: skip
    expected = logits
    for processor in (
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.TemperatureLogitsWarper(0.8),
        hf.TopKLogitsWarper(20),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.05),
    ):
        expected = processor(tokens, expected)
    torch.testing.assert_close(process_logits(logits, rows), expected, rtol=1e-6, atol=1e-6)


def test_greedy_takes_the_likeliest_of_the_lowest_ids() -> None:
    rng = random.Random(9)
    coarse = torch.randint(-2, 3, (60, VOCAB), generator=torch.Generator().manual_seed(9)).float()
    rows = [random_row(rng) for _ in range(60)]
    for row in rows:
        row.temperature = 0.0
    plain = [Row(temperature=0.0)] * 60
    for settings in (rows, plain, rows[:30] + [Row()] * 30):
        got = sample(coarse, to_rows(settings)).tolist()
        for row, values, token in zip(settings, coarse.tolist(), got, strict=True):
            if row.temperature == 0:
                assert token == max(range(VOCAB), key=process(values, row).__getitem__), row


def test_sample_is_the_noisy_maximum() -> None:
    rng = random.Random(11)
    logits = random_logits(11, 64)
    rows = to_rows([random_row(rng) for _ in range(64)])
    noisy = process_logits(logits, rows) + gumbel_noise(rows.seed, rows.position, VOCAB)
    got = sample(logits, rows)
    assert got.dtype == torch.int64
    assert torch.equal(got, noisy.argmax(-1))


def test_logits_are_left_alone() -> None:
    rng = random.Random(12)
    logits = random_logits(12, 20)
    before = logits.clone()
    rows = to_rows([random_row(rng) for _ in range(20)])
    process_logits(logits, rows)
    sample(logits, rows)
    token_logprobs(logits, torch.zeros(20, dtype=torch.int64), 3)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0}, {"temperature": 0.5, "top_k": 10}, {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 3.0, "min_p": 0.05}, {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.2, "repetition": 1.5, "presence": 0.5, "frequency": 0.4, "top_k": 30,
         "prompt": [0, 3, 8], "output": [8, 8, 2, 1], "bias": {5: 2.0, 9: NEVER}},
    ],
    ids=str,
)  # fmt: skip
def test_frequencies_match_the_distribution(settings: dict, vary: str) -> None:
    """100,000 draws from one row of logits, which differ in the seed or in the position only."""
    draws, vocab = 100_000, 40
    logits = random_logits(13, 1, vocab, scale=1.5)
    row = Row(**settings)
    count, fixed = torch.arange(draws), torch.full((draws,), 123_456_789)
    seeds, positions = (count, fixed) if vary == "seed" else (fixed, count)
    tokens = sample(logits.expand(draws, vocab), to_rows([row] * draws, seeds, positions))
    expected = torch.tensor(softmax(process(logits[0].tolist(), row)), dtype=torch.float64)
    assert chi_square(torch.bincount(tokens, minlength=vocab), expected) > UNLIKELY


def test_neighbouring_draws_are_independent() -> None:
    """Pairs (this position, the next one) and (this seed, the next one) have the product distribution."""
    draws, vocab = 40_000, 6
    logits = random_logits(14, 1, vocab, scale=0.7)
    single = torch.tensor(softmax(logits[0].tolist()), dtype=torch.float64)
    pair = (single[:, None] * single).flatten()
    count, fixed = torch.arange(2 * draws), torch.full((2 * draws,), 5)
    for seeds, positions in ((count, fixed), (fixed, count)):
        tokens = sample(logits.expand(2 * draws, vocab), to_rows([Row()] * (2 * draws), seeds, positions))
        pairs = tokens[0::2] * vocab + tokens[1::2]
        assert chi_square(torch.bincount(pairs, minlength=vocab * vocab), pair) > UNLIKELY


def test_chi_square_notices_a_wrong_distribution() -> None:
    """The draws above, held against a slightly wrong temperature or a top-k of one more."""
    draws, vocab = 100_000, 40
    logits = random_logits(13, 1, vocab, scale=1.5)
    tokens = sample(logits.expand(draws, vocab), to_rows([Row(top_k=10)] * draws, torch.arange(draws)))
    counts = torch.bincount(tokens, minlength=vocab)
    for wrong in (Row(top_k=10, temperature=1.06), Row(top_k=11), Row(top_k=9)):
        expected = torch.tensor(softmax(process(logits[0].tolist(), wrong)), dtype=torch.float64)
        assert chi_square(counts, expected) < UNLIKELY, wrong


@pytest.mark.parametrize("vocab", [1, 2, 3, 57, 1001])
def test_a_row_alone_equals_the_row_in_a_batch(vocab: int) -> None:
    """Bit-equal noise, logits, tokens and log-probabilities, whatever the number of rows in the call."""
    rng = random.Random(15)
    logits = random_logits(15, 64, vocab)
    rows = [random_row(rng) for _ in range(64)]
    for row in rows:
        row.prompt, row.output = [t % vocab for t in row.prompt], [t % vocab for t in row.output]
        row.bias = {t: v for t, v in row.bias.items() if t < vocab and v > NEVER}
    seeds = torch.randint(0, 2**62, (64,), generator=torch.Generator().manual_seed(15))
    positions = torch.arange(64) * 37
    batch = to_rows(rows, seeds, positions)
    chosen = sample(logits, batch)
    scores, noise = process_logits(logits, batch), gumbel_noise(seeds, positions, vocab)
    logprobs = token_logprobs(logits, chosen, min(4, vocab))
    for first, count in ((0, 1), (17, 1), (63, 1), (5, 3), (20, 33)):
        part = slice(first, first + count)
        some = to_rows(rows[part], seeds[part], positions[part])
        assert torch.equal(gumbel_noise(seeds[part], positions[part], vocab), noise[part])
        assert torch.equal(process_logits(logits[part], some), scores[part])
        assert torch.equal(sample(logits[part], some), chosen[part])
        for got, whole in zip(token_logprobs(logits[part], chosen[part], min(4, vocab)), logprobs, strict=True):
            assert torch.equal(got, whole[part])


def test_token_logprobs() -> None:
    logits = torch.cat([random_logits(16, 20), torch.randint(-2, 3, (20, VOCAB)).float()])
    logits[3, 5] = NEVER
    token_ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(16))
    token_ids[3] = 5
    for top_n in (0, 1, 7, VOCAB):
        logprob, rank, top_ids, top_logprobs = token_logprobs(logits, token_ids, top_n)
        for i, (values, token) in enumerate(zip(logits.double().tolist(), token_ids.tolist(), strict=True)):
            exact = [math.log(p) if p > 0 else NEVER for p in softmax(values)]
            order = ranking(values)[:top_n]
            assert logprob[i].item() == pytest.approx(exact[token], abs=1e-5)
            assert rank[i] == 1 + sum(v > values[token] for v in values)
            assert top_ids[i].tolist() == order
            assert top_logprobs[i].tolist() == pytest.approx([exact[t] for t in order], abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.5}], ids=str)
def test_scores_that_grow_beyond_every_number(settings: dict) -> None:
    """Divided by a low temperature they overflow; what rows are drawn from is a law all the same."""
    logits = random_logits(18, 2)
    logits[:, [7, 30]] = 2e38
    law = process_logits(logits, to_rows([Row(temperature=0.1, **settings)] * 2)).softmax(dim=1)
    assert law.nonzero().tolist() == [[row, token] for row in (0, 1) for token in (7, 30)]
    assert law.sum(dim=1).tolist() == [1.0, 1.0]


def test_no_numbers_at_all() -> None:
    """NaN and infinite logits choose a token of the vocabulary, and do not disturb other rows."""
    logits = random_logits(17, 6)
    logits[0] = math.nan
    logits[1] = NEVER
    logits[2, 4] = math.inf
    logits[3, 10:] = math.nan
    for row in (Row(), Row(temperature=0.0), Row(top_k=3, top_p=0.9, min_p=0.1), Row(repetition=1.2, output=[1])):
        tokens = sample(logits, to_rows([row] * 6))
        assert ((tokens >= 0) & (tokens < VOCAB)).all()
        assert tokens[2] == 4
        assert tokens[3] < 10
        clean = to_rows([row] * 2, seeds=torch.tensor([4, 5]))
        assert torch.equal(sample(logits[4:], clean), tokens[4:])
