"""lm-eval's client of completions: the same answers, so the same scores, with every kind of drafts and without.

It asks for what no other client does: echoed prompts of token ids with log-probabilities. Its package brings more than
a hundred megabytes, so it is no part of the extra `test`; without it on the path (or in LM_EVAL) this skips.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from serving import serving
from waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "checkpoints" / "demo"
PROMPTS = ROOT / "checkpoints" / "prompts.jsonl"
LM_EVAL = os.environ.get("LM_EVAL") or shutil.which("lm_eval")
pytestmark = [
    pytest.mark.skipif(LM_EVAL is None, reason="lm_eval is not installed; pip install 'lm-eval[api]'"),
    pytest.mark.skipif(not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here"),
]
TASKS: dict[str, dict[str, Any]] = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve texts with four ways to go on, the first of them right, and the texts to be gone on with freely."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = [json.loads(line)["prompt"].split(" ") for line in PROMPTS.read_text().splitlines()[:24]]
    rows = []
    for i, words in enumerate(texts[:12]):
        cut = len(words) * 2 // 3
        choices = [words[cut : cut + 4], *(texts[i + j][5:9] for j in (3, 7, 11))]
        rows.append(
            {"text": " ".join(words[max(0, cut - 60) : cut]), "choices": [" ".join(one) for one in choices], "gold": 0}
        )
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, task in TASKS.items():
        source = {"task": name, "test_split": "test", "dataset_path": "json"}
        files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(json.dumps(source | files | task))
    return folder


def answers(tasks: Path, spec: str, out: Path) -> dict[str, Any]:
    """What came back for every document, and the scores."""
    with serving(spec=spec) as server:
        model = {
            "model": "demo", "base_url": server.url + "/v1/completions", "tokenizer": str(DEMO),
            "tokenizer_backend": "huggingface", "tokenized_requests": True, "num_concurrent": 4, "max_retries": 1,
        }  # fmt: skip
        arguments = ",".join(f"{key}={value}" for key, value in model.items())
        command = [str(LM_EVAL), "--model", "local-completions", "--tasks", ",".join(TASKS), "--model_args", arguments]
        options = ["--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
        home = {"HOME": str(out), "HF_HOME": str(out), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
        done = subprocess.run(
            [*command, *options], env=os.environ | home, capture_output=True, text=True, timeout=4 * PATIENCE_S
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = {}
    for file in out.rglob("samples_*.jsonl"):
        for line in file.read_text().splitlines():
            sample = json.loads(line)
            found[f"{file.name.split('_20')[0]} {sample['doc_id']}"] = sample["resps"]
    (results,) = out.rglob("results_*.json")
    found["scores"] = json.loads(results.read_text())["results"]
    return found


def test_scores_do_not_depend_on_drafts(tasks: Path, tmp_path: Path) -> None:
    plain = answers(tasks, "off", tmp_path / "off")
    assert len(plain) == 1 + 12 * len(TASKS)
    assert plain["scores"]["choose"]["acc,none"] > 0.25, "no better than guessing"
    for spec in ("mtp:3", "ngram:4"):
        assert answers(tasks, spec, tmp_path / spec[:3]) == plain, spec
