"""docs/support.md says what runs with what: every cell is run here, every refusal is provoked and its text copied.

Run this file to write the page anew.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from oracles.tiny import TINY, write_folder
from oracles.tiny_heads import with_mtp, write_head

from skipstone import LLM, SamplingParams
from skipstone.attention.backend import check_groups
from skipstone.cli import main as cli
from skipstone.config import EngineConfig, options_of
from skipstone.core.kv_cache import CacheSpec
from skipstone.errors import SkipstoneError
from skipstone.kernels.dispatch import choose_ops
from skipstone.registry import ATTENTION, PROPOSERS
from skipstone.spec_config import LARGEST_K

TARGET = Path(__file__).resolve().parent.parent / "docs" / "support.md"
TARGETS = {"m3": "MiniMax-M3: block-sparse", "dsa": "DeepSeek-V3.2: token-sparse, latent"}
ATTENTION_NAMES = {
    "dense": "dense", "msa": "block-sparse", "msa_index": "index keys of blocks", "dsa": "token-sparse, latent",
    "dsa_index": "index keys of tokens",
}  # fmt: skip

HEAD = """# What runs with what

Written by `python tests/test_support_docs.py`; a test runs every cell and compares the page.

## Attention, proposers, k

Each cell was run on a small model of the architecture: the text is that of the engine without speculation, token by
token, with the largest k. Two numbers of MTP modules are told apart, because one module is applied again and again and
several are applied once each.

"""
DEVICES = """## Devices

The cells above are run on a CPU. `skipstone doctor` says what a machine runs, and compares every op with its reference.

| `--device` | `--kernels` | |
|---|---|---|
| cpu, float32 | auto, numba | kernels compiled by Numba (extra `cpu`), the rest plain torch; exact |
| cpu, bfloat16 or without Numba | auto, reference | plain torch; exact |
| cpu | triton | in Triton's interpreter only (`TRITON_INTERPRET=1`), for tests |
| cuda, NVIDIA | auto, triton | run on an H200; compiled for sm_90 and sm_100 in the tests |
| cuda, NVIDIA | reference | plain torch, for comparison; with `--no-exact` only |
| cuda, AMD | auto, triton | compiled for gfx942 and gfx950 in the tests; not run on hardware yet |
| cuda, AMD | reference | not run on hardware yet |

"""
_EVERYWHERE = "everywhere"
BACKENDS = {
    "dense": _EVERYWHERE,
    "msa": _EVERYWHERE,
    "msa_index": _EVERYWHERE,
    "msa_paged": "tests: the page tables that other packages' kernels read, in plain torch",
    "msa_aiter": "in place of `msa` on AMD GPUs with the package aiter, with `--no-exact`; tested with a stand-in for"
    " the package, **not run on hardware yet**. `doctor` says why it is not used",
    "dsa": _EVERYWHERE,
    "dsa_index": _EVERYWHERE,
}
SAMPLING = {
    "temperature, top-k, top-p, min-p": ("temperature", "top_k", "top_p", "min_p"),
    "repetition, presence and frequency penalty": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "logit bias": ("logit_bias",),
    "shortest and longest answer": ("min_tokens", "max_tokens"),
    "stop texts and ids, end of text": ("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    "seeds, several answers": ("seed", "n"),
    "log-probabilities": ("logprobs", "prompt_logprobs"),
    "structured output": ("json_schema", "regex", "grammar", "choice"),
    "special tokens in the text": ("skip_special_tokens",),
    "drafts per request": ("num_speculative_tokens",),
}


class Folders(NamedTuple):
    """Tiny models and heads."""

    root: Path
    bare: Path  # MiniMax-M3 without anything beside it
    m3: Path
    dsa: Path
    m3_several: Path
    dsa_several: Path


def build(root: Path) -> Folders:
    """Every model and head of the page."""
    m3, dsa = TINY["m3"](), TINY["dsa"]()
    bare = write_folder(m3, root / "bare")
    for name, target in (("m3", with_mtp(m3, 1)), ("dsa", dsa)):
        write_folder(target, root / name)
        write_folder(with_mtp(target if name == "dsa" else m3, 2), root / f"{name}-several")
        for kind in ("eagle3", "dflash"):
            write_head(kind, target, root / f"{name}-{kind}")
        shutil.copytree(bare, root / f"{name}-draft")
    return Folders(root, bare, *(root / name for name in ("m3", "dsa", "m3-several", "dsa-several")))


def reference(root: Path) -> str:
    """The whole page."""
    folders = build(root)
    return "\n".join([HEAD + matrix(folders), devices(folders), sampling(), refusals(folders)]) + "\n"


def matrix(folders: Folders) -> str:
    """Targets by proposers; every cell runs."""
    lines = ["| target | proposer | attention of the draft layers | k |", "|---|---|---|---|"]
    for name, title in TARGETS.items():
        for method in PROPOSERS:
            for several in (False, True) if method == "mtp" else (False,):
                folder = folders.root / (f"{name}-several" if several else name)
                modules = (", two modules" if several else ", one module") if method == "mtp" else ""
                lines.append(f"| {title} | {method}{modules} | " + " | ".join(cell(folder, method)) + " |")
    return "\n".join(lines) + "\n"


def cell(folder: Path, method: str) -> tuple[str, str]:
    """Draft layers and range of k of a pair that gives the same text as no speculation."""
    with LLM(str(folder), spec=f"{method}:1") as llm:
        proposer = llm.engine.speculation.proposer
        assert proposer is not None
        most = proposer.needs.max_k or LARGEST_K
        kinds = sorted({ATTENTION_NAMES[spec.backend] for spec in proposer.cache_specs()})
    params = [SamplingParams(temperature=t, seed=3, max_tokens=10, ignore_eos=True) for t in (0.0, 5.0)]
    texts = []
    for spec in ("off", f"{method}:{most}"):
        with LLM(str(folder), spec=spec) as llm:
            prompts = [[5, 6, 7] * 10, [9, 8, 7, 6]]
            texts.append([out.outputs[0].token_ids for out in llm.generate(prompts, params, progress=False)])
    assert texts[0] == texts[1], (folder, method)
    return ", ".join(kinds) or "none", f"1 to {most}"


def devices(folders: Folders) -> str:
    """Every device with every kind of ops: what a CPU runs was run, what it refuses is quoted below."""
    assert options_of(EngineConfig)["device"].allowed == "one of auto, cpu, cuda", "a device was added: give it rows"
    assert options_of(EngineConfig)["kernels"].allowed == "one of auto, numba, reference, triton", "kernels were added"
    chosen = {"auto": "numba", "numba": "numba", "reference": "reference"}
    for kernels, implementation in chosen.items():
        with LLM(str(folders.m3), device="cpu", kernels=kernels) as llm:
            assert llm.engine.kernels.ops.implementation == implementation
    with LLM(str(folders.m3), device="cpu", dtype="bfloat16") as llm:
        assert llm.engine.kernels.ops.is_reference
    assert set(BACKENDS) == set(ATTENTION.entries), "an attention backend was added or removed"
    lines = ["| attention backend | where |", "|---|---|"]
    return DEVICES + "\n".join(lines + [f"| `{name}` | {where} |" for name, where in BACKENDS.items()]) + "\n"


def sampling() -> str:
    """Features of requests."""
    known = set(options_of(SamplingParams))
    listed = {name for fields in SAMPLING.values() for name in fields}
    assert known == listed, f"give each sampling field a row: {known ^ listed}"
    lines = [
        "## Sampling\n",
        "With `--verification exact` (the default) each of these gives the same text with every proposer and k as",
        "without speculation. With `rejection` and `block` the text depends on the drafts, its law does not.\n",
        "| feature | fields |",
        "|---|---|",
    ]
    for feature, fields in SAMPLING.items():
        lines.append(f"| {feature} | {', '.join(f'`{name}`' for name in fields)} |")
    return "\n".join([*lines, ""])


class Case(NamedTuple):
    """A pair in words, and what the error text must contain of either."""

    pair: str
    first: str
    second: str


def engine(folder: Path, **options: Any) -> Callable[[], object]:
    return lambda: LLM(str(folder), **options)


def request(folder: Path, params: dict[str, Any], **options: Any) -> Callable[[], object]:
    return lambda: LLM(str(folder), **options).generate([[1, 2]], SamplingParams(**params), progress=False)


def command(*arguments: object) -> Callable[[], object]:
    """A command line that ends with an error."""

    def call() -> None:
        error = io.StringIO()
        with contextlib.redirect_stderr(error):
            assert cli.run([str(argument) for argument in arguments]) == 2
        raise SkipstoneError(error.getvalue().splitlines()[-1].removeprefix("error: "))

    return call


def without_gpu(call: Callable[[], object]) -> Callable[[], object]:
    """The call on a machine on which torch sees no GPU."""
    return lambda: mock.patch("torch.cuda.is_available", lambda: False)(call)()


def uninterpreted(call: Callable[[], object]) -> Callable[[], object]:
    """The call without leave to interpret Triton's kernels."""
    return lambda: mock.patch.dict("os.environ", TRITON_INTERPRET="0")(call)()


def peer(**keys: Any) -> str:
    return json.dumps(keys)


def edited(folder: Path, name: str, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy with another config.json."""
    copy = folder.with_name(name)
    if not copy.exists():
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text())
        edit(config)
        (copy / "config.json").write_text(json.dumps(config))
    return copy


def cases(at: Folders) -> dict[Case, Callable[[], object]]:
    """Pairs that do not go together, and what provokes the refusal. The error text contains both names."""
    table = at.root / "table.json"
    table.write_text('{"spec": "mtp", "num_speculative_tokens_per_batch_size": [[1, 8, 2]]}')
    other_vocabulary = edited(at.bare, "other", lambda config: config["text_config"].update(vocab_size=120))
    unknown = edited(at.bare, "unknown", lambda config: config.update(architectures=["FooForCausalLM"]))
    synthetic = {"rejection_sample_method": "synthetic", "num_speculative_tokens": 2}
    sparse = [CacheSpec(0, "sparse K/V", "msa", ())]
    return {
        Case("MTP; a model whose files hold no MTP modules", "mtp", "no MTP tensors"): engine(at.bare, spec="mtp:1"),
        Case("two MTP modules; k = 3", "mtp", "k=3"): engine(at.m3_several, spec="mtp:3"),
        Case("DFlash; more drafts than its block has", "dflash", "k=8"): engine(at.m3, spec="dflash:8"),
        Case("any proposer; k above 64", "ngram:65", "between 0 and 64"): engine(at.m3, spec="ngram:65"),
        Case("a proposer without weights; a folder", "ngram", "number of drafts only"): engine(
            at.m3, spec="ngram:folder:2"
        ),
        Case("EAGLE-3; no head named, none beside the model", "eagle3", "needs a folder"): engine(
            at.bare, spec="eagle3:1"
        ),
        Case("EAGLE-3; a DFlash head", "eagle3", "DFlashDraftModel"): engine(
            at.m3, spec=f"eagle3:{at.root / 'm3-dflash'}:1"
        ),
        Case("draft model; another vocabulary", "draft model", "different vocabularies"): engine(
            at.m3, spec=f"draft:{other_vocabulary}:1"
        ),
        Case("DFlash; draft layers with sparse attention", "'dflash'", "'sparse K/V' with backend 'msa'"): lambda: (
            check_groups(sparse, "in_block", "dflash")
        ),
        Case("no speculation; a table of k", "spec='off'", "k_table"): engine(at.m3, spec="off", k_table=str(table)),
        Case("one proposer; the table of another", "spec='ngram'", "k_table"): engine(
            at.m3, spec="ngram", k_table=str(table)
        ),
        Case("k from a table; no table", "spec='mtp:auto'", "--k-table"): engine(at.m3, spec="mtp:auto"),
        Case("a request's k; a smaller k of the engine", "num_speculative_tokens=3", "engine's 2"): request(
            at.m3, {"num_speculative_tokens": 3}, spec="mtp:2"
        ),
        Case("simulated verification; no rates", "'synthetic'", "acceptance rates"): engine(
            at.m3, spec=peer(**synthetic)
        ),
        Case("simulated rates; simulated length", "synthetic_acceptance_rates", "synthetic_acceptance_length"): engine(
            at.m3, spec=peer(**synthetic, synthetic_acceptance_rates=[0.5], synthetic_acceptance_length=2)
        ),
        Case("simulation; rates that rise", "simulate_acceptance", "never rise"): engine(
            at.m3, simulate_acceptance="0.5,0.6"
        ),
        Case("a GPU; a machine without one", "device='cuda'", "no GPU"): without_gpu(engine(at.m3, device="cuda")),
        Case("Triton's kernels; a CPU", "kernels='triton'", "device='cpu'"): uninterpreted(
            engine(at.m3, device="cpu", kernels="triton")
        ),
        Case("exact mode; plain torch on a GPU", "exact=True", "kernels='reference'"): lambda: choose_ops(
            torch.device("cuda"), "reference", exact=True
        ),
        Case("Numba's kernels; a GPU", "kernels='numba'", "device='cuda'"): lambda: choose_ops(
            torch.device("cuda"), "numba"
        ),
        Case("Numba's kernels; bfloat16", "kernels='numba'", "bfloat16"): engine(
            at.m3, device="cpu", kernels="numba", dtype="bfloat16"
        ),
        Case("any command; an unknown architecture", "FooForCausalLM", "is not supported"): engine(unknown),
        Case(
            "block-sparse attention; a block size that its blocks do not fill", "block_size=12", "multiple of 8"
        ): engine(at.m3, block_size=12),
        Case("FP8 index keys; block-sparse attention", "index_keys=fp8", "MiniMaxM3"): engine(at.m3, index_keys="fp8"),
        Case("a context; fewer positions of the model", "max_model_len=9999", "640 positions"): engine(
            at.m3, max_model_len=9999
        ),
        Case("shortest answer; a shorter longest one", "min_tokens=9", "max_tokens=3"): request(
            at.m3, {"min_tokens": 9, "max_tokens": 3}
        ),
        Case("structured output; shortest answer", "min_tokens=2", "regex"): request(
            at.m3, {"regex": "a+", "min_tokens": 2}
        ),
        Case("two kinds of structured output", "regex", "choice"): request(at.m3, {"regex": "a+", "choice": ["a"]}),
        Case("stop texts; a model without tokenizer", "stop", "tokenizer.json"): request(at.m3, {"stop": "end"}),
        Case("chat; several answers", "n=2", "conversation"): command("chat", at.m3, "--n", "2"),
        Case("trace; several answers", "n=2", "traced"): command("trace", at.m3, "-p", "x", "--n", "2"),
        Case(
            "check, tune; a proposer that the files do not allow", "--proposers eagle3", "cannot be used here"
        ): command("check", at.bare, "--proposers", "eagle3"),
    }


def refusals(folders: Folders) -> str:
    """Every refusal with its own words."""
    lines = ["## Refused\n", "One line each, before anything runs; nothing is changed silently.\n"]
    lines += ["| not together | what the program says |", "|---|---|"]
    for case, provoke in cases(folders).items():
        text = refusal(provoke, folders.root).replace("|", "\\|")
        lines.append(f"| {case.pair} | {text} |")
    return "\n".join(lines)


def refusal(provoke: Callable[[], object], root: Path) -> str:
    """The text of the error, without the place of this run's files."""
    try:
        provoke()
    except SkipstoneError as error:
        return " ".join(str(error).split()).replace(str(root), "…")
    raise AssertionError("nothing was refused")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("support")


def test_the_page_is_what_the_program_does(folders: Path) -> None:
    assert TARGET.read_text() == reference(folders), "run python tests/test_support_docs.py"


def test_each_refusal_names_both(tmp_path: Path) -> None:
    for case, provoke in cases(build(tmp_path)).items():
        text = refusal(provoke, tmp_path)
        assert case.first in text and case.second in text, text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        TARGET.write_text(reference(Path(place)))
