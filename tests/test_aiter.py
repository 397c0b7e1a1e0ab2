"""Attention through AMD's paged attention, which a stand-in with the documented call computes here in plain torch."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles.block_table import page_rows
from oracles.tiny import VOCAB, Tiny, write_folder
from torch import Tensor

from skipstone import LLM, SamplingParams
from skipstone.attention import msa_aiter
from skipstone.attention.msa_aiter import aiter_refusal, store_keys, store_values
from skipstone.registry import ATTENTION

pytest.importorskip("triton")
CPU = torch.device("cpu")
PATH = "aiter.ops.triton.gluon.pa_decode_gluon"
CALLS: list[dict[str, Tensor]] = []


def pa_decode_gluon(  # the names are the package's
    output, query, key_cache, value_cache, context_lengths, block_tables, softmax_scale, query_length,
    max_context_partition_num, context_partition_size, compute_type, query_scale, key_scale, value_scale,
    exp_sums=None, max_logits=None, temporary_output=None, alibi_slopes=None, sinks=None, sliding_window=0, ps=True,
):  # fmt: skip
    """One query per sequence; nothing is written for a sequence without keys but NaN."""
    sequences, group, width = query.shape
    assert output.is_contiguous() and query_length == 1 and context_partition_size == 256 and ps
    assert (alibi_slopes, sinks, sliding_window, query_scale, key_scale, value_scale) == (
        None,
        None,
        0,
        None,
        None,
        None,
    )
    assert exp_sums.shape == max_logits.shape == (sequences, 1, max_context_partition_num, group)
    assert temporary_output.shape == (*exp_sums.shape, width)
    assert context_lengths.dtype == block_tables.dtype == torch.int32 and key_cache.shape[1] == 1
    CALLS.append({"tables": block_tables.clone(), "lengths": context_lengths.clone()})
    for i, (pages, length) in enumerate(zip(block_tables.long(), context_lengths.tolist(), strict=True)):
        if length == 0:
            output[i] = torch.nan
            continue
        unread = torch.arange(len(pages) * 16) >= length
        keys = key_cache[pages, 0].permute(0, 2, 1, 3).reshape(-1, width).masked_fill(unread[:, None], 0)
        values = value_cache[pages, 0].permute(0, 1, 3, 2).reshape(-1, width).masked_fill(unread[:, None], 0)
        bias = torch.zeros(1, 1, len(unread)).masked_fill_(unread, -1e30)
        read = (tensor[None, None].float() for tensor in (query[i], keys, values))
        output[i] = F.scaled_dot_product_attention(*read, attn_mask=bias[None], scale=softmax_scale)[0, 0]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Have `aiter` be importable with that function, on a machine that it runs on."""

    def install(function: Any) -> None:
        parts = PATH.split(".")
        for end in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:end]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        sys.modules[PATH].pa_decode_gluon = function

    monkeypatch.setattr(msa_aiter, "platform_refusal", lambda device: None)
    monkeypatch.setattr(msa_aiter, "num_splits", lambda sequences, device: 3)
    CALLS.clear()
    yield install


def test_only_amd_gpus() -> None:
    assert "AMD GPU" in str(aiter_refusal(CPU))


def test_what_does_not_fit_is_said(install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(pa_decode_gluon)
    assert aiter_refusal(CPU) is None
    install(lambda output, query, query_gluon, *, ps=True: None)
    text = str(aiter_refusal(CPU))
    assert "has no parameter key_cache" in text and "needs query_gluon" in text
    monkeypatch.setitem(sys.modules, PATH, None)
    assert "cannot be imported" in str(aiter_refusal(CPU))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_order_within_a_page(dtype: torch.dtype) -> None:
    heads, block_size, width, x = 2, 32, 32, 16 // dtype.itemsize
    keys, values = (torch.zeros(5, heads, block_size, width, dtype=dtype) for _ in range(2))
    block, offset = torch.tensor([3, 4, 3]), torch.tensor([17, 0, 31])
    rows = torch.arange(3 * heads * width).view(3, heads, width).to(dtype)
    store_keys(rows, keys, block, offset)
    store_values(rows, values, block, offset)
    for i in range(3):
        for head in range(heads):
            page, t = ((int(block[i]) * heads + head) * block_size + int(offset[i])) // 16, int(offset[i]) % 16
            for c in range(width):
                wanted = rows[i, head, c]
                assert keys.view(-1)[(page * (width // x) + c // x) * 16 * x + t * x + c % x] == wanted
                assert values.view(-1)[(page * (16 // x) + t // x) * width * x + c * x + t % x] == wanted
    assert int((keys != 0).sum()) == int((values != 0).sum()) == 3 * heads * width - 1


def generated(folder: Path, **options: object) -> list[list[dict[int, float]]]:
    """The likeliest tokens of two steps, with their log-probabilities."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB - 3, (n,), generator=generator).tolist() for n in (1, 16, 17, 130, 270)]
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=5, ignore_eos=True, logit_bias={5: 60.0})
    llm = LLM(model=str(folder), dtype="bfloat16", num_blocks=600, prefix_caching=False, **options)
    llm.engine.runner.cache.fill(float("nan"))
    outs = llm.generate(prompts, params, progress=False)
    return [[dict(zip(e.top_ids, e.top_logprobs, strict=True)) for e in out.outputs[0].logprobs] for out in outs]


@pytest.fixture
def paged_folder(tiny: Callable[[str], Tiny], tmp_path: Path) -> Path:
    """A tiny model whose blocks are two pages."""
    model = tiny("m3")
    config = deepcopy(model.config)
    config.get("text_config", config)["sparse_attention_config"]["sparse_block_size"] = 32
    return write_folder(replace(model, config=config), tmp_path / "m3")


@pytest.mark.parametrize(("block_size", "chunk"), [(32, 512), (64, 50)])
def test_the_engine_computes_the_same(
    block_size: int, chunk: int, install: Callable[[Any], None], paged_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"block_size": block_size, "max_num_batched_tokens": chunk}
    with monkeypatch.context() as without:
        without.setattr(msa_aiter, "platform_refusal", lambda device: "not here")
        paged, load = ATTENTION.load("msa_paged"), ATTENTION.load  # adds up in the order of the pages as well
        without.setattr(ATTENTION, "load", lambda name: paged if name == "msa" else load(name))
        expected = generated(paged_folder, exact=False, **options)
    assert not CALLS
    install(pa_decode_gluon)
    found = generated(paged_folder, exact=False, **options)
    assert CALLS
    for rows, others in zip(found, expected, strict=True):
        for row, other in zip(rows, others, strict=True):
            shared = row.keys() & other.keys()
            assert len(shared) >= 3
            assert max(abs(row[token] - other[token]) for token in shared) < 0.02


def test_exact_mode_stays_away(install: Callable[[Any], None], paged_folder: Path) -> None:
    install(pa_decode_gluon)
    generated(paged_folder, exact=True)
    assert not CALLS


def test_another_version_falls_back(install: Callable[[Any], None], paged_folder: Path) -> None:
    install(lambda output, query: None)
    generated(paged_folder, exact=False)


def test_tables_are_those_of_plain_loops(install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from skipstone.attention.backend import SparseSettings
    from skipstone.core.batch import Batch, Selection, Span
    from skipstone.core.kv_cache import CacheMemory, CacheSpec, CacheTensorSpec, KVCache
    from skipstone.kernels.ops import load_ops

    install(pa_decode_gluon)
    rng, heads, unit, block_size, n = random.Random(3), 2, 32, 64, 3
    tensors = tuple(CacheTensorSpec(name, heads, 16) for name in ("k", "v"))
    cache = KVCache([CacheSpec(0, "sparse", "msa", tensors)], CacheMemory(9, block_size, torch.bfloat16, CPU))
    lengths, tables = [150, 2], [[5, 7, 3], [4, 8, 6]]
    positions = [[max(length - n + i, -1) for i in range(n)] for length in lengths]
    ids = [
        [sorted(rng.sample(range(p // unit + 1), min(2, p // unit + 1))) for _ in range(heads)]
        for row in positions
        for p in row
    ]
    indices = torch.tensor([[[*chosen, -1, -1][:2] for chosen in row] if row[0] else [[-1] * 2] * heads for row in ids])
    span = Span(slice(0, 2), slice(0, 2 * n), n, torch.tensor(positions), torch.tensor(tables))
    empty = torch.zeros(0, dtype=torch.int64)
    batch = Batch(empty, span.positions.flatten(), torch.tensor(lengths), empty, empty, empty, [span], 150)
    backend = msa_aiter.AiterBlockSparseBackend(
        0.25, False, SparseSettings(unit, 2, groups=heads), load_ops("reference")
    )
    q = torch.randn(2 * n, 2 * heads, 16).to(torch.bfloat16)
    out = backend.run(backend.plan(batch), 0, q, Selection(indices.int(), unit), cache)
    per_head, per_unit = block_size // 16, unit // 16
    units = [
        [block * heads * block_size // unit + j for block in table for j in range(block_size // unit)]
        for table in tables
    ]
    rows = [units[r] for r in range(2) for _ in range(n)]
    pages, context = page_rows(indices.tolist(), rows, [p for row in positions for p in row], unit, per_unit)
    expected = [[page + head * per_head for page in row] for groups in pages for head, row in enumerate(groups)]
    assert CALLS[0]["tables"].tolist() == expected
    assert CALLS[0]["lengths"].tolist() == [length for row in context for length in row]
    assert not out[n][0].any() and bool(out.isfinite().all())
