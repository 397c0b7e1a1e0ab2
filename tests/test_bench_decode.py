"""What `skipstone bench decode` needs beside a GPU: rows that route alike, a pool for all requests of a cell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles.tiny import Tiny

from skipstone.cli.main import load_command
from skipstone.config import make_config
from skipstone.core.batch import FIRST_BLOCK
from skipstone.core.kv_cache import CacheSpec, CacheTensorSpec
from skipstone.layers.feed_forward import Router
from skipstone.models.minimax_m3 import read_minimax_m3
from skipstone.runtime.memory import MemoryBudget, plan_caches
from skipstone.tools.bench.decode_run import route_alike


def test_all_rows_choose_the_same_experts() -> None:
    router = Router(16, 8, 3, 1.0, exact=True)
    router.scores.weight.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(2))
    assert len(router(x)[0].unique()) > 3
    route_alike(router)
    assert all(row == [0, 1, 2] for row in router(x)[0].sort(dim=1).values.tolist())


@pytest.mark.parametrize(("most", "held"), [(1, 16), (16, 16), (64, 64)])
def test_a_gpus_pool_holds_all_requests(most: int, held: int, tiny: Callable[[str], Tiny]) -> None:
    """At full length, where there is room; a CPU's pool stays at 16."""
    model = read_minimax_m3(tiny("m3").config)
    specs = [CacheSpec(0, "dense K/V", "dense", (CacheTensorSpec("k", 2, 16),))]
    config = make_config(model="x", max_num_seqs=most, max_model_len=64, block_size=64)
    large = MemoryBudget(1 << 40, 0.9)
    assert plan_caches(config, model, specs, torch.float32, budget=large).num_blocks == held + FIRST_BLOCK
    assert plan_caches(config, model, specs, torch.float32).num_blocks == 16 + FIRST_BLOCK


def test_prompts_run_in_large_chunks_unless_asked() -> None:
    assert load_command("bench decode").defaults["max_num_batched_tokens"] == 8192
