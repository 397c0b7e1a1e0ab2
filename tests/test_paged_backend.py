"""The engine with block-sparse attention through page tables gives what it gives without them, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles.tiny import VOCAB, Tiny, write_folder

from skipstone import LLM, SamplingParams
from skipstone.registry import ATTENTION

Entry = tuple[int, float, list[int], list[float]]


def generated(folder: Path, **options: object) -> list[list[Entry]]:
    """Token ids and log-probabilities for prompts of many lengths, in one batch."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB - 3, (n,), generator=generator).tolist() for n in (1, 15, 16, 17, 60, 130, 270)]
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=4, ignore_eos=True)
    llm = LLM(model=str(folder), exact=True, dtype="float32", num_blocks=600, prefix_caching=False, **options)
    llm.engine.runner.cache.fill(float("nan"))
    outs = llm.generate(prompts, params, progress=False)
    return [
        [(e.token_id, e.logprob, list(e.top_ids), list(e.top_logprobs)) for e in out.outputs[0].logprobs]
        for out in outs
    ]


@pytest.mark.parametrize(("unit", "block_size", "chunk"), [(16, 16, 512), (16, 64, 50), (32, 32, 512), (32, 64, 7)])
def test_the_backends_agree(
    unit: int,
    block_size: int,
    chunk: int,
    tiny: Callable[[str], Tiny],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("m3")
    config = deepcopy(model.config)
    config.get("text_config", config)["sparse_attention_config"]["sparse_block_size"] = unit
    folder = write_folder(replace(model, config=config), tmp_path / "m3")
    options = {"block_size": block_size, "max_num_batched_tokens": chunk, "kernels": "reference"}
    expected = generated(folder, **options)
    paged, calls = ATTENTION.load("msa_paged"), []

    class Counted(paged):
        def run(self, *arguments: object) -> torch.Tensor:
            calls.append(1)
            return super().run(*arguments)

    monkeypatch.setattr(ATTENTION, "load", lambda name, load=ATTENTION.load: Counted if name == "msa" else load(name))
    assert generated(folder, **options) == expected
    assert calls
