"""Tiny checkpoints and the other library's models, made once per session; one thread, so that tests do not compete."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from oracles.tiny import TINY, Tiny, write_folder

from skipstone.kernels.ops import load_ops

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Compile the CPU kernels before several processes would do so at once, and with the notice that it happens."""
    if not hasattr(config, "workerinput") and importlib.util.find_spec("numba"):
        load_ops("numba")


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Tiny]:
    """The tiny checkpoint of that name, in memory."""
    return cache(lambda name: TINY[name]())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Tiny]) -> Callable[[str], Path]:
    """The folder of the tiny checkpoint of that name."""
    root = tmp_path_factory.mktemp("tiny")
    return cache(lambda name: write_folder(tiny(name), root / name))
