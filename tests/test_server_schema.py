"""Thousands of requests made from /openapi.json: no 5xx, nothing that the document does not say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import Serving, serving
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from waiting import PATIENCE_S, wait_for

LETTERS = [chr(32 + i) for i in range(95)] + ["\n"]
TEMPLATE = (
    "{# <|tool_call|> #}{% if tools %}t{% endif %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}a:"
)
FEW, MANY = 30, 250  # cases for each of the nine addresses that take something
# One check is left out: valid bodies may be refused, as when two fields contradict each other or a prompt is too long.


@pytest.fixture(scope="module")
def server(folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A tiny model with a short context, so that most answers are short."""
    model = tmp_path_factory.mktemp("schema") / "tiny"
    shutil.copytree(folder("m3"), model)
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with serving(str(model), max_model_len=40, spec="ngram:2") as running:
        yield running
        wait_for(lambda: running.idle)
        running.service.llm.engine.scheduler.check()


def run_schemathesis(server: Serving, phases: str, cases: int) -> int:
    """Send `cases` random requests to each address, and systematic ones; returns how many there were in all."""
    options = [f"--phases={phases}", "--generation-deterministic", "--no-color"]
    options += [f"--max-examples={cases}", "--exclude-checks=positive_data_acceptance"]
    options += [f"--request-timeout={PATIENCE_S}", "--suppress-health-check=too_slow"]
    command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) generated", done.stdout)
    assert counted is not None, done.stdout[-2000:]
    return int(counted[1])


def test_hundreds_of_requests(server: Serving) -> None:
    assert run_schemathesis(server, "fuzzing", FEW) >= 150


@pytest.mark.long
def test_thousands_of_requests(server: Serving) -> None:
    assert run_schemathesis(server, "coverage,fuzzing", MANY) >= 2000


def test_the_document_is_sound(server: Serving) -> None:
    document = server.get("/openapi.json").json()
    paths = {(path, method) for path, item in document["paths"].items() for method in item}
    assert len(paths) == 16
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert references <= set(document["components"]["schemas"])
