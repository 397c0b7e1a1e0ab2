"""What every model offers the engine: the stack of decoder layers, and what draft heads must have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor, nn

from skipstone.attention.backend import AttentionStep, LayerAttention, SparseSettings
from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheSpec
from skipstone.kernels.reference.pointwise import SILU, GatedActivation
from skipstone.layers.feed_forward import GatedMLP, MixtureOfExperts, Router
from skipstone.layers.linear import Linear, RMSNorm
from skipstone.layers.rotary import RotarySettings
from skipstone.models.config_reader import from_key

MTP_MODULE = "MTP module"  # why a target leaves out the tensors of a draft module in its own files


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The keys of config.json that all models need, under our names; the engine reads no others."""

    hidden_size: int = from_key()
    vocab_size: int = from_key()
    num_layers: int = from_key("num_hidden_layers")  # draft modules not counted
    max_position_embeddings: int = from_key()  # that the model was made for
    heads: int = from_key("num_attention_heads")
    rotary: RotarySettings
    eps: float = from_key("rms_norm_eps")
    sparse: SparseSettings
    moe_layers: tuple[bool, ...]
    dense_intermediate: int
    expert_intermediate: int
    shared_intermediate: int  # of all shared experts together
    experts: int
    experts_per_token: int = from_key("num_experts_per_tok")
    expert_groups: int = 1
    kept_groups: int = 1
    routed_scaling: float = from_key("routed_scaling_factor")
    declared_mtp_modules: int  # that config.json speaks of; the weights may hold fewer

    @property
    def block_unit(self) -> int:
        """Cache blocks hold whole units of selection, a multiple of this many tokens."""
        return self.sparse.unit

    @property
    def softmax_scale(self) -> float:
        """Factor on attention scores."""
        raise NotImplementedError

    def of_draft_layers(self, count: int) -> Self:
        """The same with MTP layers: all have experts, whatever the target's have."""
        return replace(self, num_layers=count, moe_layers=(True,) * count)

    @property
    def activation(self) -> GatedActivation:
        """Of dense layers and experts alike."""
        return SILU


@runtime_checkable
class Derives(Protocol):
    """A module that derives something from its weights once they are loaded."""

    def after_load(self) -> None:
        """Called once."""


class HiddenStates(NamedTuple):
    """What a forward pass gives: states after the final norm, and the tapped ones in ascending order of layers."""

    final: Tensor  # [T, H], or [K, H] of the rows that the last layer keeps
    taps: tuple[Tensor, ...] = ()  # each [T, H], the residual stream entering a layer


class WeightedModel(nn.Module):
    """Whatever is filled from a checkpoint folder: a target model or a draft head."""

    def weight_slots(self) -> dict[str, Tensor]:
        """Hub tensor name -> the view of a parameter that it fills, each exactly once."""
        raise NotImplementedError

    def ignored_weight(self, name: str) -> str | None:
        """Why a checkpoint tensor without a slot is left out ("vision tower"), or None: it is unexpected."""
        raise NotImplementedError

    def after_load(self) -> None:
        """What must be derived from the weights once they are in place."""
        for module in self.modules():
            if module is not self and isinstance(module, Derives):
                module.after_load()


class MoeNames(NamedTuple):
    """What a checkpoint calls a mixture of experts and its parts."""

    module: str
    bias: str
    gate: str
    up: str
    down: str


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)). Subclasses name the attention, and the weights."""

    attention_class: type[Any]  # of (config, layer, dtype, exact), with `forward`, `cache_specs` and `weight_slots`
    norm_offset = 0.0  # see RMSNorm
    moe_names: MoeNames

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, exact: bool) -> None:
        super().__init__()
        hidden, activation = config.hidden_size, config.activation
        self.attention_norm = RMSNorm(hidden, config.eps, self.norm_offset)
        self.attention: Any = self.attention_class(config, layer, dtype, exact)
        self.ffn_norm = RMSNorm(hidden, config.eps, self.norm_offset)
        self.ffn: GatedMLP | MixtureOfExperts
        if config.moe_layers[layer]:
            groups = (config.expert_groups, config.kept_groups)
            router = Router(hidden, config.experts, config.experts_per_token, config.routed_scaling, exact, *groups)
            widths = (config.expert_intermediate, config.shared_intermediate)
            self.ffn = MixtureOfExperts(hidden, *widths, router, activation, dtype)
        else:
            self.ffn = GatedMLP(hidden, config.dense_intermediate, activation, dtype, exact)

    def forward(self, x: Tensor, update: Tensor | None, rotary: Any, attend: LayerAttention) -> tuple[Tensor, Tensor]:
        """Stream x [T, H] and the last layer's update of it, yet to be added -> the same of this layer's kept rows."""
        x, normed = (x, self.attention_norm(x)) if update is None else self.attention_norm.add(x, update)
        attended = self.attention(normed, rotary, attend)
        x, normed = self.ffn_norm.add(attend.keep(x), attended)
        return x, self.ffn(normed)

    def weight_slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills."""
        slots = {
            f"{prefix}.input_layernorm.weight": self.attention_norm.weight,
            f"{prefix}.post_attention_layernorm.weight": self.ffn_norm.weight,
            **self.attention.weight_slots(f"{prefix}.self_attn"),
        }
        if isinstance(self.ffn, GatedMLP):
            return slots | self.ffn.weight_slots(f"{prefix}.mlp")
        names = self.moe_names
        moe = f"{prefix}.{names.module}"
        slots[f"{moe}.gate.weight"] = self.ffn.router.scores.hub_weight
        slots[f"{moe}.{names.bias}"] = self.ffn.router.bias
        slots |= self.ffn.expert_slots(f"{moe}.experts", names.gate, names.up, names.down)
        return slots | self.ffn.shared_slots(f"{moe}.shared_experts")


class MtpLayout(NamedTuple):
    """How a release stores the MTP modules of a model, see `mtp.py`."""

    stem: str  # behind it stands a module's number
    norm: str  # the one behind the layer
    base: str = ""  # before the stem; an export may leave it out
    layer: str = ""  # before the names of the layer's weights
    after_layers: bool = False  # whether numbers follow those of the target's layers; else they begin at 0
    copies: tuple[str, ...] = ()  # of the target's weights, that files may hold with every module
    zero_first: bool = False  # whether position 0 has zeros for an embedding


class CausalLM(WeightedModel):
    """A language model over paged caches: embedding, decoder layers, final norm, vocabulary product.

    Subclasses are one file each and hold what is special about a model: its config, its layer, its angles, its names.
    """

    config: Any  # a ModelConfig of its own
    layer_class: type[DecoderLayer]
    mtp: MtpLayout | None = None

    @staticmethod
    def read_config(raw: dict[str, Any]) -> ModelConfig:
        """Read and check config.json. Raises ConfigError naming a key that is missing or out of range."""
        raise NotImplementedError

    @staticmethod
    def with_fp8_index_keys(config: Any) -> ModelConfig | None:
        """The configuration with index keys cached in FP8; None where the architecture has none per token."""
        return None

    def __init__(self, config: Any, dtype: torch.dtype, exact: bool, max_position: int) -> None:
        super().__init__()
        self.config, self.max_position = config, max_position
        self.embed = empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        layers = nn.ModuleList(self.layer_class(config, i, dtype, exact) for i in range(config.num_layers))
        self.layers = cast("list[DecoderLayer]", layers)
        self.norm = RMSNorm(config.hidden_size, config.eps, self.layer_class.norm_offset)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype, exact)

    def angles(self, positions: Tensor) -> Any:
        """What the layers' attention takes as the rotary embedding of rows at `positions` [T]."""
        raise NotImplementedError

    def cache_specs(self) -> list[CacheSpec]:
        """One or two per layer: each a cache group, its tensors and its attention backend."""
        return layer_caches(self.layers)

    def forward(self, batch: Batch, attention: AttentionStep, taps: tuple[int, ...] = ()) -> HiddenStates:
        """States of every row, or of those that the last layer keeps.

        `taps` lists layers whose input is wanted, ascending; num_layers is the last output, which nobody may tap when
        only some rows are kept.
        """
        x = self.embed[batch.input_ids]
        rotary = self.angles(batch.positions)
        update: Tensor | None = None
        tapped = []
        for i, layer in enumerate(self.layers):
            if i in taps:
                tapped.append(x if update is None else x + update)
            x, update = layer(x, update, rotary, attention[i])
        assert update is not None
        x, normed = self.norm.add(x, update)
        if len(self.layers) in taps:
            tapped.append(x)
        return HiddenStates(normed, tuple(tapped))

    def logits(self, hidden: Tensor) -> Tensor:
        """[L, H] -> [L, V] float32."""
        return self.compact_logits(hidden).float()

    def compact_logits(self, hidden: Tensor) -> Tensor:
        """[L, H] -> [L, V] in the model's dtype, of which `logits` are a float32 copy."""
        return self.lm_head(hidden)

    def weight_slots(self) -> dict[str, Tensor]:
        """Hub names."""
        slots: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed,
            "model.norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head.hub_weight,
        }
        for i, layer in enumerate(self.layers):
            slots |= layer.weight_slots(f"model.layers.{i}")
        return slots


def layer_caches(layers: Iterable[DecoderLayer]) -> list[CacheSpec]:
    """The cache groups of layers, in their order."""
    return [spec for layer in layers for spec in layer.attention.cache_specs()]


class DraftOutput(NamedTuple):
    """What a draft head makes of the states of R rows."""

    logits: Tensor  # [R, V] float32 over the target's vocabulary, -inf for tokens outside a smaller draft vocabulary
    recycled: Tensor  # [R, H], fed to the next draft step in place of the target's hidden state


class DraftHead(WeightedModel):
    """A head that drafts from the target's hidden states (MTP modules, EAGLE-3), over caches of its own.

    The row at position p is fed the state of p and the token at p + 1; its logits predict the token at p + 2. With
    several modules, module m is fed module m - 1's states and the token at p + m + 1, and predicts p + m + 2.
    """

    taps: tuple[int, ...] = ()  # target layers whose input it reads, ascending; empty: the final hidden state
    num_modules: int = 1
    attention_scale: float  # factor on attention scores
    sparse: SparseSettings | None = None  # unit and budget of sparse draft layers
    max_position: int
    remarks: tuple[str, ...] = ()  # what a user should know of it that no option says

    def cache_specs(self) -> list[CacheSpec]:
        """Cache groups of the draft layers, numbered from 0 by module."""
        raise NotImplementedError

    def first_hidden(self, hidden: HiddenStates) -> Tensor:
        """From the target's states to what the first pass is fed, [T, H]."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, batch: Batch, attention: AttentionStep, module: int = 0) -> Tensor:
        """States [K, H] of a module's kept rows; `batch.input_ids` are the tokens at p + module + 1."""
        raise NotImplementedError

    def recycled(self, states: Tensor, module: int = 0) -> Tensor:
        """What the next draft step or module is fed in place of the target's state; states [R, H] are of `forward`."""
        raise NotImplementedError

    def outputs(self, states: Tensor, module: int = 0) -> DraftOutput:
        """Logits and recycled states of the rows [R, H] of `forward`."""
        raise NotImplementedError


class BlockDraftHead(WeightedModel):
    """A head that drafts a block of tokens in one pass (DFlash), over caches of its own.

    The target's rows never run through its layers: keys and values are made from the target's states directly. A block
    is the newest committed token and one mask token per draft, all of which see each other and the whole context.
    """

    taps: tuple[int, ...]
    block_size: int  # rows of a block, one more than it can draft
    mask_token_id: int
    attention_scale: float  # factor on attention scores
    max_position: int

    def cache_specs(self) -> list[CacheSpec]:
        """Cache groups of the draft layers."""
        raise NotImplementedError

    def store_context(self, hidden: HiddenStates, batch: Batch, attention: AttentionStep) -> None:
        """Write keys and values of the target's rows, whose states are given, into every layer's cache."""
        raise NotImplementedError

    def forward(self, batch: Batch, attention: AttentionStep) -> Tensor:
        """States [T, H] of the rows of blocks."""
        raise NotImplementedError

    def logits(self, states: Tensor) -> Tensor:
        """[R, H] -> [R, V] float32; a mask token's row predicts the token at its own position."""
        raise NotImplementedError


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised weight that the loader fills."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
