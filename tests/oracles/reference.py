"""The models as another library computes them, in float32, with the published selection rule where it has none.

Loading goes through the library's own mapping of hub names, so a wrong name in a tiny checkpoint cannot cancel out.
Two things differ from the library on purpose, because engines must agree on them and the papers fix them:

- Equal index scores. `relu` makes exact zeros, hence exact ties, in DeepSeek's scores; the library takes whichever
  its top-k returns. Here the lower token id wins.
- Blocks that MiniMax-M3 always keeps at the beginning (`sparse_init_block`): the library has no such setting.

Both indexers are therefore written out below from the equations. They also take `flaws`: single mistakes that a
test uses to show that the comparison would notice them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV32ForCausalLM, DynamicCache
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3SparseForConditionalGeneration

from oracles.tiny import Tiny

NEVER = float("-inf")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first dims of x [..., S, D] by angles [S, r/2]: pairs (i, i + r/2), or (2i, 2i + 1) if interleaved."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([turned, rest], dim=-1)


def half_angles(position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The library repeats each angle for both members of a pair; keep one. [B, S, r/2] each."""
    cos, sin = position_embeddings
    half = cos.shape[-1] // 2
    return cos[..., :half], sin[..., :half]


def best_first(scores: Tensor) -> Tensor:
    """Ids by descending score, equal scores by ascending id."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


def dsa_index(
    self: nn.Module,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor,
    cache: Any = None,
) -> Tensor:
    """The lightning indexer: sum over heads of weight x relu(q . k), best `index_topk` tokens. [B, S, topk] int32."""
    flaws: frozenset[str] = self.flaws
    batch, rows, _ = hidden_states.shape
    cos, sin = half_angles(position_embeddings)
    interleaved = "interleaved" in flaws
    q = self.wq_b(q_resid).view(batch, rows, self.n_heads, self.head_dim).transpose(1, 2)  # [B, HI, S, DI]
    q = rotate(q, cos[:, None], sin[:, None], interleaved)
    bias = None if "no bias" in flaws else self.k_norm.bias
    k = nn.functional.layer_norm(self.wk(hidden_states), (self.head_dim,), self.k_norm.weight, bias, 1e-6)
    k = rotate(k, cos, sin, interleaved)
    if cache is not None:
        k = cache.update_indexer(k, self.layer_idx)
    match = q.float() @ k.float()[:, None].transpose(-1, -2)  # [B, HI, S, S_ctx]
    match = match if "no relu" in flaws else match.relu()
    weights = self.weights_proj(hidden_states).float() * (self.n_heads * self.head_dim) ** -0.5  # [B, S, HI]
    weights = weights.abs() if "positive weights" in flaws else weights
    scores = torch.einsum("bhst,bsh->bst", match, weights)
    future = torch.arange(k.shape[1]) > position_ids[..., None]
    scores = scores.masked_fill(future, NEVER)
    budget = scores.shape[-1] if "dense" in flaws else self.index_topk
    return best_first(scores)[..., :budget].int()


def m3_index(
    self: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any,
    position_ids: Tensor,
) -> Tensor:
    """Block scores and forced blocks: [B, H_idx, S, min(budget, blocks)], -1 where fewer blocks are visible."""
    flaws: frozenset[str] = self.flaws
    batch, rows, _ = hidden_states.shape
    cos, sin = half_angles(position_embeddings)
    q = self.q_norm(self.q_proj(hidden_states).view(batch, rows, self.num_heads, self.head_dim)).transpose(1, 2)
    k = self.k_norm(self.k_proj(hidden_states).view(batch, rows, 1, self.head_dim)).transpose(1, 2)
    interleaved = "interleaved" in flaws
    q, k = (rotate(x, cos[:, None], sin[:, None], interleaved) for x in (q, k))
    if cache is not None:
        k = cache.layers[self.layer_idx].update_index(k)
    scores = q.float() @ k.float().transpose(-1, -2)  # [B, H_idx, S, S_ctx]
    last = position_ids[:, None, :, None]
    scores = scores.masked_fill(torch.arange(k.shape[2]) > last, NEVER)
    blocks = -(-k.shape[2] // self.block_size)
    scores = nn.functional.pad(scores, (0, blocks * self.block_size - k.shape[2]), value=NEVER)
    scores = scores.unflatten(-1, (blocks, self.block_size))
    pooled = scores.logsumexp(-1) if "soft maximum" in flaws else scores.amax(-1)  # [B, H_idx, S, blocks]
    ids = torch.arange(blocks)
    own = last // self.block_size
    init, local = (0 if "no init" in flaws else self.init_blocks), (1 if "one local" in flaws else self.local_blocks)
    forced = (ids < init) | (ids > own - local)
    pooled = pooled.masked_fill(forced & (ids <= own), float("inf"))
    chosen = best_first(pooled)[..., : blocks if "dense" in flaws else self.topk_blocks]
    if "one group" in flaws:
        chosen = chosen[:, :1].expand_as(chosen)
    return chosen.masked_fill(chosen > own, -1)


class Reference:
    """A tiny checkpoint in the other library, with its indexers replaced by those above."""

    def __init__(self, tiny: Tiny, folder: Path, *flaws: str):
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self.is_dsa = tiny.config["architectures"] == ["DeepseekV32ForCausalLM"]
        cls = DeepseekV32ForCausalLM if self.is_dsa else MiniMaxM3SparseForConditionalGeneration
        self.model, report = cls.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        self._check_loaded(tiny, report)
        self.model.eval()
        self.layers = self.model.model.layers if self.is_dsa else self.model.model.language_model.layers
        self.text_config = self.model.config if self.is_dsa else self.model.config.text_config
        for indexer in self.indexers():
            indexer.flaws = frozenset(flaws)
            indexer.forward = MethodType(dsa_index if self.is_dsa else m3_index, indexer)
            if not self.is_dsa:
                indexer.init_blocks = tiny.text["sparse_attention_config"]["sparse_init_block"]

    @staticmethod
    def _check_loaded(tiny: Tiny, report: dict[str, Any]) -> None:
        """Everything but the vision tower and the MTP layer must have found its place."""
        extra = f"model.layers.{tiny.text['num_hidden_layers']}."
        missing = [n for n in report["missing_keys"] if "vision_tower" not in n and "multi_modal" not in n]
        unexpected = [n for n in report["unexpected_keys"] if not n.startswith((extra, "model.vision_tower"))]
        if missing or unexpected or report["mismatched_keys"]:
            raise AssertionError(f"missing {missing[:4]}, unexpected {unexpected[:4]}, {report['mismatched_keys']}")

    def indexers(self) -> list[nn.Module]:
        """The index branches of the sparse layers."""
        return [layer.self_attn.indexer for layer in self.layers if layer.self_attn.indexer is not None]

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> Tensor:
        """[n, V], one forward over the whole sequence without a cache."""
        return self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()

    def logprobs(self, token_ids: list[int]) -> Tensor:
        """[n, V] float64."""
        return self.logits(token_ids).double().log_softmax(-1)

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int, cached: bool) -> tuple[list[int], float]:
        """The likeliest continuation, and the smallest lead that any of its tokens had over the second likeliest."""
        token_ids, lead = list(prompt), float("inf")
        cache = DynamicCache(config=self.text_config) if cached else None
        for step in range(count):
            if cache is None:
                last = self.logits(token_ids)[-1]
            else:
                new = token_ids if step == 0 else token_ids[-1:]
                last = self.model(input_ids=torch.tensor([new]), cache=cache, use_cache=True).logits[0, -1]
            best = last.topk(2).values
            lead = min(lead, float(best[0] - best[1]))
            token_ids.append(int(last.argmax()))
        return token_ids[len(prompt) :], lead


def relative_error(got: Tensor, expected: Tensor) -> Tensor:
    """Per row of log-probabilities: largest difference over the vocabulary, in units of the row's largest magnitude."""
    return (got.double() - expected).abs().amax(-1) / expected.abs().amax(-1)
