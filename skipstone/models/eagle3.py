"""EAGLE-3: one decoder layer over a mixture of the target's early, middle and late states (Li et al., 2025).

x = fc([taps of p]); the layer's q, k, v read [norm(Embed(t[p+1])), norm(x)], its residual stream is x itself; norm; a
vocabulary product of its own, over the most frequent tokens only. Later steps are fed the layer's output before the
norm. Two layouts are read: the hub's (`LlamaForCausalLMEagle3`) and that of the speculators library.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipstone.attention.backend import AttentionStep, CacheRows, LayerAttention
from skipstone.core.batch import Batch
from skipstone.core.kv_cache import CacheSpec
from skipstone.errors import CheckpointError, ConfigError
from skipstone.kernels.reference.pointwise import Rotary
from skipstone.layers.linear import Linear, RMSNorm
from skipstone.models.base import CausalLM, DraftHead, DraftOutput, HiddenStates, ModelConfig, empty_parameter
from skipstone.models.config_reader import ConfigReader
from skipstone.models.draft_layers import (
    DraftLayer,
    DraftLayerConfig,
    check_vocabulary,
    read_draft_layer,
    read_layer_ids,
)

TAP_KEY = "eagle_aux_hidden_state_layer_ids"
LAYER_NAMES = ("midlayer", "layers.0")
# Variants of the head that are not implemented, by the one value that is.
REFUSED = {"use_aux_hidden_state": True, "norm_before_fc": False, "fc_norm": False, "parallel_draft_step": 1}
REFUSED |= {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}


@dataclass(frozen=True)
class Eagle3Config:
    """The keys of config.json that the head needs. Tap i is the residual stream entering the target's layer i."""

    layer: DraftLayerConfig
    taps: tuple[int, ...]
    draft_vocab: int
    norm_before_residual: bool
    norm_output: bool
    usual_taps: bool  # config.json names none


def read_eagle3(raw: dict[str, Any], target: ModelConfig, where: str) -> Eagle3Config:
    """Read config.json in either layout and check it against the target. Raises ConfigError naming the key."""
    reader = ConfigReader(raw, where)
    nested = reader.section("transformer_layer_config") if "speculators_model_type" in raw else reader
    further = {} if raw.get("eagle_config") is None else reader.section("eagle_config").raw
    options = ConfigReader({**raw, **further}, where)
    for key, value in REFUSED.items():
        options.expect(key, (value, None))
    nested.expect("num_hidden_layers", (1,))
    check_vocabulary(nested, target)
    reader.expect("target_hidden_size", (target.hidden_size, None))
    draft_vocab = reader.integer("draft_vocab_size", default=target.vocab_size)
    if draft_vocab > target.vocab_size:
        raise ConfigError(
            f"{where}: draft_vocab_size={draft_vocab} is more than the target's vocab_size={target.vocab_size}; use a "
            "head that was trained for this model"
        )
    return Eagle3Config(
        layer=read_draft_layer(nested),
        taps=_taps(options, target.num_layers),
        draft_vocab=draft_vocab,
        norm_before_residual=bool(options.expect("norm_before_residual", (True, False), False)),
        norm_output=bool(options.expect("norm_output", (True, False), False)),
        usual_taps=not options.raw.get(TAP_KEY),
    )


def _taps(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    ids = reader.raw.get(TAP_KEY)
    if ids:
        return read_layer_ids(reader, TAP_KEY, ids, 0, num_layers)
    usual = [2, num_layers // 2, num_layers - 3]
    if len(set(usual)) < len(usual) or min(usual) < 0:
        raise ConfigError(
            f"{reader.where}: {TAP_KEY} is missing, and the usual layers 2, n/2 and n-3 of a target with "
            f"{num_layers} layers are {usual}; add the layers that the head was trained with"
        )
    return tuple(sorted(usual))


class Eagle3Layer(DraftLayer):
    """The decoder layer: attention reads embedding and state side by side."""

    def __init__(self, config: Eagle3Config, dtype: torch.dtype) -> None:
        super().__init__(config.layer, dtype)
        self.norm_before_residual, hidden = config.norm_before_residual, config.layer.hidden_size
        self.head_counts = [self.heads, self.kv_heads, self.kv_heads]
        self.embed_norm = RMSNorm(hidden, config.layer.eps)
        self.hidden_norm = RMSNorm(hidden, config.layer.eps)
        self.qkv = Linear(2 * hidden, sum(self.head_counts) * self.head_dim, dtype, exact=False)

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: Rotary, attend: LayerAttention) -> Tensor:
        """Embeddings and states [T, H] -> [K, H] of the kept rows."""
        normed = self.hidden_norm(hidden)
        projected = self.qkv(torch.cat([self.embed_norm(embedded), normed], dim=-1))
        q, k, v = projected.view(len(hidden), -1, self.head_dim).split(self.head_counts, dim=1)
        attend.write(CacheRows(self.ops.rotate(k, rotary), v))
        out = attend.run(attend.keep(self.ops.rotate(q, rotary)), None)
        return self.close(attend.keep(normed if self.norm_before_residual else hidden), out)

    def weight_slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills."""
        q, k, v = self.qkv.hub_weight.split([count * self.head_dim for count in self.head_counts])
        return self.named(prefix, q, k, v, {"input_layernorm": self.embed_norm, "hidden_norm": self.hidden_norm})


class DraftVocabulary(nn.Module):
    """Which target tokens the head can draft. `d2t` holds offsets: target id = draft id + d2t[draft id]."""

    d2t: Tensor  # [draft vocabulary] int64
    t2d: Tensor  # [V] bool, whether a token can be drafted

    def __init__(self, draft_vocab: int, vocab: int) -> None:
        super().__init__()
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64), persistent=False)
        self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool), persistent=False)

    def after_load(self) -> None:
        """Turn offsets into ids, once. Raises CheckpointError when they are none."""
        self.ids = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        inside = bool((self.ids >= 0).all() and (self.ids < len(self.t2d)).all())
        if not inside or len(self.ids.unique()) < len(self.ids) or self._contradicts():
            raise CheckpointError(
                "d2t does not hold offsets (target id = draft id + d2t[draft id]) to different tokens of the target's "
                f"{len(self.t2d)}, or t2d marks others; convert it, or use a head that was trained for this model"
            )

    def _contradicts(self) -> bool:
        """A checkpoint may leave t2d out."""
        return bool(self.t2d.any()) and not torch.equal(self.t2d.nonzero()[:, 0], self.ids.sort().values)

    def forward(self, logits: Tensor) -> Tensor:
        """[R, draft vocabulary] -> [R, V]; -inf for tokens that cannot be drafted."""
        full = logits.new_full((len(logits), len(self.t2d)), -torch.inf)
        return full.index_copy_(1, self.ids, logits)


class Eagle3(DraftHead):
    """The head. What its files leave out, embedding or vocabulary product, is the target's."""

    def __init__(
        self, config: Eagle3Config, target: CausalLM, names: Collection[str], dtype: torch.dtype, max_position: int
    ) -> None:
        """`names`: the tensors in its files. Raises CheckpointError when the target's cannot replace a missing one."""
        super().__init__()
        self.config, self.taps = config, config.taps
        if config.usual_taps:
            self.remarks = (f"config.json names no {TAP_KEY}: the usual 2, n/2 and n-3",)
        hidden, target_hidden, vocab = config.layer.hidden_size, target.config.hidden_size, target.config.vocab_size
        _check_stored(config, names, target_hidden, vocab)
        self.layer_name = next((name for name in LAYER_NAMES if any(n.startswith(name) for n in names)), LAYER_NAMES[0])
        self.has_embed = "embed_tokens.weight" in names
        self.embed = empty_parameter(vocab, hidden, dtype=dtype) if self.has_embed else target.embed
        self.fc = Linear(len(config.taps) * target_hidden, hidden, dtype, exact=False)
        self.layer = Eagle3Layer(config, dtype)
        self.norm = RMSNorm(hidden, config.layer.eps)
        own = "lm_head.weight" in names
        self.lm_head = Linear(hidden, config.draft_vocab, dtype, exact=False) if own else None
        self.target_logits = target.logits
        self.vocabulary = DraftVocabulary(config.draft_vocab, vocab) if "d2t" in names else None
        self.has_mask = self.vocabulary is not None and "t2d" in names
        self.max_position = min(config.layer.max_position, max_position)
        self.rotary = config.layer.rotary_table(self.max_position)
        self.attention_scale = config.layer.softmax_scale

    def cache_specs(self) -> list[CacheSpec]:
        """Keys and values of the one layer."""
        return self.config.layer.cache_specs(0)

    def first_hidden(self, hidden: HiddenStates) -> Tensor:
        """fc of the tapped states side by side."""
        return self.fc(torch.cat(hidden.taps, dim=-1))

    def forward(self, hidden: Tensor, batch: Batch, attention: AttentionStep, module: int = 0) -> Tensor:
        """States [K, H] of the kept rows, before the norm."""
        return self.layer(self.embed[batch.input_ids], hidden, self.rotary(batch.positions), attention[0])

    def recycled(self, states: Tensor, module: int = 0) -> Tensor:
        """States without the norm, unless the head was trained otherwise."""
        return self.norm(states) if self.config.norm_output else states

    def outputs(self, states: Tensor, module: int = 0) -> DraftOutput:
        """Logits of the normalised states, over the target's vocabulary."""
        normed = self.norm(states)
        logits = self.target_logits(normed) if self.lm_head is None else self.lm_head(normed).float()
        if self.vocabulary is not None:
            logits = self.vocabulary(logits)
        return DraftOutput(logits, normed if self.config.norm_output else states)

    def weight_slots(self) -> dict[str, Tensor]:
        """The hub's names; the layer is called `midlayer` or `layers.0`."""
        slots: dict[str, Tensor] = {"fc.weight": self.fc.hub_weight, "norm.weight": self.norm.weight}
        if self.lm_head is not None:
            slots["lm_head.weight"] = self.lm_head.hub_weight
        if self.has_embed:
            slots["embed_tokens.weight"] = self.embed
        if self.vocabulary is not None:
            slots["d2t"] = self.vocabulary.d2t
            if self.has_mask:
                slots["t2d"] = self.vocabulary.t2d
        return slots | self.layer.weight_slots(self.layer_name)

    def ignored_weight(self, name: str) -> str | None:
        """What only training needs."""
        reason = "the whole vocabulary is drafted" if name == "t2d" else None
        return reason or ("for training" if name.startswith("verifier_") else None)


def _check_stored(config: Eagle3Config, names: Collection[str], target_hidden: int, vocab: int) -> None:
    hidden, draft_vocab = config.layer.hidden_size, config.draft_vocab
    if "embed_tokens.weight" not in names and hidden != target_hidden:
        raise CheckpointError(
            f"hidden_size={hidden} of the EAGLE-3 head differs from the target's {target_hidden}, so it needs an "
            "embed_tokens.weight of its own, which its files lack; use a head that was trained for this model"
        )
    if "lm_head.weight" not in names and (hidden, draft_vocab) != (target_hidden, vocab):
        raise CheckpointError(
            f"the EAGLE-3 head's files lack lm_head.weight, and the target's [{vocab}, {target_hidden}] cannot replace "
            f"it: draft_vocab_size={draft_vocab}, hidden_size={hidden}; download the head again"
        )
    if "d2t" not in names and draft_vocab != vocab:
        raise CheckpointError(
            f"draft_vocab_size={draft_vocab} of the EAGLE-3 head is less than the target's vocab_size={vocab}, so it "
            "needs the tensor d2t, which its files lack; download the head again"
        )
