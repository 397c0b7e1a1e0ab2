"""What `skipstone bench kernels` measures: ops at the sizes of MiniMax-M3 and DeepSeek-V3.2, whole on one GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from skipstone.tools.doctor.op_inputs import RELEASES, Load, Sizes

K = 1024
ROWS = (1, 4, 16, 64)


class Cell(NamedTuple):
    """One op at one size. `options` go to the maker of its case."""

    name: str
    op: str
    load: Load
    quick: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def check_sizes(self) -> tuple[Sizes, Load]:
        """A smaller call of the same kind, which plain torch in float64 can follow."""
        requests, n, context, *rest = self.load
        by_rows = context == 0
        n = min(n, 512 if by_rows else 96)
        smaller = Load(min(requests, 3), n, min(context, 5000), *rest)
        return RELEASES._replace(experts=8), smaller


def rows_load(rows: int) -> Load:
    """Rows of no particular request."""
    return Load(1, rows, 0)


def _selection() -> list[Cell]:
    cells = []
    for context in (8 * K, 32 * K, 128 * K):
        for batch in (1, 16, 64):
            for n in (1, 4):
                quick = (batch, n) == (1, 1) or (batch, context) == (16, 32 * K)
                name = f"M3 index+top-k {batch} x {n} at {context // K}k"
                cells.append(Cell(name, "block_select", Load(batch, n, context), quick))
    cells += [Cell(f"M3 index+top-k prompt {n // K}k", "block_select", Load(1, n, n)) for n in (8 * K, 32 * K)]
    for batch, n, context in ((1, 1, 8 * K), (1, 1, 128 * K), (16, 1, 32 * K), (16, 4, 32 * K), (1, 4, 128 * K)):
        for kind, options in (("", ()), ("FP8 ", (("fp8", True),))):
            name = f"DSA {kind}index+top-k {batch} x {n} at {context // K}k"
            cells.append(Cell(name, "token_select", Load(batch, n, context), batch == 1 and n == 1, options))
    return cells


def _attention() -> list[Cell]:
    cells = []
    for batch in (1, 16, 64):
        cells.append(Cell(f"M3 attention {batch} x 1", "sparse_gqa", Load(batch, 1, 8 * K), batch != 16))
        cells.append(Cell(f"M3 attention {batch} x 4, d=1", "sparse_gqa", Load(batch, 4, 8 * K), batch == 64))
        apart = Load(batch, 4, 32 * K, overlap=False)
        cells.append(Cell(f"M3 attention {batch} x 4, random", "sparse_gqa", apart, batch == 64))
    for n in (8 * K, 32 * K):
        for overlap in (True, False):
            name = f"M3 attention prompt {n // K}k, {'d=1' if overlap else 'random'}"
            cells.append(Cell(name, "sparse_gqa", Load(1, n, n, overlap), n == 8 * K))
    for batch, n in ((1, 1), (1, 4), (16, 1), (16, 4), (64, 1)):
        cells.append(Cell(f"dense attention {batch} x {n} at 8k", "dense_attention", Load(batch, n, 8 * K), n == 1))
    cells.append(Cell("dense attention prompt 8k", "dense_attention", Load(1, 8 * K, 8 * K)))
    for batch, n in ((1, 1), (1, 4), (16, 1), (64, 1), (32, 4)):
        name = f"DSA sparse MLA {batch} x {n} at 32k"
        cells.append(Cell(name, "sparse_mla", Load(batch, n, 32 * K), batch in (1, 64) and n == 1))
    cells.append(Cell("DSA sparse MLA prompt 2k", "sparse_mla", Load(1, 2 * K, 8 * K)))
    cells.append(Cell("M3 page table 64 x 4", "verify_page_table", Load(64, 4, 8 * K)))
    return cells


def _products() -> list[Cell]:
    shapes: dict[str, dict[str, Any]] = {
        "qkv+index": {"outputs": 9856},
        "out": {"inner": 8192, "outputs": 6144},
        "dense up": {"outputs": 24576},
        "dense down": {"inner": 12288, "outputs": 6144},
        "router": {"outputs": 128, "weight_dtype": torch.float32},
    }
    cells = [
        Cell(f"linear {name} T={rows}", "linear", rows_load(rows), rows in (1, 64), tuple(options.items()))
        for name, options in shapes.items()
        for rows in ROWS
    ]
    for rows in (1, 4, 64):
        vocabulary = (("outputs", RELEASES.vocab),)
        cells.append(Cell(f"vocabulary T={rows}", "linear", rows_load(rows), rows == 4, vocabulary))
        cells.append(Cell(f"sample T={rows}", "sample", rows_load(rows), rows == 4))
    return cells


def _rows() -> list[Cell]:
    cells = []
    for rows in (*ROWS, 256, 8 * K):
        cells.append(Cell(f"MoE T={rows}", "experts_forward", rows_load(rows), rows in (1, 16)))
    for rows in (1, 64, 256):
        cells.append(Cell(f"qk-norm+rope+insert T={rows}", "norm_rotate_store", rows_load(rows), rows == 64))
        cells.append(Cell(f"add+norm T={rows}", "add_rms_norm", rows_load(rows), rows == 64))
    for rows in (1, 64):
        for kind, options in (("", ()), ("FP8 ", (("fp8", True),))):
            cells.append(Cell(f"DSA {kind}index rows T={rows}", "index_rows", rows_load(rows), rows == 64, options))
    cells += [Cell(f"route T={rows}", "route", rows_load(rows)) for rows in (1, 64)]
    cells += [Cell(f"absorb T={rows}", "bmm", rows_load(rows)) for rows in (1, 64)]
    return cells


CELLS = (*_selection(), *_attention(), *_products(), *_rows())
