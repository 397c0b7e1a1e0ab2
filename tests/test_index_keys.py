"""FP8 index keys: their bytes and scales, what is selected by them, what the caches then take, and who is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracles import fp8
from oracles.kernels import Kernel, Requests
from oracles.selection import choose
from oracles.tiny import dsa_config
from torch import Tensor

from skipstone import LLM, SamplingParams
from skipstone.core.batch import FIRST_BLOCK
from skipstone.core.kv_cache import CacheMemory, CacheSpec, CacheTensorSpec, KVCache
from skipstone.errors import UnsupportedError
from skipstone.kernels.reference.fp8 import FP8, quantise, widen
from skipstone.models.deepseek_v32 import DeepseekV32, read_deepseek_v32
from skipstone.registry import KERNELS
from skipstone.tools.inspect.checkpoint import examine
from skipstone.tools.inspect.command import render

CPU = torch.device("cpu")
Folder = Callable[[str], Path]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_quantised(values: Tensor) -> None:
    """Bytes and scales of every vector are the oracle's."""
    q, scale = quantise(values)
    assert (q.dtype, scale.dtype) == (FP8, torch.float32)
    assert q.shape == values.shape and scale.shape == (*values.shape[:-1], 1)
    vectors = values.float().flatten(0, -2).tolist()
    for vector, codes, own in zip(vectors, q.view(torch.uint8).flatten(0, -2).tolist(), scale.flatten(), strict=True):
        expected, expected_scale = fp8.quantise(vector)
        if math.isnan(expected_scale):
            assert own.isnan()
            assert [code & 0x7F for code in codes] == expected
        else:
            assert (codes, float(own)) == (expected, expected_scale)


def test_the_oracle_knows_the_format() -> None:
    """Every byte has torch's value, and is that value's byte."""
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(widen(codes.view(FP8)).view(torch.int32), codes.view(FP8).float().view(torch.int32))
    for code, value in enumerate(codes.view(FP8).float().tolist()):
        ours = fp8.decode(code)
        if math.isnan(value):
            assert math.isnan(ours)
            continue
        assert (ours, math.copysign(1, ours)) == (value, math.copysign(1, value))
        assert fp8.encode(value) == code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_and_scales(dtype: torch.dtype) -> None:
    """Of vectors large, small and mixed, several heads."""
    assert_quantised((draw(4, 3, 32) * torch.tensor([1e-6, 1e-3, 1.0, 1e4])[:, None, None]).to(dtype))


def test_edges_of_the_format() -> None:
    """Zeros, vectors below the least scale, subnormal bytes, values half way between two bytes, both ends."""
    steps = [(i + 0.5) * 2.0**-9 for i in range(16)]  # between subnormals, and into the normals
    ties = [(1 + (i + 0.5) / 8) * 2.0**e for e in (-6, 0, 7) for i in range(7)]
    rows = [[0.0], [-0.0, 0.0], [1e-5, -1e-6, 1e-7], [1e-4, -1e-4], [448.0, -448.0, *steps], [448.0, *ties]]
    rows += [[1e30, -3e38, 1.0], [-448.0, 447.9, 432.0, -440.0], [1e-38, 2e-39]]
    for row in rows:
        assert_quantised(torch.tensor([row + [0.0] * (32 - len(row))]))
    q, scale = quantise(torch.zeros(2, 8))
    assert not q.view(torch.uint8).any() and bool((scale > 0).all())


def test_round_trip() -> None:
    """No value moves by more than half a step: 2^-4 of itself, or half of the least step."""
    values = draw(50, 128, seed=1)
    q, scale = quantise(values)
    allowed = torch.maximum(values.abs() / 16, scale * 2.0**-10) * 1.0001
    assert bool(((q.float() * scale - values).abs() <= allowed).all())


def test_a_vector_that_is_not_a_number_stays_alone() -> None:
    values = draw(4, 32, seed=2)
    clean = [part.clone() for part in quantise(values)]
    values[1, 5], values[2, 7] = math.nan, math.inf
    q, scale = quantise(values)
    for row in (0, 3):
        assert torch.equal(q.view(torch.uint8)[row], clean[0].view(torch.uint8)[row])
        assert torch.equal(scale[row], clean[1][row])
    assert (q.float() * scale)[1:3].isfinite().logical_not().any(dim=1).all()


def world(lengths: list[int], heads: int, width: int, seed: int) -> tuple[Requests, Requests]:
    """Random keys, queries and weights as they are, and in FP8 with the queries' scales in the weights."""
    plain, small = Requests(lengths, 64, seed), Requests(lengths, 64, seed)
    plain.add_cache("k", 1, width)
    plain.add_query("q", heads, width)
    plain.add_query("w", heads)
    parts = [quantise(keys) for keys in plain.keys["k"]]
    small.set_cache("k", [part[0] for part in parts])
    small.set_cache("scale", [part[1] for part in parts])
    queries = [quantise(q) for q in plain.queries["q"]]
    small.queries["q"] = [q for q, _ in queries]
    small.queries["w"] = [w * scale[..., 0] for w, (_, scale) in zip(plain.queries["w"], queries, strict=True)]
    return plain, small


def selected(requests: Requests, budget: int, by: str, n: int = 2) -> list[list[int]]:
    """Ids that the op chooses for the last rows of every request."""
    call = requests.last(n)
    op = Kernel("token_select") if by == "triton" else KERNELS.load("token_select/reference")
    args = (requests.caches["k"], requests.caches.get("scale"), call.span, budget, True)
    return op(call.query("q"), call.query("w"), *args)[:, 0].tolist()


def oracle_scores(requests: Requests, request: int, position: int) -> list[float]:
    """From bytes, in Python's floats."""
    codes = [key[0] for key in requests.keys["k"][request].view(torch.uint8).tolist()]
    queries = requests.queries["q"][request][position].view(torch.uint8).tolist()
    queries = [[fp8.decode(code) for code in head] for head in queries]
    weights = requests.queries["w"][request][position].tolist()
    scales = requests.keys["scale"][request].flatten().tolist()
    scores = []
    for code, scale in zip(codes[: position + 1], scales, strict=False):
        key = [fp8.decode(byte) for byte in code]
        dots = [sum(a * b for a, b in zip(head, key, strict=True)) for head in queries]
        rectified = [0.0 if dot <= 0 else dot for dot in dots]  # NaN stays
        scores.append(scale * sum(w * dot for w, dot in zip(weights, rectified, strict=True)))
    return scores


@pytest.mark.parametrize("by", ["reference", "triton"])
def test_selection_by_bytes(by: str) -> None:
    """The ids of loops over decoded bytes: random scores, which no two share, and one key that is not a number."""
    if by == "triton":
        pytest.importorskip("triton")
    _, requests = world([70, 9, 33], heads=4, width=32, seed=4)
    requests.keys["k"][0].view(torch.uint8)[3] = fp8.NOT_A_NUMBER
    requests.keys["scale"][0][3] = math.nan
    for name in ("k", "scale"):
        requests.set_cache(name, requests.keys[name])
    found = selected(requests, 12, by)
    for request, length in enumerate(requests.lengths):
        for row in (0, 1):
            position = length - 2 + row
            expected = choose(oracle_scores(requests, request, position), position, 1, 12)
            assert found[2 * request + row] == expected
            assert request or 3 not in expected


def test_triton_chooses_what_the_reference_chooses() -> None:
    """Sums in another order could turn a near tie; there is none among these."""
    pytest.importorskip("triton")
    _, requests = world([200, 64, 131], heads=16, width=128, seed=5)
    assert selected(requests, 48, "triton", 3) == selected(requests, 48, "reference", 3)


def test_most_of_the_selection_stays() -> None:
    """Of 2048 tokens among 8192, by 64 heads of 128: nearly all are those that unquantised keys choose.

    e4m3 moves normal values by 2.6 % of their length, so a dot product of two such vectors by 2.6 % * sqrt(2) of its
    standard deviation. A score sums relu(dot): half of the errors count, against a variance of (1 - 1 / pi) / 2, which
    makes 4.5 % of the scores' standard deviation. Of a quarter of all tokens, with a density of 0.318 at the threshold,
    0.318 * 0.045 / sqrt(2 pi) / 0.25 = 2.3 % then change sides; measured are 2.0 to 2.9 %.
    """
    plain, small = world([8192], heads=64, width=128, seed=6)
    pairs = zip(selected(plain, 2048, "reference", 4), selected(small, 2048, "reference", 4), strict=True)
    shares = [len(set(a) & set(b)) / 2048 for a, b in pairs]
    assert min(shares) > 0.965, shares


def test_blocks_are_copied_and_filled() -> None:
    """Mixed dtypes in one group: FP8 blocks are copied bit by bit, and can be poisoned."""
    spec = CacheSpec(0, "index keys", "dsa_index", (CacheTensorSpec("k", 1, 32, FP8), CacheTensorSpec("s", 1, 1)))
    cache = KVCache([spec], CacheMemory(9, 8, torch.float32, CPU))
    keys, scales = cache.get(0, "k"), cache.get(0, "s")
    assert (keys.dtype, scales.dtype) == (FP8, torch.float32)
    assert not keys.view(torch.uint8).any()
    cache.fill(math.nan)
    assert bool(keys[FIRST_BLOCK:].isnan().all()) and bool(scales[FIRST_BLOCK:].isnan().all())
    assert not keys[:FIRST_BLOCK].view(torch.uint8).any()
    codes = torch.arange(256, dtype=torch.uint8).view(1, 8, 32)
    keys[2], scales[2] = codes.view(FP8), 0.5
    cache.copy_blocks(torch.tensor([2, 3]), torch.tensor([3, 2]))
    assert torch.equal(keys[3].view(torch.uint8), codes) and bool((scales[3] == 0.5).all())
    assert bool(keys[2].isnan().all()) and bool(scales[2].isnan().all())


def test_bytes_of_the_release() -> None:
    """132 bytes a token and layer in place of 256, at the release's width."""
    config = read_deepseek_v32(dsa_config() | {"index_head_dim": 128})
    sizes = []
    for one in (config, DeepseekV32.with_fp8_index_keys(config)):
        with torch.device("meta"):
            specs = DeepseekV32(one, torch.bfloat16, True, 1).cache_specs()
        sizes.append({spec.bytes_per_token(torch.bfloat16) for spec in specs if spec.group == "index keys"})
    assert sizes == [{256}, {132}]


def test_every_report_counts_them(folder: Folder) -> None:
    """Engine, start-up card and `inspect`, target and MTP module: 36 bytes in place of 128 a layer."""
    report, plain = examine(folder("dsa"), "float32", "fp8"), examine(folder("dsa"), "float32")
    assert plain.cache_bytes_per_token - report.cache_bytes_per_token == 4 * (128 - 36)
    assert plain.mtp_cache_bytes_per_token - report.mtp_cache_bytes_per_token == 128 - 36
    with LLM(str(folder("dsa")), dtype="float32", index_keys="fp8") as llm:
        total = report.cache_bytes_per_token + report.mtp_cache_bytes_per_token
        assert llm.engine.caches.bytes_per_token == total
        card = dict(llm.card)
        assert f"of {total} bytes" in card["cache"] and "index keys in FP8" in card["dtype"]
        proposer = llm.engine.runner.proposer
        caches = [llm.engine.runner.cache, proposer.cache]
        layers = [tensors for cache in caches for tensors in cache.layers.values()]
        assert len(layers) == 5
        assert {(layer["index_k"].dtype, layer["index_k_scale"].dtype) for layer in layers} == {(FP8, torch.float32)}
        blocks = llm.engine.caches.num_blocks * llm.engine.caches.block_size
        assert sum(tensor.nbytes for layer in layers for tensor in layer.values()) == blocks * total
    assert any("cached in FP8" in line for line in render(report))
    assert not any("cached in FP8" in line for line in render(plain))


@pytest.mark.parametrize("ask", [lambda path: LLM(path, index_keys="fp8"), lambda path: examine(path, "auto", "fp8")])
def test_refused_without_index_keys_of_tokens(ask: Callable[[Path], object], folder: Folder) -> None:
    """Both features and the way out are named, before weights are read."""
    with pytest.raises(UnsupportedError, match=r"index_keys=fp8 and MiniMaxM3\w+ cannot .*; leave --index-keys out"):
        ask(folder("m3"))


@pytest.mark.parametrize("spec", ["off", "mtp:3"])
def test_steps_that_start_early(spec: str, folder: Folder) -> None:
    """They choose among FP8 keys as others do; the text without drafts is the oracle."""
    rng = random.Random(3)
    prompts = [[rng.randrange(120) for _ in range(length)] for length in (3, 40, 65, 17)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40, ignore_eos=True) for i in range(4)]
    texts = []
    for early in (False, True):
        own = spec if early else "off"
        llm = LLM(str(folder("dsa")), index_keys="fp8", spec=own, max_num_seqs=4, max_model_len=256)
        llm.engine.overlap = early
        texts.append([out.outputs[0].token_ids for out in llm.generate(prompts, params, progress=False)])
    assert texts[0] == texts[1]


def test_they_change_the_text(folder: Folder) -> None:
    """The tiny model reads few tokens, so another choice of them shows: the option does something."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [[(7 * i + seed) % 120 for i in range(90)] for seed in range(6)]
    texts = [
        [out.outputs[0].token_ids for out in LLM(str(folder("dsa")), index_keys=keys).generate(prompts, params)]
        for keys in ("model", "fp8")
    ]
    assert texts[0] != texts[1]
