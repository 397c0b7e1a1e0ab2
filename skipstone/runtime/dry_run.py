"""What the largest step of an engine needs on a GPU, measured by running one: so no later one runs out of memory."""

from __future__ import annotations

import torch

from skipstone.attention.backend import AttentionGroups
from skipstone.core.batch import FIRST_BLOCK
from skipstone.core.kv_cache import CacheMemory, KVCache
from skipstone.core.plan import Admission, PlanItem
from skipstone.core.request import SamplingParams
from skipstone.core.sequence_table import SequenceTable
from skipstone.kernels.ops import Ops
from skipstone.models.base import CausalLM
from skipstone.runtime.layout import make_layout
from skipstone.runtime.memory import GPU_SHARE, MemoryBudget
from skipstone.runtime.step import Step
from skipstone.spec.verify import Verifier

GREEDY = SamplingParams(temperature=0)
LOGIT_COPIES = 3  # processing the logits of sampled rows makes copies of them


def measure_budget(
    model: CausalLM, ops: Ops, block_size: int, dtype: torch.dtype, size: tuple[int, int, int, tuple[int, ...]]
) -> MemoryBudget:
    """Run the step; what is free afterwards, and what it took.

    `size`: rows of prompts, of which at most the second number belong to one request, rows with logits, tapped layers.
    """
    rows, longest, sampled, taps = size
    device = model.embed.device
    parts = [min(longest, rows - start) for start in range(0, rows, longest)]
    blocks = sum(-(-part // block_size) for part in parts)
    specs, config = model.cache_specs(), model.config
    cache = KVCache(specs, CacheMemory(blocks + FIRST_BLOCK, block_size, dtype, device))
    groups = AttentionGroups(specs, cache, config.softmax_scale, config.sparse, False, ops)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode(), device:
        table = SequenceTable(len(parts), longest, block_size, 0, device)
        table.admit([Admission(i, i, [0] * part, part, 0, part + 1, 0, GREEDY, [], []) for i, part in enumerate(parts)])
        per_part = [-(-part // block_size) for part in parts]
        owned = iter(range(FIRST_BLOCK, FIRST_BLOCK + blocks))
        table.own([(slot, place, next(owned)) for slot, count in enumerate(per_part) for place in range(count)])
        items = [PlanItem(i, i, 0, part, 0, samples=True) for i, part in enumerate(parts)]
        whole = Step(model, groups, table, ops, block_size, None, Verifier(), "coupled", 0)
        whole.taps = taps
        hidden = whole.forward(make_layout(items, table, every_row=True)).hidden.final
        logits = model.logits(hidden[:1].expand(sampled, -1).contiguous())
        copies = LOGIT_COPIES * logits.nbytes
    torch.cuda.synchronize()
    needed = torch.cuda.max_memory_allocated() - before + copies
    del cache, groups, table, whole, hidden, logits
    torch.cuda.empty_cache()
    return MemoryBudget(torch.cuda.mem_get_info()[0], GPU_SHARE, needed)
