"""Kernels for CPUs: their exponential, BLAS's order of sums, what is kept of them, who gets them, and whole engines."""

from __future__ import annotations

import gc
import importlib.util
import math
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.kernels import error, same_bits
from test_cli_speculation import needs_demo
from test_kernels_rows import mixed, randn
from torch import Tensor

from skipstone import SamplingParams
from skipstone.config import EngineConfig
from skipstone.core.batch import SamplingRows
from skipstone.errors import UnsupportedError
from skipstone.kernels import dispatch
from skipstone.kernels.dispatch import choose_ops, list_ops
from skipstone.kernels.ops import OP_NAMES, load_ops
from skipstone.kernels.reference import gemm as reference
from skipstone.kernels.reference.pointwise import GatedActivation
from skipstone.kernels.reference.sampling import sample as reference_sample
from skipstone.registry import KERNELS
from skipstone.tools.check.compare import NEAR_TIE, Comparer, Reference
from skipstone.tools.flags import choose_prompts
from skipstone.tools.workload import run_jobs

numba = pytest.importorskip("numba")
np = pytest.importorskip("numpy")
gemm, jit, moe, sampling = (
    pytest.importorskip(f"skipstone.kernels.cpu.{name}") for name in ("gemm", "jit", "moe", "sampling")
)

CPU = torch.device("cpu")


# The exponential


def exponentials(x: Tensor) -> Tensor:
    """By the kernels' exponential."""

    @numba.njit
    def fill(source: Any, out: Any) -> None:
        for i in range(len(source)):
            out[i] = jit.exp(source[i])

    out = torch.empty_like(x)
    fill(x.numpy(), out.numpy())
    return out


def test_exponential() -> None:
    """Below 3 ulp of float64's where it is not cut off; everywhere at least as large as that of smaller numbers."""
    near_zero = torch.logspace(-40, 0, 20_000)
    x = torch.cat([torch.linspace(-87, 88, 1_000_001), near_zero, -near_zero, torch.tensor([0.0, -0.0])])
    exact = np.exp(x.double().numpy())
    got = exponentials(x)
    ulp = np.abs(got.double().numpy() - exact) / np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert ulp.max() < 3, f"{ulp.max():.2f} ulp at {x[int(ulp.argmax())]}"
    assert bool((exponentials(torch.zeros(3)) == 1).all()), "the largest weight of a softmax"


def test_ends_of_the_exponential() -> None:
    """It never falls, ends at 0 and at infinity, and keeps NaN."""
    ends = torch.tensor([-math.inf, -3e38, -1e4, -104.0, -88.0, -87.0, -86.9, 87.9, 88.0, 89.0, 1e4, 3e38, math.inf])
    got = exponentials(ends)
    assert bool((got[1:] >= got[:-1]).all()) and got[:4].tolist() == [0.0] * 4 and got[-4:].tolist() == [math.inf] * 4
    assert exponentials(torch.tensor([math.nan, -math.nan])).isnan().all()
    everywhere = exponentials(torch.linspace(-90, 90, 100_001))
    assert bool((everywhere[1:] >= everywhere[:-1]).all())


# BLAS's order of sums


def uneven(seed: int, *shape: int) -> Tensor:
    """Numbers of very different sizes, with zeros: sums in another order have other bits."""
    size = torch.randint(-6, 7, shape, generator=torch.Generator().manual_seed(seed))
    return randn(seed + 1, *shape) * 10.0**size * (randn(seed + 2, *shape) > -1)


@pytest.mark.parametrize("shape", [(33, 40), (64, 128), (320, 48), (256, 320), (1024, 96), (768, 600)])
def test_segments_give_the_bits_of_blas(shape: tuple[int, int]) -> None:
    segment = gemm.blas_segment(*shape, torch.get_num_threads())
    if segment is None:
        pytest.skip("no segment length gives the bits of this machine's BLAS")
    x, weight = uneven(1, 100, shape[0]), uneven(5, *shape)
    padded = reference.padded_rows(*shape, torch.float32, False, torch.get_num_threads())
    for count in {*padded[1:], 17, 33, 64, 100}:
        assert same_bits(gemm.product(x[:count], weight, segment), torch.mm(x[:count], weight)), f"{count} rows"


def no_segment(*shape: int) -> None:
    """As on a machine whose BLAS adds up in an order of its own."""


def test_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products rounded once are no sum over segments; a row whose bits depend on its company has no order at all."""
    search = gemm.blas_segment.__wrapped__
    if search(256, 41, 1) is None:
        pytest.skip("no segment length gives the bits of this machine's BLAS")
    monkeypatch.setattr(reference, "padded_rows", reference.padded_rows.__wrapped__)
    blas = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: blas(a.double(), b.double()).float())
    assert search(256, 41, 1) is None
    monkeypatch.setattr(torch, "mm", lambda a, b: blas(a, b) * (1 + 1e-6 * len(a)))
    assert search(256, 41, 1) is None


@pytest.mark.parametrize("columns", [17, 32, 33, 320])
def test_linear_without_segments(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Padded products, or for few columns an own one: the bits of a row are the same for any number of rows."""
    monkeypatch.setattr(gemm, "blas_segment", no_segment)
    x, weight = randn(1, 64, 250), randn(2, 250, columns)
    whole = gemm.linear(x, weight, True)
    assert error(whole, x.double() @ weight.double()) < 1e-5
    for count in range(1, 41):
        assert same_bits(gemm.linear(x[24 : 24 + count], weight, True), whole[24 : 24 + count]), f"{count} rows"


def test_few_columns_need_no_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where BLAS gives a row other bits in other company, products of few columns go without it, others are refused."""

    def refuse(*shape: Any) -> tuple[int, ...]:
        raise reference.InexactMatmulError("rows depend on their number")

    monkeypatch.setattr(reference, "padded_rows", refuse)
    monkeypatch.setattr(gemm, "blas_segment", gemm.blas_segment.__wrapped__)
    x = randn(1, 9, 96)
    whole = gemm.linear(x, randn(2, 96, 16), True)
    assert same_bits(gemm.linear(x[4:5], randn(2, 96, 16), True), whole[4:5])
    with pytest.raises(reference.InexactMatmulError):
        gemm.linear(x, randn(2, 96, 48), True)


def test_experts_without_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gemm, moe):
        monkeypatch.setattr(module, "blas_segment", no_segment)
    x, weights, activation = randn(1, 40, 40), randn(2, 40, 2).abs(), GatedActivation(1.702, 7.0, 1.0)
    experts = torch.stack([torch.arange(40) % 3, torch.full((40,), 3)], dim=1)
    gate_up, down = randn(3, 4, 40, 48) / 6, randn(4, 4, 24, 40)
    whole = moe.experts_forward(x, experts, weights, gate_up, down, activation, True)
    assert error(whole, mixed(x, experts, weights, gate_up, down, activation)) < 1e-5
    for count in range(1, 41):
        rows = slice(40 - count, 40)
        got = moe.experts_forward(x[rows], experts[rows], weights[rows], gate_up, down, activation, True)
        assert same_bits(got, whole[rows]), f"{count} rows"


# The logarithm, and arrays


def test_logarithm() -> None:
    """Within 2 ulp of float64's, near 1 too; the noise is the reference's."""

    @numba.njit
    def logarithms(x: Any) -> Any:
        out = np.empty_like(x)
        for i in range(len(x)):
            out[i] = sampling._log(x[i])
        return out

    draws = np.random.default_rng(0).random(300_000)
    x = np.concatenate([draws, 1 - draws * 2.0**-30, np.ldexp(draws, -40), [2.0**-53, 0.5, 1 - 2.0**-53, 37.0]])
    exact = np.log(x)
    assert (np.abs(logarithms(x) - exact) <= 2 * np.spacing(np.abs(exact))).all()
    seed, position = torch.randint(-(2**63), 2**63 - 1, (40,)), torch.randint(0, 4000, (40,))
    flat, ones = torch.zeros(40, 5000), torch.ones(40)
    rows = SamplingRows(seed, position, ones, None, None, None, None, None, all_greedy=False)
    assert torch.equal(sampling.sample(flat, rows), reference_sample(flat, rows))


def test_weights_of_half_the_size() -> None:
    """Few rows read the upper halves where these say all; what is written to a weight afterwards counts."""
    weight = torch.nn.Parameter(randn(1, 64, 48).bfloat16().float(), requires_grad=False)
    x = randn(2, 3, 64)
    assert gemm.small(weight).dtype == np.uint16
    assert same_bits(gemm.product(x, weight, 16), gemm.product(x, torch.nn.Parameter(weight + 0, False), 16))
    whole = np.empty((3, 48), np.float32)
    gemm.grouped_product(x.numpy(), np.arange(3), np.array([0, 3]), weight.numpy()[None], 16, whole)
    assert same_bits(gemm.product(x, weight, 16), torch.from_numpy(whole))
    weight[5, 7] = 1 / 3
    assert gemm.small(weight).dtype == np.float32
    assert float(gemm.product(torch.eye(64), weight, 16)[5, 7]) == float(torch.tensor(1 / 3))
    weight.data = randn(1, 64, 48).bfloat16().float()
    assert same_bits(gemm.product(torch.eye(64), weight, 16), weight.data)


def test_arrays_keep_nothing_alive() -> None:
    """Neither those of weights nor those of results: no collector is needed to let go of them."""
    weight = torch.nn.Parameter(torch.zeros(8, 8), requires_grad=False)
    array = jit.kept(weight)
    array[3, 4] = 7.0
    assert float(weight[3, 4]) == 7.0 and jit.kept(weight) is array
    made, values = jit.result(2, 3)
    values[:] = 5.0
    assert bool((made == 5).all()) and jit.array(made) is values
    gone = [weakref.ref(weight), weakref.ref(made)]
    gc.disable()
    try:
        del weight, made
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="not contiguous"):
        jit.kept(torch.zeros(4, 4).T[:, :2])


# What is kept of compiled kernels


SIGNATURE = "(float32[::1], float32[::1])"


def twice(x: Any, out: Any) -> None:
    """A kernel to be compiled."""
    for i in range(len(x)):
        out[i] = 2 * x[i]


def assert_doubles(compiled: Callable[..., None]) -> None:
    out = np.zeros(3, np.float32)
    compiled(np.ones(3, np.float32), out)
    assert out.tolist() == [2, 2, 2]


def folder() -> Path:
    """Where kernels would be kept, asked anew."""
    found = jit.cache_folder.__wrapped__()
    assert found is not None
    return Path(found)


def test_where_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert folder().parent == tmp_path / "cache" / "skipstone" and folder().is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folder().parent == tmp_path / "home" / ".cache" / "skipstone"


@pytest.mark.parametrize("reason", ["a file in the way", "a folder that takes no files", "no home at all"])
def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Kernels are compiled all the same, and kept nowhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if reason == "a file in the way":
        (tmp_path / "skipstone").write_text("")
    elif reason == "a folder that takes no files":

        def refuse(**_: Any) -> None:
            raise PermissionError

        monkeypatch.setattr(jit.tempfile, "TemporaryFile", refuse)
    else:  # as for a container's user without a name

        def lost() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(jit.Path, "home", lost)
    assert jit.cache_folder.__wrapped__() is None
    monkeypatch.setattr(jit, "cache_folder", jit.cache_folder.__wrapped__)
    assert_doubles(jit.kernel(SIGNATURE)(twice))
    assert not list(tmp_path.rglob("*.nb?"))


def test_other_sources_are_kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of changed sources, of another file of the package too, is never taken for the new one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "cpu"
    shutil.copytree(Path(jit.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = folder()
    monkeypatch.setattr(jit, "__file__", str(copy / "jit.py"))
    assert folder() == before, "the place of the sources does not matter"
    with (copy / "moe.py").open("a") as file:
        file.write("# another line\n")
    changed = folder()
    monkeypatch.setattr(jit.numba, "__version__", "0.0")
    assert len({before, changed, folder()}) == 3


def test_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once, loaded the second time; Numba's own setting is left as it was, after a failure too."""
    monkeypatch.setattr(jit, "cache_folder", lambda: str(tmp_path))
    before = numba.config.CACHE_DIR
    assert not jit.kernel(SIGNATURE)(twice).stats.cache_hits
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
    kernel = jit.kernel(SIGNATURE)(twice)
    assert kept and sum(kernel.stats.cache_hits.values()) == 1
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")} == kept
    assert_doubles(kernel)
    assert before == numba.config.CACHE_DIR
    with pytest.raises(TypeError, match="Signature mismatch"):
        jit.kernel("(float32,)")(twice)
    assert before == numba.config.CACHE_DIR


# Who gets them


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        dispatch.importlib.util, "find_spec", lambda name, *rest: None if name == "numba" else find(name, *rest)
    )


def test_what_numba_is_for() -> None:
    choice = choose_ops(CPU, "auto")
    assert choice.ops.implementation == "numba" and choice.reason == "Numba on a CPU" and not choice.ops.is_reference
    assert choose_ops(CPU, "numba", exact=True).ops is choice.ops
    assert choose_ops(CPU, "reference").ops is load_ops("reference")
    choice = choose_ops(CPU, "auto", dtype=torch.bfloat16)
    assert choice.ops.is_reference and "float32" in choice.reason and "bfloat16" in choice.reason


def test_combinations_that_are_refused() -> None:
    """The message names both features."""
    with pytest.raises(UnsupportedError, match=r"kernels='numba' and device='cuda'.*CPU"):
        choose_ops(torch.device("cuda"), "numba")
    with pytest.raises(UnsupportedError, match=r"kernels='numba'.*cannot be combined.*bfloat16"):
        choose_ops(CPU, "numba", dtype=torch.bfloat16)


@pytest.mark.usefixtures("without_numba")
def test_a_machine_without_numba() -> None:
    with pytest.raises(
        UnsupportedError, match=r"kernels='numba' and device='cpu'.*not installed; run .*pip install.*\[cpu\]"
    ):
        choose_ops(CPU, "numba")
    choice = choose_ops(CPU, "auto")
    assert choice.ops.is_reference and "numba is not installed" in choice.reason
    assert {(kind, reason) for _, kind, reason in list_ops(CPU)} == {("reference", choice.reason)}


@pytest.mark.parametrize("package", ["numba", "triton"])
def test_a_package_that_is_there_and_cannot_be_imported(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Numba beside a NumPy that is too new: plain torch runs, and the reason is told."""
    (tmp_path / f"{package}.py").write_text("raise SystemError('needs an\\nolder NumPy')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = f"the package {package} cannot be imported: needs an older NumPy"
    with pytest.raises(UnsupportedError, match=f"kernels='{package}' and device='cpu'.*{reason}"):
        choose_ops(CPU, package)  # type: ignore[arg-type]
    choice = choose_ops(CPU, "auto")
    assert choice.ops.is_reference == (package == "numba") and (reason in choice.reason) == (package == "numba")
    assert choose_ops(CPU, "reference").ops.is_reference


def test_doctor_says_what_each_op_is_made_of() -> None:
    listed = {op: kind for op, kind, _ in list_ops(CPU)}
    compiled = {name.removesuffix("/numba") for name in KERNELS.entries if name.endswith("/numba")}
    assert listed == {op: "numba" if op in compiled else "reference" for op in OP_NAMES}
    assert set(listed.values()) == {"numba", "reference"}
    for op, kind in listed.items():
        function: Callable[..., Any] = getattr(load_ops("numba"), op)
        assert function.__module__.startswith("skipstone.kernels.cpu") == (kind == "numba"), op


# Whole engines


@needs_demo
@pytest.mark.parametrize("model", ["demo", "demo-dsa"])
def test_greedy_texts_are_plain_torchs(model: str) -> None:
    """Prompts longer than the selection's budget among them; where a text differs, two tokens were as good as equal."""
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    jobs = [(prompt, params) for prompt in choose_prompts(None, 3)]
    found = Reference()
    settings = {"model": model, "spec": "off", "dtype": "float32", "max_num_batched_tokens": 96}
    found.close(run_jobs(EngineConfig(**settings, kernels="reference"), jobs, found, lambda: None).outputs)
    comparer = Comparer(found)
    outputs = run_jobs(EngineConfig(**settings, kernels="numba"), jobs, comparer, lambda: None).outputs
    result = comparer.close(outputs, exact=False, dtype="float32")
    assert all(len(output.outputs[0].token_ids) == 64 for output in outputs)
    assert all(difference.kind == NEAR_TIE for difference in result.differences)
    assert result.equal_texts >= len(jobs) - 1
    assert result.rows > 128 and 0 < result.max_logit_difference < 1e-4 * result.largest_logit
