"""What `skipstone bench kernels` measures: ops at the sizes of MiniMax-M3 and DeepSeek-V3.2, whole on one GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from skipstone.tools.doctor.op_inputs import RELEASES, Shape, Sizes

K = 1024


class Cell(NamedTuple):
    """One op at one size. `options` go to the maker of its case."""

    name: str
    op: str
    shape: Shape
    quick: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def check_sizes(self) -> tuple[Sizes, Shape]:
        """A smaller call of the same kind, which plain torch in float64 can follow."""
        requests, n, context, *rest = self.shape
        smaller = Shape(min(requests, 3), min(n, 96 if context else 512), min(context, 5000), *rest)
        return RELEASES._replace(experts=8), smaller


def _cells(name: str, op: str, context: int, shapes: str, overlap: bool = True, **options: Any) -> list[Cell]:
    """A cell for each of `shapes`, requests x rows; * marks the quick ones."""
    cells = []
    for text in shapes.split():
        r, n = map(int, text.rstrip("*").split("x"))
        shape = Shape(r, n, context, overlap)
        cells.append(Cell(name.format(r=r, n=n), op, shape, text.endswith("*"), tuple(options.items())))
    return cells


SIZES = "1x1* 1x4 1x16 1x64*"  # of products: rows of no particular request
CELLS = (
    *_cells("M3 index+top-k {r} x {n} at 8k", "block_select", 8 * K, "1x1* 1x4 16x1 16x4 64x1 64x4"),
    *_cells("M3 index+top-k {r} x {n} at 32k", "block_select", 32 * K, "1x1* 1x4 16x1* 16x4* 64x1 64x4"),
    *_cells("M3 index+top-k {r} x {n} at 128k", "block_select", 128 * K, "1x1* 1x4 16x1 16x4 64x1 64x4"),
    *_cells("M3 index+top-k prompt 8k", "block_select", 8 * K, "1x8192"),
    *_cells("M3 index+top-k prompt 32k", "block_select", 32 * K, "1x32768"),
    *_cells("DSA index+top-k {r} x {n} at 8k", "token_select", 8 * K, "1x1*"),
    *_cells("DSA index+top-k {r} x {n} at 32k", "token_select", 32 * K, "16x1 16x4"),
    *_cells("DSA index+top-k {r} x {n} at 128k", "token_select", 128 * K, "1x1* 1x4"),
    *_cells("DSA FP8 index+top-k {r} x {n} at 8k", "token_select", 8 * K, "1x1*", fp8=True),
    *_cells("DSA FP8 index+top-k {r} x {n} at 32k", "token_select", 32 * K, "16x1 16x4", fp8=True),
    *_cells("DSA FP8 index+top-k {r} x {n} at 128k", "token_select", 128 * K, "1x1* 1x4", fp8=True),
    *_cells("M3 attention {r} x 1", "sparse_gqa", 8 * K, "1x1* 16x1 64x1*"),
    *_cells("M3 attention {r} x 4, d=1", "sparse_gqa", 8 * K, "1x4 16x4 64x4*"),
    *_cells("M3 attention {r} x 4, random", "sparse_gqa", 32 * K, "1x4 16x4 64x4*", overlap=False),
    *_cells("M3 attention prompt 8k, d=1", "sparse_gqa", 8 * K, "1x8192*"),
    *_cells("M3 attention prompt 8k, random", "sparse_gqa", 8 * K, "1x8192*", overlap=False),
    *_cells("M3 attention prompt 32k, d=1", "sparse_gqa", 32 * K, "1x32768"),
    *_cells("M3 attention prompt 32k, random", "sparse_gqa", 32 * K, "1x32768", overlap=False),
    *_cells("dense attention {r} x {n} at 8k", "dense_attention", 8 * K, "1x1* 1x4 16x1* 16x4 64x1*"),
    *_cells("dense attention prompt 8k", "dense_attention", 8 * K, "1x8192"),
    *_cells("DSA sparse MLA {r} x {n} at 32k", "sparse_mla", 32 * K, "1x1* 1x4 16x1 64x1* 32x4"),
    *_cells("DSA sparse MLA prompt 2k", "sparse_mla", 8 * K, "1x2048"),
    *_cells("M3 page table 64 x 4", "verify_page_table", 8 * K, "64x4"),
    *_cells("linear qkv+index T={n}", "linear", 0, SIZES, outputs=9856),
    *_cells("linear out T={n}", "linear", 0, SIZES, inner=8192, outputs=6144),
    *_cells("linear dense up T={n}", "linear", 0, SIZES, outputs=24576),
    *_cells("linear dense down T={n}", "linear", 0, SIZES, inner=12288, outputs=6144),
    *_cells("linear router T={n}", "linear", 0, SIZES, outputs=128, weight_dtype=torch.float32),
    *_cells("vocabulary T={n}", "linear", 0, "1x1 1x4* 1x64", outputs=RELEASES.vocab),
    *_cells("sample T={n}", "sample", 0, "1x1 1x4* 1x64"),
    *_cells("MoE T={n}", "experts_forward", 0, "1x1* 1x4 1x16* 1x64 1x256 1x8192"),
    *_cells("qk-norm+rope+insert T={n}", "norm_rotate_store", 0, "1x1 1x64* 1x256"),
    *_cells("add+norm T={n}", "add_rms_norm", 0, "1x1 1x64* 1x256"),
    *_cells("DSA index rows T={n}", "index_rows", 0, "1x1 1x64*"),
    *_cells("DSA FP8 index rows T={n}", "index_rows", 0, "1x1 1x64*", fp8=True),
    *_cells("route T={n}", "route", 0, "1x1 1x64"),
    *_cells("absorb T={n}", "bmm", 0, "1x1 1x64"),
)
