"""What a checkpoint's files may hold: the loader and `inspect` must give the same verdict, and name what is wrong."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.tiny import M3_WIDE, Tiny, dsa, m3, m3_flat, m3_tensors, m3_text_config, nest, store, write_folder
from oracles.tiny_heads import HEADS, Head, with_mtp, write_head
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from skipstone import LLM, SamplingParams
from skipstone.cli import main as cli
from skipstone.errors import ConfigError, SkipstoneError, UnsupportedError
from skipstone.kernels.dispatch import free_memory_bytes

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
PREFIX = "language_model."
WEIGHT = "model.layers.1.self_attn.o_proj.weight"


def verdict(folder: Path, capsys: pytest.CaptureFixture[str], **options: str) -> tuple[SkipstoneError | None, str]:
    """What loading says, after checking that `inspect` says the same; and inspect's words."""
    capsys.readouterr()
    code = cli.run(["inspect", str(folder)])
    captured = capsys.readouterr()
    words = captured.out + captured.err
    assert code in (0, 3), words
    try:
        LLM(str(folder), **options).close()
    except SkipstoneError as error:
        assert code == 3, f"inspect says that it loads, but: {error}"
        return error, words
    assert code == 0, words
    return None, words


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *parts: str) -> SkipstoneError:
    """Both refuse, and both name these parts."""
    error, words = verdict(folder, capsys)
    assert error is not None, "it loads"
    for part in parts:
        assert part in str(error), error
        assert part in words, words
    return error


def shard(folder: Path, name: str, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of one file, and nothing else."""
    tensors = load_file(folder / name)
    edit(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / name, metadata={"format": "pt"})


def index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    """Change the index, and nothing else."""
    content = json.loads((folder / INDEX).read_text())
    edit(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def config(folder: Path, **keys: Any) -> None:
    """Add keys to config.json."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | keys))


def with_tensors(tiny: Tiny, folder: Path, tensors: dict[str, Tensor]) -> Path:
    """The checkpoint with some tensors in place of its own, or beside them, listed in its index."""
    return write_folder(replace(tiny, tensors=tiny.tensors | tensors), folder)


WRONG_DTYPES = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool, torch.int16, torch.int32, torch.int64,
    torch.float64,
]  # fmt: skip
SLOTS = {
    "matrix": WEIGHT,
    "norm": "model.norm.weight",
    "router": "model.layers.1.block_sparse_moe.gate.weight",
    "expert": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    "embedding": "model.embed_tokens.weight",
}


class TestStoredDtypes:
    """A slot takes the dtypes that its kind can hold; others are named before any tensor is read."""

    @pytest.mark.parametrize(
        ("slot", "dtype"),
        [
            *((slot, dtype) for slot in ("matrix", "norm") for dtype in WRONG_DTYPES),
            *((slot, dtype) for slot in ("router", "expert", "embedding") for dtype in WRONG_DTYPES[:3:2]),
        ],
        ids=str,
    )
    def test_numbers_in_disguise(
        self, slot: str, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        name, tiny = PREFIX + SLOTS[slot], m3()
        folder = with_tensors(tiny, tmp_path / "m3", {name: tiny.tensors[name].to(dtype)})
        error = refused(folder, capsys, name, "BF16, F16, F32", "1 tensors are stored in a dtype")
        assert isinstance(error, UnsupportedError)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
    def test_floats_of_two_or_four_bytes_are_the_same_numbers(
        self, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        small = {n: t.half().bfloat16() if t.dtype == torch.bfloat16 else t for n, t in m3_flat().tensors.items()}
        plain = write_folder(replace(m3_flat(), tensors=small), tmp_path / "plain")
        wide = write_folder(replace(m3_flat(), tensors={n: t.to(dtype) for n, t in small.items()}), tmp_path / "wide")
        assert verdict(wide, capsys)[0] is None
        slots = [LLM(str(folder)).engine.model.weight_slots() for folder in (plain, wide)]
        name = f"{PREFIX}{WEIGHT}"
        assert torch.equal(slots[0][name], slots[1][name])

    @pytest.mark.parametrize("kind", ["eagle3", "dflash"])
    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool], ids=str)
    def test_heads(
        self, kind: str, dtype: torch.dtype, folder: Callable[[str], Path], tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        head = HEADS[kind](m3())
        path = Head(head.config, head.tensors | {"fc.weight": head.tensors["fc.weight"].to(dtype)}).write(tmp_path)
        with pytest.raises(UnsupportedError, match=r"fc\.weight (F8_E4M3|I8|BOOL)"):
            LLM(str(folder("m3")), spec=f"{kind}:{path}:2")
        assert cli.run(["inspect", str(path), "--target", str(folder("m3"))]) == 3
        assert "fc.weight" in capsys.readouterr().out

    @pytest.mark.parametrize(("name", "dtype"), [("d2t", torch.float32), ("t2d", torch.uint8), ("d2t", torch.bool)])
    def test_vocabularies_are_whole_numbers(
        self, name: str, dtype: torch.dtype, folder: Callable[[str], Path], tmp_path: Path
    ) -> None:
        head = HEADS["eagle3"](m3())
        path = Head(head.config, head.tensors | {name: head.tensors[name].to(dtype)}).write(tmp_path)
        with pytest.raises(UnsupportedError, match=f"{name} "):
            LLM(str(folder("m3")), spec=f"eagle3:{path}:2")

    @pytest.mark.parametrize("make", [m3, dsa])
    def test_mtp_modules_and_draft_models(
        self, make: Callable[[], Tiny], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiny = with_mtp(make(), 1)
        name = next(n for n in tiny.tensors if n.endswith("eh_proj.weight"))
        folder = with_tensors(tiny, tmp_path / "model", {name: tiny.tensors[name].to(torch.int8)})
        refused(folder, capsys, f"{name} I8")
        LLM(str(folder), spec="off").close()
        with pytest.raises(UnsupportedError, match="F8_E4M3"):
            first = next(n for n in tiny.tensors if n.endswith("o_proj.weight"))
            broken = with_tensors(tiny, tmp_path / "draft", {first: tiny.tensors[first].to(torch.float8_e4m3fn)})
            LLM(str(write_folder(make(), tmp_path / "target")), spec=f"draft:{broken}:2")


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DECLARED = {
    "DeepSeek": (FP8 | {"scale_fmt": "ue8m0"}, ["FP8", "'weight_block_size': [128, 128]", "ue8m0"]),
    "MXFP8": ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, ["MXFP8", "[1, 32]"]),
    "compressed-tensors": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, ["pack-quantized"]),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["MODELOPT", "'quant_algo': 'NVFP4'"]),
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, ["GPTQ", "'bits': 4"]),
    "AWQ": ({"quant_method": "awq", "bits": 4}, ["AWQ", "'bits': 4"]),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["BITSANDBYTES", "'load_in_4bit': True"]),
    "Quark": ({"quant_method": "quark"}, ["QUARK"]),
    "unnamed": ({"load_in_4bit": True}, ["a format", "'load_in_4bit': True"]),
    "not an object": ("fp8", ["fp8"]),
}


class TestFormats:
    """A format that cannot be read is refused by its name, whatever the files look like."""

    @pytest.mark.parametrize("name", DECLARED)
    @pytest.mark.parametrize("place", ["top", "text_config", "compression_config"])
    def test_declared(
        self, name: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        declared, parts = DECLARED[name]
        folder = write_folder(m3(), tmp_path / "m3")
        text = m3().text | {"quantization_config": declared}
        nested = {"text_config": text} if place == "text_config" else {}
        key = "compression_config" if place == "compression_config" else "quantization_config"
        config(folder, **(nested or {key: declared}))
        monkeypatch.setattr("skipstone.models.loader.open_shard", None)  # nothing is read
        error = refused(folder, capsys, *parts, "BF16, F16, F32", "take that out")
        assert isinstance(error, UnsupportedError)

    @pytest.mark.parametrize("declared", [None, {}])
    def test_nothing_is_declared(self, declared: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = write_folder(m3(), tmp_path / "m3")
        config(folder, quantization_config=declared)
        assert verdict(folder, capsys)[0] is None

    @pytest.mark.parametrize(
        ("file", "content", "part"),
        [
            ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "FP8"),
            ("quantize_config.json", {"bits": 4, "group_size": 128}, '"bits": 4'),
            ("quant_config.json", {"w_bit": 4, "zero_point": True}, '"w_bit": 4'),
        ],
    )
    def test_declared_in_a_file_beside(
        self, file: str, content: dict[str, Any], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_folder(m3(), tmp_path / "m3")
        (folder / file).write_text(json.dumps(content))
        refused(folder, capsys, file, part)

    def test_declared_by_a_head(self, folder: Callable[[str], Path], tmp_path: Path) -> None:
        path = write_head("eagle3", m3(), tmp_path / "head")
        config(path, quantization_config=FP8)
        with pytest.raises(UnsupportedError, match="FP8"):
            LLM(str(folder("m3")), spec=f"eagle3:{path}:2")

    @pytest.mark.parametrize("declares", [True, False])
    def test_block_scales(self, declares: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """As DeepSeek releases them; the names of the scales are not what is wrong."""
        tiny, tensors = dsa(), {}
        for name, tensor in tiny.tensors.items():
            if "proj" in name and tensor.dim() == 2:
                tensors[name] = tensor.to(torch.float8_e4m3fn)
                tensors[name.replace(".weight", ".weight_scale_inv")] = torch.ones(1, 1)
        folder = with_tensors(tiny, tmp_path / "dsa", tensors)
        if declares:
            config(folder, quantization_config=FP8)
        error, words = verdict(folder, capsys)
        assert isinstance(error, UnsupportedError)
        for text in (str(error), words):
            assert "FP8" in text and "tensors unexpected" not in text and len(text) < 4000

    @pytest.mark.parametrize(
        ("names", "part"), [(("qweight", "qzeros", "scales"), "GPTQ"), (("weight_packed",), "compressed-tensors")]
    )
    def test_told_by_names(
        self, names: tuple[str, ...], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        packed = {WEIGHT.replace("weight", name): torch.zeros(4, 4, dtype=torch.int32) for name in names}
        kept = {n: t for n, t in m3_flat().tensors.items() if n != WEIGHT}
        refused(write_folder(replace(m3_flat(), tensors=kept | packed), tmp_path / "m3"), capsys, part, names[0])


def stale_copy(folder: Path) -> None:
    """The last file holds a tensor of the first one as well, with other numbers."""
    name = PREFIX + "lm_head.weight"
    shard(folder, SECOND, lambda t: t.update({name: -load_file(folder / FIRST)[name]}))


def not_indexed(folder: Path) -> None:
    index(folder, lambda m: m.pop(PREFIX + "lm_head.weight"))


def wrong_shard(folder: Path) -> None:
    index(folder, lambda m: m.update({PREFIX + "lm_head.weight": SECOND}))


def ghost(folder: Path) -> None:
    index(folder, lambda m: m.update({"vision_tower.ghost": FIRST}))


def index_text(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(text)


def whole_beside(folder: Path) -> None:
    save_file({PREFIX + "lm_head.weight": torch.ones(2, 2)}, folder / "model.safetensors")


def no_index(folder: Path) -> None:
    """Without an index, and with the old copy of a tensor in a further file."""
    (folder / INDEX).unlink()
    name = PREFIX + "lm_head.weight"
    save_file({name: -load_file(folder / FIRST)[name]}, folder / "old.safetensors")


def dangling(folder: Path) -> None:
    """As in a cache whose blobs were deleted."""
    (folder / INDEX).unlink()
    (folder / INDEX).symlink_to(folder / "gone")


INDEX_FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a stale copy": (stale_copy, [f"lm_head.weight is in {FIRST} and {SECOND}"]),
    "a tensor without an entry": (not_indexed, [f"lm_head.weight in {FIRST} is not in the index"]),
    "an entry in the wrong file": (wrong_shard, [f"lm_head.weight is not in {SECOND}", f"it lies in {FIRST}"]),
    "a ghost": (ghost, [f"vision_tower.ghost is not in {FIRST}", "no file has it"]),
    "a list": (index_text('{"weight_map": []}'), [INDEX, "weight_map", "download it again"]),
    "no map": (index_text("{}"), [INDEX, "weight_map"]),
    "a number for a file": (index_text('{"weight_map": {"a": 3}}'), [INDEX, "weight_map"]),
    "no JSON": (index_text("{"), [INDEX, "weight_map"]),
    "an array": (index_text("[]"), [INDEX, "weight_map"]),
    "an empty map": (index_text('{"weight_map": {}}'), ["no *.safetensors file"]),
    "another folder": (index_text('{"weight_map": {"a": "../x.safetensors"}}'), ["a is in '../x.safetensors'"]),
    "an absent file": (index_text('{"weight_map": {"a": "x.safetensors"}}'), ["x.safetensors is missing", INDEX]),
    "two truths": (whole_beside, ["model.safetensors and", INDEX, "delete one"]),
    "no index, twice": (no_index, [f"lm_head.weight is in {FIRST} and old.safetensors", "1 tensors"]),
    "a dangling index": (dangling, [INDEX, "cannot be read"]),
}


class TestIndex:
    """The index is the authority, and must agree with the files that it names."""

    @pytest.mark.parametrize("fault", INDEX_FAULTS)
    def test_disagreements_name_tensor_and_files(
        self, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_folder(m3(), tmp_path / "m3")
        edit, parts = INDEX_FAULTS[fault]
        edit(folder)
        refused(folder, capsys, *parts)

    @pytest.mark.parametrize("name", ["lm_head.weight", WEIGHT])
    def test_twins_with_and_without_a_prefix(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = with_tensors(m3(), tmp_path / "m3", {name: -m3().tensors[PREFIX + name]})
        refused(folder, capsys, f"{PREFIX}{name} in model-0", f"{name} in {SECOND}", "for a slot that has one already")

    def test_further_files_are_not_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = write_folder(m3(), tmp_path / "m3")
        (folder / "consolidated.safetensors").write_bytes(b"anything")
        error, words = verdict(folder, capsys)
        assert error is None and "note: consolidated.safetensors is not in the index and not read" in words

    @pytest.mark.parametrize(("file", "part"), [("m.gguf", "GGUF files"), ("pytorch_model.bin", "pickled files")])
    def test_other_files_are_named(
        self, file: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_folder(m3(), tmp_path / "m3")
        for name in (FIRST, SECOND, INDEX):
            (folder / name).unlink()
        (folder / file).write_bytes(b"")
        refused(folder, capsys, f"{part} ({file})")

    def test_without_an_index_all_files_are_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = write_folder(m3(), tmp_path / "m3")
        (folder / INDEX).unlink()
        assert verdict(folder, capsys)[0] is None

    def test_a_heads_folder_too(self, folder: Callable[[str], Path], tmp_path: Path) -> None:
        path = write_head("eagle3", m3(), tmp_path / "head")
        save_file({"fc.weight": torch.ones(2)}, path / "old.safetensors")
        with pytest.raises(SkipstoneError, match=r"fc.weight is in model.safetensors and old.safetensors"):
            LLM(str(folder("m3")), spec=f"eagle3:{path}:2")

    def test_bytes_that_no_tensor_owns(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A hole between two tensors: sizes agree, and the library that reads the file refuses it."""
        folder = write_folder(m3(), tmp_path / "m3")
        content = (folder / FIRST).read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
        header[last]["data_offsets"] = [offset + 8 for offset in header[last]["data_offsets"]]
        text = json.dumps(header).encode()
        (folder / FIRST).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :] + bytes(8))
        refused(folder, capsys, FIRST, "download it again")


class TestMemory:
    """Sizes are compared with free memory before anything is allocated."""

    @pytest.fixture
    def free(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
        def limit(size: int) -> None:
            for place in ("models.loader", "tools.inspect.checkpoint"):
                monkeypatch.setattr(f"skipstone.{place}.free_memory_bytes", lambda device: size)

        return limit

    def test_a_model_that_does_not_fit(
        self, folder: Callable[[str], Path], free: Callable[[int], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        cli.run(["inspect", str(folder("m3")), "--json"])
        needed = json.loads(capsys.readouterr().out)["loaded_bytes"]
        free(needed)
        assert verdict(folder("m3"), capsys)[0] is None
        free(needed - 1)
        parts = [f"{needed - 1:,} bytes are free", "--dtype bfloat16", "as float32"]
        assert isinstance(refused(folder("m3"), capsys, *parts), ConfigError)
        assert verdict(folder("m3"), capsys)[1].endswith("this checkpoint does not load here\n")
        free(1000)
        assert "--dtype" not in str(verdict(folder("m3"), capsys)[0])

    def test_modules_that_do_not_fit(
        self, tmp_path: Path, free: Callable[[int], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_folder(with_mtp(dsa(), 1), tmp_path / "dsa")
        cli.run(["inspect", str(folder), "--json"])
        report = json.loads(capsys.readouterr().out)
        free(report["loaded_bytes"] + report["mtp_loaded_bytes"])
        assert verdict(folder, capsys)[0] is None
        free(report["loaded_bytes"] + report["mtp_loaded_bytes"] - 1)
        refused(folder, capsys, "--spec off", f"{report['mtp_loaded_bytes']:,}")
        LLM(str(folder), spec="off").close()

    def test_a_release_of_a_terabyte(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Its files are holes, its headers are true."""
        tiny, vocab = m3_flat(), 4_000_000_000
        folder = write_folder(tiny, tmp_path / "m3")
        config(folder, vocab_size=vocab)
        for name in (FIRST, SECOND):
            content = (folder / name).read_bytes()
            length = struct.unpack("<Q", content[:8])[0]
            header, end = json.loads(content[8 : 8 + length]), 0
            for key, entry in header.items():
                if key == "__metadata__":
                    continue
                if key in ("lm_head.weight", "model.embed_tokens.weight"):
                    entry["shape"][0] = vocab
                size = torch.Size(entry["shape"]).numel() * (4 if entry["dtype"] == "F32" else 2)
                entry["data_offsets"], end = [end, end + size], end + size
            text = json.dumps(header).encode()
            (folder / name).write_bytes(struct.pack("<Q", len(text)) + text)
            os.truncate(folder / name, 8 + len(text) + end)
        error = refused(folder, capsys, "bytes are free here", "use a machine with more memory")
        assert "2,048,0" in str(error)  # 4e9 rows of 64 in float32, twice


@pytest.mark.parametrize(
    ("limit", "stat", "expected"),
    [
        (b"3000000", b"anon 5\ninactive_file 500000\n", 2_500_000),
        (b"500000", b"inactive_file 100\n", 0),
        (b"9000000000", b"inactive_file 0\n", 8_000 * 1024),
        (b"max", b"inactive_file 0\n", 8_000 * 1024),
        (b"3000000", b"", 8_000 * 1024),
    ],
)
def test_free_memory_knows_a_containers_limit(
    limit: bytes, stat: bytes, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in {"memory.max": limit, "memory.current": b"1000000", "memory.stat": stat}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\nHugePages_Total:  0\n")
    monkeypatch.setattr("skipstone.kernels.dispatch.MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("skipstone.kernels.dispatch.CGROUP", tmp_path)
    assert free_memory_bytes() == expected
    (tmp_path / "memory.max").unlink()
    assert free_memory_bytes() == 8_000 * 1024


class TestHeads:
    """What a head does without being told is said, and its folder can be looked into."""

    def long_target(self, folder: Path) -> Path:
        freq = [0] + [1] * 7
        sparse = {"sparse_attention_freq": freq, "sparse_disable_index_value": freq}
        text = m3_text_config(num_hidden_layers=8, moe_layer_freq=freq, sparse=sparse)
        tensors = {f"{PREFIX}{n}": t for n, t in store(m3_tensors(5, text), M3_WIDE).items()}
        return write_folder(Tiny("m3", nest(text), tensors, budget=24), folder)

    def test_usual_layers_and_limits(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        target = self.long_target(tmp_path / "m3")
        head = write_head("eagle3", m3(), tmp_path / "m3-eagle3")
        raw = json.loads((head / "config.json").read_text())
        raw["eagle_config"].pop("eagle_aux_hidden_state_layer_ids")
        (head / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 45}))
        llm = LLM(str(target), spec="eagle3:2")
        said = dict(llm.card)["drafting"]
        assert "layers 2, 4, 5" in said and "the usual 2, n/2 and n-3" in said
        assert "drafts end at position 45 of 640" in said
        for arguments in (["inspect", str(target)], ["inspect", str(head)]):
            assert cli.run(arguments) == 0
            assert said in capsys.readouterr().out

    def test_named_layers_are_said_as_well(self, folder: Callable[[str], Path], tmp_path: Path) -> None:
        for kind in ("eagle3", "dflash"):
            path = write_head(kind, m3(), tmp_path / kind)
            said = dict(LLM(str(folder("m3")), spec=f"{kind}:{path}:2").card)["drafting"]
            assert said == "reads the input of layers 1, 2, 4"

    def test_a_draft_models_limit(self, folder: Callable[[str], Path], tmp_path: Path) -> None:
        short = write_folder(m3_flat(), tmp_path / "short")
        config(short, max_position_embeddings=64)
        card = dict(LLM(str(folder("m3")), spec=f"draft:{short}:2").card)
        assert "drafts end at position 64 of 640" in card["drafting"]

    @pytest.mark.parametrize("kind", ["eagle3", "eagle3_wide", "eagle3_speculators", "dflash"])
    def test_a_heads_folder_with_its_target(
        self, kind: str, folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = write_head(kind, m3(), tmp_path / "head")
        assert cli.run(["inspect", str(path), "--target", str(folder("m3"))]) == 0
        out = capsys.readouterr().out
        assert f"this head loads with {folder('m3')}" in out and "tensors: " in out
        assert cli.run(["inspect", str(path), "--target", str(folder("m3")), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["problem"] is None
        assert cli.run(["inspect", str(path)]) == 2
        assert "--target FOLDER" in capsys.readouterr().err
        assert cli.run(["inspect", str(folder("m3")), "--target", str(path)]) == 2

    def test_a_broken_head_beside_the_model_is_not_available(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        target = write_folder(m3(), tmp_path / "m3")
        path = write_head("eagle3", m3(), tmp_path / "m3-eagle3")
        shard(path, "model.safetensors", lambda t: t.pop("norm.weight"))
        assert cli.run(["inspect", str(target)]) == 0  # the model itself loads
        line = next(line for line in capsys.readouterr().out.splitlines() if "--spec eagle3" in line)
        assert "not available" in line and "norm.weight" in line


class TestOwnEmbedding:
    """An MTP module's embedding and vocabulary product are the target's only when they are equal."""

    def head(self, folder: Path) -> Any:
        llm = LLM(str(folder), spec="mtp:1")
        proposer: Any = llm.engine.speculation.proposer
        return proposer.head, llm

    def test_copies_are_dropped(self, folder: Callable[[str], Path]) -> None:
        head, _ = self.head(folder("dsa"))
        assert any(name.endswith("shared_head.head.weight") for name in dsa().tensors)
        assert head.mtp[0].embed is None and head.mtp[0].head is None

    def test_names_that_no_module_is_known_to_have(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """MiniMax-M3's modules are described without weights of their own: refused, not dropped."""
        tiny = with_mtp(m3(), 1)
        name = f"{PREFIX}model.mtp.layers.0.embed_tokens.weight"
        embed = tiny.tensors[f"{PREFIX}model.embed_tokens.weight"]
        folder = with_tensors(tiny, tmp_path / "m3", {name: -embed})
        refused(folder, capsys, name)
        LLM(str(folder), spec="off").close()

    def test_others_are_used(self, tmp_path: Path) -> None:
        tiny = dsa()
        last = f"model.layers.{tiny.config['num_hidden_layers']}"
        own = {
            f"{last}.{name}.weight": torch.randn(tiny.tensors[source].shape).bfloat16()
            for name, source in (("embed_tokens", "model.embed_tokens.weight"), ("shared_head.head", "lm_head.weight"))
        }
        head, llm = self.head(with_tensors(tiny, tmp_path / "dsa", own))
        states = torch.randn(3, tiny.config["hidden_size"])
        normed = head.recycled(states)
        expected = normed @ own[f"{last}.shared_head.head.weight"].float().T
        torch.testing.assert_close(head.outputs(states).logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(head.mtp[0].embed, own[f"{last}.embed_tokens.weight"].float())
        got = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), progress=False)
        plain = LLM(str(tmp_path / "dsa"), spec="off")
        want = plain.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), progress=False)
        assert got[0].outputs[0].token_ids == want[0].outputs[0].token_ids


@pytest.mark.parametrize(("name", "text"), [("m3", "24 tokens (3 blocks of 8"), ("dsa", "at most")])
def test_the_sparse_budget_is_named(
    name: str, text: str, folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said = dict(LLM(str(folder(name))).card)["sparse budget"]
    assert text in said and ("3 blocks" in said) == (name == "m3")
    cli.run(["inspect", str(folder(name))])
    assert f"sparse budget  {said}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model_type", "template", "said"),
    [
        ("deepseek_v32", None, "built in for deepseek_v32"),
        ("deepseek_v32", "x", "tokenizer_config.json"),
        ("deepseek_v32", [{"name": "default", "template": "x"}], "tokenizer_config.json"),
        ("deepseek_v32", [{"name": "rag", "template": "x"}], "built in for deepseek_v32"),
        ("other", [{"name": "rag", "template": "x"}], "absent: chat is not available"),
        ("other", None, "absent: chat is not available"),
    ],
)
def test_inspect_finds_the_chat_template_that_is_used(
    model_type: str, template: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(dsa(), tmp_path / "dsa")
    config(folder, model_type=model_type)
    Tokenizer(WordLevel({"a": 0, "x": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert cli.run(["inspect", str(folder)]) == 0
    assert f"chat template  {said}\n" in capsys.readouterr().out
    llm = LLM(str(folder))
    assert llm.tokenizer is not None
    try:
        chats = bool(llm.tokenizer.template_source)
    except SkipstoneError:
        chats = False
    assert chats == (not said.startswith("absent"))
