"""How many kernels Triton has compiled, or loaded from its cache on disk: after a warm-up there should be no more."""

from __future__ import annotations

_count = 0


def num_compilations() -> int:
    """Variants of kernels since the first call. Without Triton there is nothing to count."""
    try:
        from triton import knobs
    except ImportError:
        return 0
    knobs.runtime.jit_post_compile_hook = _counted
    return _count


def _counted(*args: object, **details: object) -> None:
    global _count
    _count += 1
