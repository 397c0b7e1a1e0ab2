"""Random requests in a paged cache, for kernels that see nothing else: their keys, their queries, NaN everywhere else.

Rows are named (request, position), whatever call they are part of, so that results of different calls compare by row.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skipstone.core.batch import FIRST_BLOCK, SPARE_BLOCK, ZERO_BLOCK, Span
from skipstone.kernels.ops import OP_NAMES, Implementation
from skipstone.registry import KERNELS

# "cuda" runs the same tests on a GPU, with TRITON_INTERPRET=0; on the CPU Triton's interpreter runs the kernels.
DEVICE = os.environ.get("TEST_KERNEL_DEVICE", "cpu")
if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
    from oracles.interpreter import harden

    harden()

Row = tuple[int, int]  # request and position

# How far a row may lie from the same row in float64, relative to the row's length. Rounding a result to bfloat16 alone
# costs 2^-9 / sqrt(3) = 1.1e-3 of it; probabilities, and what lies between two products, are rounded once more.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}

# What reads a value, or a number of values, back to the host: an op that does cannot be part of a CUDA graph.
SYNCHRONISING = (
    "_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive",
    "repeat_interleave.Tensor", "equal", "is_nonzero",
)  # fmt: skip


class NoSync(TorchDispatchMode):
    """Within it, whatever would read tensors back to the host raises."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        by_mask = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)
            for i in (args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ())
        )
        if by_mask or any(name == word or name.startswith(word + ".") for word in SYNCHRONISING):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out uninitialised is full of NaN, or of large integers."""
    deterministic, fill = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def moved(value: Any, device: str) -> Any:
    """A tensor, or a tuple of tensors and other things, on that device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class Kernel:
    """An op by its name: called without leave to synchronise, in poisoned memory, its arguments left alone.

    Arguments and results are on the CPU, whatever device the kernel runs on. On a GPU it runs once more as a captured
    graph, which must give the same bits. `by` is the implementation that all tests get: Triton's, unless a test file
    about CPUs says otherwise.
    """

    by: ClassVar[Implementation] = "triton"

    def __init__(self, name: str, writes: bool = False) -> None:
        assert name in OP_NAMES, name
        self.name, self.writes = name, writes

    def op(self) -> Callable[..., Any]:
        return KERNELS.load(f"{self.name}/{self.by}")

    def __call__(self, *args: Any) -> Any:
        op, inputs = self.op(), [moved(arg, DEVICE) for arg in args]
        tensors = [arg for arg in inputs if isinstance(arg, Tensor) and arg.numel() < 1_000_000]
        before = [arg.clone() for arg in tensors]
        with poisoned_memory(), NoSync() if self.by == "triton" else nullcontext():
            out = op(*inputs)
        if self.writes:
            for arg, result in zip(args, inputs, strict=True):
                copy_back(arg, result)
        else:
            for arg, copy in zip(tensors, before, strict=True):
                assert same_bits(arg, copy), f"{self.name} changed an argument of shape {list(arg.shape)}"
            if DEVICE == "cuda":
                assert all(map(same_bits, flat(out), flat(replayed(op, inputs)))), (
                    f"{self.name}: a graph gives other bits"
                )
        return moved(out, "cpu")


def flat(value: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [value] if isinstance(value, Tensor) else [part for item in value for part in flat(item)]


def copy_back(arg: Any, result: Any) -> None:
    """Results that an op wrote into its arguments, into the arguments that the test knows."""
    if isinstance(arg, Tensor):
        if arg.data_ptr() != result.data_ptr():
            arg.copy_(result)
    elif isinstance(arg, tuple):
        for part, item in zip(arg, result, strict=True):
            copy_back(part, item)


def replayed(op: Callable[..., Any], inputs: list[Any]) -> Any:
    """The op's result from the second replay of a CUDA graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*inputs)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return out


def cases(*axes: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """Parameters of a whole matrix, of which those that are not `quick` run with `pytest -m long` only."""
    return [
        pytest.param(*values, marks=() if quick(*values) else pytest.mark.long) for values in itertools.product(*axes)
    ]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality in which NaN equals NaN; in FP8 the same NaN."""
    if a.itemsize == b.itemsize == 1:
        return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(nan=1.25), b.nan_to_num(nan=1.25))


def error(got: Tensor, expected: Tensor) -> float:
    """Largest distance of a row from its expected value, relative to the larger of its length and a typical one.

    Rows are the first dimension. NaN where they are none give infinity.
    """
    got, expected = got.double().flatten(1), expected.double().flatten(1)
    length = expected.norm(dim=1)
    length = length.clamp(min=float(length.mean()) * 0.1 + 1e-30)
    worst = ((got - expected).norm(dim=1) / length).max() if len(got) else torch.tensor(0.0)
    return float(worst.nan_to_num(nan=torch.inf))


class Requests:
    """Requests of these lengths in caches of shuffled blocks, with a query for each of their positions.

    Whatever no request wrote is NaN: the rest of its last block, the blocks of none, SPARE_BLOCK. ZERO_BLOCK is zero.
    """

    def __init__(self, lengths: Iterable[int], block_size: int, seed: int = 0, dtype: torch.dtype = torch.float32):
        self.lengths, self.block_size, self.dtype = list(lengths), block_size, dtype
        self.generator = torch.Generator().manual_seed(seed)
        counts = [-(-n // block_size) for n in self.lengths]
        self.num_blocks = FIRST_BLOCK + sum(counts) + 2
        ids = list(range(FIRST_BLOCK, self.num_blocks))
        random.Random(seed).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.keys: dict[str, list[Tensor]] = {}  # per request [length, heads, width]
        self.caches: dict[str, Tensor] = {}
        self.queries: dict[str, list[Tensor]] = {}

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def small(self, *shape: int) -> Tensor:
        """-1, 0 and 1: products and sums of them are exact in any order, and many are equal."""
        return torch.randint(-1, 2, shape, generator=self.generator).float()

    def add_cache(
        self, name: str, heads: int, width: int, draw: Callable[..., Tensor] | None = None, dtype: Any = None
    ) -> None:
        """Keys of that many heads for every request, and the cache that holds them."""
        draw = draw or self.randn
        self.set_cache(name, [draw(n, heads, width).to(dtype or self.dtype) for n in self.lengths])

    def set_cache(self, name: str, keys: list[Tensor]) -> None:
        """These keys, per request [length, heads, width], and the cache that holds them."""
        _, heads, width = keys[0].shape
        cache = torch.full((self.num_blocks, heads, self.block_size, width), torch.nan, dtype=keys[0].dtype)
        cache[ZERO_BLOCK] = 0
        for table, rows in zip(self.tables, keys, strict=True):
            for place, block in enumerate(table):
                part = rows[place * self.block_size : (place + 1) * self.block_size]
                cache[block, :, : len(part)] = part.transpose(0, 1)
        self.keys[name], self.caches[name] = keys, cache

    def add_query(
        self, name: str, heads: int, *width: int, draw: Callable[..., Tensor] | None = None, dtype: Any = None
    ) -> None:
        """A query of that many heads for every position of every request."""
        draw = draw or self.randn
        self.queries[name] = [draw(n, heads, *width).to(dtype or self.dtype) for n in self.lengths]

    def call(self, requests: list[int], positions: list[list[int]], extra_columns: int = 0) -> Call:
        """A span of these requests with rows at these positions, -1 for padding."""
        return Call(self, requests, positions, extra_columns)

    def last(self, n: int, requests: Iterable[int] | None = None, extra_columns: int = 0) -> Call:
        """A span of the last n positions of each request; rows before its first one are padding."""
        chosen = list(range(len(self.lengths)) if requests is None else requests)
        positions = [[max(self.lengths[r] - n + i, -1) if r >= 0 else -1 for i in range(n)] for r in chosen]
        return Call(self, chosen, positions, extra_columns)


class Call:
    """The rows of one call: its span, and tensors in the order of its rows. Request -1 is padding as a whole."""

    def __init__(self, world: Requests, requests: list[int], positions: list[list[int]], extra_columns: int) -> None:
        self.world = world
        self.rows: list[Row | None] = [
            (r, p) if r >= 0 and p >= 0 else None for r, row in zip(requests, positions, strict=True) for p in row
        ]
        tables = [world.tables[r] if r >= 0 else [] for r in requests]
        columns = max(1, *(len(table) for table in tables)) + extra_columns
        padded = [table + [ZERO_BLOCK] * (columns - len(table)) for table in tables]
        n = len(positions[0])
        self.span = Span(
            slice(0, len(requests)), slice(0, len(self.rows)), n, torch.tensor(positions), torch.tensor(padded)
        )

    def query(self, name: str) -> Tensor:
        """[R * n, heads, ...], NaN for padding."""
        queries = self.world.queries[name]
        nothing = torch.full_like(queries[0].new_empty(queries[0].shape[1:]), torch.nan)
        return torch.stack([nothing if row is None else queries[row[0]][row[1]] for row in self.rows])

    def select(self, groups: int, unit: int, budget: int, leave_out_own: bool = False) -> Tensor:
        """Random units for each row and group, the same in every call: [R * n, groups, budget] int32."""

        def choose(row: Row | None, group: int) -> list[int]:
            if row is None:
                return [-1] * budget
            rng = random.Random(f"{row} {group}")
            own = row[1] // unit
            count = rng.choice([budget, budget, rng.randint(1, budget)])
            chosen = rng.sample(range(own), min(own, count - 1)) + ([] if leave_out_own else [own])
            return sorted(chosen) + [-1] * (budget - len(chosen))

        rows = [[choose(row, group) for group in range(groups)] for row in self.rows]
        return torch.tensor(rows, dtype=torch.int32)

    def real(self) -> list[int]:
        """Indices of the rows that are no padding."""
        return [i for i, row in enumerate(self.rows) if row is not None]

    def by_row(self, out: Tensor, padding: float | None = None) -> dict[Row, Tensor]:
        """Results by their names. Rows of padding must hold that value."""
        assert len(out) == len(self.rows)
        for i, row in enumerate(self.rows):
            if row is None and padding is not None:
                assert bool((out[i] == padding).all()), f"padding row {i} holds other than {padding}"
        return {row: out[i] for i, row in enumerate(self.rows) if row is not None}


def assert_same_rows(got: dict[Row, Tensor], expected: dict[Row, Tensor], what: str) -> None:
    """Rows of two calls that both have have the same bits; at least one does."""
    shared = got.keys() & expected.keys()
    assert shared
    other = [row for row in sorted(shared) if not same_bits(got[row], expected[row])]
    assert not other, f"{what}: (request, position) {other[:8]} of {len(shared)} differ"


def fresh_slots(
    rows: int, blocks: int, block_size: int, seed: int, padding: Iterable[int] = ()
) -> tuple[Tensor, Tensor]:
    """Distinct slots (block, offset) for rows; padding rows all get the same slot of SPARE_BLOCK."""
    rng = random.Random(seed)
    slots = rng.sample(range(FIRST_BLOCK * block_size, blocks * block_size), rows)
    block, offset = torch.tensor(slots) // block_size, torch.tensor(slots) % block_size
    skipped = list(padding)
    block[skipped], offset[skipped] = SPARE_BLOCK, 0
    return block, offset
