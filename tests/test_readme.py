"""README.md: what it prints under "Quickstart" and "Use" is run as printed, or shortened in the ordinary suite."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from skipstone.cli import main as cli

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "README.md").read_text()
# What is added to a command so that it takes a second. A port of its own, as others may serve here.
SHORTER = {
    "check": "--num-prompts 1 --max-tokens 4 --temperature 0 --proposers ngram",
    "tune": "--k 1 --batch 1 --contexts 16 --num-prompts 1 --max-tokens 4 --proposers ngram",
    "serve": "--port 0",
    "trace": "--max-tokens 4",
}
LONG_S = 1800  # of a command as printed, on a machine that others use


def blocks(section: str, language: str = "") -> list[str]:
    """The fenced blocks of one section in one language."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if kind == language]


def commands(section: str) -> list[str]:
    """The command lines of one section, comments included."""
    return [line for block in blocks(section) for line in block.splitlines() if line.strip()]


def words(line: str) -> list[str]:
    """The words of the last command of a pipeline."""
    return shlex.split(line.rpartition(" | ")[2], comments=True)


USE = commands("Use")


@contextmanager
def served(command: list[str], environ: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Start a server; its address, once it says that it is ready. It ends at a signal, with exit code 0."""
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stderr=log)
    try:
        end = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"try: curl (http://[^/]+)/", (folder / "log").read_text())):
            assert server.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.05)
        yield found[1]
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the clone to these commands; what they write stays in it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    return tmp_path


def test_the_page_has_what_is_tested() -> None:
    assert [words(line)[0] for line in commands("Quickstart")] == ["scripts/demo", "source", "scripts/test"]
    assert len(USE) == 10 and all(words(line)[0] == "skipstone" for line in USE)
    assert {"generate", "chat", "check", "tune", "trace", "serve", "inspect", "doctor"} == {words(x)[1] for x in USE}
    assert len(blocks("Use", "python")) == 1


@pytest.mark.parametrize("line", [line for line in USE if words(line)[1] != "serve"])
def test_a_command(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which saves it from importing torch; the shell runs what stands before a pipe."""
    feed = line.rpartition(" | ")[0] or "echo 'What does zip() do?'"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which tests of kernels set
    given = subprocess.run(["bash", "-c", feed], capture_output=True, check=True).stdout
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    _, verb, *arguments = words(line)
    assert cli.run([verb, *arguments, *shlex.split(SHORTER.get(verb, ""))]) == 0
    assert capsys.readouterr().out or "--json" in arguments
    written = [arguments[i + 1] for i, flag in enumerate(arguments) if flag in ("--json", "--output")]
    assert all((folder / name).stat().st_size for name in written)


def test_a_command_of_the_shell(folder: Path) -> None:
    """By the name that stands on the page."""
    shutil.which("skipstone") or pytest.skip("this Python has no command skipstone")
    done = subprocess.run(["bash", "-c", "skipstone --help"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and done.stdout.startswith("usage: skipstone")


def test_the_server(folder: Path) -> None:
    (line,) = [line for line in USE if words(line)[1] == "serve"]
    with served([sys.executable, "-m", *words(line), *shlex.split(SHORTER["serve"])], os.environ, folder) as url:
        assert b'"demo"' in urllib.request.urlopen(f"{url}/v1/models").read()


def test_the_python_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code in blocks("Use", "python"):
        exec(compile(code, "README.md", "exec"), {})
        assert len(capsys.readouterr().out) > 100


class Shell:
    """A shell of a machine that has this clone, Python and pip's settings, and nothing that this test runs in."""

    def __init__(self, clone: Path, home: Path) -> None:
        self.clone, self.setting = clone, ":"
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "http", "LANG"))}
        path = os.pathsep.join(part for part in os.get_exec_path() if not part.startswith(sys.prefix))
        self.environ = kept | {"PATH": path, "HOME": str(home)}

    def run(self, line: str, given: str = "") -> str:
        """Run one line to its end; return what it printed."""
        script = f"set -e; {self.setting}\n{line}\n"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.clone, env=self.environ, input=given, capture_output=True, text=True,
            timeout=LONG_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


@pytest.mark.long
def test_a_fresh_machine(tmp_path: Path) -> None:
    """A copy of the clone and an empty home: everything as printed, in the order of the page.

    Of `scripts/test` the set-up, lint and types are; its tests would run this suite within itself, so one file is.
    """
    clone, home = tmp_path / "clone", tmp_path / "home"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    home.mkdir()
    shell = Shell(clone, home)
    for line in commands("Quickstart"):
        if words(line)[0] == "source":
            shell.setting = line
            continue
        shown = shell.run(line.partition("#")[0] + (" tests/test_config.py" if "scripts/test" in line else ""))
        if words(line)[0] == "scripts/demo":
            assert (
                "A virtual table is an object that" in shown and "source .venv/bin/activate" in shown.splitlines()[-1]
            )
    for line in USE:
        if words(line)[1] == "serve":
            script = f"{shell.setting}\nexec {line}"
            with served(["bash", "-c", script], shell.environ, clone) as url:
                assert f"on {url}" in line
                assert b'"demo"' in urllib.request.urlopen(f"{url}/v1/models").read()
        else:
            assert shell.run(line, "What does zip() do?\n").strip()
    assert (clone / "answers.jsonl").stat().st_size and (clone / "k.png").stat().st_size
    for code in blocks("Use", "python"):
        assert len(shell.run("python -", code)) > 100
    hint = "python -c 'from skipstone.errors import install_hint; print(install_hint(\"serve\"))'"
    assert "skipstone" in shell.run(f'eval "$({hint}) --dry-run"')
