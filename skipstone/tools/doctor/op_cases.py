"""Arguments for every op, at any size: one table for the self-test of `doctor` and for `bench kernels`.

A case also says what its op must read and compute at the least, and how to cut one row out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skipstone.core.batch import PAD, SamplingRows, Span
from skipstone.kernels.ops import OP_NAMES
from skipstone.kernels.reference.block_table import PAGE_SIZE, PageTable
from skipstone.kernels.reference.fp8 import FP8
from skipstone.kernels.reference.index_rows import IndexCache, KeyNorm
from skipstone.kernels.reference.norm_rope import HeadStore
from skipstone.kernels.reference.pointwise import GatedActivation
from skipstone.tools.doctor.op_inputs import Inputs, distinct, keys_seen

EXACT: Any = object()  # stands in a case's arguments where the op is told whether to be exact
EPS = 1e-6


class OpCase(NamedTuple):
    """Arguments of one call, what may be compared of its results, and its least work."""

    args: tuple[Any, ...]  # EXACT stands for the flag
    per_row: tuple[int, ...]  # which arguments have an entry per row
    num_bytes: float = 0
    flops: float = 0
    row_dim: int = 0  # of results
    written: tuple[Tensor, ...] = ()  # arguments that the op writes
    shown: slice = slice(None)  # places of results' dim 1 that are specified

    @property
    def has_exact(self) -> bool:
        """Whether the op is told to be exact."""
        return any(arg is EXACT for arg in self.args)


def linear(
    inputs: Inputs, outputs: int | None = None, inner: int | None = None, weight_dtype: torch.dtype | None = None
) -> OpCase:
    """x [T, K] times weight [K, N]."""
    rows, k, n = inputs.shape.rows, inner or inputs.sizes.hidden, outputs or inputs.sizes.inner
    weight = inputs.weight(k, n, dtype=weight_dtype)
    num_bytes = weight.nbytes + rows * k * inputs.item + rows * n * weight.itemsize
    return OpCase((inputs.randn(rows, k), weight, EXACT), (0,), num_bytes, 2.0 * rows * k * n)


def bmm(inputs: Inputs) -> OpCase:
    """One product per latent head, as queries are absorbed."""
    rows, heads, k, n = inputs.shape.rows, inputs.sizes.latent_heads, inputs.sizes.token_width, inputs.sizes.value
    args = (inputs.randn(heads, rows, k), inputs.weight(heads, k, n), EXACT)
    return OpCase(args, (0,), heads * (k * n + rows * (k + n)) * inputs.item, 2.0 * heads * rows * k * n, row_dim=1)


def rms_norm(inputs: Inputs) -> OpCase:
    """Rows of the hidden size."""
    rows, hidden = inputs.shape.rows, inputs.sizes.hidden
    gain = inputs.randn(hidden, dtype=torch.float32).mul_(hidden**0.5)
    return OpCase((inputs.randn(rows, hidden), gain, EPS), (0,), 2.0 * rows * hidden * inputs.item)


def add_rms_norm(inputs: Inputs) -> OpCase:
    """The same, with a residual."""
    x, gain, eps = rms_norm(inputs).args
    return OpCase((x, inputs.randn(*x.shape), gain, eps), (0, 1), 4.0 * x.numel() * inputs.item)


def rotate(inputs: Inputs) -> OpCase:
    """Heads of which a part rotates."""
    x = inputs.randn(inputs.shape.rows, inputs.sizes.heads, inputs.sizes.width)
    return OpCase((x, inputs.rotary(x.shape[2], inputs.sizes.rotary)), (0, 1), 2.0 * x.numel() * inputs.item)


def norm_rotate_store(inputs: Inputs) -> OpCase:
    """Projected heads [q | index q | k | index k | v]; the last three kinds are cached."""
    sizes, rows = inputs.sizes, inputs.shape.rows
    queries = sizes.heads + sizes.index_heads
    index = queries + sizes.kv_heads
    normed = index + 1
    block, offset, blocks = inputs.slots(sizes.block_size)
    places = ((queries, sizes.kv_heads), (index, 1), (normed, sizes.kv_heads))
    shape = (sizes.block_size, sizes.width)
    caches = [torch.zeros(blocks, n, *shape, dtype=inputs.dtype, device=inputs.device) for _, n in places]
    stores = tuple(HeadStore(*place, cache) for place, cache in zip(places, caches, strict=True))
    projected = inputs.randn(rows, normed + sizes.kv_heads, sizes.width)
    gain = inputs.randn(normed, sizes.width, dtype=torch.float32).mul_(sizes.width**0.5)
    args = (projected, gain, EPS, inputs.rotary(sizes.width, sizes.rotary), stores, block, offset)
    num_bytes = 2.0 * projected.numel() * inputs.item
    return OpCase(args, (0, 3, 5, 6), num_bytes, written=tuple(caches), shown=slice(0, queries))


def index_rows(inputs: Inputs, fp8: bool = False) -> OpCase:
    """Index queries and keys. In FP8 neither is rounded before it is quantised, as another byte would be far off."""
    sizes, rows = inputs.sizes, inputs.shape.rows
    heads, width = sizes.token_heads, sizes.token_width
    block, offset, blocks = inputs.slots(sizes.token_block)
    gain, bias = inputs.randn(width).float(), inputs.randn(width).float()
    rotary, kind = inputs.rotary(width, width // 2), inputs.dtype
    if fp8:
        gain, rotary, kind = gain.zero_(), rotary._replace(cos=rotary.cos * 0 + 1, sin=rotary.sin * 0), FP8
    keys = torch.zeros(blocks, 1, sizes.token_block, width, dtype=kind, device=inputs.device)
    scales = torch.zeros(blocks, 1, sizes.token_block, 1, device=inputs.device) if fp8 else None
    cache = IndexCache(keys, scales)
    weights = inputs.randn(rows, heads, dtype=torch.float32)
    parts = (inputs.randn(rows, heads, width), inputs.randn(rows, width), weights, 0.01)
    num_bytes = rows * (heads + 1) * (width * (inputs.item + kind.itemsize) + 8.0)
    args = (*parts, KeyNorm(gain, bias, EPS), rotary, cache, block, offset)
    written = tuple(tensor for tensor in cache if tensor is not None)
    return OpCase(args, (0, 1, 2, 5, 7, 8), num_bytes, written=written)


def gated(inputs: Inputs) -> OpCase:
    """[gate | up] of a dense layer."""
    x = inputs.randn(inputs.shape.rows, 2 * inputs.sizes.inner)
    return OpCase((x, GatedActivation(1.702, 7.0, 1.0)), (0,), 1.5 * x.numel() * inputs.item)


def store(inputs: Inputs) -> OpCase:
    """Latents of a token-sparse model."""
    block, offset, blocks = inputs.slots(inputs.sizes.token_block)
    rows = inputs.randn(inputs.shape.rows, 1, inputs.sizes.latent)
    shape = (blocks, 1, inputs.sizes.token_block, inputs.sizes.latent)
    cache = torch.zeros(shape, dtype=inputs.dtype, device=inputs.device)
    return OpCase((rows, cache, block, offset), (0, 2, 3), 2.0 * rows.numel() * inputs.item, written=(cache,))


def route(inputs: Inputs) -> OpCase:
    """Router logits to experts and weights."""
    rows, experts = inputs.shape.rows, inputs.sizes.experts
    logits, bias = (inputs.randn(*shape, dtype=torch.float32) for shape in ((rows, experts), (experts,)))
    return OpCase((logits, bias, inputs.sizes.top_k, 2.0, 1, 1, experts), (0,), 4.0 * logits.numel())


def experts_forward(inputs: Inputs) -> OpCase:
    """Uniformly drawn experts and the shared one, which is the last."""
    sizes, rows = inputs.sizes, inputs.shape.rows
    one = 3 * sizes.hidden * sizes.inner * inputs.item
    draw = torch.rand(rows, sizes.experts, generator=inputs.generator, device=inputs.device)
    experts = torch.nn.functional.pad(draw.topk(sizes.top_k).indices, (0, 1), value=sizes.experts)
    weights = torch.rand(experts.shape, generator=inputs.generator, device=inputs.device)
    up = inputs.weight(sizes.experts + 1, sizes.hidden, 2 * sizes.inner)
    down = inputs.weight(sizes.experts + 1, sizes.inner, sizes.hidden)
    activation = GatedActivation(1.702, 7.0, 1.0)
    args = (inputs.randn(rows, sizes.hidden), experts, weights, up, down, activation, EXACT, inputs.dtype)
    touched = int(experts.unique().numel())
    work = 6.0 * experts.numel() * sizes.hidden * sizes.inner
    return OpCase(args, (0, 1, 2), touched * one + 2 * rows * sizes.hidden * inputs.item, work)


def _grouped_heads(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Span]:
    """Queries, cached keys and values, and where they stand."""
    sizes = inputs.sizes
    span, blocks = inputs.span(sizes.block_size, 2 * sizes.kv_heads * sizes.width * inputs.item)
    k, v = (inputs.cache(blocks, sizes.kv_heads, sizes.block_size, sizes.width) for _ in range(2))
    return inputs.randn(inputs.shape.rows, sizes.heads, sizes.width), k, v, span


def dense_attention(inputs: Inputs) -> OpCase:
    """Every row over all keys before it."""
    sizes, (requests, _, context, *_) = inputs.sizes, inputs.shape
    q, k, v, span = _grouped_heads(inputs)
    work = 4.0 * keys_seen(span.positions) * sizes.heads * sizes.width
    num_bytes = 2 * (requests * context * sizes.kv_heads * sizes.width + q.numel()) * inputs.item
    return OpCase((q, k, v, span, sizes.width**-0.5, EXACT), (0, 3), num_bytes, work)


def block_select(inputs: Inputs) -> OpCase:
    """Index keys of one head, four index queries."""
    sizes, (requests, _, context, *_) = inputs.sizes, inputs.shape
    row_bytes = sizes.width * inputs.item
    span, blocks = inputs.span(sizes.block_size, row_bytes)
    keys = inputs.cache(blocks, 1, sizes.block_size, sizes.width)
    q = inputs.randn(inputs.shape.rows, sizes.index_heads, sizes.width, whole=inputs.whole)
    args = (q, keys, span, sizes.unit, sizes.budget, 0, 1, EXACT)
    work = 2.0 * keys_seen(span.positions) * sizes.index_heads * sizes.width
    return OpCase(args, (0, 2), requests * context * row_bytes, work)


def token_select(inputs: Inputs, fp8: bool = False) -> OpCase:
    """Index keys of one head, many weighted index queries; in FP8 with a scale per key or not."""
    sizes, (requests, _, context, *_) = inputs.sizes, inputs.shape
    row_bytes = sizes.token_width * (FP8.itemsize if fp8 else inputs.item) + (torch.float32.itemsize if fp8 else 0)
    span, blocks = inputs.span(sizes.token_block, row_bytes)
    keys, scales = inputs.cache(blocks, 1, sizes.token_block, sizes.token_width), None
    q = inputs.randn(inputs.shape.rows, sizes.token_heads, sizes.token_width, whole=inputs.whole)
    weights = inputs.randn(inputs.shape.rows, sizes.token_heads, dtype=torch.float32, whole=inputs.whole)
    work = 2.0 * keys_seen(span.positions) * sizes.token_heads * sizes.token_width
    if fp8:
        scales = inputs.randn(blocks, 1, sizes.token_block, 1, dtype=torch.float32, whole=True).exp2()
        q, keys = q.to(FP8), keys.to(FP8)
    args = (q, weights, keys, scales, span, sizes.token_budget, EXACT)
    return OpCase(args, (0, 1, 4), requests * context * row_bytes, work)


def sparse_gqa(inputs: Inputs) -> OpCase:
    """Selected blocks of keys and values."""
    sizes = inputs.sizes
    q, k, v, span = _grouped_heads(inputs)
    indices = inputs.choose(span.positions, sizes.kv_heads, sizes.unit, sizes.budget)
    chosen = distinct(indices, inputs.shape.requests, -(-inputs.shape.context // sizes.unit)) * sizes.unit
    num_bytes = 2 * (chosen * sizes.width + q.numel()) * inputs.item
    work = 4.0 * float((indices >= 0).sum()) * sizes.unit * (sizes.heads // sizes.kv_heads) * sizes.width
    return OpCase((q, k, v, indices, sizes.unit, span, sizes.width**-0.5, EXACT), (0, 3, 5), num_bytes, work)


def sparse_mla(inputs: Inputs) -> OpCase:
    """Selected tokens of one latent head."""
    sizes, requests = inputs.sizes, inputs.shape.requests
    span, blocks = inputs.span(sizes.token_block, sizes.latent * inputs.item)
    cache = inputs.cache(blocks, 1, sizes.token_block, sizes.latent)
    q = inputs.randn(inputs.shape.rows, sizes.latent_heads, sizes.latent)
    indices = inputs.choose(span.positions, 1, 1, sizes.token_budget)
    read = distinct(indices, requests, inputs.shape.context) * sizes.latent
    num_bytes = (read + q.shape[0] * sizes.latent_heads * (sizes.latent + sizes.value)) * inputs.item
    work = 2.0 * float((indices >= 0).sum()) * sizes.latent_heads * (sizes.latent + sizes.value)
    args = (q, cache, indices, span, sizes.value, sizes.latent**-0.5, EXACT)
    return OpCase(args, (0, 2, 3), num_bytes, work)


def verify_page_table(inputs: Inputs) -> OpCase:
    """Tables of rows at the ends of their requests."""
    sizes, span = inputs.sizes, inputs.span(inputs.sizes.unit, 1)[0]
    indices, pages = inputs.choose(span.positions, sizes.kv_heads, sizes.unit, sizes.budget), sizes.unit // PAGE_SIZE
    args = (indices, span.block_table, span.positions[:, -1] + 1, inputs.shape.n, sizes.unit, pages)
    return OpCase(args, (), 4.0 * indices.numel() * pages)


def prefill_page_table(inputs: Inputs) -> OpCase:
    """Tables of rows anywhere."""
    sizes, span = inputs.sizes, inputs.span(inputs.sizes.unit, 1)[0]
    indices, pages = inputs.choose(span.positions, sizes.kv_heads, sizes.unit, sizes.budget), sizes.unit // PAGE_SIZE
    requests = torch.arange(inputs.shape.requests, device=inputs.device).repeat_interleave(inputs.shape.n)
    args = (indices, span.block_table, requests, span.positions.flatten(), sizes.unit, pages)
    return OpCase(args, (0, 2, 3), 4.0 * indices.numel() * pages)


def paged_attention(inputs: Inputs) -> OpCase:
    """Pages in random order, as many for each row."""
    sizes, rows = inputs.sizes, inputs.shape.rows
    places = sizes.budget * sizes.unit // PAGE_SIZE
    total = max(places, rows * places // 2)
    k, v = (inputs.randn(total, sizes.kv_heads, PAGE_SIZE, sizes.width) for _ in range(2))
    pages = inputs.integers(0, total, rows, sizes.kv_heads, places).int()
    lengths = inputs.integers(places * PAGE_SIZE // 2, places * PAGE_SIZE + 1, rows, sizes.kv_heads).int()
    if inputs.shape.padding:
        lengths[-1] = 0
    q, keys = inputs.randn(rows, sizes.heads, sizes.width), float(lengths.sum())
    work = 4.0 * keys * (sizes.heads // sizes.kv_heads) * sizes.width
    args = (q, k, v, PageTable(pages, lengths), sizes.width**-0.5, EXACT)
    return OpCase(args, (0, 3), 2 * keys * sizes.width * inputs.item, work)


def sample(inputs: Inputs) -> OpCase:
    """Every other row greedy, the others drawn with noise."""
    rows = inputs.shape.rows
    row = torch.arange(rows, device=inputs.device)
    settings = SamplingRows(row * 7 + 1, row + 5, (row % 2).float(), None, None, None, None, None, rows == 1)
    logits = inputs.randn(rows, inputs.sizes.vocab)
    return OpCase((logits, settings), (0, 1), logits.numel() * float(inputs.item))


def _drafts(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of requests with n rows, where the first row stands, and behind what position a request may not write."""
    requests, n, context, _, padding = inputs.shape
    tokens = inputs.integers(0, 4, requests, n)
    start = torch.full((requests,), context - n, device=inputs.device)
    if padding:
        start[-1] = PAD
    return tokens, start, torch.full_like(start, context - n // 2)


def step_rows(inputs: Inputs, drafts: bool = False) -> OpCase:
    """Rows of requests, the last of them past their limit; tokens stand in a table by slot, or are `drafts`."""
    (requests, n, context, *_), (own, start, limit) = inputs.shape, _drafts(inputs)
    table = inputs.span(inputs.sizes.block_size, 1)[0].block_table
    if drafts:
        return OpCase((own, None, start, limit, table, None, None, inputs.sizes.block_size), ())
    tokens = inputs.integers(0, 4, requests, context).to(torch.int32)
    row = torch.arange(requests * n, device=inputs.device)
    slots = torch.arange(requests, device=inputs.device).flip(0)
    return OpCase((tokens, slots, start, limit, table, row // n, row % n, inputs.sizes.block_size), ())


def accept(inputs: Inputs) -> OpCase:
    """Few different tokens, so that some drafts survive."""
    tokens, start, limit = _drafts(inputs)
    return OpCase((inputs.integers(0, 4, *tokens.shape), tokens, start, limit, start * 3 + 1, None), ())


OP_CASES: dict[str, Callable[..., OpCase]] = {op: globals()[op] for op in OP_NAMES if op in globals()}

# Options of makers under which `doctor` compares an op once more.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "index_rows": ({"fp8": True},),
    "token_select": ({"fp8": True},),
    "step_rows": ({"drafts": True},),
}
# Scores of selections are made of whole numbers where results are compared, so that no rounding decides who is chosen.
WHOLE = ("block_select", "token_select")
# Float32 is part of what these mean: what is chosen, or which dtype gains have.
FLOAT32 = ("route", "sample", "index_rows")
