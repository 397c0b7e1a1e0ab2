"""How many cache blocks there are, how long a sequence may be, and why: resolved once, before the caches exist."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from skipstone.config import EngineConfig
from skipstone.core.batch import FIRST_BLOCK
from skipstone.core.kv_cache import CacheSpec
from skipstone.errors import ConfigError, RequestError
from skipstone.kernels.dispatch import free_memory_bytes
from skipstone.models.base import ModelConfig

DEFAULT_SHARE = 0.25  # of the free memory for the caches, when nothing else is asked: other programs run here too
GPU_SHARE = 0.9  # of what is free on a GPU, which serves nothing else
# No more full-length sequences than this when nothing else is asked; on a GPU than run at once, if that is more.
DEFAULT_SEQUENCES = 16
SMALLEST_BLOCK = 32


@dataclass(frozen=True)
class CachePlan:
    """Resolved sizes, each with its reason for the start-up card."""

    block_size: int
    num_blocks: int  # with the blocks of special roles
    max_model_len: int
    bytes_per_token: int
    reason: str
    advice: str  # what allows longer sequences than max_model_len

    def check_length(self, tokens: int) -> None:
        """Raise RequestError for a prompt of so many tokens that leaves no room for one more."""
        if tokens >= self.max_model_len:
            raise RequestError(
                f"the prompt has {tokens} tokens, but prompt and output together must fit "
                f"max_model_len={self.max_model_len}; shorten it ({self.advice})"
            )


def choose_block_size(config: EngineConfig, model: ModelConfig, draft_unit: int = 1) -> int:
    """Tokens of a cache block. Raises ConfigError when the one asked for does not hold whole sparse blocks."""
    unit = math.lcm(model.block_unit, draft_unit)
    block_size = config.block_size or unit * max(1, -(-SMALLEST_BLOCK // unit))
    if block_size % unit:
        whose = "the model's sparse block"
        if draft_unit > 1:
            whose = f"for the model's sparse block {model.block_unit} and the draft model's {draft_unit}"
        raise ConfigError(f"block_size={block_size} must be a multiple of {unit}, {whose}; pass --block-size {unit}")
    return block_size


def check_fits(plan: CachePlan, config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError when caches whose size was asked for take more than is free."""
    name = "num_blocks" if config.num_blocks else "cache_memory_gb"
    asked = getattr(config, name)
    if asked is None:
        return
    if device.type != "cpu":
        torch.cuda.empty_cache()  # what torch keeps for later is free too
    wanted, free = plan.num_blocks * plan.block_size * plan.bytes_per_token, free_memory_bytes(device)
    if wanted > free:
        raise ConfigError(f"{name}={asked} makes caches of {wanted:,} bytes, but {free:,} bytes are free; lower it")


class MemoryBudget(NamedTuple):
    """Memory that caches may take when nothing else is asked."""

    free: int
    share: float
    step_bytes: int = 0  # what the largest step needs besides

    @property
    def size(self) -> int:
        """Bytes."""
        return max(int(self.free * self.share) - self.step_bytes, 0)


def plan_caches(
    config: EngineConfig,
    model: ModelConfig,
    specs: list[CacheSpec],
    dtype: torch.dtype,
    draft_unit: int = 1,
    budget: MemoryBudget | None = None,
) -> CachePlan:
    """Resolve block size, number of blocks and longest sequence. Raises ConfigError when they cannot agree.

    Blocks serve target and draft layers, so they hold whole sparse blocks of both. `budget`: on a GPU, what a dry run
    of the largest step left.
    """
    block_size = choose_block_size(config, model, draft_unit)
    longest = config.max_model_len or model.max_position_embeddings
    if longest > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={longest} is more than the model's {model.max_position_embeddings} positions; lower it"
        )
    per_token = sum(spec.bytes_per_token(dtype) for spec in specs)
    per_sequence = -(-longest // block_size)
    if config.num_blocks:
        blocks, reason = config.num_blocks, "num_blocks"
    elif config.cache_memory_gb:
        blocks, reason = int(config.cache_memory_gb * 2**30 / (per_token * block_size)), "cache_memory_gb"
    else:
        sequences = max(DEFAULT_SEQUENCES, config.max_num_seqs) if budget else DEFAULT_SEQUENCES
        budget = budget or MemoryBudget(free_memory_bytes(), DEFAULT_SHARE)
        fitting = budget.size // (per_token * block_size)
        blocks = min(fitting, sequences * per_sequence)
        reason = f"{sequences} full sequences" if blocks < fitting else f"{budget.share:.0%} of free memory"
    if blocks < per_sequence:
        if config.max_model_len and blocks:
            raise ConfigError(
                f"max_model_len={longest} needs {per_sequence} cache blocks of {block_size} tokens but {reason} gives "
                f"{blocks}; raise it or pass --max-model-len {blocks * block_size}"
            )
        longest = blocks * block_size
    if longest < 1:
        raise ConfigError(f"no cache block of {block_size} tokens fits ({reason}); raise --cache-memory-gb")
    if longest == model.max_position_embeddings:
        advice = "the model has no more positions"
    elif config.max_model_len:
        advice = "--max-model-len raises it"
    else:
        flag = "--num-blocks" if config.num_blocks else "--cache-memory-gb"
        advice = f"the caches hold no more ({reason}), {flag} raises it"
    return CachePlan(block_size, blocks + FIRST_BLOCK, longest, per_token, reason, advice)
