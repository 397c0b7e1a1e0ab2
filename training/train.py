"""Trains one demo checkpoint: dense pretraining, indexer warm-up, sparse stage, MTP module.

    python training/train.py --model m3 --out OUT [--seconds 540] [--start checkpoints/demo --stages sparse mtp]

Every stage has a number of steps and a cap in seconds; the learning rate follows the larger of the two kinds of progress, so that
a slow machine still ends a stage with a finished schedule. After each stage the weights are written as bf16 shards.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsa
import m3
from evaluate import bits_per_byte, coverage, speculation
from export import MODELS, load_checkpoint, to_checkpoint, write_weights
from layers import LoadBalance
from network import run_draft, run_target, shift, soft_cross_entropy

SEED = 20261129
DRAFT_STEPS = 4
STEP_WEIGHTS = (1.0, 0.8, 0.6, 0.4)


@dataclass(frozen=True)
class Stage:
    """steps and seconds cap one stage; batch and length shape a step; index_rate is the indexer's own learning rate."""

    steps: int
    seconds: float
    batch: int
    length: int
    rate: float
    index_rate: float = 0.0
    dropout: float = 0.0
    final: float = 0.0  # learning rate at the end, as a share of the peak
    compiled: bool = False  # compile the layers; not worth the compile time in the short stages


STAGES = {
    "dense": Stage(steps=5000, seconds=175, batch=16, length=2048, rate=2.5e-3, dropout=0.1, final=0.15, compiled=True),
    "warm": Stage(steps=400, seconds=45, batch=8, length=2048, rate=0.0, index_rate=4e-3, final=0.05),
    "sparse": Stage(steps=1000, seconds=125, batch=8, length=2048, rate=4e-4, index_rate=2e-3, dropout=0.05, final=0.02, compiled=True),
    "long": Stage(steps=3000, seconds=270, batch=4, length=4096, rate=1e-3, index_rate=2e-3, dropout=0.1, final=0.01, compiled=True),
    "mtp": Stage(steps=1200, seconds=185, batch=8, length=2048, rate=2.5e-3, index_rate=2.5e-3, final=0.02),
}
MODES = {"dense": "dense", "warm": "warm", "sparse": "sparse", "long": "sparse_all"}
TINY = {"batch": 1, "length": 96, "steps": 2}


class Windows:
    """Random windows of a token stream; every epoch covers the stream once from a random offset."""

    def __init__(self, path: Path, device: str, seed: int) -> None:
        self.tokens = torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int32)).to(device)
        self.random = np.random.default_rng(seed)
        self.starts: list[int] = []
        self.length, self.used = 0, 0

    def take(self, batch: int, length: int) -> Tensor:
        """[batch, length + 1] int64."""
        if length != self.length:
            self.length, self.starts = length, []
        while len(self.starts) < batch:
            offset = int(self.random.integers(0, length))
            fresh = np.arange(offset, len(self.tokens) - length - 1, length)
            self.random.shuffle(fresh)
            self.starts += fresh.tolist()
        picked, self.starts = self.starts[:batch], self.starts[batch:]
        self.used += batch * length
        return torch.stack([self.tokens[s : s + length + 1] for s in picked]).long()


class Log:
    """JSON lines on disk and short lines on stdout."""

    def __init__(self, path: Path) -> None:
        self.file, self.begin = path.open("a"), time.time()

    def __call__(self, **values) -> None:
        values["t"] = round(time.time() - self.begin, 1)
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        print(" ".join(f"{k}={v:.4f}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()), flush=True)


def is_index(name: str) -> bool:
    return "index" in name


def parameters(model: nn.Module, stage: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(model parameters, indexer parameters) that this stage trains; everything else is frozen."""
    main, index = [], []
    for name, parameter in model.named_parameters():
        drafting = name.startswith("mtp.")
        trained = drafting if stage == "mtp" else not drafting
        trained &= is_index(name) if stage == "warm" else not (stage == "dense" and is_index(name))
        parameter.requires_grad_(trained)
        if trained:
            (index if is_index(name) else main).append(parameter)
    return main, index


def optimizer(main: list[nn.Parameter], index: list[nn.Parameter], stage: Stage, fused: bool) -> torch.optim.AdamW:
    groups = [{"params": [p for p in main if p.dim() > 1], "peak": stage.rate, "weight_decay": 0.1},
              {"params": [p for p in main if p.dim() == 1], "peak": stage.rate, "weight_decay": 0.0},
              {"params": index, "peak": stage.index_rate, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-3, betas=(0.9, 0.95), eps=1e-10, fused=fused)


def rate_factor(progress: float, step: int, final: float, warmup: int = 60) -> float:
    return min(1.0, (step + 1) / warmup) * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def next_token_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """hidden [B, S, H], labels [B, S]."""
    return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), labels.flatten())


def target_loss(model: nn.Module, window: Tensor, mode: str) -> tuple[Tensor, dict]:
    hidden, losses, _ = run_target(model, window[:, :-1], mode)
    stats, total = {}, torch.zeros((), device=window.device)
    if losses:
        total = torch.stack(losses).sum()
        stats["index_kl"] = total.detach() / len(losses)
    if mode != "warm":
        loss = next_token_loss(hidden, model.lm_head.weight, window[:, 1:])
        stats["loss"] = loss.detach()
        total = total + loss
    return total, stats


def draft_loss(model: nn.Module, window: Tensor) -> tuple[Tensor, dict]:
    """Distillation of the frozen target into the MTP module over DRAFT_STEPS unrolled steps."""
    ids = window[:, :-1]
    with torch.no_grad():
        hidden, _, _ = run_target(model, ids, "select")
        teacher = model.lm_head(hidden)                                      # [B, S, V]: row p is the law of t[p+1]
    outputs, index_loss, _ = run_draft(model, ids, hidden, DRAFT_STEPS, "sparse", greedy=False)
    total, stats, length = index_loss, {"index_kl": index_loss.detach()}, ids.shape[1]
    for step, (out, weight) in enumerate(zip(outputs, STEP_WEIGHTS, strict=True), 1):
        goal = shift(teacher, step)                                          # row p: the law of t[p+step+1]
        mask = (torch.arange(length, device=ids.device) < length - step).float().expand(ids.shape)
        logits = model.lm_head(out)
        loss = soft_cross_entropy(logits, goal, mask)
        total = total + weight * loss
        agree = (logits.argmax(-1) == goal.argmax(-1)).float()
        stats |= {f"draft{step}": loss.detach(), f"agree{step}": (agree * mask).sum() / mask.sum()}
    return total, stats


def snap_target(model: nn.Module) -> None:
    """Round the target to what the checkpoint stores, so that the MTP module learns from the shipped weights."""
    for name, parameter in model.named_parameters():
        if not name.startswith("mtp.") and not name.endswith("moe.gate.weight"):
            parameter.data = parameter.data.bfloat16().float()


def start_mtp(model: nn.Module) -> None:
    """Begin from the last target layer; eh_proj passes the hidden half through."""
    model.mtp.layer.load_state_dict(model.layers[-1].state_dict())
    model.mtp.out_norm.load_state_dict(model.norm.state_dict())
    size = model.cfg.hidden
    with torch.no_grad():
        model.mtp.eh_proj.weight[:, size:] += torch.eye(size, device=model.norm.weight.device) * 0.5


def set_compiled(model: nn.Module, compiled: bool) -> None:
    for layer in [*model.layers, model.mtp.layer]:
        if compiled:
            layer.compile(dynamic=False)
        else:
            layer._compiled_call_impl = None


def run_stage(model: nn.Module, name: str, stage: Stage, data: Windows, log: Log, device: str, probe: Callable[[str], None]) -> None:
    """One stage; the last third of the sparse and MTP stages runs at twice the length."""
    main, index = parameters(model, name)
    opt = optimizer(main, index, stage, fused=device == "cuda")
    for layer in [*model.layers, model.mtp.layer]:
        layer.dropout = stage.dropout
    model.train()
    trained = [model.mtp.layer] if name == "mtp" else list(model.layers)
    balances = [m for layer in trained for m in layer.modules() if isinstance(m, LoadBalance)]
    begin, step, progress, every = time.time(), 0, 0.0, min(100, max(1, stage.steps // 4))
    mark = begin
    while progress < 1.0:
        progress = max(step / stage.steps, (time.time() - begin) / stage.seconds)
        factor = rate_factor(progress, step, stage.final)
        for group in opt.param_groups:
            group["lr"] = group["peak"] * factor
        long = name in ("sparse", "mtp") and progress > 2 / 3
        if long and model.layers[0]._compiled_call_impl:
            set_compiled(model, False)
        window = data.take(max(1, stage.batch // 2), 2 * stage.length) if long else data.take(stage.batch, stage.length)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss, stats = draft_loss(model, window) if name == "mtp" else target_loss(model, window, MODES[name])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(main + index, 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if name != "warm":
            for balance in balances:
                balance.step(2e-3 * min(1.0, 2 * (1 - progress) + 0.05))
        if step % every == 0:
            values = {k: v.item() for k, v in stats.items()}
            ms, mark = 1000 * (time.time() - mark) / every, time.time()
            log(stage=name, step=step, ms=ms, rate=opt.param_groups[0]["lr"], norm=norm.item(), **values)
        step += 1
        if name == "dense" and step % 1000 == 0 and device == "cuda":
            model.eval()
            probe(f"dense {step}")
            model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.eval()
    seconds = time.time() - begin
    log(stage=name, done=step, seconds=seconds, tokens=data.used, memory_gb=torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0)


@torch.no_grad()
def report(model: nn.Module, name: str, heldout: Tensor, data: Path, log: Log, quick: bool, tiny: bool) -> None:
    """Held-out numbers after a stage."""
    torch.compiler.set_stance("force_eager")
    length, windows, device = (96 if tiny else 2048), (16 if quick else 64), heldout.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        values = {"bpb_dense": bits_per_byte(model, heldout, data, length, "dense", windows)}
        if name in ("warm", "sparse", "long"):
            values["bpb_sparse"] = bits_per_byte(model, heldout, data, length, "select", windows)
            values["coverage"] = [round(c, 4) for c in coverage(model, heldout, length, 4)[0]]
        if name == "mtp":
            prompts = [heldout[i * 997 : i * 997 + (40 if tiny else 300)].tolist() for i in range(2 if tiny else 64)]
            values["speculation"] = speculation(model, prompts, 5 if tiny else 64)
    log(stage=name, heldout=values)
    torch.compiler.set_stance("default")


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--data", type=Path, default=here / ".data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="checkpoint folder to continue from")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[s for s in STAGES if s != "long"])
    parser.add_argument("--scale", type=float, default=1.0, help="factor on steps and seconds of every stage")
    parser.add_argument("--steps", type=int, help="steps of every stage, for a timing run")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--keep-mtp", action="store_true", help="do not start the MTP module anew")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="two steps a stage on short sequences")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    cls, config = MODELS[options.model]
    model = (load_checkpoint(options.start)[1] if options.start else cls(config())).to(device)
    options.out.mkdir(parents=True, exist_ok=True)
    log = Log(options.out / "log.jsonl")
    if options.compile:
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.suppress_errors = True
        for function in ("next_token_loss", "soft_cross_entropy"):
            globals()[function] = torch.compile(globals()[function], dynamic=False)
        for module, function in ((dsa, "step_attention"), (m3, "step_attention"), (dsa, "divergence"), (m3, "divergence")):
            setattr(module, function, torch.compile(getattr(module, function), dynamic=False))
    data = Windows(options.data / "train.bin", device, options.seed)
    heldout = torch.from_numpy(np.fromfile(options.data / "heldout.bin", dtype=np.uint16).astype(np.int64)).to(device)
    for name in options.stages:
        stage = STAGES[name]
        stage = replace(stage, steps=max(1, int(stage.steps * options.scale)), seconds=stage.seconds * options.scale)
        if options.steps:
            stage = replace(stage, steps=options.steps)
        if options.tiny:
            stage = replace(stage, **TINY)
        if name == "mtp":
            snap_target(model)
            if not options.keep_mtp:
                start_mtp(model)
        set_compiled(model, options.compile and stage.compiled)
        run_stage(model, name, stage, data, log, device, lambda label: report(model, label, heldout, options.data, log, quick=True, tiny=options.tiny))
        write_weights(to_checkpoint(options.model, model), options.out, index=False)
        report(model, name, heldout, options.data, log, quick=name not in ("sparse", "long"), tiny=options.tiny)


if __name__ == "__main__":
    main()
