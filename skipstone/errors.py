"""The errors a user can cause. Each message names the field, its value and the way out.

The command line prints the message alone and exits with `exit_code`; the server answers 400. Anything else that is
raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SkipstoneError(Exception):
    """Base of every error a user can cause."""

    exit_code = 2


class ConfigError(SkipstoneError):
    """An option or a key of a checkpoint's config.json is missing, unknown or out of range."""


class RequestError(SkipstoneError):
    """One request is invalid; the engine and its other requests go on."""


class UnsupportedError(SkipstoneError):
    """Two features that cannot work together, or an architecture we do not have; names both."""


class CheckpointError(SkipstoneError):
    """A model folder whose files are missing, truncated or do not match the architecture."""


class ShapeError(SkipstoneError):
    """A tensor with another shape than the contract says: the caller of a public function is wrong."""


def install_hint(extra: str) -> str:
    """The command line that adds one of this package's extras to the Python that runs."""
    root = Path(__file__).resolve().parent.parent
    clone = (root / "pyproject.toml").exists()
    what = ["-e", f"{root}[{extra}]"] if clone else [f"skipstone[{extra}]"]  # pip finds an installed wheel by its name
    return shlex.join([sys.executable, "-m", "pip", "install", *what])


@contextmanager
def needing(extra: str, what: str, kind: type[SkipstoneError] = ConfigError) -> Iterator[None]:
    """Turn a package that cannot be imported in the block into an error that names it and the extra's command."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "skipstone").partition(".")[0]
        if package == "skipstone":
            raise
        raise kind(f"{what} needs the package {package} ({error}); run {install_hint(extra)}") from None
