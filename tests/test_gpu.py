"""On a GPU: rows have the same bits alone, in any batch and with any drafts; neither graphs nor overlap change a text.

Skipped where there is no GPU. The first run compiles every kernel, so several processes at once save time:

    TRITON_INTERPRET=0 python -m pytest tests/test_gpu.py -n 8
"""

from __future__ import annotations

import os
import random
from functools import cache
from typing import Any

import pytest
import torch

from skipstone import LLM, SamplingParams
from skipstone.core.observer import EmittedRun, Observer

COMPILED = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0"
pytestmark = pytest.mark.skipif(not COMPILED, reason="needs a GPU, and TRITON_INTERPRET=0")

Rows = dict[tuple[tuple[int, ...], int], tuple[int, torch.Tensor]]  # (prompt, position) -> token, logits
LENGTHS = (5, 40, 130, 300, 500)
TOKENS = 24


class Keep(Observer):
    """Keeps every emitted row."""

    def __init__(self) -> None:
        self.rows: Rows = {}

    def on_runs(self, runs: list[EmittedRun]) -> None:
        for run in runs:
            prompt = tuple(run.request.token_ids[: run.request.num_prompt_tokens])
            for i, token in enumerate(run.token_ids):
                self.rows[prompt, run.start + i] = token, run.logits[i].cpu()


def jobs() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(1)
    found = []
    for number in range(64):
        prompt = [rng.randrange(8, 6000) for _ in range(rng.choice(LENGTHS))]
        params = SamplingParams(temperature=number % 2, seed=number, max_tokens=TOKENS, ignore_eos=True)
        found.append((prompt, params))
    return found


def engine(model: str, spec: str, **more: Any) -> LLM:
    """`model`: a demo, and how its index keys are cached if that is to be said."""
    name, _, keys = model.partition(" ")
    own = {"model": name, "index_keys": keys or "model", "spec": spec}
    options = {**own, "device": "cuda", "max_num_seqs": 64, "max_model_len": 1024, **more}
    return LLM(**options)


def watched(model: str, spec: str, batch: int, shuffled: bool) -> Rows:
    keep = Keep()
    llm = engine(model, spec, observer=keep, prefix_caching=False)
    chosen = jobs()[: max(batch, 4)]
    if shuffled:
        random.Random(2).shuffle(chosen)
    for first in range(0, len(chosen), batch):
        prompts, params = zip(*chosen[first : first + batch], strict=True)
        llm.generate(list(prompts), list(params), progress=False)
    return keep.rows


@cache
def reference(model: str) -> Rows:
    return watched(model, "off", 64, False)


WAYS = [
    ("off", 1, False),
    ("off", 7, False),
    ("off", 64, True),
    ("mtp:1", 64, False),
    ("mtp:3", 7, True),
    ("mtp:7", 64, False),
]


@pytest.mark.parametrize("model", ["demo", "demo-dsa", "demo-dsa fp8"])
def test_bits_of_a_row_do_not_depend_on_what_runs_beside_it(model: str) -> None:
    expected = reference(model)
    for spec, batch, shuffled in WAYS:
        got = watched(model, spec, batch, shuffled)
        common = expected.keys() & got.keys()
        assert len(common) >= min(batch, 4) * TOKENS
        for key in common:
            token, logits = got[key]
            assert token == expected[key][0], (spec, batch, key[1])
            assert torch.equal(logits, expected[key][1]), (spec, batch, key[1])


def written(llm: LLM) -> list[list[int]]:
    prompts, params = zip(*jobs()[:24], strict=True)
    outputs = llm.generate(list(prompts), list(params), progress=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("model", ["demo", "demo-dsa", "demo-dsa fp8"])
def test_graphs_and_overlap_write_the_same_texts(model: str) -> None:
    expected = written(engine(model, "off", cuda_graphs=False, overlap=False))
    heads = ["mtp:1", "mtp:3", "mtp:5", "ngram:4", *(["eagle3:3", "dflash:7"] if model == "demo" else [])]
    for spec in ["off", *heads]:
        llm = engine(model, spec)
        assert written(llm) == expected, spec
        graphs = not spec.startswith("ngram")  # prompt lookup's work cannot be captured
        assert (llm.engine.runner.graphs is not None and llm.engine.runner.graphs.replays > TOKENS // 8) == graphs, spec
    assert written(engine(model, "mtp:3", overlap=False)) == expected


@pytest.mark.parametrize("model", ["demo", "demo-dsa"])
def test_float32_writes_the_cpus_greedy_texts(model: str) -> None:
    prompts = [prompt for prompt, _ in jobs()[:8]]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    texts = []
    for device in ("cpu", "cuda"):
        llm = LLM(model=model, device=device, dtype="float32", spec="off", max_model_len=1024)
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, progress=False)])
    equal = sum(a == b for a, b in zip(*texts, strict=True))
    assert equal >= len(prompts) - 1  # sums in another order may turn one near tie
