"""Two draft heads for the demo target: EAGLE-3 (one causal layer, recycled) and DFlash (a few layers, one block at once).

Neither holds the target's embedding or output head; callers pass what those give. Letters as in layers.py, and: A anchors of a
sequence, K rows of a block, n query heads of a group.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import Linear, Mlp, RMSNorm, StepMemory, attend, causal_mask, rope_half, step_attention


@dataclass(frozen=True)
class Eagle3Config:
    """taps: residual stream entering that target layer; the number of layers means the output of the last one."""

    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    width: int = 768
    vocab: int = 6144
    draft_vocab: int = 4096
    taps: tuple[int, ...] = (2, 4, 6)
    rope_theta: float = 10000.0
    max_positions: int = 4096


@dataclass(frozen=True)
class DflashConfig:
    """taps: output of that target layer, counted from 0; block: the newest token and block - 1 masks."""

    hidden: int = 256
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    width: int = 768
    vocab: int = 6144
    block: int = 8
    mask_token: int = 7
    taps: tuple[int, ...] = (1, 3, 5)
    rope_theta: float = 10000.0
    max_positions: int = 4096


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Rotary(nn.Module):
    """cos and sin for the half-split rotation over a whole head."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        frequencies = theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B or 1, S] -> cos, sin [B or 1, S, D/2]."""
        angles = positions.float()[..., None] * self.frequencies
        return angles.cos(), angles.sin()


class HeadAttention(nn.Module):
    """Projections of grouped-query attention; `inputs` is the width of what q, k and v read, `qk_norm` norms each head."""

    def __init__(self, cfg: Eagle3Config | DflashConfig, inputs: int, qk_norm: bool, out_std: float) -> None:
        super().__init__()
        self.cfg, self.scale = cfg, cfg.head_dim**-0.5
        self.q_proj = Linear(inputs, cfg.heads * cfg.head_dim)
        self.k_proj = Linear(inputs, cfg.kv_heads * cfg.head_dim)
        self.v_proj = Linear(inputs, cfg.kv_heads * cfg.head_dim)
        self.o_proj = Linear(cfg.heads * cfg.head_dim, cfg.hidden, out_std)
        self.q_norm = RMSNorm(cfg.head_dim, False) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(cfg.head_dim, False) if qk_norm else nn.Identity()

    def heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * D] -> [B, heads, S, D]."""
        return x.unflatten(-1, (-1, self.cfg.head_dim)).transpose(1, 2)

    def query(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, S, inputs] -> [B, G, n, S, D]; turn: cos and sin of the rows."""
        return rope_half(self.q_norm(self.heads(self.q_proj(x))), *turn).unflatten(1, (self.cfg.kv_heads, -1))

    def keys(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [B, S, inputs] -> keys and values, each [B, G, n, S, D], the same for all n heads of a group."""
        k = rope_half(self.k_norm(self.heads(self.k_proj(x))), *turn)
        v = self.heads(self.v_proj(x))
        count = self.cfg.heads // self.cfg.kv_heads
        return tuple(t[:, :, None].expand(-1, -1, count, -1, -1) for t in (k, v))


class Eagle3Layer(nn.Module):
    """Attention over [norm(embedding), norm(hidden)], then a gated MLP; the residual is the hidden half before its norm."""

    def __init__(self, cfg: Eagle3Config) -> None:
        super().__init__()
        out_std = 0.02 / 2**0.5
        self.input_layernorm, self.hidden_norm = RMSNorm(cfg.hidden, False), RMSNorm(cfg.hidden, False)
        self.post_attention_layernorm = RMSNorm(cfg.hidden, False)
        self.self_attn = HeadAttention(cfg, 2 * cfg.hidden, False, out_std)
        self.mlp = Mlp(cfg.hidden, cfg.width, silu_gate, out_std)
        self.rotary = Rotary(cfg.head_dim, cfg.rope_theta)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Two [B, S, H] -> what q, k and v read, [B, S, 2H]; embedding half first."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)

    def close(self, hidden: Tensor, attended: Tensor) -> Tensor:
        h = hidden + self.self_attn.o_proj(attended)
        return h + self.mlp(self.post_attention_layernorm(h))

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, StepMemory]:
        """Rows [B, S, H] at `positions` [1, S], each attending to itself and all rows before -> (output, its keys)."""
        attention, x, turn = self.self_attn, self.join(embedded, hidden), self.rotary(positions)
        k, v = attention.keys(x, turn)
        out = attend(attention.query(x, turn), k, v, attention.scale, None)
        return self.close(hidden, out), StepMemory((k, v, k))

    def step(self, embedded: Tensor, hidden: Tensor, positions: Tensor, memory: StepMemory) -> Tensor:
        """One further draft step of every row [B, S, H]; appends its keys to the memory."""
        attention, x, turn = self.self_attn, self.join(embedded, hidden), self.rotary(positions)
        k, v = attention.keys(x, turn)
        memory.own.append((k, v, k))
        q, length = attention.query(x, turn), embedded.shape[1]
        keep_first = causal_mask(length, x.device).expand(x.shape[0], self.self_attn.cfg.kv_heads, -1, -1)
        keep_own = torch.ones(1, 1, length, len(memory.own), dtype=torch.bool, device=x.device).expand(*keep_first.shape[:3], -1)
        return self.close(hidden, step_attention(q, memory, keep_first, keep_own, attention.scale))


class Eagle3(nn.Module):
    """fc over the tapped streams, one layer, norm and output head over the draft vocabulary."""

    def __init__(self, cfg: Eagle3Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.fc = Linear(len(cfg.taps) * cfg.hidden, cfg.hidden)
        self.midlayer = Eagle3Layer(cfg)
        self.norm = RMSNorm(cfg.hidden, False)
        self.lm_head = Linear(cfg.hidden, cfg.draft_vocab)
        self.register_buffer("d2t", torch.zeros(cfg.draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(cfg.vocab) < cfg.draft_vocab)

    def set_vocabulary(self, ids: Tensor) -> None:
        """ids [draft_vocab]: the target ids that the head can draft."""
        ids = ids.sort().values
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids] = True

    def target_ids(self) -> Tensor:
        """Target id of each draft id, [draft_vocab]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def taps(self, streams: list[Tensor]) -> Tensor:
        """streams[i] [B, S, H]: residual stream entering target layer i -> [B, S, 3H]."""
        return torch.cat([streams[tap] for tap in sorted(self.cfg.taps)], -1)

    def logits(self, y: Tensor) -> Tensor:
        """Output of the layer [B, S, H] -> [B, S, draft_vocab]."""
        return self.lm_head(self.norm(y))

    def choose(self, y: Tensor) -> Tensor:
        """The likeliest token as a target id, [B, S]."""
        return self.target_ids()[self.logits(y).argmax(-1)]


class DflashLayer(nn.Module):
    """Attention of block rows over the context and their own block, then a gated MLP."""

    def __init__(self, cfg: DflashConfig) -> None:
        super().__init__()
        out_std = 0.02 / (2 * cfg.layers) ** 0.5
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(cfg.hidden, False), RMSNorm(cfg.hidden, False)
        self.self_attn = HeadAttention(cfg, cfg.hidden, True, out_std)
        self.mlp = Mlp(cfg.hidden, cfg.width, silu_gate, out_std)

    def forward(self, h: Tensor, context: tuple[Tensor, Tensor], turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """h [B, A*K, H]; context: keys and values [B, G, n, S, D]; mask [B, 1, A*K, S + A*K], True where a row may look."""
        attention, x = self.self_attn, self.input_layernorm(h)
        k, v = (torch.cat(pair, -2).flatten(1, 2) for pair in zip(context, attention.keys(x, turn), strict=True))
        q = attention.query(x, turn).flatten(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attention.scale)
        h = h + attention.o_proj(out.transpose(1, 2).flatten(2))
        return h + self.mlp(self.post_attention_layernorm(h))


class Dflash(nn.Module):
    """fc and norm over the tapped outputs give every layer's context; a block of masks is filled in one pass."""

    def __init__(self, cfg: DflashConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.fc = Linear(len(cfg.taps) * cfg.hidden, cfg.hidden)
        self.hidden_norm, self.norm = RMSNorm(cfg.hidden, False), RMSNorm(cfg.hidden, False)
        self.layers = nn.ModuleList([DflashLayer(cfg) for _ in range(cfg.layers)])
        self.rotary = Rotary(cfg.head_dim, cfg.rope_theta)

    def features(self, streams: list[Tensor]) -> Tensor:
        """streams[i] [B, S, H]: residual stream entering target layer i, so that i + 1 is the output of i -> f [B, S, H]."""
        return self.hidden_norm(self.fc(torch.cat([streams[tap + 1] for tap in sorted(self.cfg.taps)], -1)))

    def forward(self, features: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """features [B, S, H]; embedded [B, A, K, H]: newest token, then masks; anchors [B, A]: position of the newest token.

        Row i of a block stands at anchor + i, sees the features before the anchor and its whole block. -> normed [B, A, K, H].
        """
        size, length, device = self.cfg.block, features.shape[1], features.device
        positions = (anchors[..., None] + torch.arange(size, device=device)).flatten(1)                 # [B, A*K]
        past = torch.arange(length, device=device) < anchors.repeat_interleave(size, 1)[..., None]      # [B, A*K, S]
        number = torch.arange(positions.shape[1], device=device) // size
        own = (number[:, None] == number).expand(len(anchors), -1, -1)                                  # [B, A*K, A*K]
        mask = torch.cat([past, own], -1)[:, None]
        turn, context_turn = self.rotary(positions), self.rotary(torch.arange(length, device=device)[None])
        h = embedded.flatten(1, 2)
        for layer in self.layers:
            h = layer(h, layer.self_attn.keys(features, context_turn), turn, mask)
        return self.norm(h).unflatten(1, (-1, size))


def run_streams(model: nn.Module, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """The target with its selection: (residual stream entering each layer and leaving the last, final hidden), [B, S, H] each."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    streams = [model.embed_tokens(ids)]
    for layer in model.layers:
        streams.append(layer(streams[-1], positions, "select")[0])
    return streams, model.norm(streams[-1])


def run_eagle3(head: Eagle3, model: nn.Module, ids: Tensor, streams: list[Tensor], steps: int, greedy: bool) -> list[Tensor]:
    """Unroll the head from every row at once; -> outputs before `norm`, one [B, S, H] for each step.

    Row p of step 1 sees the taps of p and Embed(t[p+1]) at position p and guesses t[p+2]; row p of step j >= 2 sees its own last
    output and the next token at position p+j-1, and attends to the step-1 keys up to p and to its own later ones. `greedy` feeds
    back the head's choice, otherwise the text's tokens.
    """
    positions, tokens = torch.arange(ids.shape[1], device=ids.device)[None], F.pad(ids[:, 1:], (0, 1))
    y, memory = head.midlayer(model.embed_tokens(tokens), head.fc(head.taps(streams)), positions)
    outputs = [y]
    for step in range(2, steps + 1):
        tokens = head.choose(outputs[-1]) if greedy else F.pad(ids[:, step:], (0, step))
        outputs.append(head.midlayer.step(model.embed_tokens(tokens), outputs[-1], positions + step - 1, memory))
    return outputs


def run_dflash(head: Dflash, model: nn.Module, ids: Tensor, streams: list[Tensor], anchors: Tensor) -> Tensor:
    """Fill the blocks at `anchors` [B, A] -> normed hidden [B, A, K-1, H] of the mask rows; row i - 1 guesses t[anchor + i]."""
    newest = model.embed_tokens(ids.gather(1, anchors))[:, :, None]
    masks = model.embed_tokens.weight[head.cfg.mask_token].to(newest.dtype).expand(*anchors.shape, head.cfg.block - 1, -1)
    return head(head.features(streams), torch.cat([newest, masks], 2), anchors)[:, :, 1:]
