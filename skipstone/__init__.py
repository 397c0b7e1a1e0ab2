"""Skipstone: exact speculative decoding for sparse-attention language models.

The public names load on first use, so that `skipstone --help` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipstone.config import EngineConfig
    from skipstone.core.request import SamplingParams
    from skipstone.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

_HOMES = {"LLM": "llm", "EngineConfig": "config", "SamplingParams": "core.request"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'skipstone' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"skipstone.{_HOMES[name]}"), name)
