"""Corpus: downloads the permissive packages, turns them into documents, splits by file, writes NOTICE and a manifest.

    python training/corpus.py [--data training/.data] [--offline]

Output in the data folder: train.jsonl and heldout.jsonl, one document a line:
{"source", "path", "kind": code | prose | table | dialogue, "text" or "turns": [[role, text], ...]}.
"""

import argparse
import gzip
import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chat_pairs import dialogues
from html_text import html_to_text, tidy

HELDOUT_PER_MILLE = 20
PART_CHARS = 24_000  # single-file sources are cut into parts of this size, so that the split is by part


@dataclass(frozen=True)
class Source:
    """One row of NOTICE and the reader that turns the unpacked package into (path, kind, text)."""

    key: str
    package: str
    title: str
    licence: str
    reader: str
    rights: str


SOURCES = (
    Source("python-doc", "python3.11-doc", "CPython documentation, reST sources", "PSF-2.0 (code samples also 0BSD)", "read_rst",
           "Copyright 2001-2023 Python Software Foundation. All rights reserved."),
    Source("python-stdlib", "libpython3.11-stdlib", "CPython standard library", "PSF-2.0", "read_python",
           "Copyright 2001-2023 Python Software Foundation; Copyright 2000 BeOpen.com; Copyright 1995-2001 CNRI; "
           "Copyright 1991-1995 Stichting Mathematisch Centrum. Some modules carry their own permissive notices."),
    Source("python-minimal", "libpython3.11-minimal", "CPython standard library, core modules", "PSF-2.0", "read_python",
           "As for the CPython standard library."),
    Source("sqlite-doc", "sqlite3-doc", "SQLite documentation", "public domain", "read_sqlite", "Dedicated to the public domain by D. Richard Hipp."),
    Source("postgresql-doc", "postgresql-doc-15", "PostgreSQL documentation", "PostgreSQL", "read_html",
           "Portions Copyright 1996-2025, PostgreSQL Global Development Group; Portions Copyright 1994, The Regents of the University of California."),
    Source("abs-guide", "abs-guide", "Advanced Bash-Scripting Guide", "public domain", "read_abs", "Granted to the public domain by Mendel Cooper."),
    Source("jargon", "jargon-text", "The Jargon File 4.4.7, 29 Dec 2003", "public domain", "read_jargon",
           "In the public domain; maintained by Eric S. Raymond."),
    Source("devil", "dict-devil", "The Devil's Dictionary, Ambrose Bierce", "public domain", "read_devil", "First published 1911; copyright expired."),
    Source("us-state", "miscfiles", "US Declaration of Independence and Constitution (share/state only)", "public domain", "read_state",
           "Works of the United States government."),
)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def unpack(data: Path, source: Source, offline: bool) -> tuple[Path, Path]:
    """Download and unpack one package; returns (deb file, unpacked folder)."""
    deb_dir, target = data / "deb", data / "raw" / source.package
    deb_dir.mkdir(parents=True, exist_ok=True)
    if not offline and not list(deb_dir.glob(f"{source.package}_*.deb")):
        subprocess.run(["apt-get", "download", source.package], cwd=deb_dir, check=True)
    debs = sorted(deb_dir.glob(f"{source.package}_*.deb"))
    if not debs:
        raise FileNotFoundError(f"no package file for {source.package} in {deb_dir}; run once without --offline")
    if not target.exists():
        target.mkdir(parents=True)
        subprocess.run(["dpkg", "-x", str(debs[-1]), str(target)], check=True)
    return debs[-1], target


def read_rst(root: Path) -> Iterator[tuple[str, str, str]]:
    base = next(root.rglob("_sources"))
    for path in sorted(base.rglob("*.txt")):
        yield str(path.relative_to(base)), "prose", tidy(path.read_text(encoding="utf-8"))


def read_python(root: Path) -> Iterator[tuple[str, str, str]]:
    base = next(root.rglob("python3.11"))
    for path in sorted(root.rglob("*.py")):
        name = str(path.relative_to(base)) if base in path.parents else path.name
        if not path.is_file() or re.search(r"(^|/)(test|tests|idle_test|pydoc_data)/", name) or name.startswith("encodings/"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) > 200:
            yield name, "code", tidy(text) + "\n"


def read_sqlite(root: Path) -> Iterator[tuple[str, str, str]]:
    skipped = {"requirements.html", "doc_backlink_crossref.html", "doc_keyword_crossref.html", "doc_pagelink_crossref.html",
               "capi3ref.html", "syntaxdiagrams.html", "keyword_index.html", "sitemap.html"}
    for name, kind, text in read_html(root):
        if Path(name).name not in skipped:
            yield name, kind, text


def read_html(root: Path) -> Iterator[tuple[str, str, str]]:
    for path in sorted(root.rglob("*.html")):
        text = html_to_text(path.read_text(encoding="utf-8", errors="replace"))
        if len(text) < 300:
            continue
        lines = text.splitlines()
        is_table = sum(" | " in line for line in lines) > 0.2 * len(lines)
        yield path.name, "table" if is_table else "prose", text


def read_abs(root: Path) -> Iterator[tuple[str, str, str]]:
    yield from read_html(root)
    for path in sorted(root.rglob("*.sh")):
        text = tidy(path.read_text(encoding="utf-8", errors="replace"))
        if len(text) > 150:
            yield "examples/" + path.name, "code", text + "\n"


def parts(name: str, text: str) -> Iterator[tuple[str, str, str]]:
    """Cut one long text at blank lines into pieces of about PART_CHARS."""
    piece: list[str] = []
    size = count = 0
    for paragraph in tidy(text).split("\n\n"):
        piece.append(paragraph)
        size += len(paragraph)
        if size > PART_CHARS:
            yield f"{name}#{count}", "prose", "\n\n".join(piece)
            piece, size, count = [], 0, count + 1
    yield f"{name}#{count}", "prose", "\n\n".join(piece)


def read_jargon(root: Path) -> Iterator[tuple[str, str, str]]:
    raw = gzip.decompress(next(root.rglob("jargon.txt.gz")).read_bytes())
    yield from parts("jargon.txt", raw.decode("utf-8", errors="replace").replace("\n   ", "\n"))


def read_devil(root: Path) -> Iterator[tuple[str, str, str]]:
    raw = gzip.decompress(next(root.rglob("devil.dict.dz")).read_bytes()).decode("utf-8", errors="replace")
    yield from parts("devil.dict", raw)


def read_state(root: Path) -> Iterator[tuple[str, str, str]]:
    for path in sorted((next(root.rglob("state"))).glob("us-*.gz")):
        yield path.name, "prose", tidy(gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace"))


def is_heldout(source: str, path: str) -> bool:
    """Deterministic 2 % of the files; documents and dialogues of a file always land on the same side."""
    digest = hashlib.sha256(f"{source}/{path}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELDOUT_PER_MILLE


def drop_repeats(text: str, seen: set[bytes]) -> str:
    """Remove paragraphs longer than 200 characters that an earlier document already had (licence headers, shared notes)."""
    kept = []
    for paragraph in text.split("\n\n"):
        if len(paragraph) > 200:
            digest = hashlib.sha256(re.sub(r"\s+", " ", paragraph).encode()).digest()[:12]
            if digest in seen:
                continue
            seen.add(digest)
        kept.append(paragraph)
    return "\n\n".join(kept)


def build(data: Path, offline: bool) -> dict:
    """Write both splits; returns the manifest."""
    seen: set[bytes] = set()
    rows, outputs = [], {name: (data / f"{name}.jsonl").open("w", encoding="utf-8") for name in ("train", "heldout")}
    for source in SOURCES:
        deb, root = unpack(data, source, offline)
        stats = {"files": 0, "heldout_files": 0, "characters": 0, "dialogue_characters": 0}
        for path, kind, text in globals()[source.reader](root):
            text = drop_repeats(text, seen)
            if len(text) < 150:
                continue
            heldout = is_heldout(source.key, path)
            documents = [{"source": source.key, "path": path, "kind": kind, "text": text}]
            documents += [{"source": source.key, "path": path, "kind": "dialogue", "turns": turns} for turns in dialogues(source.key, path, kind, text)]
            for document in documents:
                outputs["heldout" if heldout else "train"].write(json.dumps(document, ensure_ascii=False) + "\n")
            stats["files"] += 1
            stats["heldout_files"] += heldout
            stats["characters"] += len(text)
            stats["dialogue_characters"] += sum(len(t) for d in documents[1:] for _, t in d["turns"])
        version = deb.name.split("_")[1].replace("%3a", ":")
        rows.append({"source": source.key, "title": source.title, "package": source.package, "version": version,
                     "licence": source.licence, "rights": source.rights, "sha256": sha256(deb), **stats})
    for handle in outputs.values():
        handle.close()
    return {"sources": rows, "splits": {name: {"sha256": sha256(data / f"{name}.jsonl"), "bytes": (data / f"{name}.jsonl").stat().st_size} for name in outputs}}


def notice(manifest: dict) -> str:
    """Text of NOTICE: what the demo checkpoints were trained on, and under which terms."""
    lines = ["Skipstone", "", "The demo checkpoints under checkpoints/ were trained from scratch on text from the packages below",
             "(Debian package files; the SHA-256 is that of the package file). No other text or model was used.",
             "The excerpts in checkpoints/prompts.jsonl are taken from held-out files of the same packages.", ""]
    for row in manifest["sources"]:
        lines += [row["title"], f"    package {row['package']} {row['version']}", f"    licence {row['licence']}", f"    rights  {row['rights']}",
                  f"    sha256  {row['sha256']}", ""]
    lines += ["Licence texts: PSF-2.0 https://docs.python.org/3/license.html; 0BSD https://opensource.org/license/0bsd;",
              "PostgreSQL https://www.postgresql.org/about/licence/.",
              "The Jargon File asks for citation: \"The on-line hacker Jargon File, version 4.4.7, 29 Dec 2003\".", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / ".data")
    parser.add_argument("--offline", action="store_true", help="use the package files already in the data folder")
    options = parser.parse_args()
    manifest = build(options.data, options.offline)
    here = Path(__file__).parent
    (here / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (here.parent / "NOTICE").write_text(notice(manifest))
    for row in manifest["sources"]:
        print(f"{row['source']:16} {row['files']:5} files ({row['heldout_files']} held out) {row['characters'] / 1e6:6.2f} M characters, "
              f"dialogue {row['dialogue_characters'] / 1e6:.2f} M")


if __name__ == "__main__":
    main()
