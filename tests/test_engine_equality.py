"""One request, any company: token ids and log-probabilities have the same bits whatever else the engine does.

Each request is first run alone in a roomy engine. Then the same requests run in batches, in chunks of one row to whole
prompts, with and without the prefix cache, and with so few blocks that requests are preempted and computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from oracles.tiny import VOCAB, engine_options

from skipstone import LLM, SamplingParams

MODELS = ["m3", "dsa", "dsa_fp8"]
Prompt = list[int]
Job = tuple[Prompt, SamplingParams]
SEEDED = {
    "temperature": 1.0,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "min_p": 0.01,
    "top_k": 40,
    "top_p": 0.95,
    "logit_bias": {5: 1.5, 9: -3.0, 17: float("-inf")},
    "min_tokens": 4,
}


def tokens(length: int, seed: int) -> Prompt:
    """Uniform token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB - 3, (length,), generator=generator).tolist()


def jobs() -> list[Job]:
    """16 requests: prompts of many lengths, half of them with shared beginnings; greedy, seeded and several choices.

    The one of 270 tokens makes every batch it is in longer than the others would be.
    """
    shared = tokens(60, 1)
    prompts = [tokens(n, n) for n in (1, 7, 8, 9, 25, 33, 64, 270)]
    prompts += [shared[:n] + tokens(extra, n) for n, extra in ((60, 0), (60, 5), (60, 20), (48, 9), (40, 1), (56, 8))]
    prompts += [prompts[9], prompts[9][:63]]
    kinds: list[dict] = [
        {"temperature": 0.0},
        {**SEEDED},
        {"temperature": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.5, "min_tokens": 30, "max_tokens": 35},
        {"temperature": 1.7, "top_p": 0.7, "n": 3},
        {"temperature": 0.6, "top_k": 5, "ignore_eos": True},
        {"temperature": 1.0, "min_p": 0.2, "stop_token_ids": [3, 50, 77], "n": 2},
    ]
    out = []
    for number, prompt in enumerate(prompts):
        kind = {"max_tokens": 14 + number, "seed": 1000 + number} | kinds[number % len(kinds)]
        out.append((prompt, SamplingParams(logprobs=5, **kind)))
    return out


def everything(llm: LLM, some: list[Job]) -> list[list[tuple]]:
    """Per request and choice: ids, why it ended, and every number of its log-probabilities."""
    outs = llm.generate([prompt for prompt, _ in some], [params for _, params in some], progress=False)
    return [
        [
            (
                list(choice.token_ids),
                choice.finish_reason,
                [(e.token_id, e.logprob, e.rank, list(e.top_ids), list(e.top_logprobs)) for e in choice.logprobs],
            )
            for choice in out.outputs
        ]
        for out in outs
    ]


def load(folder: Path, **options: object) -> LLM:
    """The engine on a tiny checkpoint, in float32 and exact."""
    defaults = {"dtype": "float32", "max_num_batched_tokens": 512, "max_num_seqs": 16, "num_blocks": 600}
    own = {"prefix_caching": False, **engine_options(folder)}
    return LLM(model=str(folder), exact=True, **(own | defaults | options))


@pytest.fixture(scope="module")
def alone(folder: Callable[[str], Path]) -> Callable[[str], list[list[tuple]]]:
    """What each job gives alone: its prompt in one chunk, nothing reused, nothing preempted."""

    def run(name: str) -> list[list[tuple]]:
        llm = load(folder(name), max_num_seqs=1)
        return [everything(llm, [job])[0] for job in jobs()]

    return cache(run)


@pytest.mark.parametrize("name", MODELS)
def test_the_jobs_are_worth_running(name: str, alone: Callable) -> None:
    """Choices differ, some texts end early, log-probabilities are listed, and none is trivially short."""
    results = alone(name)
    assert len(results) == 16
    for (_, params), choices in zip(jobs(), results, strict=True):
        assert len(choices) == params.n
        for ids, reason, logprobs in choices:
            assert len(ids) == len(logprobs)
            assert len(ids) >= params.min_tokens
            assert len(ids) == params.max_tokens if reason == "length" else len(ids) <= params.max_tokens
            assert all(len(e[3]) == 5 for e in logprobs)
        if params.n == 3:
            assert len({tuple(ids) for ids, *_ in choices}) == params.n
    assert {reason for choices in results for _, reason, _ in choices} == {"stop", "length"}
    assert len({tuple(ids) for choices in results for ids, *_ in choices}) > 16


@pytest.mark.parametrize(
    ("batch", "chunk", "prefix_caching"),
    [
        (16, 512, False), (16, 512, True), (16, 16, False), (16, 16, True), (16, 1, False),
        (4, 512, True), (4, 16, False), (4, 1, True), (1, 512, True), (1, 16, True), (1, 1, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_batches_and_chunks(
    name: str, batch: int, chunk: int, prefix_caching: bool, folder: Callable[[str], Path], alone: Callable
) -> None:
    few = slice(0, 16) if chunk > 1 and batch > 1 else slice(1, 10, 4)  # few rows per step are slow
    llm = load(folder(name), max_num_seqs=batch, max_num_batched_tokens=chunk, prefix_caching=prefix_caching)
    assert everything(llm, jobs()[few]) == alone(name)[few]


@pytest.mark.parametrize(
    ("kernels", "dtype", "threads"),
    [("numba", "float32", 2), ("reference", "float32", 2), ("reference", "bfloat16", 1), ("auto", "bfloat16", 2)],
)
@pytest.mark.parametrize("name", MODELS)
def test_dtypes_and_threads(name: str, kernels: str, dtype: str, threads: int, folder: Callable[[str], Path]) -> None:
    """The promise holds for any number of threads, although libraries split their sums by it, and in bfloat16."""
    some = [(tokens(n, n), SamplingParams(max_tokens=5, seed=n, logprobs=5)) for n in (9, 30, 44)]
    options = {"dtype": dtype, "num_threads": threads, "kernels": kernels}
    try:
        alone = load(folder(name), max_num_seqs=1, **options)
        expected = [everything(alone, [job])[0] for job in some]
        assert torch.get_num_threads() == threads
        assert everything(load(folder(name), max_num_batched_tokens=50, **options), some) == expected
        assert everything(load(folder(name), max_num_batched_tokens=7, **options), some) == expected
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("block_size", [8, 24, 96, 256])
@pytest.mark.parametrize("name", ["m3", "dsa"])
def test_any_block_size(name: str, block_size: int, kernels: str, folder: Callable[[str], Path]) -> None:
    """Also one that holds other keys than a tile of dense attention."""
    some = [(tokens(n, n), SamplingParams(max_tokens=5, seed=n, logprobs=5)) for n in (9, 150, 290)]
    options = {"kernels": kernels, "block_size": block_size, "num_blocks": 20 + 2000 // block_size}
    expected = [everything(load(folder(name), max_num_seqs=1, **options), [job])[0] for job in some]
    assert everything(load(folder(name), max_num_batched_tokens=50, **options), some) == expected


@pytest.mark.parametrize("name", MODELS)
def test_nothing_reads_unwritten_or_stale_cache(name: str, folder: Callable[[str], Path], alone: Callable) -> None:
    """Every cache slot holds NaN before the run, so a single one that is read would show."""
    llm = load(folder(name), max_num_batched_tokens=50)
    for _ in range(2):
        llm.engine.runner.cache.fill(float("nan"))
        assert everything(llm, jobs()[::2]) == alone(name)[::2]


@pytest.mark.parametrize("name", MODELS)
def test_order_of_requests(name: str, folder: Callable[[str], Path], alone: Callable) -> None:
    llm = load(folder(name), max_num_seqs=5, max_num_batched_tokens=40, prefix_caching=True)
    assert everything(llm, jobs()[::-1]) == alone(name)[::-1]


@pytest.mark.parametrize("name", MODELS)
def test_a_warm_prefix_cache(name: str, folder: Callable[[str], Path], alone: Callable) -> None:
    """A second run finds blocks of the first one, a third run those of its answers too; nothing changes."""
    llm = load(folder(name), max_num_seqs=8, max_num_batched_tokens=64, prefix_caching=True)
    stats = llm.engine.scheduler.stats
    for run in range(2):
        before = stats.prefix_hit_tokens
        assert everything(llm, jobs()) == alone(name)
        if run:
            assert stats.prefix_hit_tokens > before + 300
    continued = [
        (prompt + ids[:-1], SamplingParams(max_tokens=4, seed=8, logprobs=5))
        for (prompt, params), [(ids, *_), *_] in zip(jobs(), alone(name), strict=True)
        if params.n == 1
    ]
    cold = load(folder(name), max_num_seqs=8, max_num_batched_tokens=64)
    before = stats.prefix_hit_tokens
    assert everything(llm, continued) == everything(cold, continued)
    assert stats.prefix_hit_tokens > before + 300


@pytest.mark.parametrize("name", MODELS)
def test_equal_blocks_after_different_beginnings(name: str, folder: Callable[[str], Path]) -> None:
    """Cached blocks are those of a beginning, not of equal tokens at another place or after other tokens."""
    warm, cold = (load(folder(name), prefix_caching=caching) for caching in (True, False))
    size = warm.engine.caches.block_size
    a, b, c = (tokens(size, seed) for seed in (1, 2, 3))
    prompts = [a + b + c, b + c + [1], c + b + [1], a + c + [1], a + b + b, b + b + [1], a + b + c]
    params = SamplingParams(max_tokens=3, seed=1, logprobs=5)
    for prompt in prompts:
        assert everything(warm, [(prompt, params)]) == everything(cold, [(prompt, params)])


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_preemption(name: str, prefix_caching: bool, folder: Callable[[str], Path], alone: Callable) -> None:
    """Blocks for the longest request and little more: the others are thrown out and computed again."""
    size = load(folder(name)).engine.caches.block_size
    blocks = 340 // size + 2
    llm = load(
        folder(name), num_blocks=blocks, max_model_len=320, max_num_batched_tokens=64, prefix_caching=prefix_caching
    )
    assert everything(llm, jobs()) == alone(name)
    assert llm.engine.scheduler.stats.preemptions > 3
    llm.engine.scheduler.check()
    assert everything(llm, jobs()[::5]) == alone(name)[::5]


@pytest.mark.parametrize("name", MODELS)
def test_prompt_log_probabilities_survive(name: str, folder: Callable[[str], Path]) -> None:
    """Those of the prompt as well, alone, in a batch, in small chunks, after preemption and after a cached run."""
    params = SamplingParams(temperature=0, max_tokens=30, prompt_logprobs=4, logprobs=2, ignore_eos=True)
    some = [(tokens(n, n + 7), params) for n in (40, 9, 70, 56, 40)]

    def prompt_entries(llm: LLM) -> list[list[tuple | None]]:
        outs = llm.generate([prompt for prompt, _ in some], params, progress=False)
        return [
            [e and (e.token_id, e.logprob, e.rank, list(e.top_ids), list(e.top_logprobs)) for e in out.prompt_logprobs]
            for out in outs
        ]

    size = load(folder(name)).engine.caches.block_size
    expected = prompt_entries(load(folder(name), max_num_seqs=1))
    assert [len(entries) for entries in expected] == [len(prompt) for prompt, _ in some]
    assert prompt_entries(load(folder(name))) == expected
    assert prompt_entries(load(folder(name), max_num_batched_tokens=11, prefix_caching=True)) == expected
    tight = load(folder(name), num_blocks=170 // size + 2, max_model_len=120, max_num_batched_tokens=48)
    assert prompt_entries(tight) == expected
    assert tight.engine.scheduler.stats.preemptions > 0
    warm = load(folder(name), prefix_caching=True)
    everything(warm, [(prompt, SamplingParams(max_tokens=2, seed=1, logprobs=0)) for prompt, _ in some])
    assert prompt_entries(warm) == expected


@pytest.mark.parametrize("name", MODELS)
def test_choices_in_any_company(name: str, folder: Callable[[str], Path]) -> None:
    """n = 3: each choice equals itself whatever the number of choices is; choice 0 is the request with n = 1."""
    prompt, others = tokens(45, 3), jobs()[:6]
    settings = {"temperature": 1.2, "max_tokens": 20, "seed": 77, "logprobs": 3, "ignore_eos": True}
    llm = load(folder(name), prefix_caching=True, max_num_batched_tokens=32)
    (one,) = everything(llm, [(prompt, SamplingParams(**settings))])
    (three,) = everything(llm, [(prompt, SamplingParams(**settings, n=3))])
    (four, *_) = everything(llm, [(prompt, SamplingParams(**settings, n=4)), *others])
    assert one == three[:1]
    assert three == four[:3]
    assert len({tuple(ids) for ids, *_ in four}) == 4


def test_seeds_matter_and_suffice(folder: Callable[[str], Path]) -> None:
    """Equal seeds: equal texts. Different seeds, and no seed at all: different texts. Greedy: the seed is not used."""
    llm = load(folder("m3"))
    prompt = tokens(30, 5)

    def run(**settings: object) -> list[int]:
        params = SamplingParams(max_tokens=20, ignore_eos=True, **settings)
        return list(llm.generate([prompt], params, progress=False)[0].outputs[0].token_ids)

    assert run(seed=1) == run(seed=1)
    assert run(seed=1) != run(seed=2)
    assert run() != run()
    assert run(temperature=0.0, seed=1) == run(temperature=0.0, seed=2) == run(temperature=0.0)
    assert run(top_k=1, seed=1) == run(temperature=0.0)


@pytest.mark.parametrize("name", ["m3", "m3_mixed", "m3_init", "dsa", "dsa_fp8"])
def test_block_size_is_a_detail(name: str, folder: Callable[[str], Path]) -> None:
    """The same text for every size of cache blocks."""
    some = jobs()[4:9]
    results = [
        [[ids for ids, *_ in choices] for choices in everything(load(folder(name), block_size=size), some)]
        for size in (8, 16, 64)
    ]
    assert results[0] == results[1] == results[2]
