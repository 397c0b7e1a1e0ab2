"""DeepSeek-V3.2 for training: latent attention over tokens chosen by the indexer, grouped sigmoid routing, one MTP module.

Module names follow the checkpoint, experts are stacked. Modes of a layer are those of m3.py. Two rotary styles, as the model
requires: interleaved in the latent attention, half-split in the indexer, with the same YaRN frequencies.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import (Experts, Linear, LoadBalance, Mlp, RMSNorm, StepMemory, Stepper, attend, attention_mass, causal_mask, choose, divergence,
                    mixture, rope_half, rope_interleaved, step_attention)


@dataclass(frozen=True)
class DsaConfig:
    hidden: int = 256
    layers: int = 6
    dense_layers: int = 1
    heads: int = 8
    q_rank: int = 128
    kv_rank: int = 64
    nope: int = 32
    rope: int = 16
    value: int = 32
    index_heads: int = 4
    index_dim: int = 32
    index_top: int = 256
    dense_width: int = 768
    expert_width: int = 160
    experts: int = 8
    experts_per_token: int = 2
    expert_groups: int = 4
    groups_per_token: int = 2
    routed_scale: float = 2.5
    rope_theta: float = 10000.0
    yarn_factor: float = 4.0
    yarn_original: int = 1024
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    vocab: int = 6144
    max_positions: int = 4096
    dropout: float = 0.0

    @property
    def out_std(self) -> float:
        return 0.02 / (2 * self.layers) ** 0.5

    @property
    def softmax_scale(self) -> float:
        """(nope + rope)^-1/2 times the square of YaRN's 0.1 ln(factor) + 1 (mscale and mscale_all_dim are 1)."""
        return (self.nope + self.rope) ** -0.5 * (0.1 * math.log(self.yarn_factor) + 1.0) ** 2


def yarn_frequencies(cfg: DsaConfig) -> Tensor:
    """[rope / 2] float32: fast dims untouched, slow dims divided by the factor, a ramp between."""
    def correction(rotations: float) -> float:
        return cfg.rope * math.log(cfg.yarn_original / (rotations * 2 * math.pi)) / (2 * math.log(cfg.rope_theta))

    base = cfg.rope_theta ** (-torch.arange(0, cfg.rope, 2).double() / cfg.rope)
    low = max(math.floor(correction(cfg.beta_fast)), 0)
    high = min(math.ceil(correction(cfg.beta_slow)), cfg.rope - 1)
    ramp = ((torch.arange(cfg.rope // 2).double() - low) / max(high - low, 0.001)).clamp(0, 1)
    return (base / cfg.yarn_factor * ramp + base * (1 - ramp)).float()


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


class Indexer(nn.Module):
    """Scores every visible token for a query: sum_h w_h relu(q_h . k)."""

    def __init__(self, cfg: DsaConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.wq_b = Linear(cfg.q_rank, cfg.index_heads * cfg.index_dim, 0.06)
        self.wk = Linear(cfg.hidden, cfg.index_dim)
        self.k_norm = nn.LayerNorm(cfg.index_dim, eps=1e-6)
        self.weights_proj = Linear(cfg.hidden, cfg.index_heads, 0.06)

    def forward(self, x: Tensor, qr: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, H], qr [B, S, q_rank], both detached -> q [B, h, S, D_i], w [B, h, S] float32, k [B, 1, S, D_i]."""
        cfg = self.cfg
        q = self.wq_b(qr).unflatten(-1, (cfg.index_heads, cfg.index_dim)).transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            k = F.layer_norm(F.linear(x.float(), self.wk.weight.float()), (cfg.index_dim,), self.k_norm.weight.float(), self.k_norm.bias.float(), 1e-6)
            w = F.linear(x.float(), self.weights_proj.weight.float()) * (cfg.index_heads**-0.5 * cfg.index_dim**-0.5)
        return rope_half(q, cos, sin), w.transpose(1, 2), rope_half(k[:, None].to(q.dtype), cos, sin)


def index_logits(q: Tensor, w: Tensor, k: Tensor) -> Tensor:
    """q [B, h, S, D], w [B, h, S], k [B, 1, T, D] -> [B, 1, S, T] float32; the relu is inside the sum over heads."""
    logits = w[:, 0, :, None] * (q[:, 0] @ k[:, 0].transpose(-1, -2)).float().relu()
    for head in range(1, q.shape[1]):
        logits = logits + w[:, head, :, None] * (q[:, head] @ k[:, 0].transpose(-1, -2)).float().relu()
    return logits[:, None]


def pick_tokens(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Mask of the `count` best visible keys; scores [B, 1, S, N], visible broadcastable to it."""
    scores = scores.masked_fill(~visible, float("-inf"))
    top = scores.topk(min(count, scores.shape[-1]), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, top, True) & visible


class DsaAttention(nn.Module):
    """Multi-head latent attention (expanded form) with its indexer."""

    def __init__(self, cfg: DsaConfig) -> None:
        super().__init__()
        self.cfg, self.scale = cfg, cfg.softmax_scale
        self.q_a_proj = Linear(cfg.hidden, cfg.q_rank)
        self.q_a_layernorm = RMSNorm(cfg.q_rank, False)
        self.q_b_proj = Linear(cfg.q_rank, cfg.heads * (cfg.nope + cfg.rope), 0.04)
        self.kv_a_proj_with_mqa = Linear(cfg.hidden, cfg.kv_rank + cfg.rope)
        self.kv_a_layernorm = RMSNorm(cfg.kv_rank, False)
        self.kv_b_proj = Linear(cfg.kv_rank, cfg.heads * (cfg.nope + cfg.value), 0.04)
        self.o_proj = Linear(cfg.heads * cfg.value, cfg.hidden, cfg.out_std)
        self.indexer = Indexer(cfg)
        self.register_buffer("frequencies", yarn_frequencies(cfg), persistent=False)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[..., None] * self.frequencies
        return angles.cos(), angles.sin()

    def qkv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, S, H] -> q, k [B, 1, h, S, nope+rope], v [B, 1, h, S, value], and qr [B, S, q_rank] for the indexer."""
        cfg, (cos, sin) = self.cfg, self.rotary(positions)
        qr = self.q_a_layernorm(self.q_a_proj(x))
        q_nope, q_rope = self.q_b_proj(qr).unflatten(-1, (cfg.heads, -1)).transpose(1, 2).split([cfg.nope, cfg.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([cfg.kv_rank, cfg.rope], -1)
        k_nope, v = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (cfg.heads, -1)).transpose(1, 2).split([cfg.nope, cfg.value], -1)
        q = torch.cat([q_nope, rope_interleaved(q_rope, cos, sin)], -1)
        k_rope = rope_interleaved(k_rope[:, None], cos, sin).expand(-1, cfg.heads, -1, -1)
        return q[:, None], torch.cat([k_nope, k_rope], -1)[:, None], v[:, None], qr

    def forward(self, x: Tensor, positions: Tensor, mode: str) -> tuple[Tensor, Tensor | None, dict]:
        """-> (output [B, S, H], indexer loss or None, what the draft steps and the evaluation need)."""
        q, k, v, qr = self.qkv(x, positions)
        if mode == "dense":
            return self.o_proj(attend(q, k, v, self.scale, None)), None, {}
        causal = causal_mask(x.shape[1], x.device)
        iq, iw, ik = self.indexer(x.detach(), qr.detach(), *self.rotary(positions))
        scores = index_logits(iq, iw, ik)                                    # [B, 1, S, S]
        mask = pick_tokens(scores.detach(), causal, self.cfg.index_top)
        out = self.o_proj(attend(q, k, v, self.scale, None if mode == "warm" else mask))
        loss = None
        if mode in ("warm", "sparse", "sparse_all"):
            loss = divergence(attention_mass(q, k, self.scale, causal), scores, mask if mode == "sparse" else causal.expand_as(scores))
        return out, loss, {"qk": (q, k), "mask": mask, "memory": (k, v, ik)}

    def step(self, x: Tensor, positions: Tensor, memory: StepMemory) -> Tensor:
        """One further draft step: x [B, S, H] at `positions` [1, S]; appends its keys to the memory."""
        length = x.shape[1]
        q, k, v, qr = self.qkv(x, positions)
        iq, iw, ik = self.indexer(x.detach(), qr.detach(), *self.rotary(positions))
        memory.own.append((k, v, ik))
        first = index_logits(iq, iw, memory.first[2])                        # [B, 1, S, S]
        own = [(iw * (iq * row[2]).sum(-1).float().relu()).sum(1)[:, None] for row in memory.own]   # each [B, 1, S]
        visible = F.pad(causal_mask(length, x.device), (0, len(own)), value=True)
        keep = pick_tokens(torch.cat([first, torch.stack(own, -1)], -1).detach(), visible, self.cfg.index_top)
        return self.o_proj(step_attention(q, memory, keep[..., :length], keep[..., length:], self.scale))


class DsaMoe(nn.Module):
    """Sigmoid routing limited to the best groups, routed experts and one shared expert."""

    def __init__(self, cfg: DsaConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = Linear(cfg.hidden, cfg.experts)
        self.balance = LoadBalance(cfg.experts)
        self.experts = Experts(cfg.experts, cfg.hidden, cfg.expert_width, cfg.out_std)
        self.shared_experts = Mlp(cfg.hidden, cfg.expert_width, silu_gate, cfg.out_std)

    def forward(self, x: Tensor) -> Tensor:
        cfg = self.cfg
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.gate.weight.float()))              # [B, S, E]
        biased = scores.detach() + self.balance.bias
        grouped = biased.unflatten(-1, (cfg.expert_groups, -1))
        groups = choose(grouped.topk(2, -1).values.sum(-1), cfg.groups_per_token)              # [B, S, n_group]
        biased = grouped.masked_fill(groups[..., None] == 0, float("-inf")).flatten(-2)
        chosen = choose(biased, cfg.experts_per_token)
        self.balance.observe(chosen)
        weights = scores * chosen
        weights = cfg.routed_scale * weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return mixture(x, weights, self.experts, self.shared_experts)


class DsaLayer(nn.Module):
    """One decoder layer; returns the new stream."""

    def __init__(self, cfg: DsaConfig, moe: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(cfg.hidden, False), RMSNorm(cfg.hidden, False)
        self.self_attn = DsaAttention(cfg)
        self.mlp = DsaMoe(cfg) if moe else Mlp(cfg.hidden, cfg.dense_width, silu_gate, cfg.out_std)
        self.dropout = cfg.dropout

    def feed_forward(self, h: Tensor) -> Tensor:
        return h + F.dropout(self.mlp(self.post_attention_layernorm(h)), self.dropout, self.training)

    def forward(self, h: Tensor, positions: Tensor, mode: str) -> tuple[Tensor, Tensor | None, dict]:
        out, loss, extra = self.self_attn(self.input_layernorm(h), positions, mode)
        return self.feed_forward(h + F.dropout(out, self.dropout, self.training)), loss, extra

    def step(self, h: Tensor, positions: Tensor, memory: StepMemory) -> Tensor:
        return self.feed_forward(h + self.self_attn.step(self.input_layernorm(h), positions, memory))


class DsaMtp(Stepper):
    """MTP module, stored as the layer after the last; recycles its output after shared_head.norm."""

    def __init__(self, cfg: DsaConfig) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.shared_head_norm = (RMSNorm(cfg.hidden, False) for _ in range(3))
        self.eh_proj = Linear(2 * cfg.hidden, cfg.hidden)
        self.layer = DsaLayer(cfg, True)

    @property
    def out_norm(self) -> RMSNorm:
        return self.shared_head_norm


class Dsa(nn.Module):
    """Target and MTP module."""

    def __init__(self, cfg: DsaConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab, cfg.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList([DsaLayer(cfg, index >= cfg.dense_layers) for index in range(cfg.layers)])
        self.norm = RMSNorm(cfg.hidden, False)
        self.lm_head = Linear(cfg.hidden, cfg.vocab)
        self.mtp = DsaMtp(cfg)
