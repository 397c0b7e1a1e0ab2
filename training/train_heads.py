"""Trains one draft head for a frozen target, on corpus windows and on texts that the target wrote.

    python training/train_heads.py --head eagle3 --rollouts OUT/a.npz --out OUT/eagle3 --seconds 400

The schedule follows the clock. Leaves the exported folder, log.jsonl and results.json in OUT.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evaluate_heads import measure, show
from export import load_checkpoint
from export_heads import HEADS, frequent_ids, load_head, write_head
from heads import Dflash, Eagle3, run_dflash, run_eagle3, run_streams
from train import Log, Windows, rate_factor

SEED = 20261202
STEPS = 5                    # unrolled draft steps of EAGLE-3
STEP_DECAY = 0.85            # weight of step j + 1 over step j, EAGLE-3
ROW_DECAY = 0.85             # weight of row i + 1 over row i, DFlash
MOST_ANCHORS = 128


@dataclass(frozen=True)
class Source:
    """Where a batch comes from; `share` of the batches."""

    kind: str  # "short" or "long" for rollouts, "corpus"
    share: float
    batch: int
    length: int


SOURCES = (Source("short", 0.70, 56, 448), Source("long", 0.10, 8, 2048), Source("corpus", 0.14, 8, 2048), Source("corpus", 0.06, 4, 4096))
TINY_SOURCES = (Source("short", 0.5, 2, 64), Source("corpus", 0.5, 1, 96))


class Batches:
    """Draws batches of ids [B, S] with `start` [B]: rows from the position before it on count."""

    def __init__(self, data: Path, rollouts: list[Path], sources: tuple[Source, ...], device: str, seed: int) -> None:
        self.sources, self.device, self.random = sources, device, np.random.default_rng(seed)
        self.corpus, self.rows, self.order = Windows(data / "train.bin", device, seed), {}, {}
        for kind, files in (("short", rollouts), ("long", [p.with_name("long-" + p.name) for p in rollouts])):
            if any(s.kind == kind for s in sources):
                parts = [np.load(p) for p in files]
                self.rows[kind] = (torch.from_numpy(np.concatenate([p["ids"] for p in parts]).astype(np.int32)).to(device),
                                   torch.from_numpy(np.concatenate([p["start"] for p in parts]).astype(np.int64)).to(device))
                self.order[kind] = np.empty(0, np.int64)

    def counts(self, vocab: int) -> np.ndarray:
        """How often each token occurs in the generated parts, the corpus adding a fifth; [V] float."""
        total = np.zeros(vocab)
        for ids, start in self.rows.values():
            new = ids[torch.arange(ids.shape[1], device=ids.device) >= start[:, None]]
            total += torch.bincount(new, minlength=vocab).cpu().numpy()
        corpus = torch.bincount(self.corpus.tokens, minlength=vocab).cpu().numpy()
        return total / total.sum() + 0.2 * corpus / corpus.sum()

    def take(self) -> tuple[Tensor, Tensor]:
        source = self.sources[self.random.choice(len(self.sources), p=[s.share for s in self.sources])]
        if source.kind == "corpus":
            ids = self.corpus.take(source.batch, source.length)[:, :-1]
            return ids, torch.ones(len(ids), dtype=torch.int64, device=self.device)
        ids, start = self.rows[source.kind]
        if len(self.order[source.kind]) < source.batch:
            self.order[source.kind] = self.random.permutation(len(ids))
        picked, self.order[source.kind] = np.split(self.order[source.kind], [source.batch])
        picked = torch.from_numpy(picked).to(self.device)
        return ids[picked].long(), start[picked]


def cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """-sum teacher * log softmax(student) over the last dim; teacher holds probabilities, which may sum to less than one."""
    return -(teacher.float() * F.log_softmax(student.float(), -1)).sum(-1)


def path_weights(likely: list[Tensor], floor: float) -> list[Tensor]:
    """Weight of each draft step: floor + (1 - floor) x the head's probability of the text's tokens in all earlier steps.

    likely[j]: probability of the text's token at step j + 1; a step counts only if all before it were accepted.
    """
    weights, path = [], torch.ones_like(likely[0])
    for probability in likely:
        weights.append(floor + (1 - floor) * path)
        path = path * probability
    return weights


def sharpen(teacher: Tensor, hard: float) -> Tensor:
    """Move the share `hard` of each distribution [..., V] to its likeliest token; greedy drafting asks only for that one."""
    top, best = teacher.max(-1, keepdim=True)
    return (teacher * (1 - hard)).scatter_add(-1, best, torch.full_like(top, hard))


def eagle3_loss(head: Eagle3, model: nn.Module, ids: Tensor, start: Tensor, floor: float, hard: float) -> tuple[Tensor, dict]:
    """Cross entropy with the target's sharpened probabilities on the draft vocabulary, over STEPS unrolled steps.

    The probabilities are not made to sum to one: a row whose next token the head cannot draft weighs less.
    """
    with torch.no_grad():
        streams, hidden = run_streams(model, ids)
        chosen = head.target_ids()
        teacher = sharpen(model.lm_head(hidden).float().softmax(-1), hard)[..., chosen].bfloat16()   # [B, S, draft]: law of t[p+1]
        draft_of = torch.full((head.cfg.vocab,), -1, device=ids.device).scatter(0, chosen, torch.arange(len(chosen), device=ids.device))
        labels = draft_of[ids]
    rows, length = torch.arange(ids.shape[1], device=ids.device), ids.shape[1]
    outputs, losses, likely, right, total = run_eagle3(head, model, ids, streams, STEPS, greedy=False), [], [], [], 0.0
    for step, y in enumerate(outputs, 1):
        logits, goal = head.logits(y), F.pad(teacher[:, step:], (0, 0, 0, step))               # goal of row p: law of t[p+step+1]
        text = F.pad(labels[:, step + 1 :], (0, step + 1), value=-1)
        losses.append(cross_entropy(logits, goal))
        with torch.no_grad():
            picked = logits.gather(-1, text.clamp_min(0)[..., None])[..., 0].float()
            likely.append((picked - logits.float().logsumexp(-1)).exp() * (text >= 0))
            right.append((logits.argmax(-1) == text).float())
    stats = {}
    for step, (loss, weight) in enumerate(zip(losses, path_weights(likely, floor), strict=True), 1):
        mask = ((rows >= start[:, None] - 1) & (rows < length - step - 1)).float()
        total = total + STEP_DECAY ** (step - 1) * (loss * mask * weight).sum() / mask.sum()
        stats |= {f"loss{step}": ((loss * mask).sum() / mask.sum()).detach(), f"right{step}": (right[step - 1] * mask).sum() / mask.sum()}
    return total, stats


def dflash_loss(head: Dflash, model: nn.Module, ids: Tensor, start: Tensor, floor: float, hard: float) -> tuple[Tensor, dict]:
    """Cross entropy at random anchors with the target's sharpened probabilities after the true text."""
    size, (batch, length) = head.cfg.block, ids.shape
    count = min(MOST_ANCHORS, max(2, length // 5))
    room = torch.rand(batch, count, device=ids.device)
    anchors = (start[:, None] + room * (length - size - start[:, None]).clamp_min(1)).long().clamp_max(length - size)   # [B, A]
    places = anchors[..., None] + torch.arange(1, size, device=ids.device)                    # [B, A, K-1]: positions to guess
    with torch.no_grad():
        streams, hidden = run_streams(model, ids)
        before = hidden.gather(1, (places - 1).flatten(1)[..., None].expand(-1, -1, hidden.shape[-1]))
        goal = sharpen(model.lm_head(before).float().softmax(-1), hard).bfloat16()
        text = ids.gather(1, places.flatten(1))
    logits = model.lm_head(run_dflash(head, model, ids, streams, anchors)).flatten(1, 2)       # [B, A*(K-1), V]
    loss = cross_entropy(logits, goal).unflatten(1, (count, size - 1))
    with torch.no_grad():
        likely = (logits.gather(-1, text[..., None])[..., 0].float() - logits.float().logsumexp(-1)).exp().unflatten(1, (count, size - 1))
        right = (logits.argmax(-1) == text).float().unflatten(1, (count, size - 1)).mean((0, 1))
        weight = torch.stack(path_weights(list(likely.unbind(-1)), floor), -1) * ROW_DECAY ** torch.arange(size - 1, device=ids.device)
    mean = loss.detach().mean((0, 1))
    return (loss * weight).mean((0, 1)).sum(), {f"loss{i + 1}": mean[i] for i in range(size - 1)} | {f"right{i + 1}": right[i] for i in range(size - 1)}


LOSSES = {"eagle3": eagle3_loss, "dflash": dflash_loss}


def start_eagle3(head: Eagle3, model: nn.Module, counts: np.ndarray) -> float:
    """Vocabulary, output head of the target, last tap passed through by fc; -> share of the counts that can be drafted."""
    ids = frequent_ids(counts, head.cfg.draft_vocab)
    head.set_vocabulary(ids.to(head.d2t.device))
    with torch.no_grad():
        gain = model.norm.offset + model.norm.weight
        head.lm_head.weight.copy_((model.lm_head.weight * gain)[head.target_ids()])
        head.fc.weight[:, -head.cfg.hidden :] += torch.eye(head.cfg.hidden, device=head.d2t.device)
    return float(counts[ids.numpy()].sum() / counts.sum())


def optimizer(head: nn.Module, rate: float, fused: bool) -> torch.optim.AdamW:
    groups = [{"params": [p for p in head.parameters() if p.dim() > 1], "weight_decay": 0.05},
              {"params": [p for p in head.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-10, fused=fused)


def train(head: nn.Module, model: nn.Module, name: str, batches: Batches, options: argparse.Namespace, log: Log) -> None:
    """Steps until the clock or the step count ends the schedule; a NaN gradient ends the run."""
    device = batches.device
    opt, begin, step, progress = optimizer(head, options.rate, device == "cuda"), time.time(), 0, 0.0
    mark, sums, every = begin, {}, 1 if options.tiny else 200
    head.train()
    while progress < 1.0:
        progress = max(step / options.steps, (time.time() - begin) / options.seconds)
        for group in opt.param_groups:
            group["lr"] = options.rate * rate_factor(progress, step, 0.01, 200)
        ids, start = batches.take()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss, stats = LOSSES[name](head, model, ids, start, options.floor, options.hard)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        for key, value in stats.items():
            sums[key] = sums.get(key, 0.0) + value
        step += 1
        if step % every == 0:
            values = {k: round(float(v) / every, 4) for k, v in sums.items()}
            ms, mark, sums = 1000 * (time.time() - mark) / every, time.time(), {}
            log(step=step, progress=progress, ms=ms, norm=float(norm), **values)
            if not math.isfinite(float(norm)):
                raise FloatingPointError(f"gradient norm {norm} at step {step}")
    log(done=step, seconds=time.time() - begin, memory_gb=torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0)


def parse() -> argparse.Namespace:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", choices=HEADS, required=True)
    parser.add_argument("--target", type=Path, default=here.parent / "checkpoints/demo")
    parser.add_argument("--data", type=Path, default=here / ".data")
    parser.add_argument("--rollouts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="folder of a head to continue from")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--floor", type=float, default=0.3, help="weight of a step whose path is unlikely; 1 turns the path weights off")
    parser.add_argument("--hard", type=float, default=0.5, help="share of the goal that is the target's likeliest token alone")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="fields of the head's config, taps=1,3,6")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="two steps on short sequences")
    options = parser.parse_args()
    if options.tiny:
        options.steps = 2
    return options


def main() -> None:
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    model = load_checkpoint(options.target, device)[1].requires_grad_(False)
    cls, config = HEADS[options.head]
    fields = dict(pair.split("=") for pair in options.set)
    shape = {k: tuple(map(int, v.split(","))) if k == "taps" else type(getattr(config(), k))(v) for k, v in fields.items()}
    head = load_head(options.start, device) if options.start else cls(replace(config(), **shape)).to(device)
    options.out.mkdir(parents=True, exist_ok=True)
    log = Log(options.out / "log.jsonl")
    batches = Batches(options.data, options.rollouts, TINY_SOURCES if options.tiny else SOURCES, device, options.seed)
    if options.head == "eagle3" and not options.start:
        log(coverage=start_eagle3(head, model, batches.counts(head.cfg.vocab)), draft_vocab=head.cfg.draft_vocab)
    if options.compile:
        torch._dynamo.config.recompile_limit = 64
        globals()["cross_entropy"] = torch.compile(cross_entropy, dynamic=False)
    train(head, model, options.head, batches, options, log)
    write_head(head, options.out)
    if options.compile:
        torch.compiler.set_stance("force_eager")
    numbers = measure(load_head(options.out, device), model, dict(np.load(options.data / "greedy.npz")), device, 4 if options.tiny else None)
    show(options.head, numbers)
    (options.out / "results.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
