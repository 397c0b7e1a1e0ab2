"""Model cards and licences of the draft heads, filled from measured numbers and the training logs.

    python training/card_heads.py checkpoints/demo-eagle3 checkpoints/demo-dflash
"""

import argparse
import json
from pathlib import Path

from card import LICENCE_HEAD, percent
from export_heads import FILE, load_head
from heads import Eagle3

SHAPE = {
    "eagle3": """
One decoder layer (`LlamaForCausalLMEagle3`): hidden 256, 8 query heads and 4 key/value heads of 32 dims, MLP of 768, rotary over the
whole head (halves i and i + 16), plain RMS norms, {parameters:.2f} M parameters. The embedding is the target's and is not stored.

- Taps 2, 4, 6: residual stream entering target layer 2 and 4, and the output of the last layer before the final norm. `fc` takes
  them side by side in this order.
- The row at position p is fed the taps of p and Embed(t[p+1]), stands at position p and guesses t[p+2]. q, k and v read
  [input_layernorm(embedding), hidden_norm(hidden)]; the residual is the hidden before its norm.
- Further draft steps feed back the output before `norm`, at positions p+1, p+2, ...
- `lm_head` knows {vocabulary} tokens: target id = draft id + d2t[draft id]. They cover {coverage} of the tokens that the target writes
  greedily after the held-out prompts.""",
    "dflash": """
Three decoder layers (`DFlashDraftModel`): hidden 256, 8 query heads and 4 key/value heads of 32 dims, normed per head, MLP of 768,
rotary over the whole head (halves i and i + 16), plain RMS norms, {parameters:.2f} M parameters. Embedding and output head are the
target's and are not stored.

- Taps 1, 3, 5: outputs of these target layers, counted from 0. f = hidden_norm(fc(taps side by side)).
- Context keys and values of every draft layer come from f at the position of f; context tokens do not run through the layers.
- A block has 8 rows at positions a .. a+7: the newest token (at a) and 7 masks (token 7). All rows see the context before a
  and the whole block. Row i guesses t[a+i], through `norm` and the target's output head.""",
}
GOAL = {
    "eagle3": "Five unrolled steps, each row attending to the first step's keys up to it and to its own later ones, as in drafting. Cross entropy\n"
              "with the target's probabilities on the draft vocabulary, weight 0.85 from step to step; in the second run, half of each\n"
              "distribution was moved to its likeliest token.",
    "dflash": "Blocks at random anchors. Cross entropy with the target's distribution after the true text, half of it moved to its likeliest token,\n"
              "weight 0.85 from row to row.",
}


def acceptance_rows(numbers: dict) -> list[str]:
    return [f"| {kind} | {k} | {v['length']:.2f} | {percent(v['rates'])} | {v['steps']} |" for k, kinds in numbers.items() for kind, v in kinds.items()]


def loss_rows(results: Path, name: str) -> list[str]:
    """Training losses along both runs, a few rows each; means over 200 batches of the mix."""
    rows = []
    for run in (1, 2):
        lines = [json.loads(line) for line in (results / f"{name}.run{run}.jsonl").open()]
        steps = [e for e in lines if "step" in e]
        for entry in [*steps[3 :: max(1, len(steps) // 4)], steps[-1]]:
            last = max(int(k[4:]) for k in entry if k.startswith("loss"))
            pairs = [[entry[f"{key}{j}"] for j in (1, 3, last)] for key in ("loss", "right")]
            rows.append(f"| {run} | {entry['step']} | {' / '.join(f'{v:.2f}' for v in pairs[0])} | {percent(pairs[1])} |")
    return list(dict.fromkeys(rows))


def seconds(results: Path, name: str) -> list[int]:
    return [round(json.loads((results / f"{name}.run{run}.jsonl").read_text().splitlines()[-1])["seconds"]) for run in (1, 2)]


def card(folder: Path, results: Path, coverage: str) -> str:
    head = load_head(folder)
    name, size = ("eagle3" if isinstance(head, Eagle3) else "dflash"), (folder / FILE).stat().st_size / 1e6
    numbers = json.loads((results / f"{folder.name}.json").read_text())
    shape = SHAPE[name].format(parameters=sum(p.numel() for p in head.parameters()) / 1e6, coverage=coverage,
                               vocabulary=head.cfg.draft_vocab if isinstance(head, Eagle3) else 0)
    spent, last = seconds(results, folder.name), 5 if name == "eagle3" else 7
    lines = [
        "---", "license: apache-2.0", "language: en", "---", "", f"# Skipstone {folder.name}", "",
        f"A draft head for the target in `checkpoints/demo`, {size:.1f} MB. Speculative decoding with it gives the target's own text, in fewer steps.",
        "Acceptance numbers of a model this small say nothing about a large one.", "", "## Architecture", shape, "",
        "## Data and licence", "",
        "The training part of the target's corpus (see `NOTICE`) and texts that the target wrote after prompts cut from it: 60 % greedy,",
        "20 % at temperature 0.7, 20 % at 1.0. Prompts: code, prose, tables and dialogues of 24 to 300 tokens, and a few of 1300 to 1800.",
        "Nothing held out was used in training. Weights: Apache-2.0, see `LICENSE`.", "",
        "## Acceptance", "",
        "Greedy speculative decoding on the 200 held-out prompts of `checkpoints/prompts.jsonl`, 128 new tokens each or up to the first stop",
        "token, simulated in plain torch in fp32 on a CPU. Length: tokens a verify step emits, bonus included. Shares: steps in which draft 1, 2, ...",
        "was accepted. The target's MTP module reaches 3.13 at k = 3 by the same measure (82.6 / 70.2 / 60.2). Greedy text of a small model",
        "repeats itself, which raises all of these numbers.", "",
        "| prompts | k | acceptance length | accepted, % | verify steps |", "|---|---|---|---|---|", *acceptance_rows(numbers), "",
        "## Training", "", GOAL[name],
        "In the sum a step weighs 0.3 + 0.7 x the head's probability of the true tokens in all steps before it, since it counts only if",
        "those are accepted. The target is frozen, as shipped, with its block selection.", "",
        "70 % of the batches: 56 texts of the target of 448 tokens; 10 %: 8 of 2048; 14 %: 8 corpus windows of 2048; 6 %: 4 of 4096.",
        f"AdamW, 2e-3 and then 1e-3, cosine to 1 %; {spent[0]} and {spent[1]} seconds on one H200. Losses before weighting, and how often the head's choice is the text's token:", "",
        f"| run | step | loss, draft 1 / 3 / {last} | right, % |", "|---|---|---|---|", *loss_rows(results, folder.name), "",
        "The runs differ in the goal, so their losses do not compare." if name == "eagle3" else "Both runs have the same goal.",
        "Commands, for both heads at once on two GPUs, the weights copied into this folder between them:", "",
        "```", 'EAGLE3="--hard 0" DFLASH="--set layers=3" bash training/heads.sh OUT 425 24576',
        'export EAGLE3="--start checkpoints/demo-eagle3 --rate 1e-3 --seed 20261203" DFLASH="--start checkpoints/demo-dflash --rate 1e-3 --seed 20261203"',
        "DATA=training/.data/second SEED=11 bash training/heads.sh OUT2 320 18432",
        f"python training/evaluate_heads.py checkpoints/{folder.name} --save training/results/{folder.name}.json", "```", "",
    ]
    return "\n".join(lines)


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--coverage", default="98.8 %", help="share of the greedy held-out tokens in the draft vocabulary")
    options = parser.parse_args()
    for folder in options.folders:
        (folder / "README.md").write_text(card(folder, here / "results", options.coverage))
        (folder / "LICENSE").write_text(LICENCE_HEAD + (here / "LICENSE-weights.txt").read_text())


if __name__ == "__main__":
    main()
