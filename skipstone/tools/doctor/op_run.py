"""Runs a case of an op: as it is, against plain torch in higher precision, and one row of it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from skipstone.core.batch import SamplingRows, Span
from skipstone.kernels.ops import Implementation
from skipstone.kernels.reference.block_table import PageTable
from skipstone.kernels.reference.pointwise import Rotary
from skipstone.registry import KERNELS
from skipstone.tools.doctor.op_cases import EXACT, FLOAT32, OP_CASES, VARIANTS, WHOLE, OpCase
from skipstone.tools.doctor.op_inputs import SMALL, Inputs, Shape, Sizes

# Of all of a result against float64, by its length. bfloat16 rounds to 2^-9; results between products are rounded too.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
SELF_TEST_SHAPE = Shape(3, 2, 200, overlap=False, padding=True)


class Verdict(msgspec.Struct):
    """One op: what the self-test found of it, what runs it here, and why."""

    op: str
    error: float | None  # relative, of numbers; None: there is no result
    same_alone: bool | None  # whether a row alone has the bits that it has among others; None: no such promise
    failure: str | None = None
    implementation: str = ""
    reason: str = ""


def in_words(fault: Exception) -> str:
    """What went wrong, in one line that is not too long."""
    return " ".join(f"{type(fault).__name__}: {fault}".split())[:200]


def import_kernels(names: Iterable[str]) -> None:
    """Import entries of KERNELS, which threads had better not do at once; what fails fails again when it is run."""
    for name in names:
        with suppress(Exception):
            KERNELS.load(name)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same arguments with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def arguments(case: OpCase, exact: bool) -> tuple[Any, ...]:
    """A case's arguments, with the flag in its place."""
    return tuple(exact if arg is EXACT else arg for arg in case.args)


def results(case: OpCase, op: Callable[..., Any], exact: bool, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Everything that the op returns or writes, in new tensors, computed from inputs of `dtype`."""

    def convert(tensor: Tensor) -> Tensor:
        changes = dtype is not None and tensor.is_floating_point()
        return tensor.to(dtype) if changes else tensor

    written = [convert(cache).clone() for cache in case.written]
    fresh = {id(old): new for old, new in zip(case.written, written, strict=True)}
    out = op(*map_tensors(arguments(case, exact), lambda tensor: fresh.get(id(tensor), convert(tensor))))
    shown = [tensor[:, case.shown] if tensor.dim() > 1 else tensor for tensor in tensors_in(out)]
    return [*shown, *written]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of nested tuples, in order."""
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


class Distance(NamedTuple):
    """How far results are from what they should be."""

    error: float  # largest relative error of numbers; NaN counts as infinite
    other_ids: float  # largest share of integers that differ

    def failure(self, dtype: torch.dtype) -> str | None:
        """Why results in `dtype` are wrong."""
        if self.other_ids:
            return f"{100 * self.other_ids:.2g} % of the ids differ"
        return None if self.error <= TOLERANCE[dtype] else f"error {self.error:.1e} is above {TOLERANCE[dtype]:.1e}"


def distance(got: list[Tensor], expected: list[Tensor]) -> Distance:
    """Compare the results of two calls."""
    error, ids = 0.0, 0.0
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape:
            return Distance(torch.inf, 1.0)
        if b.is_floating_point():
            away = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)
            error = max(error, float(away.nan_to_num(nan=torch.inf)))
        elif b.numel():
            ids = max(ids, float((a != b).double().mean()))
    return Distance(error, ids)


def compare(op: str, case: OpCase, function: Callable[..., Any]) -> list[Distance]:
    """How far an op is, fast and exact, from plain torch in float64: in float32 where that is part of what it means."""
    precision = torch.float32 if op in FLOAT32 else torch.float64
    expected = results(case, KERNELS.load(f"{op}/reference"), False, precision)
    modes = (False, True) if case.has_exact else (False,)
    return [distance(results(case, function, exact), expected) for exact in modes]


def alone(case: OpCase, row: int) -> OpCase:
    """The case of one of its rows."""

    def cut(value: Any, dim: int) -> Any:
        match value:
            case Span():
                request, place = divmod(row, value.query_len)
                positions = value.positions[request : request + 1, place : place + 1]
                return Span(slice(0, 1), slice(0, 1), 1, positions, value.block_table[request : request + 1])
            case Rotary():
                return Rotary(value.cos[row : row + 1], value.sin[row : row + 1], value.partner)
            case PageTable() | SamplingRows():
                return map_tensors(value, lambda tensor: tensor[row : row + 1])
            case _:
                return value.narrow(dim, row, 1)

    args = tuple(cut(arg, case.row_dim) if i in case.per_row else arg for i, arg in enumerate(case.args))
    return case._replace(args=args, written=tuple(cache.clone() for cache in case.written))


def same_alone(case: OpCase, op: Callable[..., Any], row: int) -> bool:
    """Whether a row computed alone in exact mode has the bits that it has among the others."""
    together, single = results(case, op, True), results(alone(case, row), op, True)
    returned = len(together) - len(case.written)
    cut = [many.narrow(case.row_dim, row, 1) for many in together[:returned]]
    bits = ([tensor.contiguous().view(torch.uint8) for tensor in side] for side in (cut, single[:returned]))
    return all(torch.equal(many, one) for many, one in zip(*bits, strict=True))


def make_case(op: str, sizes: Sizes, shape: Shape, dtype: torch.dtype, device: torch.device, **options: Any) -> OpCase:
    """A case to be compared. `options` go to the case's own maker."""
    return OP_CASES[op](Inputs(sizes, shape, dtype, device, 1, op in WHOLE), **options)


def examine(op: str, implementation: Implementation, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Compare an op with its reference, and a row alone with the row among others. Never raises for a broken op."""
    found: list[Distance] = []
    same: bool | None = None
    try:
        function = KERNELS.load(f"{op}/{implementation}")
        for options in ({}, *VARIANTS.get(op, ())):
            case = make_case(op, SMALL, SELF_TEST_SHAPE, dtype, device, **options)
            found += compare(op, case, function)
            if case.per_row:
                same = same is not False and same_alone(case, function, 2)
    except Exception as fault:  # whatever a kernel does wrong here is what the self-test is for
        return Verdict(op, None, None, in_words(fault))
    failures = [text for item in found if (text := item.failure(dtype)) is not None]
    if same is False:
        failures.append("a row alone has other bits than among others")
    return Verdict(op, max(item.error for item in found), same, "; ".join(dict.fromkeys(failures)) or None)
