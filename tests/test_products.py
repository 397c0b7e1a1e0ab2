"""Matrix products in exact mode: the bits of a row, whatever the number of rows, of products in a batch, of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from skipstone.kernels.reference.gemm import bmm, linear

COUNTS = [*range(1, 14), 16, 17, 31, 64, 257]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Libraries split products by the number of threads."""
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def on_one_thread(product: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    """What every number of threads must give, as small steps run on one and large steps on all."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = product(a, b, exact=True)
    torch.set_num_threads(threads)
    return out


def random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("inner", "outer", "dtype"),
    [(64, 128, FLOAT), (256, 320, FLOAT), (256, 16, FLOAT), (33, 17, FLOAT), (64, 48, HALF)],
)
def test_rows_of_linear(inner: int, outer: int, dtype: torch.dtype, threads: int) -> None:
    weight = random(1, inner, outer, dtype=dtype)
    x = random(2, max(COUNTS), inner, dtype=dtype)
    whole = on_one_thread(linear, x, weight)
    for count in COUNTS:
        for start in {0, min(5, max(COUNTS) - count), max(COUNTS) - count}:
            part = slice(start, start + count)
            same = torch.equal(linear(x[part], weight, exact=True), whole[part])
            assert same, f"{count} rows from row {start}, {threads} threads"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("inner", "outer", "dtype"), [(16, 256, FLOAT), (32, 512, FLOAT), (256, 16, FLOAT), (24, 32, FLOAT), (16, 64, HALF)]
)
def test_rows_of_bmm(inner: int, outer: int, transposed: bool, dtype: torch.dtype, threads: int) -> None:
    """`transposed`: the second factor as attention has it, keys [S, D] viewed as [D, S]."""
    b = random(1, 8, outer, inner, dtype=dtype).mT if transposed else random(1, 8, inner, outer, dtype=dtype)
    a = random(2, 8, max(COUNTS), inner, dtype=dtype)
    whole = on_one_thread(bmm, a, b)
    for count in COUNTS:
        for batch in (1, 2, 3, 8):
            got = bmm(a[:batch, :count].contiguous(), b[:batch], exact=True)
            same = torch.equal(got, whole[:batch, :count])
            assert same, f"{count} rows in a batch of {batch}, {threads} threads"


def test_inexact_products_depend_on_their_rows() -> None:
    """If no plain product did here, the tests above would show nothing."""
    differs = False
    for inner, outer in ((64, 128), (256, 320), (256, 16)):
        weight, x = random(1, inner, outer, dtype=torch.float32), random(2, 64, inner, dtype=torch.float32)
        whole = linear(x, weight, exact=False)
        differs |= any(not torch.equal(linear(x[:n], weight, exact=False), whole[:n]) for n in range(1, 9))
    if not differs:
        pytest.skip("this machine's products do not depend on their number of rows")
