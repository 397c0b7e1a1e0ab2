"""Tiny checkpoints and the other library's models, made once per session; what no test may depend on is held still.

One thread, so that tests do not compete; draws, free memory and generated examples that are the same in every run.
"""

from __future__ import annotations

import gc
import importlib.util
import random
import resource
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from oracles.tiny import TINY, Tiny, write_folder

from skipstone.kernels.ops import load_ops

MEMORY_KB, MUCH_MEMORY = 16 << 20, 128 << 20

torch.set_num_threads(1)
settings.register_profile(
    "fixed", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Compile the CPU kernels before several processes would do so at once, and with the notice that it happens."""
    if not hasattr(config, "workerinput") and importlib.util.find_spec("numba"):
        load_ops("numba")


def pytest_collection_finish() -> None:
    """What is there stays, so that looking for garbage takes milliseconds."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _garbage() -> Iterator[None]:
    """Engines in cycles go when they have taken much memory; Python counts objects, however large they are."""
    before = _resident()
    yield
    if _resident() - before > MUCH_MEMORY:
        gc.collect()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Tiny]:
    """The tiny checkpoint of that name, in memory."""
    return cache(lambda name: TINY[name]())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Tiny]) -> Callable[[str], Path]:
    """The folder of the tiny checkpoint of that name."""
    root = tmp_path_factory.mktemp("tiny")
    return cache(lambda name: write_folder(tiny(name), root / name))


@pytest.fixture(scope="session", autouse=True)
def _free_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches are planned for a machine of its own, whatever other tests take."""
    folder = tmp_path_factory.mktemp("memory")
    (folder / "meminfo").write_text(f"MemAvailable: {MEMORY_KB} kB\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skipstone.kernels.dispatch.MEMINFO", folder / "meminfo")
        patch.setattr("skipstone.kernels.dispatch.CGROUP", folder)
        yield


@pytest.fixture(autouse=True)
def _fixed_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no seed of its own draws the same in every run, whichever tests ran before."""
    torch.manual_seed(0)
    monkeypatch.setattr("skipstone.session.secrets", SimpleNamespace(randbits=random.Random(0).getrandbits))
