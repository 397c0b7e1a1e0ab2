"""vLLM's Triton kernels for MiniMax-M3, timed beside ours in one process.

A user gives a folder with two files of vLLM (0.33), unchanged: index_topk.py and sparse_attn.py from
vllm/models/minimax_m3/common/ops. They ask their package for very little, for which stand-ins are put in place here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from skipstone.core.batch import PAD, Span
from skipstone.errors import ConfigError
from skipstone.registry import KERNELS
from skipstone.tools.doctor.op_cases import OpCase
from skipstone.tools.doctor.op_run import arguments

FILES = ("index_topk.py", "sparse_attn.py")
DECODED = 8  # most rows of a request that go through the kernels for decoding


class Peer:
    """Calls that do what a case's op does."""

    def __init__(self, index: ModuleType, attention: ModuleType) -> None:
        self.index, self.attention = index, attention

    def calls(self, op: str, cases: list[OpCase]) -> list[Callable[[], Any]] | None:
        """The peer's calls for these inputs; None where it has no such kernel. Raises when results differ from ours."""
        if op not in ("block_select", "sparse_gqa"):
            return None
        make: Callable[..., Callable[[], Any]] = self._select if op == "block_select" else self._attend
        made = [make(*arguments(case, False)) for case in cases]
        ours, theirs = KERNELS.load(f"{op}/triton")(*arguments(cases[0], False)), made[0]()
        if op == "block_select":
            theirs = theirs.permute(1, 0, 2)
            last = torch.iinfo(torch.int32).max
            ours, theirs = (ids.masked_fill(ids == PAD, last).sort(-1).values.float() for ids in (ours, theirs))
            differ = float((ours != theirs).any(-1).float().mean())
        else:
            differ = float((ours.double() - theirs.double()).norm() / ours.double().norm())
        if not differ < 0.02:  # of selections, those whose last two scores are nearly equal
            raise RuntimeError(f"the peer's results differ: {differ:.1%}")
        return made

    def _select(
        self, q: Tensor, keys: Tensor, span: Span, unit: int, budget: int, init: int, local: int, exact: bool
    ) -> Callable[[], Any]:
        lengths, table, starts, prefix = _lengths(span)
        cache, heads, n, longest = keys[:, 0], q.shape[1], span.query_len, span.block_table.shape[1] * unit
        if n <= DECODED:
            decode = self.index.minimax_m3_index_decode
            return partial(decode, q, cache, table, lengths, longest, budget, init, local, heads, n, n)

        def prefill() -> Any:
            scores = self.index.minimax_m3_index_score(q, cache, table, starts, lengths, prefix, n, longest, heads)
            return self.index.minimax_m3_index_topk(scores, starts, prefix, n, budget, init, local)

        return prefill

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, unit: int, span: Span, scale: float, exact: bool
    ) -> Callable[[], Any]:
        lengths, table, starts, prefix = _lengths(span)
        cache, ids = torch.cat([k, v], dim=-1), indices.permute(1, 0, 2).contiguous()
        heads, n = k.shape[1], span.query_len

        def attend() -> Tensor:
            out = torch.empty_like(q)
            if n <= DECODED:
                self.attention.minimax_m3_sparse_attn_decode(q, cache, ids, table, lengths, heads, scale, out, n)
            else:
                rows = (starts, lengths, prefix, n, heads, scale, out)
                self.attention.minimax_m3_sparse_attn(q, cache, ids, table, *rows)
            return out

        return attend


def _lengths(span: Span) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lengths [R], block table, starts of requests among the rows [R + 1], lengths before these rows [R]: int32."""
    lengths = (span.positions[:, -1] + 1).int()
    starts = torch.arange(len(lengths) + 1, device=lengths.device, dtype=torch.int32) * span.query_len
    return lengths, span.block_table.int(), starts, lengths - span.query_len


def load_peer(folder: str) -> Peer:
    """The peer whose files lie in a folder. Raises ConfigError when they do not, or cannot be imported."""
    for name in FILES:
        if not (Path(folder) / name).is_file():
            raise ConfigError(f"--peer {folder}: {name} is missing; put vLLM's {' and '.join(FILES)} there, unchanged")
    KERNELS.load("store/triton")  # imports Triton
    for name, values in _stand_ins().items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules.setdefault(name, module)
    try:
        index, attention = (_load(Path(folder) / name) for name in FILES)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--peer {folder}: cannot be imported: {error}") from None
    return Peer(index, attention)


def _stand_ins() -> dict[str, dict[str, Any]]:
    triton = sys.modules["triton"]
    capability = torch.cuda.get_device_capability()
    nvidia = torch.version.hip is None
    platform = SimpleNamespace(
        is_cuda=lambda: nvidia,
        is_rocm=lambda: not nvidia,
        is_arch_support_pdl=lambda: nvidia and capability >= (9, 0),
        is_device_capability=lambda wanted: nvidia and capability == wanted,
    )
    return {
        "vllm": {},
        "vllm.utils": {},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": sys.modules["triton.language"]},
        "vllm.utils.math_utils": {"round_up": lambda value, multiple: -(-value // multiple) * multiple},
    }


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Triton looks kernels up there
    spec.loader.exec_module(module)
    return module
