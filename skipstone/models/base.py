"""What every model offers the engine, and how its config keys are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from skipstone.attention.backend import AttentionStep, SparseSettings
from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheSpec
from skipstone.errors import ConfigError
from skipstone.kernels.reference.pointwise import SILU, GatedActivation
from skipstone.layers.linear import Linear
from skipstone.layers.rotary import RotarySettings

MTP_MODULE = "MTP module"  # why a target leaves out the tensors of a draft module in its own files
# Words that begin the keys of what a model computes, and keys among them that only training reads.
WORDS = (
    *(
        "attention_",
        "attn_logit",
        "embedding_",
        "expert",
        "final_logit",
        "index",
        "layernorm_",
        "logit",
        "mlp_",
        "moe_",
    ),
    *("qk_", "residual_", "rope_", "rotary_", "rout", "sliding_", "sparse_", "swiglu_"),
)
TRAINING = ("attention_dropout", "router_aux_loss_coef", "router_jitter_noise")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The keys of config.json that all models need, under our names; the engine reads no others."""

    hidden_size: int
    vocab_size: int
    num_layers: int  # draft modules not counted
    max_position_embeddings: int  # that the model was made for
    heads: int
    rotary: RotarySettings
    eps: float
    sparse: SparseSettings
    moe_layers: tuple[bool, ...]
    dense_intermediate: int
    expert_intermediate: int
    shared_intermediate: int  # of all shared experts together
    experts: int
    experts_per_token: int
    expert_groups: int = 1
    kept_groups: int = 1
    routed_scaling: float
    declared_mtp_modules: int  # that config.json speaks of; the weights may hold fewer

    @property
    def block_unit(self) -> int:
        """Cache blocks hold whole units of selection, a multiple of this many tokens."""
        return self.sparse.unit

    @property
    def softmax_scale(self) -> float:
        """Factor on attention scores."""
        raise NotImplementedError

    @property
    def activation(self) -> GatedActivation:
        """Of dense layers and experts alike."""
        return SILU


@runtime_checkable
class Derives(Protocol):
    """A module that derives something from its weights once they are loaded."""

    def after_load(self) -> None:
        """Called once."""


class Kept(NamedTuple):
    """The K rows whose final states are wanted; the last layer only caches the keys of the others.

    `attention` is the step of a batch of these rows alone. Rows are independent, so in exact mode no bit changes.
    """

    rows: Tensor  # [K] int64, ascending
    attention: AttentionStep


class HiddenStates(NamedTuple):
    """What a forward pass gives: states after the final norm, and the tapped ones in ascending order of layers."""

    final: Tensor  # [T, H], or [K, H] of the kept rows
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


class CausalLM(WeightedModel):
    """A language model over paged caches. Subclasses are one file each and read like the paper."""

    config: ModelConfig
    embed: Tensor  # [V, H]
    lm_head: Linear

    @staticmethod
    def read_config(raw: dict[str, Any]) -> ModelConfig:
        """Read and check config.json. Raises ConfigError naming a key that is missing or out of range."""
        raise NotImplementedError

    @staticmethod
    def with_fp8_index_keys(config: Any) -> ModelConfig | None:
        """The configuration with index keys cached in FP8; None where the architecture has none per token."""
        return None

    def cache_specs(self) -> list[CacheSpec]:
        """One or two per layer: each a cache group, its tensors and its attention backend."""
        raise NotImplementedError

    def forward(
        self, batch: Batch, attention: AttentionStep, taps: tuple[int, ...] = (), kept: Kept | None = None
    ) -> HiddenStates:
        """States of every row, or of those that are `kept`.

        `taps` lists layers whose input is wanted, ascending; num_layers is the last output, which nobody may tap when
        only some rows are kept.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """[L, H] -> [L, V] float32."""
        return self.compact_logits(hidden).float()

    def compact_logits(self, hidden: Tensor) -> Tensor:
        """[L, H] -> [L, V] in the model's dtype, of which `logits` are a float32 copy."""
        raise NotImplementedError


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
    max_position: int
    remarks: tuple[str, ...] = ()  # what a user should know of it that no option says

    def cache_specs(self) -> list[CacheSpec]:
        """Cache groups of the draft layers, numbered from 0 by module."""
        raise NotImplementedError

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores."""
        raise NotImplementedError

    @property
    def sparse(self) -> SparseSettings | None:
        """Unit and budget of sparse draft layers."""
        raise NotImplementedError

    def first_hidden(self, hidden: HiddenStates) -> Tensor:
        """From the target's states to what the first pass is fed, [T, H]."""
        raise NotImplementedError

    def forward(
        self, hidden: Tensor, batch: Batch, attention: AttentionStep, module: int = 0, kept: Kept | None = None
    ) -> Tensor:
        """States [T, H] of a module, or of the kept rows alone; `batch.input_ids` are the tokens at p + module + 1."""
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
    max_position: int

    def cache_specs(self) -> list[CacheSpec]:
        """Cache groups of the draft layers."""
        raise NotImplementedError

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores."""
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


class ConfigReader:
    """Typed reads from a raw config dictionary; every error names the key, its value and what is expected."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = dict(raw)
        self.where = where
        self.read: set[str] = set()  # keys that somebody asked for
        self.places: dict[str, str] = {}  # of keys whose value was found under another name

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands."""
        self.read.add(key)
        return self.raw.get(key, default)

    def place(self, key: str) -> str:
        """Where the value of a key was found, for messages."""
        return self.places.get(key, f"{self.where}: {key}")

    def integer(self, key: str, low: int = 1, default: int | None = None) -> int:
        """An int of at least `low`. Raises ConfigError."""
        value = self.get(key, default)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"{self.place(key)}={value!r} must be a whole number of at least {low}; fix config.json")
        return value

    def number(self, key: str, default: float | None = None, zero: bool = False) -> float:
        """A finite positive number, or 0 where that is allowed. Raises ConfigError."""
        value = self.get(key, default)
        if value is None:
            raise self._missing(key)
        wrong = not isinstance(value, (int, float)) or isinstance(value, bool)
        if wrong or not 0 <= value < float("inf") or not (value or zero):
            allowed = "a number of at least 0" if zero else "a positive number"
            raise ConfigError(f"{self.place(key)}={value!r} must be {allowed}; fix config.json")
        return float(value)

    def layers(self, key: str, length: int, kinds: tuple[Any, ...] = (0, 1)) -> tuple[bool, ...]:
        """A list with one of some values for each of `length` layers: whether it is the last. Raises ConfigError."""
        value = self.get(key)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, list) or len(value) != length or any(item not in kinds for item in value):
            options = " or ".join(repr(kind) for kind in kinds)
            raise ConfigError(
                f"{self.place(key)}={value!r:.80} must list {options} for each of num_hidden_layers={length}"
            )
        return tuple(item == kinds[-1] for item in value)

    def expect(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """One of the values we implement. Raises ConfigError."""
        value = self.get(key, default)
        if value not in allowed:
            options = " or ".join(repr(item) for item in allowed)
            raise ConfigError(f"{self.place(key)}={value!r} is not supported, only {options}")
        return value

    def section(self, key: str) -> ConfigReader:
        """A nested object. Raises ConfigError."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise self._missing(key) if value is None else ConfigError(f"{self.where}: {key} must be an object")
        return ConfigReader(value, f"{self.where}.{key}")

    def multiple(self, key: str, value: int, of_key: str, of: int) -> None:
        """Check that one key is a multiple of another. Raises ConfigError."""
        if value % of:
            raise ConfigError(f"{self.place(key)}={value} must be a multiple of {of_key}={of}; fix config.json")

    def agree(self, key: str, value: Any, place: str) -> None:
        """Raise ConfigError when the key is given and is not the value that follows from another place."""
        own = self.get(key)
        if own is not None and own != value:
            raise ConfigError(
                f"{self.place(key)}={own!r:.80} disagrees with {place}={value!r:.80}; keep what the model was made with"
            )

    def adopt(self, key: str, value: Any, place: str) -> None:
        """Take the value of a key from another place. Raises ConfigError when the key is given and differs."""
        if value is not None:
            self.agree(key, value, place)
            self.raw[key] = value
        if value is not None or key not in self.raw:
            self.places[key] = place

    def also(self, key: str, other: ConfigReader, name: str) -> None:
        """A second name of a key. Raises ConfigError when both are given and differ."""
        self.adopt(key, other.get(name), other.place(name))

    def finish(self, words: tuple[str, ...] = WORDS, when: str = "") -> None:
        """Raise ConfigError for a key that nobody asked for although its name begins with one of the words.

        Such a key names a mechanism that is not here. Keys without any of the words belong to other programs.
        """
        for key, value in self.raw.items():
            if key.startswith(words) and key not in self.read and key not in TRAINING and value is not None:
                raise ConfigError(
                    f"{self.place(key)}={value!r:.80} is not supported{when}: nothing here reads it; take it out if "
                    "the model does not depend on it"
                )

    def _missing(self, key: str) -> ConfigError:
        other = "" if self.place(key) == f"{self.where}: {key}" else f" (or {self.place(key)})"
        return ConfigError(
            f"{self.where}: key {key!r}{other} is missing; take config.json from the model's own release"
        )


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised weight that the loader fills."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
