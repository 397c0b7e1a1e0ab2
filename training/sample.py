"""Continue a few held-out prompts with a checkpoint, running the whole sequence again for every token.

    python training/sample.py checkpoints/demo [--ids code-21 prose-37 dialogue-46] [--tokens 100] [--temperature 0.8]
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer

from export import END, EOS, load_checkpoint
from network import generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ids", nargs="+", default=["code-21", "prose-37", "dialogue-46"])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    entries = {e["id"]: e for e in map(json.loads, (options.folder.parent / "prompts.jsonl").open(encoding="utf-8"))}
    _, model = load_checkpoint(options.folder)
    prompts = [tokenizer.encode(entries[name]["prompt"]).ids for name in options.ids]
    ids, lengths = generate(model, prompts, options.tokens, options.temperature)
    for name, row, length in zip(options.ids, ids.tolist(), lengths.tolist(), strict=True):
        new = row[length : length + options.tokens]
        stop = min((new.index(t) for t in (EOS, END) if t in new), default=len(new))
        print(f"=== {name}\n{entries[name]['prompt'][-240:]}\n>>>{tokenizer.decode(new[:stop])}\n")


if __name__ == "__main__":
    main()
