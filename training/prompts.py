"""Held-out prompts: 200 pieces in four kinds, with the true continuation.

    python training/prompts.py [--data training/.data] [--out checkpoints/prompts.jsonl]

Lines: {"id", "kind": code | prose | table | dialogue, "prompt", "reference"}. Dialogue prompts hold the role tokens of the chat
template, without <|bos|>. Four prompts of code and four of prose are long (1500 to 2500 tokens).
"""

import argparse
import hashlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from tokenizer import read_documents

PER_KIND = 50
LONG = {"code": 4, "prose": 4, "table": 0}
LONGEST = {"code": 400, "prose": 400, "table": 120}
REFERENCE_CHARS = 400
SEED = 7


def is_table(line: str) -> bool:
    """A row of a table, or a line of literal data."""
    return " | " in line or bool(re.match(r"\s*(\||\+[-=]|={3,} +={3,}|[\"'][^\"']+[\"']\s*[:,]|[\[{(].*[\]})],?$|\d+[|,]\s*\S)", line))


def is_code(line: str) -> bool:
    return bool(re.match(r"\s*(def|class|return|if|for|import|from|self\.|try:|except|while|with|elif|else:|raise|#)", line))


def any_line(line: str) -> bool:
    return bool(line.strip())


KINDS: dict[str, tuple[Callable[[str], bool], float, tuple[str, ...]]] = {
    "code": (is_code, 0.4, ("code",)), "prose": (any_line, 0.5, ("prose",)), "table": (is_table, 0.2, ("prose", "table", "code")),
}


def cut(text: str, tokenizer: Tokenizer, start: int, tokens: int) -> tuple[str, str] | None:
    """(prompt, reference): `tokens` tokens from the character offset `start`, then the text that follows."""
    encoding = tokenizer.encode(text[start : start + tokens * 8], add_special_tokens=False)
    if len(encoding.ids) <= tokens + 40:
        return None
    end = start + encoding.offsets[tokens - 1][1]
    reference = text[end : end + REFERENCE_CHARS]
    return (text[start:end], reference) if len(reference) > 60 else None


def candidates(text: str, wanted: Callable[[str], bool], share: float) -> list[int]:
    """Offsets of line starts whose next ten lines look like the kind."""
    offsets, lines, position = [], text.splitlines(keepends=True), 0
    flags = [wanted(line) for line in lines]
    for index, line in enumerate(lines):
        if line.strip() and sum(flags[index : index + 10]) >= 10 * share:
            offsets.append(position)
        position += len(line)
    return offsets


def windows(documents: list[dict], tokenizer: Tokenizer, kind: str, rng: random.Random) -> list[tuple[str, str]]:
    """PER_KIND disjoint pieces that start where the text looks like the kind."""
    wanted, share, doc_kinds = KINDS[kind]
    texts = [d["text"] for d in documents if d["kind"] in doc_kinds and len(d["text"]) > 600]
    places = [(index, start) for index, text in enumerate(texts) for start in candidates(text, wanted, share)]
    rng.shuffle(places)
    used: dict[int, list[tuple[int, int]]] = {}
    out: list[tuple[str, str]] = []
    for index, start in places:
        if len(out) == PER_KIND:
            break
        tokens = rng.randint(1500, 2500) if len(out) < LONG[kind] else int(30 * (LONGEST[kind] / 30) ** rng.random())
        if any(start < b and a < start + tokens * 4 for a, b in used.get(index, [])):
            continue
        piece = cut(texts[index], tokenizer, start, tokens)
        if piece and len(set(piece[0])) > 12:
            used.setdefault(index, []).append((start, start + len(piece[0]) + REFERENCE_CHARS))
            out.append(piece)
    if len(out) < PER_KIND:
        raise RuntimeError(f"only {len(out)} prompts of kind {kind} among {len(places)} places; lower its share in KINDS")
    return out


def dialogue_prompts(documents: list[dict], rng: random.Random) -> list[tuple[str, str]]:
    """Prompts that end at an assistant turn of a held-out dialogue."""
    pieces = []
    for document in (d for d in documents if d["kind"] == "dialogue"):
        text = ""
        for role, content in document["turns"]:
            if role == "assistant" and len(content) > 60:
                pieces.append((text + "<|assistant|>", content[:REFERENCE_CHARS]))
            text += f"<|{role}|>{content}<|end|>"
    short = [p for p in pieces if len(p[0]) < 1600]
    rng.shuffle(short)
    return short[:PER_KIND]


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=here / ".data")
    parser.add_argument("--out", type=Path, default=here.parent / "checkpoints/prompts.jsonl")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    documents = read_documents(options.data / "heldout.jsonl")
    rng, lines = random.Random(SEED), []
    for kind in ("code", "prose", "table", "dialogue"):
        pieces = dialogue_prompts(documents, rng) if kind == "dialogue" else windows(documents, tokenizer, kind, rng)
        lines += [{"id": f"{kind}-{n:02d}", "kind": kind, "prompt": p, "reference": r} for n, (p, r) in enumerate(pieces)]
        sizes = sorted(len(tokenizer.encode(p).ids) for p, _ in pieces)
        print(f"{kind}: {len(pieces)} prompts, tokens {sizes[0]} / {sizes[len(sizes) // 2]} / {sizes[-1]}")
    options.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    print("sha256", hashlib.sha256(options.out.read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
