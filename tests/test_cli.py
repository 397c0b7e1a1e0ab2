"""The command line from outside: results on stdout, one line for an error, exit codes, Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from damage import BAD_CHECKPOINTS, change, truncate
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from waiting import PATIENCE_S, below

from skipstone import LLM, errors
from skipstone.cli import main as cli
from skipstone.cli.main import COMMANDS
from skipstone.errors import install_hint, needing
from skipstone.tools.inspect.checkpoint import examine

ROOT = Path(__file__).resolve().parent.parent
SKIPSTONE = [sys.executable, "-m", "skipstone"]
NEWLINE = "\n"
LETTERS = [chr(32 + i) for i in range(95)] + [NEWLINE]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
DEMO = ROOT / "checkpoints" / "demo"


class Result(NamedTuple):
    code: int
    out: str
    err: str

    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture(scope="session")
def model(folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MiniMax-M3 with a tokenizer of single characters, a chat template and a context of 20,000 tokens."""
    copy = tmp_path_factory.mktemp("cli") / "tiny"
    shutil.copytree(folder("m3"), copy)
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(copy / "tokenizer.json"))
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 20_000
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "generation_config.json").write_text('{"temperature": 0.5, "top_p": 0.9, "eos_token_id": 127}')
    return copy


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command line inside this process."""

    def call(*arguments: object, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = cli.run([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    return call


def run_process(*arguments: object, **options: Any) -> Result:
    """Run a command line as a user's shell would."""
    command = [*SKIPSTONE, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, **options)
    return Result(done.returncode, done.stdout, done.stderr)


class TestStart:
    def test_help_is_fast_and_needs_no_torch(self) -> None:
        script = "import sys; from skipstone.__main__ import main; main()"

        def processor_time() -> float:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run([sys.executable, "-c", script, "--help"], cwd=ROOT, capture_output=True, text=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert done.returncode == 0
            assert all(verb in done.stdout for verb in COMMANDS.entries)
            return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

        below(0.3, processor_time)

    @pytest.mark.parametrize("verb", COMMANDS.entries)
    def test_help_of_a_verb_needs_no_torch(self, verb: str) -> None:
        script = (
            "import sys; from skipstone.cli.main import run\n"
            f"code = run(['{verb}', '--help'])\n"
            "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2', 'rich', 'yaml'} & set(sys.modules)\n"
            "sys.exit(f'imported {heavy}' if heavy else code)"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"usage: skipstone {verb}" in done.stdout

    def test_without_a_verb_the_overview_and_exit_code_2(self, run: Callable[..., Result]) -> None:
        assert run().code == 2
        assert run("version").out.startswith("skipstone ")
        assert run("--version") == run("version")

    @pytest.mark.parametrize("flag", ["--help", "-h", None])
    def test_help_of_a_verb_of_two_words(self, run: Callable[..., Result], flag: str | None) -> None:
        code, out, err = run("bench", *([flag] if flag else []))
        assert (code, err) == (0 if flag else 2, "")
        listed = [line.split()[:2] for line in out.splitlines() if line.startswith("  ")]
        assert listed == [["bench", "kernels"], ["bench", "decode"], ["bench", "load"], ["bench", "serve"]]

    def test_print_config_shows_values_and_origins(self, run: Callable[..., Result], model: Path) -> None:
        out = run("generate", model, "--top-k", "5", "--print-config").out.splitlines()
        rows = {line.split(":")[0]: line.split(" # ")[1] for line in out}
        assert rows["top_k"] == "--top-k"
        assert rows["top_p"] == "generation_config.json"
        assert rows["seed"] == "default"
        assert run("generate", "--print-config").out.startswith("# model: not given\n")

    @pytest.mark.parametrize("file", ["", '{"do_sample": false, "temperature": 0.7, "top_p": 0.9}', '{"top_k": 3}'])
    def test_print_config_shows_what_a_run_uses(
        self, file: str, run: Callable[..., Result], model: Path, tmp_path: Path
    ) -> None:
        """All that read generation_config.json take it alike: what is printed, the model, and inspect."""
        folder = shutil.copytree(model, tmp_path / "model")
        (folder / "generation_config.json").unlink()
        if file:
            (folder / "generation_config.json").write_text(file)
        out = run("generate", folder, "--print-config").out.splitlines()
        rows = dict(line.split(" # ")[0].rstrip().split(": ", 1) for line in out if "generation_config.json" in line)
        defaults = LLM(str(folder), num_blocks=20).default_params
        assert {name: json.loads(value) for name, value in rows.items()} == defaults
        if "do_sample" in file:
            assert defaults == {"temperature": 0.0, "top_p": 0.9}
            assert "sampling: temperature=0.0 (generation_config.json)" in run("generate", folder, "-p", "a").err
        assert not examine(folder, "auto").unusable


BAD_REQUESTS = {
    "no prompt": ([], ["no prompt given", "-p TEXT"]),
    "empty prompt": (["-p", ""], ["-p: the prompt is empty"]),
    "temperature": (
        ["-p", "x", "--temperature", "-1"],
        ["temperature=-1.0 (from --temperature)", "a number from 0 to 100"],
    ),
    "kind": (["-p", "x", "--top-k", "many"], ["top_k=many (from --top-k)", "whole number"]),
    "engine option": (["-p", "x", "--max-num-seqs", "0"], ["max_num_seqs=0", "at least 1"]),
    "stop id": (["-p", "x", "--stop-token-ids", "500"], ["stop_token_ids contains token id 500", "0 to 127"]),
    "file": (["-f", "absent.txt"], ["-f absent.txt cannot be read", "No such file"]),
    "suffix": (["-f", "prompts.csv"], ["prompts.csv", ".txt", ".jsonl"]),
    "target": (["-p", "x", "--json", "/nowhere/out.jsonl"], ["--json /nowhere/out.jsonl", "does not exist"]),
    "threads": (["-p", "x", "--num-threads", "100000"], ["num_threads=100000 (from --num-threads)", "from 1 to 1024"]),
    "cache": (["-p", "x", "--cache-memory-gb", "1e9"], ["cache_memory_gb=1000000000.0 makes", "bytes are free"]),
    "blocks": (["-p", "x", "--num-blocks", "1G"], ["num_blocks=1073741824 makes", "bytes are free"]),
    "context": (["-p", "x", "--max-model-len", "1M"], ["max_model_len=1048576", "lower it"]),
    "long": (
        ["-q", "-p", "x", "-p", "y" * 70, "--max-model-len", "64"],
        ["-p: the text has 70 characters", "64 tokens of at most 1"],
    ),
    "longer than the model": (
        ["-q", "-p", "y" * 20_000],
        ["has 20000", "shorten it (the model has no more positions)"],
    ),
    "longer than asked": (["-q", "-p", "y" * 70, "--max-model-len", "64"], ["it (--max-model-len raises it)"]),
    "longer than caches": (["-q", "-p", "y" * 70, "--num-blocks", "2"], ["no more (num_blocks), --num-blocks raises"]),
    "no cache": (
        ["-q", "-p", "x", "--cache-memory-gb", "1e-9", "--max-model-len", "64"],
        ["no cache block of", "raise"],
    ),
}


# Without the model's weights, so before they are loaded.
BAD_FROM_THE_START = {
    "regex": (["--regex", "("], ["regex", "cannot be used"]),
    "schema": (["--json-schema", "{"], ["json_schema='{'", "not valid JSON"]),
    "table": (["--k-table", "nofile"], ["k_table=nofile cannot be read"]),
    "drafts": (["--spec", "ngram:3", "--num-speculative-tokens", "9"], ["num_speculative_tokens=9 is more than the 3"]),
    "no drafts": (["--spec", "off", "--num-speculative-tokens", "1"], ["num_speculative_tokens=1 is more than the 0"]),
    "no table": (["--spec", "ngram:auto"], ["takes k from a table", "--k-table FILE"]),
    "rates": (["--simulate-acceptance", "x"], ["simulate_acceptance='x' must list numbers"]),
    "rising rates": (["--simulate-acceptance", "0.2,0.9"], ["simulate_acceptance=0.2,0.9", "never rise"]),
    "head": (["--spec", "eagle3:nofolder:3"], ["spec=eagle3: model=nofolder is neither a folder"]),
    "no head": (["--spec", "dflash:3"], ["spec=dflash needs a folder"]),
    "draft model": (["--spec", "draft:nofolder:3"], ["spec=draft: model=nofolder is neither a folder"]),
    "device": (["--device", "cuda"], ["device='cuda'", "--device cpu"]),
    "kernels": (["--device", "cpu", "--kernels", "triton"], ["kernels='triton' and device='cpu' cannot be combined"]),
}


class TestErrors:
    """Exit code 2 and one line: the field, its value, the way out."""

    def check(self, result: Result, words: list[str], code: int = 2) -> None:
        assert result.code == code
        assert result.out == ""
        lines = [line for line in result.err.splitlines() if not line.startswith("loading ")]
        assert len(lines) == 1 and lines[0].startswith("error: "), result.err
        assert all(word in lines[0] for word in words), lines[0]

    @pytest.mark.parametrize("name", BAD_CHECKPOINTS)
    @pytest.mark.parametrize("verb", ["generate", "inspect"])
    def test_checkpoint(self, run: Callable[..., Result], model: Path, tmp_path: Path, name: str, verb: str) -> None:
        edit, words = BAD_CHECKPOINTS[name]
        arguments = ["-p", "x"] if verb == "generate" else []
        # A folder without config.json is no checkpoint; inspect's answer about any other is that it does not load.
        code = 3 if verb == "inspect" and name != "no config" else 2
        self.check(run(verb, change(model, tmp_path / "broken", edit), *arguments), words, code)

    @pytest.mark.parametrize("name", BAD_REQUESTS)
    def test_request(self, run: Callable[..., Result], model: Path, name: str) -> None:
        arguments, words = BAD_REQUESTS[name]
        self.check(run("generate", model, *arguments), words)

    @pytest.mark.parametrize("name", BAD_FROM_THE_START)
    def test_before_the_model_is_loaded(
        self, run: Callable[..., Result], model: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        arguments, words = BAD_FROM_THE_START[name]
        folder = DEMO if name in ("regex", "schema") else model  # whose tokenizer the grammar's library can read
        result = run("generate", folder, "-p", "x", *arguments)
        self.check(result, words)
        assert "loading" not in result.err

    def test_a_tokenizer_that_grammars_cannot_use(self, run: Callable[..., Result], model: Path) -> None:
        self.check(run("generate", model, "-p", "x", "--regex", "a+"), ["regex", "tokenizer.json", "decoder"])

    def test_truncated_shard_gives_expected_and_actual_bytes(
        self, run: Callable[..., Result], model: Path, tmp_path: Path
    ) -> None:
        broken = change(model, tmp_path / "broken", truncate)
        shard = sorted(broken.glob("*.safetensors"))[0]
        actual = shard.stat().st_size
        assert f"{shard} is truncated" in (err := run("inspect", broken).err)
        assert f"describes {actual + 100} bytes, the file has {actual}" in err

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ('{"prompt": "a", "temperature": "hot"}', ["temperature=hot", "a number"]),
            ('{"prompt": "a", "temperature": -1}', ["temperature=-1", "a number from 0 to 100"]),
            ('{"prompt": "a", "max_token": 3}', ["no field 'max_token'", "did you mean max_tokens?"]),
            ('{"prompt": "a", "messages": []}', ["exactly one of", "prompt and messages"]),
            ('{"temperature": 1}', ["exactly one of", "none of them"]),
            ('{"prompt": 3}', ["prompt=3", "must be text"]),
            ('{"prompt_token_ids": [1, 500]}', ["prompt_token_ids contains 500", "0 to 127"]),
            ('{"prompt_token_ids": ["a"]}', ["prompt_token_ids=['a']", "a list of token ids"]),
            ('{"prompt_token_ids": []}', ["the prompt is empty"]),
            ('{"prompt": ', ["not a JSON object"]),
            ("[1]", ["not a JSON object"]),
        ],
    )
    def test_a_bad_line_is_named(
        self, run: Callable[..., Result], model: Path, tmp_path: Path, line: str, words: list[str]
    ) -> None:
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"prompt": "fine"}\n\n' + line + "\n")
        result = run("generate", model, "-f", file)
        self.check(result, [f"{file}:3", *words])
        assert "loading" not in result.err

    def test_from_a_shell_there_is_no_traceback_unless_asked(self, tmp_path: Path) -> None:
        (tmp_path / "options.yaml").write_text("max_num_seq: 3\n")
        arguments = ["generate", "demo", "-p", "x", "--config", tmp_path / "options.yaml"]
        self.check(run_process(*arguments), ["no option 'max_num_seq'", "options.yaml", "did you mean max_num_seqs?"])
        shown = run_process(*arguments, "--traceback")
        assert shown.code == 2
        assert "Traceback" in shown.err and shown.err.splitlines()[-1].startswith("error: no option")

    def test_an_unknown_model_and_an_unknown_verb(self, tmp_path: Path) -> None:
        self.check(run_process("generate", tmp_path / "no", "-p", "x"), ["neither a folder", "demo, demo-dsa"])
        self.check(run_process("generat"), ["no command 'generat'; did you mean generate?"])
        environment = os.environ | {"SKIPSTONE_MAX_NUM_SEQ": "2"}
        self.check(run_process("inspect", "demo", env=environment), ["did you mean SKIPSTONE_MAX_NUM_SEQS?"])


class TestGenerate:
    def test_text_alone_goes_to_stdout(self, run: Callable[..., Result], model: Path) -> None:
        result = run("generate", model, "-p", "abc", "--max-tokens", "4", "--seed", "1", "--ignore-eos")
        assert result.code == 0
        assert len(result.out) <= 5 and result.out.endswith("\n")
        assert "sampling: temperature=0.5 (generation_config.json), top_p=0.9 (generation_config.json)" in result.err
        assert "max_tokens=4 (--max-tokens)" in result.err
        assert "finish_reason length" in result.err

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--max-tokens", "4"], "length); --max-tokens raises it"),
            (["--num-blocks", "1"], "that is max_model_len=32, prompt included: the caches hold no more (num_blocks)"),
            (["--max-model-len", "40"], "that is max_model_len=40, prompt included: --max-model-len raises it"),
        ],
    )
    def test_the_limit_that_ended_an_answer_is_named(
        self, run: Callable[..., Result], model: Path, arguments: list[str], words: str
    ) -> None:
        err = run("generate", model, "-p", "abc", "--ignore-eos", *arguments).err
        assert words in err.splitlines()[-1]
        assert ("--max-tokens" in err.splitlines()[-1]) == (arguments[0] == "--max-tokens")

    def test_limits_of_several_answers(self, run: Callable[..., Result], model: Path) -> None:
        prompts = ["-p", "abc", "-p", "a" * 38]
        err = run("generate", model, *prompts, "--ignore-eos", "--max-tokens", "4", "--max-model-len", "40").err
        assert "2 of 2 answers ended" in err and "--max-tokens raises it; for 1 that is max_model_len=40" in err

    def test_quiet_is_quiet(self, run: Callable[..., Result], model: Path) -> None:
        assert run("generate", model, "-p", "abc", "--max-tokens", "4", "-q").err == ""

    def test_every_source_of_prompts(self, run: Callable[..., Result], model: Path, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("one\n\ntwo\r\n")
        lines = [
            {"prompt": "three", "id": "mine", "max_tokens": 2, "logprobs": 1},
            {"prompt_token_ids": [5, 6, 7], "temperature": 0},
            {"messages": [{"role": "user", "content": "four"}], "seed": 4},
        ]
        (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
        files = ["-f", tmp_path / "a.txt", "-f", tmp_path / "b.jsonl"]
        common = ["--max-tokens", "3", "--ignore-eos", "--json", "-"]
        result = run("generate", model, "-p", "zero", *files, "-", *common, stdin="five\nlines")
        assert result.code == 0, result.err
        found = result.objects()
        assert [item["id"] for item in found] == ["0", "1", "2", "mine", "4", "5", "6"]
        prompts = ["zero", "one", "two", "three", [5, 6, 7], lines[2]["messages"], "five\nlines"]
        assert [item["prompt"] for item in found] == prompts
        assert [item["output_tokens"] for item in found] == [3, 3, 3, 2, 3, 3, 3]
        assert [item["prompt_tokens"] for item in found] == [4, 3, 3, 5, 3, len("u:four\na:"), 10]
        assert all(item["finish_reason"] == "length" for item in found)
        assert [len(item.get("logprobs", [])) for item in found] == [0, 0, 0, 2, 0, 0, 0]
        assert len(found[3]["logprobs"][0]["top_ids"]) == 1

    def test_parts_of_messages(self, run: Callable[..., Result], model: Path, tmp_path: Path) -> None:
        file, part = tmp_path / "a.jsonl", {"type": "text", "text": "four"}
        file.write_text(json.dumps({"messages": [{"role": "user", "content": [part, part]}]}))
        (found,) = run("generate", model, "-f", file, "--max-tokens", "1", "--json", "-").objects()
        assert found["prompt_tokens"] == len("u:four\nfour\na:")
        file.write_text(json.dumps({"messages": [{"role": "user", "content": [part, {"type": "image_url"}]}]}))
        result = run("generate", model, "-f", file)
        assert result.code == 2 and "a.jsonl:1: messages[0].content[1]={'type': 'image_url'}" in result.err

    @pytest.mark.skipif(not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here")
    def test_a_thought_is_not_held_to_a_constraint(self, run: Callable[..., Result], tmp_path: Path) -> None:
        copy, file = tmp_path / "thinks", tmp_path / "a.jsonl"
        shutil.copytree(DEMO, copy)
        (copy / "chat_template.jinja").write_text("{{ messages[0].content }}<think>")
        file.write_text(json.dumps({"messages": [{"role": "user", "content": "four"}]}))
        common = ["--regex", "a", "-q", "--max-tokens", "1"]
        result = run("generate", copy, "-f", file, *common)
        assert result.code == 2 and "a.jsonl:1: regex says what the whole answer is" in result.err
        assert "error: regex says what" in run("chat", copy, *common, stdin="four\n").err

    def test_json_file_and_several_choices(self, run: Callable[..., Result], model: Path, tmp_path: Path) -> None:
        target = tmp_path / "out.jsonl"
        result = run("generate", model, "-p", "a", "--n", "3", "--max-tokens", "2", "--json", target, "--stats")
        assert (result.code, result.out) == (0, "")
        found = [json.loads(line) for line in target.read_text().splitlines()]
        assert [(item["id"], item["index"]) for item in found] == [("0", 0), ("0", 1), ("0", 2)]
        for row in ("prompt tokens: ", "output tokens: ", "steps: ", "preemptions: 0", "cache blocks in use: 0 of "):
            assert row in result.err

    def test_several_answers_have_headings(self, run: Callable[..., Result], model: Path) -> None:
        out = run("generate", model, "-p", "abc", "-p", "def", "--max-tokens", "2").out
        assert out.count("== ") == 2 and "== 1: def\n" in out

    def test_the_same_seed_gives_the_same_text(self, run: Callable[..., Result], model: Path) -> None:
        arguments = ["generate", model, "-p", "abc", "--max-tokens", "8", "--seed", "7", "--json", "-"]
        assert run(*arguments).out == run(*arguments).out

    @pytest.mark.skipif(not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here")
    def test_the_demo(self) -> None:
        result = run_process("generate", "demo", "-p", "The history of", "--max-tokens", "8", "--seed", "1")
        assert result.code == 0
        assert result.out.strip() and "MiniMaxM3" in result.err

    def test_a_reader_that_leaves_early_is_no_error(self, model: Path) -> None:
        arguments = [str(model), "-p", "a", "--max-tokens", "2", "--json", "-", "-q"]
        program = subprocess.Popen([*SKIPSTONE, "generate", *arguments], cwd=ROOT, stdout=-1, stderr=-1)
        assert program.stdout and program.stderr
        program.stdout.close()
        assert program.stderr.read() == b""
        assert program.wait(PATIENCE_S) == 141


class TestOutput:
    """A target that takes nothing: one line that names it."""

    @pytest.mark.parametrize(
        ("target", "words"),
        [
            ("--json /dev/full", "error: --json /dev/full cannot be written: No space left on device"),
            ("> /dev/full", "error: standard output cannot be written: No space left on device"),
            (">&-", "error: standard output is closed"),
        ],
    )
    def test_it_is_named(self, model: Path, target: str, words: str) -> None:
        command = " ".join([*SKIPSTONE, "generate", str(model), "-q -p a --max-tokens 2", target])
        done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 2
        assert done.stderr.startswith(words) and done.stderr.count("\n") == 1

    def test_of_a_verb_without_a_model(self) -> None:
        command = " ".join([*SKIPSTONE, "version > /dev/full"])
        done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)

    def test_closed_standard_error_is_no_error(self, model: Path) -> None:
        command = " ".join([*SKIPSTONE, "generate", str(model), "-p a --max-tokens 2 --ignore-eos 2>&-"])
        done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0 and "loading" not in done.stdout


class TestInput:
    """A standard input that is closed or not open for reading: one line, or an end of input."""

    @pytest.mark.parametrize("stdin", ["<&-", "0>/dev/null"])
    @pytest.mark.parametrize("verb", ["generate", "trace"])
    def test_it_is_named(self, model: Path, verb: str, stdin: str) -> None:
        command = " ".join([*SKIPSTONE, verb, str(model), "-", stdin])
        done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.returncode, done.stdout) == (2, "")
        words = "the prompt is empty" if stdin == "<&-" else "standard input cannot be read: "
        assert words in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1

    def test_chat_without_one_ends_at_once(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "stdin", None)
        assert cli.run(["chat", str(model), "-q"]) == 0
        with open(os.open(os.devnull, os.O_WRONLY)) as unreadable:
            monkeypatch.setattr(sys, "stdin", unreadable)
            assert cli.run(["chat", str(model), "-q"]) == 2
        assert "standard input cannot be read: Bad file descriptor" in capsys.readouterr().err


class TestChat:
    def test_turns_and_commands_over_a_pipe(self, run: Callable[..., Result], model: Path) -> None:
        lines = "hello\n\n/help\n/what\nagain\n/reset\nhello\n/exit\nnever\n"
        result = run("chat", model, "--max-tokens", "5", "--temperature", "0", "--ignore-eos", stdin=lines)
        assert result.code == 0
        answers = result.out
        assert "Ctrl-C stops an answer" in result.err and "no command /what" in result.err
        again = run("chat", model, "--max-tokens", "5", "--temperature", "0", "--ignore-eos", stdin="hello\n")
        assert answers.startswith(again.out) and answers.endswith(again.out)
        assert len(answers) >= len(again.out) * 2

    def test_the_conversation_is_remembered(self, run: Callable[..., Result], model: Path) -> None:
        both = run("chat", model, "--system", "s", "--max-tokens", "4", stdin="hello\nworld\n")
        assert both.code == 0 and both.out.count("\n") >= 2

    def test_a_turn_that_does_not_fit_is_undone(self, run: Callable[..., Result], model: Path) -> None:
        arguments = ["--max-tokens", "3", "--max-model-len", "64"]
        result = run("chat", model, *arguments, stdin="x" * 100 + "\nhi\n")
        assert result.code == 0
        assert "error: the text has" in result.err and result.out.count("\n") >= 1

    def test_many_choices_are_refused(self, run: Callable[..., Result], model: Path) -> None:
        result = run("chat", model, "--n", "2")
        assert result.code == 2 and "n=2 has no meaning in a conversation" in result.err

    def test_without_a_tokenizer(self, run: Callable[..., Result], folder: Callable[[str], Path]) -> None:
        result = run("chat", folder("m3"))
        assert result.code == 2 and "has no tokenizer.json" in result.err


def let_interrupts_through() -> None:
    """A program that is started in the background of a shell would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command line with pipes; killed at the end if it still runs."""
    programs = []

    def call(*arguments: object, program: list[str] = SKIPSTONE) -> subprocess.Popen[str]:
        command = [*program, *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        programs.append(
            subprocess.Popen(command, cwd=ROOT, text=True, bufsize=0, preexec_fn=let_interrupts_through, **pipes)
        )
        return programs[-1]

    yield call
    for program in programs:
        if program.poll() is None:
            program.kill()
            program.wait()


NOTING = """
from skipstone.__main__ import main
from skipstone.cli import output
take = output.Results.take
def noting(results, place, answer):
    take(results, place, answer)
    output.note(f"finished: {place}")
output.Results.take = noting
main()
"""


class TestInterrupt:
    def wait_for(self, stream: Any, text: str) -> str:
        seen = ""
        while text not in seen:
            line = stream.readline()
            assert line, f"ended before {text!r}: {seen}"
            seen += line
        return seen

    def test_generate_ends_with_130(self, start: Callable[..., subprocess.Popen[str]], model: Path) -> None:
        program = start("generate", model, "-p", "abc", "--ignore-eos", "--max-tokens", "19000")
        self.wait_for(program.stderr, "sampling: ")
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=PATIENCE_S)
        assert program.returncode == 130
        assert err.strip() == "interrupted" and out == ""

    @pytest.mark.parametrize("to_file", [True, False])
    def test_what_is_finished_is_kept(
        self, start: Callable[..., subprocess.Popen[str]], model: Path, tmp_path: Path, to_file: bool
    ) -> None:
        lengths = [2, 19000, 2, 100]
        lines = [{"prompt": "abc", "id": f"p{i}", "max_tokens": length} for i, length in enumerate(lengths)]
        (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
        target = tmp_path / "out.jsonl"
        arguments = ["-f", tmp_path / "in.jsonl", "--json", target if to_file else "-", "--ignore-eos", "--spec", "off"]
        program = start("generate", model, *arguments, program=[sys.executable, "-c", NOTING])
        for place in (0, 2, 3):  # in this order, as all run at once
            self.wait_for(program.stderr, f"finished: {place}")
        assert not to_file or [json.loads(line)["id"] for line in target.read_text().splitlines()] == ["p0"]
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=PATIENCE_S)
        assert program.returncode == 130 and err.strip() == "interrupted"
        found = [json.loads(line)["id"] for line in (target.read_text() if to_file else out).splitlines()]
        assert found == ["p0", "p2", "p3"]

    def test_chat_stops_the_answer_then_ends(self, start: Callable[..., subprocess.Popen[str]], model: Path) -> None:
        no_lines = ["--logit-bias", f"{LETTERS.index(NEWLINE)}=-100"]  # so that one ends the answer, and nothing else
        program = start("chat", model, "--ignore-eos", "--max-tokens", "19000", *no_lines)
        self.wait_for(program.stderr, "sampling: ")
        for _ in range(2):  # the first answer is stopped and the program goes on
            program.stdin.write("hello\n")
            program.stdin.flush()
            assert program.stdout.read(1) not in ("", NEWLINE)
            program.send_signal(signal.SIGINT)
            self.wait_for(program.stdout, NEWLINE)
        program.send_signal(signal.SIGINT)  # the second in a row, while it waits for a line
        assert program.wait(PATIENCE_S) == 130
        assert program.stderr.read().split() == ["interrupted"]


def read_terminal(master: int) -> bytes:
    """All that is written to a terminal until the other side closes it. Unread, it would block the writer."""
    seen = b""
    with contextlib.suppress(OSError):  # how Linux reports that the other side has closed
        while chunk := os.read(master, 65536):
            seen += chunk
    os.close(master)
    return seen


def test_a_progress_bar_does_not_mix_with_results(model: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = [*SKIPSTONE, "generate", str(model), "-p", "abc", "-p", "def", "--max-tokens", "2", "--json", "-"]
    with (tmp_path / "out").open("wb") as results:
        program = subprocess.Popen(arguments, cwd=ROOT, stdout=results, stderr=theirs)
    os.close(theirs)
    assert b"sampling: " in read_terminal(ours)
    assert program.wait(PATIENCE_S) == 0
    assert [json.loads(line)["id"] for line in (tmp_path / "out").read_text().splitlines()] == ["0", "1"]


def test_a_terminal_gets_a_table_and_a_stream(model: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = ["generate", str(model), "-p", "abc", "--max-tokens", "5", "--ignore-eos", "--temperature", "0"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    program = subprocess.Popen([*SKIPSTONE, *arguments], cwd=ROOT, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = read_terminal(ours).decode()
    assert program.wait(PATIENCE_S) == 0
    assert "│ model" in shown and "sampling: temperature=0.0 (--temperature)" in shown


SERVE, RAY, BENCH = ("serve", "demo", "--port", "0"), ("serve", "demo", "--port", "0", "--ray"), ("bench", "serve")
WANTED = [  # a package, whether it is there and broken, what wants it, the extra
    *((package, False, SERVE, "serve") for package in ("starlette", "uvloop", "httptools", "prometheus_client")),
    ("uvicorn", True, SERVE, "serve"),
    ("ray", False, RAY, "serve,ray"),
    ("httpx", False, BENCH, "bench"),
]


class TestMissingPackages:
    """What is absent, or there and broken, is named with a line that installs it; the model is not loaded before."""

    def test_it_is_named(self, tmp_path: Path) -> None:
        """Each package in a process that has imported torch alone."""
        script = f"""
import os, sys, torch
for package, broken, words, _ in {WANTED!r}:
    if not (child := os.fork()):
        if broken:
            open(f"{tmp_path}/{{package}}.py", "w").write("import absent")
            sys.path.insert(0, "{tmp_path}")
        else:
            sys.modules[package] = None
        from skipstone.cli.main import run
        os._exit(run(words))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.stdout.split() == ["2"] * len(WANTED), done.stderr
        for (package, broken, _, extra), line in zip(WANTED, done.stderr.splitlines(), strict=True):
            assert f" needs the package {'absent' if broken else package} (" in line
            assert line.startswith("error: ") and line.endswith(f"; run {install_hint(extra)}")

    def test_a_fault_of_ours_is_none_of_theirs(self) -> None:
        with pytest.raises(ImportError), needing("serve", "serve"):
            from skipstone.cli import nothing_of_that_name  # noqa: F401

    def test_the_hint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert install_hint("serve") == shlex.join([sys.executable, "-m", "pip", "install", "-e", f"{ROOT}[serve]"])
        monkeypatch.setattr(errors, "__file__", "/usr/lib/site-packages/skipstone/errors.py")
        assert install_hint("serve") == shlex.join([sys.executable, "-m", "pip", "install", "skipstone[serve]"])
