"""Parts that both training models share: norms, rotary embedding, experts, attention over a selection.

Letters: B sequences, S positions, H hidden, G groups that share one selection, n query heads of a group, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A bias-free linear layer with the project's initialisation."""

    def __init__(self, inputs: int, outputs: int, std: float = 0.02) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=std)


class RMSNorm(nn.Module):
    """fp32 RMS norm; `gemma` stores the gain minus one."""

    def __init__(self, size: int, gemma: bool, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if gemma else torch.ones(size))
        self.offset, self.eps = float(gemma), eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (self.offset + self.weight.float())).to(x.dtype)


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of the first 2 x cos.shape[-1] dims of x [B, heads, S, D]; cos, sin [B or 1, S, r/2]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    wide = x.float()
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation of the pairs (2i, 2i+1) of x [B, heads, S, r]; cos, sin [B or 1, S, r/2]."""
    cos, sin = cos[:, None], sin[:, None]
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


class Mlp(nn.Module):
    """Gated MLP; `act(gate, up)` is the model's activation."""

    def __init__(self, hidden: int, width: int, act, out_std: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, width), Linear(hidden, width)
        self.down_proj = Linear(width, hidden, out_std)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))


class Experts(nn.Module):
    """Stacked weights of all routed experts."""

    def __init__(self, count: int, hidden: int, width: int, out_std: float) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(count, width, hidden) * 0.02)
        self.up = nn.Parameter(torch.randn(count, width, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(count, hidden, width) * out_std)


def mixture(x: Tensor, weights: Tensor, experts: Experts, shared: Mlp) -> Tensor:
    """sum_e weights[e] expert_e(x) + shared(x), every expert run on every row as one wide matmul.

    x [B, S, H]; weights [B, S, E], zero for experts that are not chosen. Eight small experts are faster this way than sorted.
    """
    count, width, _ = experts.gate.shape
    gate = F.linear(x, torch.cat([experts.gate.flatten(0, 1), shared.gate_proj.weight]))   # [B, S, E*I + I_shared]
    up = F.linear(x, torch.cat([experts.up.flatten(0, 1), shared.up_proj.weight]))
    inner = shared.act(gate, up)
    routed, common = inner[..., : count * width], inner[..., count * width :]
    routed = (routed.unflatten(-1, (count, width)) * weights[..., None].to(inner.dtype)).flatten(-2)
    down = torch.cat([experts.down.transpose(0, 1).flatten(1), shared.down_proj.weight], 1)  # [H, E*I + I_shared]
    return F.linear(torch.cat([routed, common], -1), down)


class LoadBalance(nn.Module):
    """Counts how often each expert is chosen; `step` moves the selection bias against the load error."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(count))
        self.register_buffer("load", torch.zeros(count), persistent=False)

    def observe(self, chosen: Tensor) -> None:
        """chosen [B, S, E] 0/1."""
        if self.training:
            self.load.add_(chosen.detach().float().sum((0, 1)))

    def step(self, rate: float) -> None:
        self.bias.add_(rate * torch.sign(self.load.mean() - self.load))
        self.bias.sub_(self.bias.mean())
        self.load.zero_()


def choose(scores: Tensor, count: int) -> Tensor:
    """0/1 mask [..., E] of the `count` largest scores."""
    return torch.zeros_like(scores).scatter(-1, scores.topk(count, -1).indices, 1.0)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """q, k, v [B, G, n, S, D]; mask [B, G, S, S] bool or None for causal -> [B, S, G*n*D_v]."""
    batch, groups, heads, length, _ = q.shape
    q, k, v = (t.reshape(batch, groups * heads, length, -1) for t in (q, k, v))
    if mask is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        mask = mask[:, :, None].expand(-1, -1, heads, -1, -1).reshape(batch, groups * heads, length, length)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).flatten(2)


def causal_mask(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


@torch.no_grad()
def attention_mass(q: Tensor, k: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Attention distribution summed over the heads of a group and normalised: [B, G, S, S] float32."""
    scores = (q @ k.transpose(-1, -2)).float() * scale                     # [B, G, n, S, S]
    mask = mask if mask.dim() == 2 else mask[:, :, None]
    return scores.masked_fill_(~mask, float("-inf")).softmax(-1).mean(2)


def divergence(target: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    """KL(target || softmax(scores)) over the masked keys, mean over rows with at least two of them.

    target, scores, mask [B, G, S, N]; the target is renormalised over the mask.
    """
    rows = mask.sum(-1) > 1                                                 # [B, G, S]
    target = target * mask
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-6)
    predicted = scores.float().masked_fill(~mask, -1e9).log_softmax(-1)
    loss = (torch.xlogy(target, target) - target * predicted).masked_fill(~mask, 0.0).sum(-1)
    return (loss * rows).sum() / rows.sum().clamp_min(1)


class StepMemory:
    """Keys of the draft layer during unrolled drafting: step-1 keys of all rows, and each row's own recycled keys.

    first: (k, v, index_k) with k, v [B, G, n, S, D] and index_k [B, 1, S, D_i]; own: list of the same for steps 2, 3, ...
    """

    def __init__(self, first: tuple[Tensor, Tensor, Tensor]) -> None:
        self.first, self.own = first, []


def step_attention(q: Tensor, memory: StepMemory, keep_first: Tensor, keep_own: Tensor, scale: float) -> Tensor:
    """Attention of row p over step-1 keys (mask [B, G, S, S]) and its own keys (mask [B, G, S, J]) -> [B, S, G*n*D_v]."""
    k, v, _ = memory.first
    scores = (q @ k.transpose(-1, -2)).float()                              # [B, G, n, S, S]
    own = torch.stack([(q * row[0]).sum(-1) for row in memory.own], -1).float()   # [B, G, n, S, J]
    scores = torch.cat([scores, own], -1) * scale
    mask = torch.cat([keep_first, keep_own], -1)[:, :, None]
    probs = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype)
    length = k.shape[-2]
    out = probs[..., :length] @ v
    for j, row in enumerate(memory.own):
        out = out + probs[..., length + j, None] * row[1]
    return out.flatten(1, 2).transpose(1, 2).flatten(2)


class Stepper(nn.Module):
    """Drafting module shared by both models: combine, one decoder layer, one norm; subclasses name the parts."""

    zero_first = False  # replace the embedding by zeros where position == 0

    def combine(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        if self.zero_first:
            embedded = embedded * (positions > 0)[..., None].to(embedded.dtype)
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
