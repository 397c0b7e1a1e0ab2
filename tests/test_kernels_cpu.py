"""Kernels for CPUs: what Triton's are held to, at all shapes and odd ones; and rows whose bits no threshold changes."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import test_index_rows as index_rows
import test_kernels_attention as attention
import test_kernels_rows as rowwise
import test_kernels_selection as selection
import torch
from oracles.block_table import attend
from oracles.kernels import DEVICE, Kernel, Requests, assert_same_rows, error, fresh_slots, same_bits
from oracles.selection import choose
from torch import Tensor

from skipstone.kernels.reference.gemm import cpu_threads
from skipstone.kernels.reference.norm_rope import HeadStore
from skipstone.kernels.reference.pointwise import GatedActivation
from skipstone.registry import KERNELS
from skipstone.tools.doctor.op_run import examine

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="kernels for CPUs")

FLOAT = torch.float32
CPU = torch.device("cpu")
OPS = sorted(name.removesuffix("/numba") for name in KERNELS.entries if name.endswith("/numba"))
randn = rowwise.randn

ODD_SHAPES = {
    attention: {
        "group of 1": attention.Shape("dense_attention", 3, 3, 7, 16),
        "group of 5": attention.Shape("dense_attention", 10, 2, 33, 16),
        "three units a block": attention.Shape("sparse_gqa", 6, 3, 31, 48, 16, 3),
        "group of 7": attention.Shape("sparse_gqa", 7, 1, 5, 32, 8, 4),
        "group of 8, budget of 1": attention.Shape("sparse_gqa", 16, 2, 24, 16, 16, 1),
    },
    selection: {
        "three units a block": selection.Shape("block_select", 2, 7, 48, 16, 4, 1, 2),
        "budget of 1": selection.Shape("block_select", 1, 1, 8, 8, 1, 0, 1),
        "all forced": selection.Shape("block_select", 5, 33, 32, 8, 3, 1, 2),
    },
}


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Kernel` runs the ops of this file, and the shared tests know its odd shapes."""
    monkeypatch.setattr(Kernel, "by", "numba")
    for module, shapes in ODD_SHAPES.items():
        for name, shape in shapes.items():
            monkeypatch.setitem(module.SHAPES, name, shape)


# The tests of Triton's kernels, in float32, with the parts of their matrices that are too long for an interpreter

# Ops that CPUs have no kernels for; other types, and views that no layer makes; tests of twins and of the tests.
NOT_SHARED = {
    "test_greedy", "test_odd_logits", "test_noise", "test_every_feature", "test_sampling_row_by_row",
    "test_index_tensors_of_32_bits", "test_slots_of_32_bits", "test_gated_of_views", "test_store_of_quantised_rows",
    "test_bytes_are_those_of_the_twin", "test_bytes_at_the_edges", "test_parts_of_projections",
    "test_offsets_beyond_32_bits", "test_store_beyond_32_bits", "test_slots_beyond_32_bits",
    "test_same_as_the_reference", "test_the_oracle_notices_single_mistakes", "test_span_type_is_what_kernels_get",
}  # fmt: skip


def matrix(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The arguments that a test's own parametrisation gives it."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args
            names = [names] if isinstance(names, str) else names
            rows = [getattr(value, "values", value if len(names) > 1 else (value,)) for value in values]
            axes.append([dict(zip(names, row, strict=True)) for row in rows])
    for parts in itertools.product(*axes):
        yield {name: value for part in parts for name, value in part.items()}


def shared(module: ModuleType) -> list[Any]:
    """Calls of a module's tests that concern kernels for CPUs. Those look at `exact` in products only."""
    odd = ODD_SHAPES.get(module, {})
    params = []
    for title, test in vars(module).items():
        if not title.startswith("test_") or title in NOT_SHARED:
            continue
        calls = [call for call in matrix(test) if call.get("dtype", FLOAT) == FLOAT or title == "test_store"]
        if odd:
            calls = [call for call in calls if module.SHAPES[call["name"]].op in OPS and call.get("exact", True)]
            ops = {module.SHAPES[call["name"]].op for call in calls}
            more = [name for name, shape in odd.items() if shape.op in ops]
            calls += unique(call | {"name": name} for name in more for call in calls)
        params += [pytest.param(test, call, id="-".join([title, *map(str, call.values())])) for call in calls]
    return params


def unique(calls: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(call) for call in dict.fromkeys(tuple(call.items()) for call in calls)]


@pytest.mark.parametrize(("test", "call"), shared(attention))
def test_attention(test: Callable[..., None], call: dict[str, Any]) -> None:
    test(**call)


@pytest.mark.parametrize(("test", "call"), shared(selection))
def test_selection(test: Callable[..., None], call: dict[str, Any]) -> None:
    test(**call)


@pytest.mark.parametrize(("test", "call"), [*shared(rowwise), *shared(index_rows)])
def test_rows(test: Callable[..., None], call: dict[str, Any]) -> None:
    test(**call)


# Every op


@pytest.mark.parametrize("op", OPS)
def test_what_doctor_tests(op: str) -> None:
    verdict = examine(op, "numba", FLOAT, CPU)
    assert verdict.failure is None and verdict.same_alone is not False and verdict.error is not None


@pytest.mark.parametrize("op", OPS)
def test_signatures_are_the_twins(op: str) -> None:
    kernel, twin = (inspect.signature(KERNELS.load(f"{op}/{by}")) for by in ("numba", "reference"))
    assert [(p.name, p.default) for p in kernel.parameters.values()] == [
        (p.name, p.default) for p in twin.parameters.values()
    ]


# Attention and selection


@pytest.mark.parametrize("name", ["demo dense", "group of 5", "demo blocks", "two units a block", "group of 7"])
def test_attention_in_any_chunks(name: str) -> None:
    """A request's rows one at a time, in threes and fours, in chunks of other lengths, all at once: the same bits."""
    size = attention.SHAPES[name].block_size
    requests = attention.world(name, some=[3 * size + 5])
    length = requests.lengths[0]
    whole = attention.rows_of(name, requests.last(length), True)
    for chunk in (1, 3, 4, 17, size, size + 1):
        for first in range(0, length, chunk):
            positions = list(range(first, min(first + chunk, length)))
            assert_same_rows(
                attention.rows_of(name, requests.call([0], [positions]), True), whole, f"chunks of {chunk}"
            )


@pytest.mark.parametrize("unit", [0, 8])
def test_values_of_another_width(unit: int) -> None:
    """Keys of 24 numbers with values of 9; a strided query, as a slice of a projection is."""
    requests = Requests([1, 15, 40], 16)
    requests.add_cache("k", 2, 24)
    requests.add_cache("v", 2, 9)
    requests.add_query("q", 9, 24)
    call = requests.last(2)
    q, caches, indices = call.query("q")[:, 3:], (requests.caches["k"], requests.caches["v"]), call.select(2, 8, 3)
    name, chosen = ("sparse_gqa", (indices, unit)) if unit else ("dense_attention", ())
    out = Kernel(name)(q, *caches, *chosen, call.span, 0.2, True)
    assert list(out.shape) == [6, 6, 9]
    for i in call.real():
        request, position = call.rows[i]
        for head in range(2):
            chosen = indices[i, head].tolist()
            tokens = [t for t in range(position + 1) if not unit or t // unit in chosen]
            keys, values = (requests.keys[name][request][tokens, head] for name in "kv")
            expected = attend(q[i, 3 * head : 3 * head + 3], keys, values, 0.2)
            assert error(out[i, 3 * head : 3 * head + 3], expected) < 1e-5


@pytest.mark.parametrize("name", ["demo dense", "demo blocks"])
def test_a_visible_key_that_is_not_a_number(name: str) -> None:
    """It makes its own request's rows NaN, as in the plain-torch twin, rather than look like an answer."""
    shape = attention.SHAPES[name]
    requests = attention.world(name, some=[40, 40])
    requests.keys["k"][0][3] = math.nan
    requests.set_cache("k", requests.keys["k"])
    call = requests.last(2)
    everything = torch.tensor([0, 1, -1, -1, -1], dtype=torch.int32).expand(4, shape.kv_heads, -1).contiguous()
    got = attention.rows_of(name, call, True, everything if shape.unit else None)
    for (request, _), out in got.items():
        assert bool(out.isnan().all()) if request == 0 else bool(out.isfinite().all())


def test_what_selections_do_not_name_is_never_read() -> None:
    """Blocks that a row does not select hold NaN; so do the unwritten slots of the block it stands in."""
    shape = attention.SHAPES["two units a block"]
    requests = attention.world("two units a block", some=[7 * 16 + 5])
    call = requests.last(1)
    indices = torch.tensor([[[1, 4, 7], [0, 7, -1]]], dtype=torch.int32)
    expected = attention.expected_row(shape, requests, (0, 116), 116, indices[0])
    for name in "kv":
        keys = requests.keys[name][0]
        for head, kept in enumerate(((1, 4, 7), (0, 7))):
            for unit in set(range(8)) - set(kept):
                keys[unit * 16 : unit * 16 + 16, head] = math.nan
        requests.set_cache(name, requests.keys[name])
    got = attention.rows_of("two units a block", call, True, indices)[0, 116]
    assert error(got[None], expected[None]) < 1e-5


@pytest.mark.parametrize("width", [5, 32, 40, 128])
def test_equal_keys_score_alike_wherever_they_stand(width: int) -> None:
    """The sum over a key's numbers has one order: ties of equal keys are exact, so the lowest ids win."""
    requests = Requests([16 * 32 - 3], 32)
    requests.add_cache("k", 1, width)
    requests.add_query("q", 1, width)
    keys = requests.keys["k"][0]
    keys[:] = keys[0] * torch.sign(keys[0] @ requests.queries["q"][0][-1, 0])
    requests.set_cache("k", [keys])
    ids = Kernel("block_select")(
        requests.last(1).query("q"), requests.caches["k"], requests.last(1).span, 16, 5, 0, 1, True
    )
    assert ids.flatten().tolist() == [0, 1, 2, 3, 31]


def test_the_last_slot_of_a_table() -> None:
    requests = Requests([64], 32)
    requests.add_cache("k", 1, 8, requests.small)
    requests.add_query("q", 2, 8, draw=requests.small)
    ids = Kernel("block_select")(
        requests.last(1).query("q"), requests.caches["k"], requests.last(1).span, 8, 3, 1, 1, True
    )
    for group in range(2):
        scores = (requests.keys["k"][0][:, 0] @ requests.queries["q"][0][63, group]).view(8, 8).amax(dim=1)
        assert ids[0, group].tolist() == choose(scores.tolist(), 63, 8, 3, 1, 1)


# Products and experts


COUNTS = [*range(1, 41), 63, 64]
WIDE = (513, 520)  # above the megabyte from which more rows go without BLAS


def assert_counts(op: Callable[[slice], Tensor], whole: Tensor, counts: Iterable[int] = COUNTS) -> None:
    """Any number of rows, beginning anywhere: the bits that these rows have among all."""
    for count in counts:
        for first in {0, (7 * count) % (len(whole) - count + 1), len(whole) - count}:
            rows = slice(first, first + count)
            assert same_bits(op(rows), whole[rows]), f"{count} rows from {first} on"


@pytest.mark.parametrize("shape", [(33, 17), (64, 128), (320, 16), (256, 320), (250, 33), (1024, 96), (5, 3), WIDE])
def test_rows_of_linear_for_any_number(shape: tuple[int, int]) -> None:
    x, weight = randn(1, 64, shape[0]), randn(2, *shape) / shape[0] ** 0.5
    whole = Kernel("linear")(x, weight, True)
    assert error(whole, x.double() @ weight.double()) < 1e-5
    assert_counts(lambda rows: Kernel("linear")(x[rows], weight, True), whole)
    with cpu_threads(2):
        assert_counts(lambda rows: Kernel("linear")(x[rows], weight, True), whole, (1, 4, 5, 17))


def test_rows_of_linear_that_are_not_numbers() -> None:
    """NaN and infinities in one row stay there, whichever way a product takes."""
    x, weight = randn(1, 64, 256), randn(2, 256, 40)
    whole = Kernel("linear")(x, weight, True)
    for count in (2, 3, 4, 5, 16, 17, 33):
        part = x[:count].clone()
        part[0], part[1, 3] = math.nan, math.inf
        got = Kernel("linear")(part, weight, True)
        assert got[0].isnan().all() and not got[1].isfinite().any() and same_bits(got[2:], whole[2:count])


def experts_of(kind: str, count: int, experts: int) -> Tensor:
    """Chosen experts, two and a shared one: at random, or the same for all rows."""
    chosen = torch.stack(
        [torch.randperm(experts, generator=torch.Generator().manual_seed(i))[:2] for i in range(count)]
    )
    if kind == "one for all":
        chosen[:] = torch.tensor([experts - 1, 0])
    return torch.cat([chosen, torch.full((count, 1), experts)], dim=1)


@pytest.mark.parametrize("kind", ["random", "one for all"])
@pytest.mark.parametrize("sizes", [(40, 24, 3), (64, 32, 16), (256, 160, 5), (33, 7, 2)])
def test_rows_of_experts_for_any_number(sizes: tuple[int, int, int], kind: str) -> None:
    """Also where most experts get no row, and one gets all of them."""
    hidden, inner, experts = sizes
    x, weights, chosen = randn(1, 64, hidden), randn(2, 64, 3).abs(), experts_of(kind, 64, experts)
    gate_up = randn(3, experts + 1, hidden, 2 * inner) / hidden**0.5
    down, activation = randn(4, experts + 1, inner, hidden), GatedActivation(1.702, 7.0, 1.0)

    def run(rows: slice) -> Tensor:
        return Kernel("experts_forward")(x[rows], chosen[rows], weights[rows], gate_up, down, activation, True)

    whole = run(slice(0, 64))
    assert error(whole, rowwise.mixed(x, chosen, weights, gate_up, down, activation)) < 1e-5
    assert_counts(run, whole)


def test_experts_of_no_row_are_not_read() -> None:
    """Their weights are NaN."""
    x, chosen, weights = randn(1, 40, 64), experts_of("one for all", 40, 6), torch.ones(40, 3)
    gate_up, down = randn(3, 7, 64, 48), randn(4, 7, 24, 64)
    gate_up[1:5], down[1:5] = math.nan, math.nan
    for count in (1, 4, 16, 17, 40):
        rows = (part[:count] for part in (x, chosen, weights))
        assert Kernel("experts_forward")(*rows, gate_up, down, GatedActivation(), True).isfinite().all()


# What works value by value


@pytest.mark.parametrize("value", [1e-30, 1e-12, 1e12])
def test_norms_of_small_and_large_rows(value: float) -> None:
    """Like float64's as long as squares neither vanish nor overflow; else what the twin gives."""
    x, gain = randn(1, 3, 37) * value, randn(2, 37)
    twin = KERNELS.load("rms_norm/reference")(x, gain, 1e-6)
    assert error(Kernel("rms_norm")(x, gain, 1e-6), twin) < 1e-5


def test_no_rows() -> None:
    """Ops of a step without any."""
    gain, slots = torch.ones(24), torch.zeros(0, dtype=torch.int64)
    nothing = torch.zeros(0, 24)
    assert list(Kernel("rms_norm")(nothing, gain, 1e-6).shape) == [0, 24]
    assert [list(part.shape) for part in Kernel("add_rms_norm")(nothing, nothing, gain, 1e-6)] == [[0, 24]] * 2
    assert list(Kernel("gated")(nothing, GatedActivation()).shape) == [0, 12]
    assert list(Kernel("linear")(nothing, torch.ones(24, 5), True).shape) == [0, 5]
    assert list(Kernel("route")(nothing, gain, 3, 1.0, 4, 2, None)[0].shape) == [0, 3]
    cache = torch.zeros(3, 2, 4, 12)
    Kernel("store", writes=True)(nothing.view(0, 2, 12), cache, slots, slots)
    angles = rowwise.rotary("part", 12, 1).of_rows(slots)
    stores = (HeadStore(1, 1, cache[:, :1].contiguous()),)
    arguments = (nothing.view(0, 2, 12), torch.ones(2, 12), 1e-6, angles, stores, slots, slots)
    assert list(Kernel("norm_rotate_store", writes=True)(*arguments).shape) == [0, 2, 12]
    assert not cache.any()


def test_gates_where_the_exponential_ends() -> None:
    """Gates far below zero give nothing, far above themselves; in between there is no step."""
    gates = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([-1e10, -1e20, -1e30, -3e38, 1e10, 1e30])])
    pairs = torch.stack([gates, torch.ones_like(gates)], dim=1)
    for activation in rowwise.ACTIVATIONS:
        torch.testing.assert_close(Kernel("gated")(pairs, activation), activation(pairs), rtol=1e-5, atol=1e-30)


def test_route_of_logits_at_the_ends() -> None:
    """Weights are finite, ids differ, the order is that of the logits."""
    logits = torch.tensor([[-90.0, -60.0, -80.0, -70.0], [90.0, 60.0, 10.0, 5.0], [-math.inf, 0.0, 1.0, -math.inf]])
    ids, weights = Kernel("route")(logits, torch.zeros(4), 2, 1.0, 1, 1, None)
    assert ids.tolist() == [[1, 3], [0, 1], [2, 1]] and weights.isfinite().all()
    twin = KERNELS.load("route/reference")(logits, torch.zeros(4), 2, 1.0)
    assert torch.equal(ids, twin[0])
    torch.testing.assert_close(weights, twin[1], rtol=1e-5, atol=1e-20)


def test_offsets_beyond_32_bits(tmp_path: Any) -> None:
    """Slots more than 2^31 elements from the cache's start, in a file of which only these are ever written."""
    blocks = 2**31 // (2 * 16 * 32) + 3
    size = blocks * 2 * 16 * 32
    cache = torch.from_file(str(tmp_path / "cache"), shared=True, size=size, dtype=FLOAT).view(blocks, 2, 16, 32)
    requests = Requests([33], 16)
    requests.add_cache("k", 2, 32)
    requests.add_query("q", 4, 32)
    call = requests.last(1)
    small = requests.caches["k"]
    expected = Kernel("dense_attention")(call.query("q"), small, small, call.span, 0.2, True)
    table = torch.tensor([[blocks - 1, blocks - 3, blocks - 2]])
    slots = torch.arange(33)
    Kernel("store", writes=True)(requests.keys["k"][0], cache, table[0, slots // 16], slots % 16)
    span = call.span._replace(block_table=table)
    assert same_bits(Kernel("dense_attention")(call.query("q"), cache, cache, span, 0.2, True), expected)
    everything = torch.arange(3, dtype=torch.int32).expand(1, 2, 3).contiguous()
    got = Kernel("sparse_gqa")(call.query("q"), cache, cache, everything, 16, span, 0.2, True)
    assert same_bits(got, expected)


def test_index_rows_of_views() -> None:
    """Queries, keys and weights that are parts of one projection."""
    made = index_rows.project(5, 3, 40, FLOAT)
    wide = torch.cat([made.q.flatten(1), made.k, made.weights], dim=1)
    q, k, weights = wide[:, :120].view(5, 3, 40), wide[:, 120:160], wide[:, 160:]
    assert not q.is_contiguous() and not k.is_contiguous()
    expected, got = (index_rows.made(part, False) for part in (made, made._replace(q=q, k=k, weights=weights)))
    assert all(same_bits(a, b) for a, b in zip(expected[:3], got[:3], strict=True))


def test_strided_rows_reach_their_slots() -> None:
    """Rows that are part of wider ones, a cache of more heads, NaN where no row goes."""
    rows = randn(1, 7, 5, 24)[:, 1:4]
    cache = torch.full((4, 3, 8, 24), math.nan)
    block, offset = fresh_slots(7, 4, 8, seed=1)
    Kernel("store", writes=True)(rows, cache, block, offset)
    assert same_bits(cache[block, :, offset], rows) and int(cache.isfinite().all(-1).sum()) == 21
