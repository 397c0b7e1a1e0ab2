"""What lies in the caches: nothing that was not written is read, and what is written has the same bits on every path.

Poison is NaN or infinity in every slot without valid keys: one of them read, even with weight zero, shows in the text's
log-probabilities. The caches of running requests are compared with those of the same tokens computed in one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from oracles.tiny import VOCAB, engine_options
from torch import Tensor

from skipstone import LLM, SamplingParams
from skipstone.core.batch import FIRST_BLOCK, SPARE_BLOCK, ZERO_BLOCK
from skipstone.core.request import Request

MODELS = ["m3", "dsa", "dsa_fp8"]
POISONS = [float("nan"), float("inf")]
Folder = Callable[[str], Path]
Caches = dict[tuple[int, str], Tensor]


def tokens(length: int, seed: int) -> list[int]:
    """Uniform token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB - 3, (length,), generator=generator).tolist()


def prompts() -> list[list[int]]:
    """Around the edges of blocks and budgets, some with a shared beginning."""
    shared = tokens(37, 1)
    return [tokens(1, 2), tokens(8, 3), shared, shared[:24] + tokens(9, 4), tokens(17, 5), shared + tokens(30, 6)]


def params(seed: int, count: int = 12) -> SamplingParams:
    """Sampled text of a fixed length, with log-probabilities."""
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=count, ignore_eos=True, logprobs=4)


def load(folder: Path, **options: object) -> LLM:
    """Float32, exact, small blocks."""
    defaults = {"block_size": 8, "num_blocks": 80, "max_num_batched_tokens": 256, "prefix_caching": False}
    return LLM(model=str(folder), dtype="float32", exact=True, **engine_options(folder), **(defaults | options))


def request(prompt: list[int], seed: int, count: int = 12) -> Request:
    """An engine request, so that a test can look at its blocks."""
    return Request(f"r{seed}", list(prompt), params(seed, count), seed, len(prompt) + count)


def result(request: Request) -> tuple:
    """Text and every number of its log-probabilities."""
    return request.output_token_ids, [
        (e.token_id, e.logprob, e.rank, e.top_ids, e.top_logprobs) for e in request.logprobs
    ]


@cache
def alone(folder: Path) -> list[tuple]:
    """Results of all prompts one after the other, in caches that nothing poisons."""
    llm, out = load(folder), []
    for seed, prompt in enumerate(prompts()):
        one = request(prompt, seed)
        llm.engine.add(one)
        while llm.engine.has_work:
            llm.engine.step()
        out.append(result(one))
    return out


def valid_slots(llm: LLM) -> Tensor:
    """[num_blocks, block_size]: slots that a later step may read."""
    engine = llm.engine
    size = engine.caches.block_size
    valid = torch.zeros(engine.caches.num_blocks, size, dtype=torch.bool)
    valid[ZERO_BLOCK] = True
    valid[list(engine.pool._key_of)] = True
    for running in engine.scheduler.running:
        for i, block in enumerate(running.block_ids):
            valid[block, : max(running.num_computed_tokens - i * size, 0)] = True
    return valid


def poison(llm: LLM, value: float) -> None:
    """Overwrite every slot that is not valid; the block of padding rows too."""
    invalid = ~valid_slots(llm)[:, None, :, None]
    assert invalid[SPARE_BLOCK].all()
    for tensors in llm.engine.runner.cache.layers.values():
        for tensor in tensors.values():
            wide = tensor.float().masked_fill(invalid, value)  # torch does not mask FP8, but copies into it
            tensor.copy_(wide)


def assert_zero_block(llm: LLM) -> None:
    """Nothing was written to the block that stands for zeros."""
    for tensors in llm.engine.runner.cache.layers.values():
        for tensor in tensors.values():
            assert not tensor[ZERO_BLOCK].any()


@pytest.mark.parametrize("name", MODELS)
def test_fill_spares_the_special_blocks(name: str, folder: Folder) -> None:
    llm = load(folder(name))
    llm.engine.runner.cache.fill(float("nan"))
    for tensors in llm.engine.runner.cache.layers.values():
        for tensor in tensors.values():
            assert tensor[FIRST_BLOCK:].isnan().all()
            assert not tensor[:FIRST_BLOCK].any()


@pytest.mark.parametrize("value", POISONS)
@pytest.mark.parametrize("name", MODELS)
def test_poison_after_each_request(name: str, value: float, folder: Folder) -> None:
    """Through `generate`, one request after the other, in chunks of several sizes."""
    clean = load(folder(name))
    for chunk in (256, 10):
        llm = load(folder(name), max_num_batched_tokens=chunk)
        for seed, prompt in enumerate(prompts()):
            llm.engine.runner.cache.fill(value)
            outs = [one.generate([prompt], params(seed), progress=False)[0] for one in (llm, clean)]
            found, expected = (out.outputs[0] for out in outs)
            assert list(found.token_ids) == list(expected.token_ids)
            assert found.logprobs == expected.logprobs
        assert_zero_block(llm)


@pytest.mark.parametrize("value", POISONS)
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_poison_after_each_step(name: str, prefix_caching: bool, value: float, folder: Folder) -> None:
    """All requests together, few blocks: after every step only keys of running or cached tokens survive."""
    llm = load(folder(name), num_blocks=15, max_model_len=96, max_num_batched_tokens=20, prefix_caching=prefix_caching)
    poison(llm, value)
    some = [request(prompt, seed) for seed, prompt in enumerate(prompts())]
    for one in some:
        llm.engine.add(one)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.scheduler.check()
        poison(llm, value)
    assert llm.engine.scheduler.stats.preemptions > 0
    assert (llm.engine.scheduler.stats.prefix_hit_tokens > 0) == prefix_caching
    assert [result(one) for one in some] == alone(folder(name))
    assert_zero_block(llm)


def caches_of(llm: LLM, one: Request) -> Caches:
    """[heads, num_computed_tokens, width] of every layer and tensor."""
    blocks = torch.tensor(one.block_ids)
    return {
        (layer, name): tensor[blocks].transpose(0, 1).flatten(1, 2)[:, : one.num_computed_tokens].clone()
        for layer, tensors in llm.engine.runner.cache.layers.items()
        for name, tensor in tensors.items()
    }


@dataclass
class Snapshot:
    """A running request at some step: the tokens whose keys are valid, and the keys."""

    token_ids: list[int]
    caches: Caches


def watch(llm: LLM, some: list[Request]) -> dict[Request, list[Snapshot]]:
    """Run all requests. Keeps what their caches held after their first text, and at last, for each time they ran."""
    for one in some:
        llm.engine.add(one)
    first: dict[tuple[Request, int], Snapshot] = {}
    last: dict[tuple[Request, int], Snapshot] = {}
    while llm.engine.has_work:
        llm.engine.step()
        for one in llm.engine.scheduler.running:
            if one.num_output_tokens:
                run = (one, one.num_preemptions)
                last[run] = Snapshot(one.token_ids[: one.num_computed_tokens], caches_of(llm, one))
                first.setdefault(run, last[run])
    return {one: [runs[run] for runs in (first, last) for run in runs if run[0] is one] for one in some}


def assert_fresh(folder: Path, snapshots: list[Snapshot]) -> None:
    """Each snapshot has the bits of its tokens computed in one chunk, alone, in new caches."""
    llm = load(folder)
    for snapshot in snapshots:
        llm.engine.runner.cache.fill(float("nan"))
        one = request(snapshot.token_ids, 0)
        llm.engine.add(one)
        llm.engine.step()
        assert one.num_computed_tokens == len(snapshot.token_ids)
        expected = caches_of(llm, one)
        assert expected.keys() == snapshot.caches.keys()
        for key, tensor in expected.items():
            assert tensor.shape[1] == len(snapshot.token_ids)
            assert tensor.float().isfinite().all()
            assert tensor.any(dim=-1).all(), f"{key} was not written"
            wrong = (tensor.view(torch.uint8) != snapshot.caches[key].view(torch.uint8)).any(dim=-1).any(dim=0)
            assert not wrong.any(), f"{key} differs at positions {wrong.nonzero().flatten().tolist()}"
        llm.engine.abort(one)


@pytest.mark.parametrize("chunk", [5, 33])
@pytest.mark.parametrize("name", MODELS)
def test_chunked_prompts(name: str, chunk: int, folder: Folder) -> None:
    llm = load(folder(name), max_num_batched_tokens=chunk)
    poison(llm, float("nan"))
    some = [request(prompt, seed) for seed, prompt in enumerate(prompts())]
    seen = watch(llm, some)
    for one, snapshots in seen.items():
        assert len(snapshots[1].token_ids) == one.num_prompt_tokens + 10
        assert_fresh(folder(name), snapshots)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_after_preemption(name: str, prefix_caching: bool, folder: Folder) -> None:
    """Blocks for less than half of the requests; each one preempted is looked at before and when it runs again."""
    llm = load(folder(name), num_blocks=15, max_model_len=96, max_num_batched_tokens=30, prefix_caching=prefix_caching)
    poison(llm, float("nan"))
    seen = watch(llm, [request(tokens(20 + 9 * seed, seed), seed, 30) for seed in range(4)])
    again = [one for one in seen if one.num_preemptions]
    assert len(again) >= 2
    for one in again:
        assert len(seen[one]) >= 4
        assert_fresh(folder(name), seen[one])


@pytest.mark.parametrize("name", MODELS)
def test_after_a_prefix_hit(name: str, folder: Folder) -> None:
    """A prompt that continues an earlier prompt and its text, and one that shares half of the prompt."""
    llm = load(folder(name), max_num_batched_tokens=30, prefix_caching=True)
    poison(llm, float("nan"))
    first = request(tokens(37, 1), 1)
    watch(llm, [first])
    poison(llm, float("nan"))
    longer, other = request([*first.token_ids, 5, 6, 7], 2), request([*first.token_ids[:20], *tokens(21, 8)], 3)
    seen = watch(llm, [longer, other])
    assert longer.num_cached_tokens == 48
    assert other.num_cached_tokens == 16
    for snapshots in seen.values():
        assert_fresh(folder(name), snapshots)
