"""Running the training models: the target over whole sequences, and the MTP module unrolled over draft steps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import StepMemory


def run_target(model: nn.Module, ids: Tensor, mode: str) -> tuple[Tensor, list[Tensor], list[dict]]:
    """ids [B, S] -> (hidden after the final norm [B, S, H], indexer losses, per-layer extras of the sparse layers)."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    h = model.embed_tokens(ids)
    losses, extras = [], []
    for layer in model.layers:
        h, loss, extra = layer(h, positions, mode)
        losses += [loss] if loss is not None else []
        extras += [extra] if extra else []
    return model.norm(h), losses, extras


def shift(values: Tensor, count: int) -> Tensor:
    """values [B, S, ...] moved `count` rows to the left, zeros at the end."""
    return torch.cat([values[:, count:], torch.zeros_like(values[:, :count])], 1)


def run_draft(model: nn.Module, ids: Tensor, hidden: Tensor, steps: int, mode: str, greedy: bool) -> tuple[list[Tensor], Tensor | None, dict]:
    """Unroll the MTP module from every row at once.

    Row p of step 1 sees Embed(t[p+1]) and hidden[p] at position p and guesses t[p+2]. Row p of step j >= 2 sees the next token
    and the module's own output after its norm, at position p+j-1; it attends the step-1 keys up to p and its own recycled keys.
    `greedy` feeds back the module's argmax, otherwise the text's tokens. Returns (normed outputs, each [B, S, H]), indexer
    loss of step 1, extras of step 1.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    mtp, tokens = model.mtp, shift(ids, 1)
    x = mtp.combine(model.embed_tokens(tokens), hidden, positions)
    y, loss, extra = mtp.layer(x, positions, mode)
    outputs = [mtp.out_norm(y)]
    memory = StepMemory(extra["memory"])
    for step in range(2, steps + 1):
        tokens = model.lm_head(outputs[-1]).argmax(-1) if greedy else shift(ids, step)
        x = mtp.combine(model.embed_tokens(tokens), outputs[-1], positions + step - 1)
        outputs.append(mtp.out_norm(mtp.layer.step(x, positions + step - 1, memory)))
    return outputs, loss, extra


@torch.no_grad()
def generate(model: nn.Module, prompts: list[list[int]], count: int, temperature: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Continue prompts by running the whole sequence again for every token, with the selection applied.

    Returns (ids [N, longest + count], lengths [N]); sequences are padded on the right, which causal attention never sees.
    """
    device = model.lm_head.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(lengths.max())
    ids = torch.zeros(len(prompts), longest + count, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    rows, noise = torch.arange(len(prompts), device=device), torch.Generator(device).manual_seed(seed)
    for step in range(count):
        hidden, _, _ = run_target(model, ids[:, : longest + step], "select")
        logits = model.lm_head(hidden[rows, lengths + step - 1]).float()
        if temperature:
            sampled = torch.multinomial((logits / temperature).softmax(-1), 1, generator=noise)[:, 0]
        else:
            sampled = logits.argmax(-1)
        ids[rows, lengths + step] = sampled
    return ids, lengths


def soft_cross_entropy(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Mean over masked rows of -sum teacher_probs * log softmax(student); student, teacher logits [B, S, V], mask [B, S]."""
    loss = -(teacher.float().softmax(-1) * F.log_softmax(student.float(), -1)).sum(-1)
    return (loss * mask).sum() / mask.sum()
