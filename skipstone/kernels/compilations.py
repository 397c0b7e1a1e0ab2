"""How many kernels Triton has compiled, or loaded from its cache on disk: after a warm-up there should be no more."""

from __future__ import annotations

_names: list[str] = []


def watch_compilations() -> None:
    """Count from now on. Without Triton there is nothing to count."""
    try:
        from triton import knobs
    except ImportError:
        return
    knobs.runtime.jit_post_compile_hook = _counted


def compilations() -> list[str]:
    """The kernels, one entry for each variant, since `watch_compilations`."""
    return _names


def _counted(*args: object, **details: object) -> None:
    _names.append(str(details.get("repr", "kernel")))
