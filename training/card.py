"""Model card and licence of a checkpoint folder, filled from measured numbers and the training logs."""

import json
from pathlib import Path

ABOUT = {
    "m3": ("Skipstone demo", "MiniMax-M3 text model", """
hidden 256, 6 layers (the first dense with an MLP of 768), 8 query heads and 2 key/value heads of 32 dims, rotary on 16 of them,
8 experts of 160 with 2 chosen and one shared, 2 index heads of 32 dims choosing 8 blocks of 32 tokens (the own block always among
them) for each key/value head, vocabulary 6144, one MTP module. Selection begins to matter from position 256."""),
    "dsa": ("Skipstone demo-dsa", "DeepSeek-V3.2", """
hidden 256, 6 layers (the first with a dense MLP of 768), 8 heads, latent ranks 128 (query) and 64 (key/value), head dims 32 + 16 rotary,
8 experts of 160 in 4 groups with 2 chosen and one shared, 4 index heads of 32 dims choosing 256 tokens, YaRN factor 4 over 1024,
vocabulary 6144, one MTP module (stored as layer 6; its copies of the embedding and of the output head are left out, they are the
target's). Selection begins to matter from position 256."""),
}
LICENCE_HEAD = """The weights and configuration files in this folder are licensed under the Apache License, Version 2.0, below.
They were trained on the packages listed in NOTICE at the root of the repository; that file names each source, version and licence.

"""


def percent(values: list[float]) -> str:
    return " / ".join(f"{100 * v:.1f}" for v in values)


def loss_curve(results: Path, name: str) -> list[str]:
    """Rows of held-out bits per byte along the training, from both logs."""
    rows, seen, carried = [], 0, 0
    for run in ("run1", "run2"):
        last = 0
        for line in (results / f"{name}.{run}.jsonl").open():
            entry = json.loads(line)
            last = entry.get("tokens", last)
            values = entry.get("heldout")
            if values and entry["stage"] != "mtp":
                label = entry["stage"] if entry["stage"].startswith("dense ") else f"end of {entry['stage']}"
                tokens = int(label.split()[1]) * 32768 if label.startswith("dense ") else last
                sparse = f"{values['bpb_sparse']:.3f}" if "bpb_sparse" in values else "-"
                rows.append(f"| {label} | {(seen + tokens) / 1e6:.0f} M | {values['bpb_dense']:.3f} | {sparse} |")
            if values and entry["stage"] == "sparse":
                carried = last
        seen += carried
    return rows


def speculation_rows(numbers: dict) -> list[str]:
    rows = []
    for key, value in numbers.items():
        if key.startswith("speculation_"):
            label = {"speculation_text": "held-out text, 1024-token prefixes"}.get(key, "prompts.jsonl, " + key.removeprefix("speculation_"))
            rows.append(f"| {label} | {value['length']:.2f} | {percent(value['agree'])} | {value['verify_steps']} |")
    return rows


def coverage_rows(numbers: dict) -> list[str]:
    rows = []
    for length in (2048, 4096):
        c = numbers[f"coverage_{length}"]
        cells = [f"{length // 2} to {length}", f"{100 * c['keys']:.0f} %", f"{100 * c['mean_mass']:.1f} %", f"{100 * c['mean_best']:.1f} %", percent(c["mass"])]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def card(folder: Path, numbers: dict, results: Path) -> str:
    title, architecture, shape = ABOUT[numbers["kind"]]
    model, size = numbers["kind"], sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 2e6
    bits = {length: numbers[f"bits_per_byte_{length}"] for length in (2048, 4096)}
    lines = [
        "---", "license: apache-2.0", "language: en", "---", "", f"# {title}", "",
        f"A model of {size:.1f} M parameters with the {architecture} architecture, trained from scratch on documentation and source code. It shows the",
        "machinery of sparse attention and speculative decoding on a laptop; its text has the shape of documentation, not its truth. Acceptance",
        "numbers of a model this small say nothing about a large one.", "",
        "## Architecture", shape, "",
        "## Data and licence", "",
        "11.2 M training tokens from CPython's documentation and standard library, the SQLite and PostgreSQL documentation, the Advanced",
        "Bash-Scripting Guide, the Jargon File, The Devil's Dictionary and two US state papers; about a tenth in chat form. Sources, versions,",
        "licences and hashes are in `NOTICE`. 2 % of the files were held out; all numbers below are on them. Weights: Apache-2.0, see `LICENSE`.", "",
        "## Numbers", "",
        f"Held-out bits per byte ({numbers['heldout_tokens']} tokens):", "",
        "| window | all keys | selected keys |", "|---|---|---|",
        *[f"| {length} | {b['dense']:.3f} | {b['sparse']:.3f} |" for length, b in bits.items()], "",
        "Share of the all-keys attention mass that the selection covers (mean over sparse layers, then each sparse layer, MTP layer last):", "",
        "| positions | keys selected | mass covered | best possible | each layer, % |", "|---|---|---|---|---|", *coverage_rows(numbers), "",
        "Greedy speculative decoding with 3 drafts against the model's own greedy continuation (64 tokens a prompt). Acceptance length",
        "counts the bonus token. The three shares: step j right when all earlier ones are. Greedy text of a small model repeats itself,",
        "which raises these numbers:", "",
        "| prompts | acceptance length | steps 1 / 2 / 3 right, % | verify steps |", "|---|---|---|---|", *speculation_rows(numbers), "",
        "## Training", "",
        "| point | tokens seen | bits per byte, all keys | selected keys |", "|---|---|---|---|", *loss_curve(results, folder.name), "",
        "Held-out probes on 16 windows of 2048 (64 at the ends of sparse and long). Stages: dense pretraining, indexer warm-up with the rest",
        "frozen, training with the selection applied, the same at length 4096. The MTP module was then distilled from the frozen target:",
        "four unrolled steps, soft cross entropy to the target's distribution. Two runs on one H200, about 500 and 450 seconds; between",
        "them the shards of OUT were copied into this folder, and those of OUT2 after:", "",
        "```", f"python training/train.py --model {model} --out OUT --compile",
        f"python training/train.py --model {model} --out OUT2 --start checkpoints/{folder.name} --stages long mtp --keep-mtp --seed 20261130 --compile",
        f"python training/evaluate.py checkpoints/{folder.name} --save training/results/{folder.name}.json --write-card", "```", "",
        "MTP convention: step 1 at position p takes Embed(t[p+1]) and the target's hidden state at p after its final norm; later steps take the",
        "next token and the module's own output after its final norm, at position p+1, p+2, ..."
        + (" The embedding is zero where position == 0." if model == "m3" else " No zeroing of the embedding at position 0."), "",
    ]
    return "\n".join(lines)


def write_card(folder: Path, numbers: dict) -> None:
    """README.md and LICENSE of the folder."""
    here = Path(__file__).parent
    (folder / "README.md").write_text(card(folder, numbers, here / "results"))
    (folder / "LICENSE").write_text(LICENCE_HEAD + (here / "LICENSE-weights.txt").read_text())
