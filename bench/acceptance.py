"""How many drafts are accepted on the held-out prompts, by proposer and by the way drafts are drawn.

    python bench/acceptance.py [--model demo] [--prompts 200] [--tokens 128] [--noise]

Table 1: greedy decoding, acceptance length (bonus included) of every proposer the model has, and the acceptance rate
of each draft position given that the ones before it were accepted. Table 2 (`--noise`): the same at temperatures 0.7
and 1 with drafts drawn with the target's own noise (coupled), greedily, or independently; the text is the same in all
three, which is checked. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

from skipstone import LLM, SamplingParams
from skipstone.errors import SkipstoneError

ROOT = Path(__file__).resolve().parent.parent
GREEDY = {"mtp": [3, 5], "eagle3": [3, 5], "dflash": [3, 7], "ngram": [4]}
NOISY = {"mtp": 3, "eagle3": 3, "dflash": 7}
MODES = ("coupled", "greedy", "independent")


def load(model: str, spec: str, **options: Any) -> LLM | None:
    """The engine with this proposer; None when the model has no such head."""
    try:
        return LLM(model, spec=spec, **options)
    except SkipstoneError as error:
        print(f"{spec}: {error}")
        return None


def run(llm: LLM, prompts: list[str], params: SamplingParams) -> tuple[list[list[int]], dict[str, Any]]:
    """Texts, and acceptance over all prompts."""
    outputs = llm.generate(prompts, params)
    stats = llm.engine.scheduler.stats.speculation
    conditional, before = [], stats.steps
    for accepted in stats.accepted_per_position:
        conditional.append(round(accepted / before, 3) if before else 0.0)
        before = accepted
    result = {"length": round(stats.acceptance_length or 1.0, 3), "steps": stats.steps, "conditional": conditional}
    return [output.outputs[0].token_ids for output in outputs], result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--noise", action="store_true")
    args = parser.parse_args()
    lines = (ROOT / "checkpoints" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    every = [json.loads(line)["prompt"] for line in lines]
    prompts = every[:: max(len(every) // args.prompts, 1)][: args.prompts]
    where = f"{platform.machine()}, torch {torch.__version__}"
    print(f"{where}; {args.model}, {len(prompts)} prompts x {args.tokens} tokens")
    results: dict[str, Any] = {}
    reference = None
    print(f"{'greedy':28}{'length':>8}  accepted given those before")
    for name, ks in GREEDY.items():
        for k in ks:
            llm = load(args.model, f"{name}:{k}", max_num_seqs=16)
            if llm is None:
                break
            texts, result = run(llm, prompts, SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True))
            reference = reference or texts
            assert texts == reference, f"{name}:{k} changed the text"
            results[f"{name}:{k}"] = result
            print(f"{name + ':' + str(k):28}{result['length']:8.2f}  {result['conditional']}", flush=True)
    if args.noise:
        results["noise"] = noise(args.model, prompts, args.tokens)
    print(json.dumps({"bench": "acceptance", "model": args.model, "prompts": len(prompts), "results": results}))


def noise(model: str, prompts: list[str], tokens: int) -> dict[str, Any]:
    """Acceptance by temperature and by the noise of the drafts."""
    results = {}
    print(f"{'noise of the drafts':28}{'length':>8}  accepted given those before")
    for temperature in (0.7, 1.0):
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=tokens, ignore_eos=True)
        reference = None
        for name, k in NOISY.items():
            for mode in MODES:
                llm = load(model, f"{name}:{k}", max_num_seqs=16, draft_sampling=mode)
                if llm is None:
                    break
                texts, result = run(llm, prompts, params)
                reference = reference or texts
                assert texts == reference, f"{name}:{k} with {mode} drafts changed the text"
                label = f"{name}:{k} T={temperature} {mode}"
                results[label] = result
                print(f"{label:28}{result['length']:8.2f}  {result['conditional']}", flush=True)
    return results


if __name__ == "__main__":
    main()
