"""Products by tensor descriptors: the bits of the plain kernels, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from oracles.kernels import DEVICE  # noqa: E402

from skipstone.core.batch import Span  # noqa: E402
from skipstone.kernels.gpu import (  # noqa: E402
    dense_attn,
    gemm,
    gemm_persistent,
    moe_persistent,
    moe_prefill,
    sparse_gqa,
    sparse_gqa_chunk,
)
from skipstone.kernels.gpu.descriptors import Tiles, describable  # noqa: E402
from skipstone.kernels.reference import moe as reference  # noqa: E402
from skipstone.kernels.reference.pointwise import GatedActivation  # noqa: E402

ACTIVATION = GatedActivation(1.702, 7.0, 1.0)
SMALL = Tiles(32, 32, 16, 4, 2)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(
        DEVICE, torch.bfloat16
    )


@pytest.mark.parametrize(("rows", "k", "n"), [(70, 128, 96), (33, 96, 40), (64, 320, 64)])
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_product(rows: int, k: int, n: int, splits: int) -> None:
    """Sums of segments in ascending order, whatever of a tile lies outside."""
    x, weight = random(rows, k), random(k, n)
    segment = triton.cdiv(k // SMALL.k, splits) * SMALL.k
    found = gemm_persistent.product(x, weight, segment, splits, SMALL)
    total = torch.zeros(rows, n, dtype=torch.float32, device=x.device)
    for first in range(0, k, segment):
        total += (x[:, first : first + segment].double() @ weight[first : first + segment].double()).float()
    torch.testing.assert_close(found.float(), total, rtol=1e-2, atol=1e-2)
    assert torch.equal(found[5:38], gemm_persistent.product(x[5:38], weight, segment, splits, SMALL))


def test_a_product_has_the_bits_of_the_plain_kernel() -> None:
    x, weight = random(130, 256), random(256, 128)
    tiles = gemm.decode_tiles(128, 256, x.dtype, False)
    segment = triton.cdiv(256 // tiles.k, tiles.splits) * tiles.k
    plain = gemm.linear(x, weight, True)
    assert torch.equal(gemm_persistent.product(x, weight, segment, tiles.splits, Tiles(64, 64, 64, 4, 2)), plain)


@pytest.mark.parametrize("counts", [(40, 0, 33, 1, 26), (0, 0, 0, 0, 100), (32, 64, 4, 0, 0)])
def test_experts(counts: tuple[int, ...]) -> None:
    """Experts without rows, with whole tiles and with the rest of one."""
    hidden, inner, rows = 64, 32, sum(counts) // 2
    experts = torch.repeat_interleave(torch.arange(5), torch.tensor(counts))
    experts = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(1))].view(rows, 2)
    x, gate_up, down = random(rows, hidden), random(5, hidden, 2 * inner) / 8, random(5, inner, hidden) / 8
    experts, weights = experts.to(x.device), torch.rand(rows, 2, device=x.device)
    order, starts = moe_prefill._by_expert(experts, 5)
    x_sorted, place = moe_prefill._sorted_rows(x, order, 2)
    assert torch.equal(x_sorted, x[order // 2])
    parts = moe_persistent.products(x_sorted, starts, gate_up, down, ACTIVATION, SMALL, SMALL)
    found = moe_prefill._combine(parts, place, weights, torch.float32)
    plain = moe_prefill._triton_parts(x, experts, gate_up, down, ACTIVATION)
    assert torch.equal(found, moe_prefill._combine(plain, None, weights, torch.float32))
    expected = reference.experts_forward(x.float(), experts, weights, gate_up.float(), down.float(), ACTIVATION, True)
    assert ((found - expected).norm() / expected.norm()).item() < 1e-2


def test_what_can_be_described() -> None:
    wide = random(8, 72)
    assert describable(wide)
    assert describable(wide[:, 8:40])
    assert not describable(wide[:, 1:40])
    assert not describable(random(8, 36))
    assert not describable(wide.t())
    assert not describable(wide.float())


def test_not_in_the_interpreter() -> None:
    """Nobody has them there, unless a test asks."""
    x, weight = random(512, 256), random(256, 256)
    if triton.knobs.runtime.interpret:
        assert not gemm_persistent.product_fits(x, weight)


@pytest.mark.parametrize("starts", [(0,), (150,), (40, 300)])
def test_dense_attention(starts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that all rows of a tile see are loaded through descriptors, with the same bits."""
    n, heads, kv_heads, width, size = 40, 4, 2, 32, 128
    positions = torch.tensor(starts)[:, None] + torch.arange(n)
    blocks = -(-(max(starts) + n) // size)
    table = torch.randperm(8, generator=torch.Generator().manual_seed(2))[: len(starts) * blocks].view(len(starts), -1)
    span = Span(slice(0, len(starts)), slice(0, len(starts) * n), n, positions.to(DEVICE), table.to(DEVICE))
    caches = [random(8, kv_heads, size, width) for _ in range(2)]
    q = random(len(starts) * n, heads, width)
    plain = dense_attn.dense_attention(q, *caches, span, width**-0.5, True)
    monkeypatch.setattr(dense_attn, "capability", lambda: 90)
    assert torch.equal(dense_attn.dense_attention(q, *caches, span, width**-0.5, True), plain)


@pytest.mark.parametrize("overlap", [True, False])
def test_chunks_in_exact_attention(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the kernel that decodes: whole blocks, the last ones, rows that chose different blocks."""
    n, first, kv_heads, group, width, size, unit, budget = 21, 150, 2, 16, 16, 64, 32, 4
    positions = first + torch.arange(n)[None]
    generator = torch.Generator().manual_seed(4)
    table = torch.randperm(8, generator=generator)[: -(-(first + n) // size)][None]
    chosen = torch.full((n, kv_heads, budget), -1, dtype=torch.int32)
    for row in range(n):
        last = int(positions[0, row]) // unit
        for head in range(kv_heads):
            count = min(budget, last + 1) - (row % 5 == 0)
            others = torch.arange(last) if overlap else torch.randperm(last, generator=generator)
            ids = torch.cat([others[: count - 1], torch.tensor([last])]).sort().values
            chosen[row, head, :count] = ids.int()
    span = Span(slice(0, 1), slice(0, n), n, positions.to(DEVICE), table.to(DEVICE))
    caches = [random(8, kv_heads, size, width) for _ in range(2)]
    caches[1].view(8, kv_heads, size, width)[int(table[0, -1]), :, (first + n) % size :] = float("nan")
    q = random(n, 3 * kv_heads * group, width)[:, : kv_heads * group]
    args = (q, *caches, chosen.to(DEVICE), unit, span, width**-0.5)
    shape = sparse_gqa.AttendConfig(64, 16, 4, 2)
    plain = sparse_gqa.attend(*args, 4, 1, shape)
    tiles = sparse_gqa_chunk.ChunkConfig(4, 64, 16, 8)
    assert torch.equal(sparse_gqa_chunk.attend_chunk(*args, tiles), plain)
    assert torch.equal(sparse_gqa.attend(args[0].contiguous(), *args[1:], 4, 1, shape), plain)
    assert not plain.isnan().any()
