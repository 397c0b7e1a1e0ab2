"""Engine options: one definition from which flags, SKIPSTONE_ variables and YAML keys are made.

`EngineConfig` is frozen. What a field may be is checked once, in `make_config`; what depends on the checkpoint (block
size, context length) is resolved by the engine when it has read the checkpoint.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from skipstone.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu"]
PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the engine; `None` means: chosen at start-up from the checkpoint and the machine, and printed."""

    model: Annotated[str, Meta(description="checkpoint folder, or demo / demo-dsa")]
    dtype: Annotated[Dtype, Meta(description="weights and activations; auto: float32 on a CPU")] = "auto"
    device: Annotated[Device, Meta(description="where the model runs")] = "auto"
    exact: Annotated[bool, Meta(description="bit-equal logits whatever else runs in the step")] = True
    max_model_len: Annotated[PositiveInt | None, Meta(description="longest prompt plus output, in tokens")] = None
    max_num_seqs: Annotated[PositiveInt, Meta(description="most requests in one step")] = 64
    max_num_batched_tokens: Annotated[PositiveInt, Meta(description="most rows in one step; prompts run in chunks")] = 512
    block_size: Annotated[PositiveInt | None, Meta(description="tokens per cache block")] = None
    num_blocks: Annotated[PositiveInt | None, Meta(description="cache blocks; default: from cache_memory_gb")] = None
    cache_memory_gb: Annotated[PositiveFloat | None, Meta(description="memory for all caches")] = None
    prefix_caching: Annotated[bool, Meta(description="reuse cached blocks of equal prompt beginnings")] = True
    num_threads: Annotated[PositiveInt | None, Meta(description="CPU threads; default: torch's own choice")] = None


def make_config(**options: object) -> EngineConfig:
    """Check options against the definition. Raises ConfigError naming the option, its value and what is allowed."""
    try:
        return msgspec.convert(options, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
