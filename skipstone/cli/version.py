"""`skipstone version`: the versions that decide what runs, read without importing any of them."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from skipstone.cli.options import Command, Settings

PACKAGES = ("skipstone", "torch", "numpy", "safetensors", "tokenizers")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print one line per package."""
    rows = [(name, _version(name)) for name in PACKAGES]
    for name, text in [*rows, ("python", platform.python_version()), ("machine", platform.platform())]:
        print(f"{name:<12} {text}")
    return 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed (running from a source folder)" if name == "skipstone" else "not installed"


COMMAND = Command(summary="versions of this program and of what it runs on", usage="", options={}, run=run)
