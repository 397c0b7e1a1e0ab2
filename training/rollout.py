"""Texts that the target itself writes: prompts from the training corpus, continued row by row with cached keys.

    python training/rollout.py --cut                                   # training/.data/draft_prompts.npz, from train.jsonl
    python training/rollout.py --seed 1 --rows 24576 --out OUT/a.npz   # prompts continued to a fixed length
    python training/rollout.py --greedy training/.data/greedy.npz      # greedy continuations of checkpoints/prompts.jsonl, to measure on

Files hold `ids` [N, S] uint16, `start` [N] (length of the prompt), and for --greedy also `kind` [N].
"""

import argparse
import json
import random
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from export import load_checkpoint
from layers import rope_half
from m3 import block_scores, pick_blocks
from prompts import KINDS, candidates
from tokenizer import read_documents

LENGTH, LONG_LENGTH = 448, 2048
SHARES = {"code": 0.28, "prose": 0.28, "table": 0.22, "dialogue": 0.22}
LONGEST = {"code": 300, "prose": 300, "table": 160, "dialogue": 300}
LONG_SHARE = 0.04
KEPT = 44000  # prompts that --cut keeps, in random order
TEMPERATURES = ((0.6, 0.0), (0.2, 0.7), (0.2, 1.0))  # share of the rows, temperature
GREEDY_TOKENS = 144


class Row:
    """One new row at a time for N sequences: the target's step with cached keys and its block selection."""

    def __init__(self, model: nn.Module, count: int, length: int) -> None:
        self.model, cfg, device = model, model.cfg, model.lm_head.weight.device
        length = -(-length // cfg.block) * cfg.block
        self.keys, self.values = (torch.zeros(cfg.layers, count, cfg.kv_heads, length, cfg.head_dim, device=device) for _ in range(2))
        self.index = torch.zeros(cfg.layers, count, 1, length, cfg.index_dim, device=device)

    def attention(self, number: int, x: Tensor, position: Tensor, seen: int) -> Tensor:
        """x [N, 1, H] at position [1, 1]; keys of slots < seen are read, later ones masked -> [N, 1, H]."""
        module, at = self.model.layers[number].self_attn, position[0]
        cfg, visible = module.cfg, torch.arange(seen, device=x.device) <= position[0]      # [seen]
        q, k, v = module.qkv(x, position)                                                  # q [N, G, n, 1, D]
        self.keys[number].index_copy_(2, at, k[:, :, 0])
        self.values[number].index_copy_(2, at, v[:, :, 0])
        keys, values = self.keys[number, :, :, :seen], self.values[number, :, :, :seen]
        mask = visible
        if module.sparse:
            cos, sin = module.rotary(position)
            iq, ik = module.index_q_proj(x).unflatten(-1, (-1, cfg.index_dim)).transpose(1, 2), module.index_k_proj(x)[:, None]
            self.index[number].index_copy_(2, at, rope_half(module.index_k_norm(ik), cos, sin))
            scores = rope_half(module.index_q_norm(iq), cos, sin) @ self.index[number, :, :, :seen].transpose(-1, -2)
            blocks = pick_blocks(block_scores(scores, visible, cfg.block), position // cfg.block, cfg.top_blocks)  # [N, G, 1, blocks]
            mask = module.token_mask(blocks, seen) & visible
        scores = (q[..., 0, :] @ keys.transpose(-1, -2)) * module.scale                    # [N, G, n, seen]
        out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values                # [N, G, n, D]
        return module.o_proj(out.flatten(1)[:, None])

    def __call__(self, tokens: Tensor, step: int) -> Tensor:
        """tokens [N] at position `step` -> logits [N, V] of the next."""
        model, size = self.model, self.keys.shape[-2]
        position = torch.tensor([[step]], device=tokens.device)
        seen = min(size, -(-(step + 1) // 64) * 64)
        h = model.embed_tokens(tokens)[:, None]
        for number, layer in enumerate(model.layers):
            h = layer.feed_forward(h + self.attention(number, layer.input_layernorm(h), position, seen))
        return model.lm_head(model.norm(h[:, 0]))


@torch.no_grad()
def continue_rows(model: nn.Module, ids: Tensor, start: Tensor, temperature: Tensor, seed: int) -> Tensor:
    """ids [N, S]: prompts of `start` [N] tokens, filled up in place; temperature [N], 0 for the likeliest token."""
    row, noise = Row(model, *ids.shape), torch.Generator(ids.device).manual_seed(seed)
    heat = temperature.clamp_min(1e-3)[:, None]
    for step in range(ids.shape[1] - 1):
        logits = row(ids[:, step], step)
        uniform = torch.rand(logits.shape, generator=noise, device=ids.device).clamp_(1e-9, 1 - 1e-7)
        noisy = logits / heat - torch.log(-torch.log(uniform)) * (temperature > 0)[:, None]   # Gumbel: argmax samples the softmax
        ids[:, step + 1] = torch.where(step + 1 < start, ids[:, step + 1], noisy.argmax(-1))
    return ids


def dialogue_texts(documents: list[dict], rng: random.Random, count: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts that end at an assistant turn, with <|bos|>, at most LONGEST tokens."""
    texts = []
    for document in (d for d in documents if d["kind"] == "dialogue"):
        text = ""
        for role, content in document["turns"]:
            texts += [text + "<|assistant|>"] if role == "assistant" else []
            text += f"<|{role}|>{content}<|end|>"
    rng.shuffle(texts)
    found = [e.ids for e in tokenizer.encode_batch([t for t in texts if len(t) < 1600][:count])]
    return [ids for ids in found if len(ids) <= LONGEST["dialogue"]]


def piece_texts(documents: list[dict], rng: random.Random, kind: str, count: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts of one kind, log-uniform in length, and a few long ones, with <|bos|>; each starts at a line of that kind."""
    wanted, share, doc_kinds = KINDS[kind]
    texts = [d["text"] for d in documents if d["kind"] in doc_kinds and len(d["text"]) > 600]
    places = [(number, at) for number, text in enumerate(texts) for at in candidates(text, wanted, share)]
    places = rng.sample(places, min(count, len(places)))
    sizes = [rng.randint(1300, 1800) if rng.random() < LONG_SHARE else int(24 * (LONGEST[kind] / 24) ** rng.random()) for _ in places]
    encoded = tokenizer.encode_batch([texts[number][at : at + 8 * size] for (number, at), size in zip(places, sizes, strict=True)])
    return [e.ids[: size + 1] for e, size in zip(encoded, sizes, strict=True) if len(e.ids) > size]


def cut(data: Path, count: int) -> None:
    """Write draft_prompts.npz: flat `tokens`, `sizes`; training documents only."""
    tokenizer, rng, found = Tokenizer.from_file(str(data / "tokenizer.json")), random.Random(20261201), []
    documents = read_documents(data / "train.jsonl")
    for kind, share in SHARES.items():
        size = int(count * share)
        got = dialogue_texts(documents, rng, size, tokenizer) if kind == "dialogue" else piece_texts(documents, rng, kind, size, tokenizer)
        print(kind, len(got), "prompts, mean", round(float(np.mean([len(p) for p in got])), 1))
        found += got
    rng.shuffle(found)
    found = found[:KEPT]
    np.savez(data / "draft_prompts.npz", tokens=np.array([t for p in found for t in p], np.uint16), sizes=np.array([len(p) for p in found], np.int32))


def padded(prompts: list[np.ndarray], length: int, device: str) -> tuple[Tensor, Tensor]:
    """-> ids [N, length] with zeros behind the prompts, start [N]."""
    ids = np.zeros((len(prompts), length), np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return torch.from_numpy(ids).to(device), torch.tensor([len(p) for p in prompts], device=device)


def write_rollouts(model: nn.Module, data: Path, seed: int, rows: int, batch: int, out: Path, device: str) -> None:
    """`rows` short prompts continued to LENGTH, and the long ones among as many to LONG_LENGTH (`long` in the file's name)."""
    stored, rng, begin = np.load(data / "draft_prompts.npz"), np.random.default_rng(seed), time.time()
    prompts = np.split(stored["tokens"], np.cumsum(stored["sizes"])[:-1])
    short, long = ([p for p in prompts if (len(p) > LENGTH) == large] for large in (False, True))
    for chosen, length, name in ((short, LENGTH, out), (long, LONG_LENGTH, out.with_name("long-" + out.name))):
        count = rows if length == LENGTH else max(1, rows * LENGTH // LONG_LENGTH // 6)
        picked = [chosen[i] for i in np.resize(rng.permutation(len(chosen)), count)]
        temperature = rng.choice([t for _, t in TEMPERATURES], count, p=[s for s, _ in TEMPERATURES])
        parts, starts = [], []
        size = max(1, batch * LENGTH // length)
        for at in range(0, count, size):
            ids, start = padded(picked[at : at + size], length, device)
            heat = torch.from_numpy(temperature[at : at + size]).float().to(device)
            parts.append(continue_rows(model, ids, start, heat, seed + at).cpu().numpy().astype(np.uint16))
            starts.append(start.cpu().numpy().astype(np.int32))
        np.savez(name, ids=np.concatenate(parts), start=np.concatenate(starts))
        print(f"{name}: {count} x {length}, {time.time() - begin:.1f} s so far", flush=True)


def write_greedy(model: nn.Module, folder: Path, out: Path, device: str) -> None:
    """Greedy continuations of the held-out prompts; rows in order of length, so that few are padded far."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    entries = [json.loads(line) for line in (folder.parent / "prompts.jsonl").open(encoding="utf-8")]
    prompts = [(np.array(tokenizer.encode(e["prompt"]).ids), e["kind"]) for e in entries]
    prompts.sort(key=lambda pair: len(pair[0]))
    ids, start = np.zeros((len(prompts), len(prompts[-1][0]) + GREEDY_TOKENS), np.uint16), []
    cuts = [0, len(prompts) // 2, sum(len(p) <= 600 for p, _ in prompts), len(prompts)]
    for begin, end in pairwise(cuts):
        batch = [p for p, _ in prompts[begin:end]]
        if batch:
            rows, sizes = padded(batch, len(batch[-1]) + GREEDY_TOKENS, device)
            ids[begin:end, : rows.shape[1]] = continue_rows(model, rows, sizes, torch.zeros(len(batch), device=device), 0).cpu().numpy()
            start += sizes.tolist()
    np.savez_compressed(out, ids=ids, start=np.array(start, np.int32), kind=np.array([k for _, k in prompts]))


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=here.parent / "checkpoints/demo")
    parser.add_argument("--data", type=Path, default=here / ".data")
    parser.add_argument("--cut", type=int, nargs="?", const=60000, help="cut this many prompts")
    parser.add_argument("--greedy", type=Path)
    parser.add_argument("--rows", type=int, default=24576)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.cut:
        cut(options.data, options.cut)
        return
    model = load_checkpoint(options.target, device)[1]
    if options.greedy:
        write_greedy(model, options.target, options.greedy, device)
    else:
        torch.set_float32_matmul_precision("high")
        write_rollouts(model, options.data, options.seed, options.rows, options.batch, options.out, device)


if __name__ == "__main__":
    main()
