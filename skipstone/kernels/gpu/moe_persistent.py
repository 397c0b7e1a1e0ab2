"""Products of experts with many rows by persistent kernels, with tiles loaded by TMA.

For NVIDIA GPUs from Hopper on. Rows are gathered by expert first, as only whole tiles of memory can be described; the
sums over K go in the order of `moe_prefill`, so the bits are the same.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from skipstone.kernels.gpu.descriptors import Tiles, capability, describable, multiprocessors, place_of
from skipstone.kernels.gpu.dot import dot
from skipstone.kernels.gpu.moe_tiles import gate
from skipstone.kernels.reference.pointwise import GatedActivation

UP_TILES = Tiles(128, 128, 64, 8, 3)  # columns of the gate, and as many of the up projection
DOWN_TILES = Tiles(128, 256, 64, 8, 3)
GROUP = 16
ROWS = 512  # from which on this pays
LISTED = 64  # tiles that a program of the list looks for


@triton.jit(do_not_specialize=["most"])
def _list_kernel(
    start_ptr,  # [EXPERTS + 1] where each expert's pairs begin
    tile_ptr,  # [1 + 3 * most] out: how many tiles there are; of each the expert, its first pair and the expert's end
    most,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Tiles of at most BLOCK_M pairs of one expert, in order. One program per LISTED tiles."""
    bins = tl.arange(0, BLOCK_E)
    starts = tl.load(start_ptr + bins, mask=bins < EXPERTS, other=0).to(tl.int32)
    ends = tl.load(start_ptr + bins + 1, mask=bins < EXPERTS, other=0).to(tl.int32)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, axis=0)  # the first tile of the next expert
    tile = tl.program_id(0) * LISTED + tl.arange(0, LISTED)
    is_it = (last[None, :] > tile[:, None]) & ((last - tiles)[None, :] <= tile[:, None])
    expert = tl.sum(tl.where(is_it, bins[None, :], 0), axis=1)
    first = tl.sum(tl.where(is_it, (starts - (last - tiles) * BLOCK_M)[None, :], 0), axis=1) + tile * BLOCK_M
    end = tl.sum(tl.where(is_it, ends[None, :], 0), axis=1)
    count = tl.sum(tiles, axis=0)
    tl.store(tile_ptr, count)
    tl.store(tile_ptr + 1 + tile, expert, mask=tile < count)
    tl.store(tile_ptr + 1 + most + tile, first, mask=tile < count)
    tl.store(tile_ptr + 1 + 2 * most + tile, end, mask=tile < count)


@triton.jit(do_not_specialize=["most"])
def _persistent_up_kernel(
    x_rows,  # descriptor of [pairs, K], by expert
    w_rows,  # descriptor of [EXPERTS * K, 2N] = [gate | up]
    tile_ptr,  # see _list_kernel
    inner_ptr,  # [pairs, N], by expert
    most,
    alpha,
    limit,
    shift,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Each program takes every so many-th tile. Rows of a tile that are another expert's are not stored."""
    n_tiles: tl.constexpr = N // BLOCK_N
    row_tiles = tl.load(tile_ptr)
    for tile in tl.range(tl.program_id(0), row_tiles * n_tiles, tl.num_programs(0)):
        row_tile, column = place_of(tile, row_tiles, n_tiles, GROUP)
        expert = tl.load(tile_ptr + 1 + row_tile)
        first = tl.load(tile_ptr + 1 + most + row_tile)
        end = tl.load(tile_ptr + 1 + 2 * most + row_tile)
        gates = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_rows.load([first, k])
            gates = dot(x, w_rows.load([expert * K + k, column * BLOCK_N]), gates)
            ups = dot(x, w_rows.load([expert * K + k, N + column * BLOCK_N]), ups)
        kind: tl.constexpr = inner_ptr.dtype.element_ty
        inner = gate(gates.to(kind).to(tl.float32), ups.to(kind).to(tl.float32), alpha, limit, shift)
        place = first + tl.arange(0, BLOCK_M)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(inner_ptr + place.to(tl.int64)[:, None] * N + n[None, :], inner.to(kind), mask=(place < end)[:, None])


@triton.jit(do_not_specialize=["most"])
def _persistent_down_kernel(
    inner_rows,  # descriptor of [pairs, K], by expert
    w_rows,  # descriptor of [EXPERTS * K, N]
    tile_ptr,  # see _list_kernel
    part_ptr,  # [pairs, N], by expert
    most,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """As `_persistent_up_kernel`."""
    n_tiles: tl.constexpr = N // BLOCK_N
    row_tiles = tl.load(tile_ptr)
    for tile in tl.range(tl.program_id(0), row_tiles * n_tiles, tl.num_programs(0), flatten=True):
        row_tile, column = place_of(tile, row_tiles, n_tiles, GROUP)
        expert = tl.load(tile_ptr + 1 + row_tile)
        first = tl.load(tile_ptr + 1 + most + row_tile)
        end = tl.load(tile_ptr + 1 + 2 * most + row_tile)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = dot(inner_rows.load([first, k]), w_rows.load([expert * K + k, column * BLOCK_N]), acc)
        place = first + tl.arange(0, BLOCK_M)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        part_ptrs = part_ptr + place.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(part_ptrs, acc.to(part_ptr.dtype.element_ty), mask=(place < end)[:, None])


def products_fit(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether `products` takes rows like x [T, H] and these weights, and pays."""
    hidden, inner = x.shape[1], down.shape[1]
    whole = hidden % max(DOWN_TILES.n, UP_TILES.k) == 0 and inner % max(UP_TILES.n, DOWN_TILES.k) == 0
    kind = x.dtype == gate_up.dtype == down.dtype and x.dtype in (torch.bfloat16, torch.float16)
    described = describable(gate_up) and describable(down) and gate_up.is_contiguous() and down.is_contiguous()
    return capability() >= 90 and x.shape[0] >= ROWS and whole and kind and described


def products(
    x_sorted: Tensor,
    starts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: GatedActivation,
    up_tiles: Tiles = UP_TILES,
    down_tiles: Tiles = DOWN_TILES,
) -> Tensor:
    """Every pair's result [pairs, H]. x_sorted [pairs, H] by expert, starts [E + 1] where each expert's pairs begin."""
    pairs, hidden = x_sorted.shape
    stored, inner_size = down.shape[:2]
    inner = x_sorted.new_empty(pairs, inner_size)
    parts = x_sorted.new_empty(pairs, hidden)
    most = triton.cdiv(pairs, up_tiles.m) + min(stored, pairs)
    tiles = torch.empty(1 + 3 * most, dtype=torch.int32, device=x_sorted.device)
    _list_kernel[(triton.cdiv(most, LISTED),)](
        starts, tiles, most, EXPERTS=stored, BLOCK_E=triton.next_power_of_2(stored), BLOCK_M=up_tiles.m, LISTED=LISTED
    )
    for kernel, rows, weight, out, n, tile, settings in (
        (_persistent_up_kernel, x_sorted, gate_up, inner, inner_size, up_tiles, (most, *activation)),
        (_persistent_down_kernel, inner, down, parts, hidden, down_tiles, (most,)),
    ):
        k = weight.shape[1]
        kernel[(min(multiprocessors(x_sorted.device), most * (n // tile.n)),)](
            TensorDescriptor.from_tensor(rows, [tile.m, tile.k]),
            TensorDescriptor.from_tensor(weight.view(stored * k, -1), [tile.k, tile.n]),
            tiles, out, *settings, K=k, N=n, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=GROUP,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return parts
