"""Calls of every op at the sizes of real models and of the demos, for the compilers.

Tensors are reserved and never touched where they are large: nothing runs on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skipstone.core.batch import SamplingRows, Span
from skipstone.kernels.reference.index_rows import IndexCache, KeyNorm
from skipstone.kernels.reference.norm_rope import HeadStore
from skipstone.kernels.reference.pointwise import GatedActivation, Rotary
from skipstone.registry import KERNELS

Call = tuple[str, str, Callable[[], Any]]  # op, label, what calls it


class Geometry(NamedTuple):
    """Sizes of a model, as its config has them; 0 where it has no such part."""

    dtype: torch.dtype
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    width: int
    block_size: int
    rotary: int
    experts: int
    top_k: int
    inner: int
    groups: int
    kept_groups: int
    activation: GatedActivation
    unit: int = 0
    budget: int = 0
    init: int = 0
    local: int = 0
    index_heads: int = 0
    index_width: int = 0
    latent: int = 0  # with its rotary part
    value: int = 0


HALF, FLOAT = torch.bfloat16, torch.float32
SILU, MINIMAX = GatedActivation(), GatedActivation(1.702, 7.0, 1.0)
M3 = Geometry(
    HALF, 6144, 200064, 64, 4, 128, 128, 64, 128, 4, 3072, 1, 1, MINIMAX,
    unit=128, budget=16, local=1, index_heads=4, index_width=128,
)  # fmt: skip
V32 = Geometry(
    HALF, 7168, 129280, 128, 128, 128, 64, 64, 256, 8, 2048, 8, 4, SILU,
    unit=1, budget=2048, index_heads=64, index_width=128, latent=576, value=512,
)  # fmt: skip
DEMO = Geometry(
    FLOAT, 256, 6144, 8, 2, 32, 32, 16, 8, 2, 160, 1, 1, MINIMAX,
    unit=32, budget=8, local=1, index_heads=2, index_width=32,
)  # fmt: skip
DEMO_DSA = Geometry(
    FLOAT, 256, 6144, 8, 8, 48, 64, 16, 8, 2, 160, 4, 2, SILU,
    unit=1, budget=256, index_heads=4, index_width=32, latent=80, value=64,
)  # fmt: skip
HEAD = Geometry(HALF, 256, 4096, 8, 4, 32, 32, 32, 0, 0, 768, 1, 1, SILU)

# Requests and rows of each: decoding, verifying, a chunk of a prompt.
STEPS = {"decode": (4, 1), "verify": (4, 4), "chunk": (1, 512)}
MODELS = {
    "m3": [M3],
    "v32": [V32],
    "demo": [DEMO, DEMO._replace(dtype=HALF), DEMO_DSA, DEMO_DSA._replace(dtype=HALF), HEAD],
}
SHORT = "short"  # each op once or twice, as the largest models call it
SWEEP = "sweep"  # limits only: more sizes than the table of registers lists
GEOMETRIES = (SHORT, *MODELS)
BLOCKS = 40


def calls(name: str) -> Iterator[Call]:
    """All calls of a set of models, or the short selection from those of the large ones."""
    if name == SHORT:
        yield from _short()
        return
    if name == SWEEP:
        yield from _sweep()
        return
    for model in MODELS[name]:
        dtype = "bf16" if model.dtype == HALF else "f32"
        for step, (requests, n) in STEPS.items():
            for op, label, call in (*_attention(model, requests, n), *_rows(model, requests * n)):
                yield op, f"{label} {dtype} {step}", call


def _sweep() -> Iterator[Call]:
    """MiniMax-M3 with every small number of rows a request, for few and many requests: tiles follow both."""
    for n in (1, 2, 3, 4, 5, 6, 8, 9, 16, 17, 33):
        for requests in (1, 16, 64):
            for op, label, call in (*_attention(M3, requests, n), *(_rows(M3, requests * n) if n < 5 else ())):
                yield op, f"{label} {requests} x {n} rows", call


def _short() -> Iterator[Call]:
    """Verification and a chunk of MiniMax-M3 in exact mode, and one step of the ops that only DeepSeek-V3.2 has."""
    covered = set()
    for model, step in ((M3, "verify"), (M3, "chunk"), (V32, "verify")):
        requests, n = STEPS[step]
        for op, label, call in (*_attention(model, requests, n), *_rows(model, requests * n)):
            if not label.startswith("free") and (model is M3 or op not in covered):
                covered.add(op if model is M3 else "")
                yield op, f"{label} {step}", call


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _op(name: str, *args: Any) -> Callable[[], Any]:
    return lambda: KERNELS.load(f"{name}/triton")(*args)


def _span(model: Geometry, requests: int, n: int) -> Span:
    table = torch.zeros(requests, 16384 // model.block_size, dtype=torch.int64)
    positions = torch.zeros(requests, n, dtype=torch.int64)
    return Span(slice(0, requests), slice(0, requests * n), n, positions, table)


def _attention(model: Geometry, requests: int, n: int) -> Iterator[Call]:
    """Selection and attention of one span."""
    rows, span, dtype, size = requests * n, _span(model, requests, n), model.dtype, model.block_size
    for exact in (False, True):
        mode = "exact" if exact else "free"
        if model.unit:
            index_k = empty(BLOCKS, 1, size, model.index_width, dtype=dtype)
            index_q = empty(rows, model.index_heads, model.index_width, dtype=dtype)
        if model.latent:
            weights = empty(rows, model.index_heads, dtype=FLOAT)
            fp8 = tuple(tensor.to(torch.float8_e4m3fn) for tensor in (index_q, index_k))
            for label, q, k, scale in (
                (mode, index_q, index_k, None),
                (f"{mode} fp8", fp8[0], fp8[1], empty(BLOCKS, 1, size, 1, dtype=FLOAT)),
            ):
                yield "token_select", label, _op("token_select", q, weights, k, scale, span, model.budget, exact)
            indices = torch.zeros(rows, 1, model.budget, dtype=torch.int32)
            cache = empty(BLOCKS, 1, size, model.latent, dtype=dtype)
            q = empty(rows, model.heads, model.latent, dtype=dtype)
            yield "sparse_mla", mode, _op("sparse_mla", q, cache, indices, span, model.value, 0.1, exact)
            continue
        q = empty(rows, model.heads, model.width, dtype=dtype)
        k, v = (empty(BLOCKS, model.kv_heads, size, model.width, dtype=dtype) for _ in range(2))
        yield "dense_attention", mode, _op("dense_attention", q, k, v, span, 0.1, exact)
        if not model.unit:
            continue
        choice = (model.unit, model.budget, model.init, model.local, exact)
        yield "block_select", mode, _op("block_select", index_q, index_k, span, *choice)
        indices = torch.zeros(rows, model.kv_heads, model.budget, dtype=torch.int32)
        yield "sparse_gqa", mode, _op("sparse_gqa", q, k, v, indices, model.unit, span, 0.1, exact)
        if model.unit % 16 == 0:
            yield from _paged(model, indices, span, q, exact)


def _paged(model: Geometry, indices: Tensor, span: Span, q: Tensor, exact: bool) -> Iterator[Call]:
    """Page tables and attention through them."""
    requests, n = span.positions.shape
    pages = model.unit // 16
    if not exact:
        lengths = torch.zeros(requests, dtype=torch.int64)
        yield (
            "verify_page_table",
            "",
            _op("verify_page_table", indices, span.block_table, lengths, n, model.unit, pages),
        )
        request_ids = torch.zeros(requests * n, dtype=torch.int64)
        yield (
            "prefill_page_table",
            "",
            _op(
                "prefill_page_table",
                indices,
                span.block_table,
                request_ids,
                span.positions.flatten(),
                model.unit,
                pages,
            ),
        )
    from skipstone.kernels.reference.block_table import PageTable

    table = PageTable(
        torch.zeros(requests * n, model.kv_heads, model.budget * pages, dtype=torch.int32),
        torch.zeros(requests * n, model.kv_heads, dtype=torch.int32),
    )
    k, v = (empty(BLOCKS, model.kv_heads, 16, model.width, dtype=model.dtype) for _ in range(2))
    mode = "exact" if exact else "free"
    yield "paged_attention", mode, _op("paged_attention", q, k, v, table, 0.1, exact)


def _rows(model: Geometry, rows: int) -> Iterator[Call]:
    """All that knows rows only."""
    dtype, hidden = model.dtype, model.hidden
    x, gain = empty(rows, hidden, dtype=dtype), empty(hidden, dtype=FLOAT)
    yield "rms_norm", "", _op("rms_norm", x, gain, 1e-6)
    yield "add_rms_norm", "", _op("add_rms_norm", x, x, gain, 1e-6)
    yield "gated", "", _op("gated", empty(rows, 2 * model.inner, dtype=dtype), model.activation)
    yield from _heads(model, rows)
    yield from _products(model, rows, x)
    if model.experts:
        logits, bias = empty(rows, model.experts, dtype=FLOAT), empty(model.experts, dtype=FLOAT)
        groups = (model.groups, model.kept_groups, model.experts)
        yield "route", "", _op("route", logits, bias, model.top_k, 2.5, *groups)
        chosen = torch.zeros(rows, model.top_k + 1, dtype=torch.int64)
        up = empty(model.experts + 1, hidden, 2 * model.inner, dtype=dtype)
        down = empty(model.experts + 1, model.inner, hidden, dtype=dtype)
        for exact in (False, True):
            yield (
                "experts_forward",
                "exact" if exact else "free",
                _op("experts_forward", x, chosen, chosen.float(), up, down, model.activation, exact, dtype),
            )
    if rows <= 16:
        yield from _steps(model, rows)
        seed, temperature = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
        for label, greedy in (("greedy", True), ("noise", False)):
            settings = SamplingRows(seed, seed, temperature, None, None, None, None, None, greedy)
            yield "sample", label, _op("sample", empty(rows, model.vocab, dtype=dtype), settings)


def _steps(model: Geometry, rows: int) -> Iterator[Call]:
    """What surrounds the model in a step of requests with four rows each."""
    n = min(rows, 4)
    tokens, each = torch.zeros(rows // n, n, dtype=torch.int64), torch.zeros(rows // n, dtype=torch.int64)
    table = torch.zeros(rows // n, 256, dtype=torch.int64)
    slots, pool = torch.zeros(rows // n, dtype=torch.int64), torch.zeros(rows // n, 256, dtype=torch.int32)
    row = torch.zeros(rows, dtype=torch.int64)
    yield "step_rows", "", _op("step_rows", pool, slots, each, each, table, row, row, model.block_size)
    yield "step_rows", "drafts", _op("step_rows", tokens, None, each, each, table, None, None, model.block_size)
    for label, rates in (("", None), ("coins", torch.zeros(3, dtype=torch.float64))):
        yield "accept", label, _op("accept", tokens, tokens, each, each, each, rates)


def _heads(model: Geometry, rows: int) -> Iterator[Call]:
    """Norms, rotation and inserts of heads."""
    dtype, width = model.dtype, model.latent or model.width
    slots = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    rotary = Rotary(empty(rows, 1, width, dtype=FLOAT), empty(rows, 1, width, dtype=FLOAT), torch.arange(width))
    if model.latent:
        for label, kind, wide in (
            ("", dtype, width),
            ("fp8", torch.float8_e4m3fn, model.index_width),
            ("scale", FLOAT, 1),
        ):
            cache = empty(BLOCKS, 1, model.block_size, wide, dtype=kind)
            yield "store", label, _op("store", empty(rows, 1, wide, dtype=kind), cache, *slots)
        yield "rotate", "", _op("rotate", empty(rows, model.heads, width, dtype=dtype), rotary)
        index = model.index_width
        parts = (empty(rows, model.index_heads, index, dtype=dtype), empty(rows, index, dtype=dtype))
        weights, norm = empty(rows, model.index_heads, dtype=FLOAT), KeyNorm(*empty(2, index, dtype=FLOAT), 1e-6)
        turn = Rotary(empty(rows, 1, index, dtype=FLOAT), empty(rows, 1, index, dtype=FLOAT), torch.arange(index))
        for label, kind, scaled in (("", dtype, False), ("fp8", torch.float8_e4m3fn, True)):
            keys = empty(BLOCKS, 1, model.block_size, index, dtype=kind)
            cache = IndexCache(keys, empty(BLOCKS, 1, model.block_size, 1, dtype=FLOAT) if scaled else None)
            yield "index_rows", label, _op("index_rows", *parts, weights, 0.01, norm, turn, cache, *slots)
        return
    kv, index, size = model.kv_heads, model.index_heads, model.block_size
    normed = model.heads + kv + index + (index > 0)
    caches = [(model.heads, kv), *([(normed - 1, 1)] if index else []), (normed, kv)]
    stores = tuple(HeadStore(first, n, empty(BLOCKS, n, size, width, dtype=dtype)) for first, n in caches)
    projected = empty(rows, normed + kv, width, dtype=dtype)
    gain = empty(normed, width, dtype=FLOAT)
    yield "norm_rotate_store", "", _op("norm_rotate_store", projected, gain, 1e-6, rotary, stores, *slots)


def _products(model: Geometry, rows: int, x: Tensor) -> Iterator[Call]:
    """Projections and the vocabulary's product."""
    dtype, hidden = model.dtype, model.hidden
    for exact in (False, True):
        mode = "exact" if exact else "free"
        wide = (model.heads + 2 * model.kv_heads) * model.width if not model.latent else 2112
        yield "linear", mode, _op("linear", x, empty(hidden, wide, dtype=dtype), exact)
        if model.experts:
            yield "linear", f"{mode} router", _op("linear", x, empty(hidden, model.experts, dtype=FLOAT), exact)
        if rows > 64:  # as a chunk of a long prompt: one segment of K, and two
            longer = empty(4 * rows, hidden, dtype=dtype)
            yield "linear", f"{mode} long", _op("linear", longer, empty(hidden, 9856, dtype=dtype), exact)
            yield "linear", f"{mode} long", _op("linear", longer, empty(hidden, 6144, dtype=dtype), exact)
        if rows <= 16:
            yield "linear", f"{mode} vocabulary", _op("linear", x, empty(hidden, model.vocab, dtype=dtype), exact)
        if model.latent:
            a = empty(model.heads, rows, model.width, dtype=dtype)
            yield "bmm", mode, _op("bmm", a, empty(model.heads, model.width, model.value, dtype=dtype), exact)


def ops_covered(geometry: str) -> set[str]:
    """Ops that some call of a geometry compiles."""
    return {op for op, _, _ in calls(geometry)}
