"""MiniMax-M3 text model for training: grouped-query attention over selected blocks, mixture of experts, one MTP module.

Module names follow the checkpoint, experts are stacked. Modes of a layer: "dense" (all keys), "warm" (all keys, indexer loss),
"sparse" (selected keys, indexer loss on them), "sparse_all" (selected keys, indexer loss on all), "select" (selected keys, no loss).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import (Experts, Linear, LoadBalance, Mlp, RMSNorm, StepMemory, Stepper, attend, attention_mass, causal_mask, choose, divergence,
                    mixture, rope_half, step_attention)


@dataclass(frozen=True)
class M3Config:
    hidden: int = 256
    layers: int = 6
    dense_layers: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 16
    rope_theta: float = 10000.0
    dense_width: int = 768
    expert_width: int = 160
    experts: int = 8
    experts_per_token: int = 2
    routed_scale: float = 2.0
    index_dim: int = 32
    block: int = 32
    top_blocks: int = 8
    vocab: int = 6144
    max_positions: int = 4096
    dropout: float = 0.0

    @property
    def out_std(self) -> float:
        return 0.02 / (2 * self.layers) ** 0.5


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """Clamped SwiGLU with alpha 1.702, limit 7, beta 1; fp32 inside."""
    gate, up, kind = gate.float().clamp(max=7.0), up.float().clamp(-7.0, 7.0), gate.dtype
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1.0)).to(kind)


def block_scores(scores: Tensor, mask: Tensor, block: int) -> Tensor:
    """Max of token scores over each block: [B, G, S, S] -> [B, G, S, ceil(S / block)]; -inf where nothing is visible."""
    pad = -scores.shape[-1] % block
    scores = F.pad(scores.masked_fill(~mask, float("-inf")), (0, pad), value=float("-inf"))
    return scores.unflatten(-1, (-1, block)).amax(-1)


def pick_blocks(scores: Tensor, own_block: Tensor, count: int) -> Tensor:
    """Mask [B, G, S, N] of the own block and the best others, `count` in all; scores are -inf for invisible blocks."""
    own = F.one_hot(own_block, scores.shape[-1]).bool()                     # [B or 1, S, N]
    forced = scores.masked_fill(own[:, None], float("inf"))
    top = forced.topk(min(count, scores.shape[-1]), -1).indices
    return torch.zeros_like(forced, dtype=torch.bool).scatter(-1, top, True) & (forced > float("-inf"))


class M3Attention(nn.Module):
    """Projections, per-head norms, rotary embedding, and the index branch in sparse layers."""

    def __init__(self, cfg: M3Config, sparse: bool) -> None:
        super().__init__()
        self.cfg, self.sparse, self.scale = cfg, sparse, cfg.head_dim**-0.5
        self.q_proj = Linear(cfg.hidden, cfg.heads * cfg.head_dim)
        self.k_proj = Linear(cfg.hidden, cfg.kv_heads * cfg.head_dim)
        self.v_proj = Linear(cfg.hidden, cfg.kv_heads * cfg.head_dim)
        self.o_proj = Linear(cfg.heads * cfg.head_dim, cfg.hidden, cfg.out_std)
        self.q_norm, self.k_norm = RMSNorm(cfg.head_dim, True), RMSNorm(cfg.head_dim, True)
        if sparse:
            self.index_q_proj = Linear(cfg.hidden, cfg.kv_heads * cfg.index_dim)
            self.index_k_proj = Linear(cfg.hidden, cfg.index_dim)
            self.index_q_norm, self.index_k_norm = RMSNorm(cfg.index_dim, True), RMSNorm(cfg.index_dim, True)
        frequencies = cfg.rope_theta ** (-torch.arange(0, cfg.rotary_dim, 2).double() / cfg.rotary_dim)
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[..., None] * self.frequencies
        return angles.cos(), angles.sin()

    def qkv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, H] -> q, k, v [B, G, n, S, D], k and v expanded over the heads of a group."""
        cfg, (cos, sin) = self.cfg, self.rotary(positions)
        heads = cfg.heads // cfg.kv_heads
        q, k, v = (proj(x).unflatten(-1, (-1, cfg.head_dim)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rope_half(self.q_norm(q), cos, sin), rope_half(self.k_norm(k), cos, sin)
        return q.unflatten(1, (cfg.kv_heads, heads)), *(t[:, :, None].expand(-1, -1, heads, -1, -1) for t in (k, v))

    def index_qk(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, H] (detached by the caller) -> index q [B, G, S, D_i], index k [B, 1, S, D_i]."""
        cos, sin = self.rotary(positions)
        iq = self.index_q_proj(x).unflatten(-1, (-1, self.cfg.index_dim)).transpose(1, 2)
        ik = self.index_k_proj(x)[:, None]
        return rope_half(self.index_q_norm(iq), cos, sin), rope_half(self.index_k_norm(ik), cos, sin)

    def token_mask(self, blocks: Tensor, length: int) -> Tensor:
        """Blocks [B, G, S, N] -> keys [B, G, S, length]."""
        return blocks.repeat_interleave(self.cfg.block, -1)[..., :length]

    def forward(self, x: Tensor, positions: Tensor, mode: str) -> tuple[Tensor, Tensor | None, dict]:
        """-> (output [B, S, H], indexer loss or None, what the draft steps and the evaluation need)."""
        q, k, v = self.qkv(x, positions)
        if mode == "dense" or not self.sparse:
            return self.o_proj(attend(q, k, v, self.scale, None)), None, {}
        length, block = x.shape[1], self.cfg.block
        causal = causal_mask(length, x.device)
        iq, ik = self.index_qk(x.detach(), positions)
        scores = block_scores((iq @ ik.transpose(-1, -2)).float() * self.cfg.index_dim**-0.5, causal, block)  # [B, G, S, N]
        own_block = torch.arange(length, device=x.device)[None] // block
        selected = pick_blocks(scores.detach(), own_block, self.cfg.top_blocks)
        mask = self.token_mask(selected, length) & causal
        out = self.o_proj(attend(q, k, v, self.scale, None if mode == "warm" else mask))
        loss = None
        if mode in ("warm", "sparse", "sparse_all"):
            candidates = selected if mode == "sparse" else scores > float("-inf")
            candidates = candidates & ~F.one_hot(own_block, scores.shape[-1]).bool()[:, None]
            mass = attention_mass(q, k, self.scale, causal)
            mass = F.pad(mass, (0, -length % block)).unflatten(-1, (-1, block)).sum(-1)
            loss = divergence(mass, scores, candidates)
        return out, loss, {"qk": (q, k), "mask": mask, "memory": (k, v, ik)}

    def step(self, x: Tensor, positions: Tensor, memory: StepMemory) -> Tensor:
        """One further draft step: x [B, S, H] at `positions` [1, S]; appends its keys to the memory."""
        block, length = self.cfg.block, x.shape[1]
        q, k, v = self.qkv(x, positions)
        iq, ik = self.index_qk(x.detach(), positions)
        memory.own.append((k, v, ik))
        causal = causal_mask(length, x.device)
        scores = block_scores((iq @ memory.first[2].transpose(-1, -2)).float(), causal, block)
        scores = F.pad(scores, (0, 1), value=float("-inf"))                  # the draft may cross into one more block
        start = torch.arange(length, device=x.device)[None]
        own_blocks = torch.stack([(start + 1 + j) // block for j in range(len(memory.own))], -1)   # [1, S, J]
        own_blocks = own_blocks[:, None].expand(*scores.shape[:3], -1)
        own_scores = torch.stack([(iq * row[2]).sum(-1) for row in memory.own], -1).float()        # [B, G, S, J]
        scores = scores.scatter_reduce(-1, own_blocks, own_scores, "amax")
        selected = pick_blocks(scores.detach(), own_blocks[:1, 0, :, -1], self.cfg.top_blocks)
        keep_first = self.token_mask(selected, length) & causal
        return self.o_proj(step_attention(q, memory, keep_first, selected.gather(-1, own_blocks), self.scale))


class M3Moe(nn.Module):
    """Sigmoid routing with a selection bias, routed experts and one shared expert."""

    def __init__(self, cfg: M3Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = Linear(cfg.hidden, cfg.experts)
        self.balance = LoadBalance(cfg.experts)
        self.experts = Experts(cfg.experts, cfg.hidden, cfg.expert_width, cfg.out_std)
        self.shared_experts = Mlp(cfg.hidden, cfg.expert_width, swiglu_oai, cfg.out_std)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.gate.weight.float()))              # [B, S, E]
        chosen = choose(scores.detach() + self.balance.bias, self.cfg.experts_per_token)
        self.balance.observe(chosen)
        weights = scores * chosen
        weights = self.cfg.routed_scale * weights / weights.sum(-1, keepdim=True)
        return mixture(x, weights, self.experts, self.shared_experts)


class M3Layer(nn.Module):
    """One decoder layer; returns the new stream."""

    def __init__(self, cfg: M3Config, sparse: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(cfg.hidden, True), RMSNorm(cfg.hidden, True)
        self.self_attn = M3Attention(cfg, sparse)
        self.dropout = cfg.dropout
        if sparse:
            self.block_sparse_moe = M3Moe(cfg)
        else:
            self.mlp = Mlp(cfg.hidden, cfg.dense_width, swiglu_oai, cfg.out_std)

    def feed_forward(self, h: Tensor) -> Tensor:
        body = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return h + F.dropout(body(self.post_attention_layernorm(h)), self.dropout, self.training)

    def forward(self, h: Tensor, positions: Tensor, mode: str) -> tuple[Tensor, Tensor | None, dict]:
        out, loss, extra = self.self_attn(self.input_layernorm(h), positions, mode)
        return self.feed_forward(h + F.dropout(out, self.dropout, self.training)), loss, extra

    def step(self, h: Tensor, positions: Tensor, memory: StepMemory) -> Tensor:
        return self.feed_forward(h + self.self_attn.step(self.input_layernorm(h), positions, memory))


class M3Mtp(Stepper):
    """MTP module 0; recycles its output after final_layernorm."""

    zero_first = True

    def __init__(self, cfg: M3Config) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.final_layernorm = (RMSNorm(cfg.hidden, True) for _ in range(3))
        self.eh_proj = Linear(2 * cfg.hidden, cfg.hidden)
        self.layer = M3Layer(cfg, True)

    @property
    def out_norm(self) -> RMSNorm:
        return self.final_layernorm


class M3(nn.Module):
    """Target and MTP module."""

    def __init__(self, cfg: M3Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab, cfg.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList([M3Layer(cfg, index >= cfg.dense_layers) for index in range(cfg.layers)])
        self.norm = RMSNorm(cfg.hidden, True)
        self.lm_head = Linear(cfg.hidden, cfg.vocab)
        self.mtp = M3Mtp(cfg)
