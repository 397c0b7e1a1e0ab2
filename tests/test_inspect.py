"""`skipstone inspect`: its numbers against the tensors themselves, and every way a checkpoint can fail to match."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracles.tiny import Tiny
from oracles.tiny_heads import write_head
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from skipstone import LLM
from skipstone.cli import main as cli
from skipstone.errors import CheckpointError
from skipstone.models.loader import read_model_info
from skipstone.tools.inspect.checkpoint import PARTS, CheckpointReport, examine
from skipstone.tools.inspect.command import render
from skipstone.tools.inspect.headers import read_header

NAMES = ["m3", "m3_flat", "m3_mixed", "dsa"]


@pytest.fixture
def copy(folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy that a test may damage."""
    return lambda name: Path(shutil.copytree(folder(name), tmp_path / name))


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of the first shard, and the index with them."""
    shard, index = sorted(folder.glob("*.safetensors"))[0], folder / "model.safetensors.index.json"
    tensors = load_file(shard)
    edit(tensors)
    save_file(tensors, shard)
    weight_map = json.loads(index.read_text())["weight_map"]
    kept = {name: file for name, file in weight_map.items() if file != shard.name} | dict.fromkeys(tensors, shard.name)
    index.write_text(json.dumps({"weight_map": kept}))


@pytest.mark.parametrize("name", NAMES)
class TestNumbers:
    def test_headers_are_what_safetensors_reads(self, name: str, folder: Callable[[str], Path]) -> None:
        for file in folder(name).glob("*.safetensors"):
            with safe_open(file, framework="pt") as shard:
                stored = {key: list(shard.get_tensor(key).shape) for key in shard.keys()}  # noqa: SIM118
            assert {name: entry.shape for name, entry in read_header(file).items()} == stored

    def test_parts_add_up_to_the_checkpoint(
        self, name: str, folder: Callable[[str], Path], tiny: Callable[[str], Tiny]
    ) -> None:
        report, tensors = examine(folder(name), "auto"), tiny(name).tensors
        assert sum(part.parameters for part in report.parts) == sum(tensor.numel() for tensor in tensors.values())
        assert sum(part.tensors for part in report.parts) == len(tensors)
        assert sum(part.num_bytes for part in report.parts) == sum(
            t.numel() * t.element_size() for t in tensors.values()
        )
        assert {part.part for part in report.parts if part.loaded} <= {part for part, _ in PARTS}
        assert report.loads and not report.missing

    def test_memory_is_that_of_the_engine(self, name: str, folder: Callable[[str], Path]) -> None:
        report = examine(folder(name), "float32")
        plain, drafting = (  # with MTP modules when the files hold any
            LLM(str(folder(name)), dtype="float32", spec=spec).engine.caches.bytes_per_token for spec in ("off", "auto")
        )
        assert report.cache_bytes_per_token == plain
        assert report.cache_bytes_per_token + report.mtp_cache_bytes_per_token == drafting
        assert (report.mtp_cache_bytes_per_token > 0) == (name == "dsa") == (report.mtp_modules_present > 0)
        info = read_model_info(folder(name))
        model = info.model_class(info.config, torch.float32, True, 1)
        assert report.loaded_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
        assert report.tokens_that_fit == (report.free_bytes - report.loaded_bytes) // report.cache_bytes_per_token
        assert examine(folder(name), "bfloat16").cache_bytes_per_token * 2 == report.cache_bytes_per_token

    def test_every_fact_is_printed(self, name: str, folder: Callable[[str], Path]) -> None:
        report = examine(folder(name), "auto")
        text = "\n".join(render(report))
        assert report.architecture in text
        assert all(part.part in text and f"{part.parameters:,}" in text for part in report.parts)
        assert all(group.group in text for group in report.cache_groups)
        assert text.endswith("every weight is there: this checkpoint loads")


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_memory_and_dtype_are_those_of_the_device(
    device: str, dtype: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU "auto" means bfloat16, and what is free is the GPU's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12_345_678, 1 << 40))
    report, asked = examine(folder("m3"), "auto"), examine(folder("m3"), dtype, device=device)
    assert (report.run_dtype, report.loaded_bytes) == (dtype, asked.loaded_bytes)
    assert (report.free_bytes == 12_345_678) == (device == "cuda")
    assert examine(folder("m3"), "auto", device="cpu").run_dtype == "float32"


def test_layers_by_kind(folder: Callable[[str], Path]) -> None:
    kinds = ("layers", "dense attention", "sparse attention", "dense feed-forward", "MoE feed-forward")
    assert examine(folder("m3"), "auto").layers == dict(zip(kinds, (4, 1, 3, 1, 3), strict=True))
    assert examine(folder("dsa"), "auto").layers["sparse attention"] == examine(folder("dsa"), "auto").layers["layers"]


def test_names_that_do_not_match(copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy("m3")
    gone: list[str] = []

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        first, second = sorted(name for name in tensors if "o_proj" in name or "q_proj" in name)[:2]
        gone.extend([first, second])
        del tensors[first]
        tensors[second] = tensors[second][1:].clone()
        tensors["model.surprise.weight"] = torch.ones(3)

    rewrite(folder, edit)
    report: CheckpointReport = examine(folder, "auto")
    assert report.missing == [gone[0]]
    assert report.unexpected == ["model.surprise.weight"]
    assert [text.split(" ")[0] for text in report.other_shape] == [gone[1]]
    assert not report.loads
    assert cli.run(["inspect", str(folder)]) == 3
    out = capsys.readouterr().out
    assert "1 tensors missing:\n  " + gone[0] in out and out.endswith("this checkpoint does not load\n")
    assert cli.run(["inspect", str(folder), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["missing"] == report.missing
    with pytest.raises(CheckpointError, match=re.escape(gone[0])):
        LLM(str(folder))


def test_modules_declared_and_absent(copy: Callable[[str], Path]) -> None:
    folder = copy("m3")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"num_mtp_modules": 7, "num_nextn_predict_layers": 7}
    (folder / "config.json").write_text(json.dumps(config))
    report = examine(folder, "auto")
    assert report.declared_but_absent == ["config.json declares 7 MTP modules, the files hold 0"]
    assert "note: config.json declares 7 MTP modules" in "\n".join(render(report))
    assert examine(copy("dsa"), "auto").declared_but_absent == []


def test_proposers_that_would_work(copy: Callable[[str], Path], tiny: Callable[[str], Tiny]) -> None:
    bare, beside = copy("m3"), copy("dsa")
    write_head("eagle3", tiny("dsa"), beside.with_name("dsa-eagle3"))
    assert {one.method for one in examine(bare, "auto").proposers if one.works} == {"ngram"}
    report = examine(beside, "auto")
    assert {one.method for one in report.proposers if one.works} == {"mtp", "eagle3", "ngram"}
    text = "\n".join(render(report))
    assert "MTP modules: 1 declared, 1 in the files" in text and "--spec eagle3:K" in text
    assert "not available: no folder dsa-dflash beside the model" in text
    for one in report.proposers:
        if one.works:
            LLM(str(beside), spec=f"{one.spec}:1").close()


def test_files_beside_the_weights(copy: Callable[[str], Path]) -> None:
    folder = copy("dsa")
    bare = examine(folder, "auto")
    assert (bare.tokenizer, bare.chat_template, bare.licences) == (False, "built in for deepseek_v32", [])
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (folder / "LICENSE.txt").write_text("free")
    found = examine(folder, "auto")
    assert (found.tokenizer, found.chat_template, found.licences) == (True, "tokenizer_config.json", ["LICENSE.txt"])
    (folder / "chat_template.jinja").write_text("y")
    assert examine(folder, "auto").chat_template == "chat_template.jinja"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer_config.json", "[1", "tokenizer_config.json"),
        ("generation_config.json", "[]", "generation_config.json must hold a JSON object"),
        ("generation_config.json", '{"temperature": "hot"}', "temperature=hot (from generation_config.json)"),
        ("generation_config.json", '{"temperature": -5}', "temperature=-5 (from generation_config.json)"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id='x' is not an id"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id=True is not an id"),
    ],
)
def test_files_that_cannot_be_used(
    copy: Callable[[str], Path], name: str, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy("m3")
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    assert cli.run(["inspect", str(folder)]) == 0
    (folder / name).write_text(content)
    capsys.readouterr()
    assert cli.run(["inspect", str(folder)]) == 3
    out = capsys.readouterr().out
    assert message in out and "1 files that cannot be used" in out and "this checkpoint does not load" in out
    assert cli.run(["generate", str(folder), "-p", "a", "--max-tokens", "1"]) == 2


def enlarge(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def misstate(file: Path) -> None:
    """Give a tensor a shape that its bytes do not fill."""
    content = file.read_bytes()
    file.write_bytes(re.sub(rb'"shape":\[64,64\]', b'"shape":[64,65]', content, count=1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: os.truncate(file, file.stat().st_size - 1), "is truncated: its header describes"),
        (lambda file: os.truncate(file, 100), "is truncated: its header alone needs"),
        (lambda file: os.truncate(file, 3), "is truncated"),
        (lambda file: os.truncate(file, 0), "is truncated"),
        (enlarge, "is damaged: its header describes"),
        (misstate, "which is not"),
        (lambda file: file.write_bytes(b"\x10" + b"\0" * 7 + b"x" * 16), "is not a safetensors file"),
        (lambda file: file.write_bytes(b"version https://git-lfs"), "is a Git LFS pointer"),
        (lambda file: file.write_bytes(b'\x0f\0\0\0\0\0\0\0{"a":{"dtype":3}'), "is not a safetensors file"),
        (lambda file: file.write_bytes(b'\x11\0\0\0\0\0\0\0{"a":{"dtype":3}}'), "malformed safetensors header"),
    ],
)
def test_damaged_shards_are_named(copy: Callable[[str], Path], damage: Callable[[Path], object], message: str) -> None:
    file = sorted(copy("m3_flat").glob("*.safetensors"))[0]
    damage(file)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(file))}.*{message}"):
        for shard in sorted(file.parent.glob("*.safetensors")):
            read_header(shard)
