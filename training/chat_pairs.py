"""Chat-form documents from "heading -> section" and "function -> docstring" pairs.

Deterministic: every choice comes from a hash of the text, so a rebuild gives the same dialogues.
"""

import ast
import hashlib
import re
from collections.abc import Iterator

SYSTEM = ("You are a helpful assistant. Answer from the documentation.", "Answer briefly and precisely.",
          "You are Skipstone, a small documentation assistant.")
ASK = ("What is {0}?", "Explain {0}.", "Tell me about {0}.", "Describe {0} in {1}.", "How does {0} work?", "Can you summarise {0} for me?")
ASK_FUNCTION = ("What does `{0}` do?", "Explain the function `{0}`.", "Describe `{0}`.", "How do I use `{0}`?")
ASK_CODE = ("Write a Python function with the signature `{0}`.", "Show me an implementation of `{0}`.", "Implement `{0}` in Python.")
TOPIC = {"python-doc": "Python", "python-stdlib": "Python", "python-minimal": "Python", "sqlite-doc": "SQLite", "postgresql-doc": "PostgreSQL",
         "abs-guide": "Bash", "jargon": "hacker slang", "devil": "The Devil's Dictionary"}
KEEP = {"python-stdlib": 0.8, "python-minimal": 0.8, "python-doc": 0.4, "sqlite-doc": 0.35, "postgresql-doc": 0.4, "abs-guide": 0.4,
        "jargon": 0.4, "devil": 0.4}


def draw(text: str, count: int) -> int:
    """A fixed pseudo-random number in 0..count-1 for this text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % count


def clip(text: str, limit: int = 700) -> str:
    """Leading paragraphs up to the limit; never cuts inside a paragraph unless the first is too long."""
    kept, size = [], 0
    for paragraph in text.strip().split("\n\n"):
        if kept and size + len(paragraph) > limit:
            break
        kept.append(paragraph)
        size += len(paragraph)
    joined = "\n\n".join(kept)
    if len(joined) <= 2 * limit:
        return joined
    return joined[: 2 * limit].rsplit(". ", 1)[0] + "."


def python_pairs(text: str) -> Iterator[tuple[str, str]]:
    """(question, answer) from functions with docstrings, and short functions as code."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("__"):
            continue
        header = lines[node.lineno - 1].strip().rstrip(":")
        doc = ast.get_docstring(node)
        if doc and len(doc) > 40:
            yield ASK_FUNCTION[draw(doc, len(ASK_FUNCTION))].format(re.sub(r"^(def|class) ", "", header)), clip(doc)
        body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef) and header.endswith(")") and 120 < len(body) < 900 and draw(body, 4) == 0:
            indent = len(body) - len(body.lstrip())
            code = "\n".join(line[indent:] for line in body.splitlines())
            yield ASK_CODE[draw(code, len(ASK_CODE))].format(header), f"```python\n{code}\n```"


def rst_pairs(text: str, topic: str) -> Iterator[tuple[str, str]]:
    """Headings with their section, and `.. function::` style directives with their description."""
    for match in re.finditer(r"^(.{4,70})\n([=\-~^\"*])\2{3,}\n\n((?:(?!\.\. )[^\n]+\n|\n(?![^\n]+\n[=\-~^\"*]{4,})){2,30})", text, re.M):
        title, body = match.group(1).strip(), match.group(3)
        if len(body) > 120:
            yield ASK[draw(title + body, len(ASK))].format(title, topic), clip(body)
    directive = (r"^\.\. (?:function|method|class|attribute|data|exception|decorator|opcode|cmdoption|option):: "
                 r"([^\n]+)\n((?:\n|   [^\n]+\n)+)")
    for match in re.finditer(directive, text, re.M):
        body = re.sub(r"^   ", "", match.group(2), flags=re.M)
        body = re.sub(r"^:noindex:.*\n", "", body.split("\n.. ")[0], flags=re.M).strip()
        if len(body) > 80:
            yield ASK_FUNCTION[draw(body, len(ASK_FUNCTION))].format(match.group(1).strip()), clip(body)


def heading_pairs(text: str, topic: str) -> Iterator[tuple[str, str]]:
    """`## title` sections of converted HTML pages."""
    pieces = re.split(r"^#{1,4} (.+)$", text, flags=re.M)
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        title = re.sub(r"^[A-Z]?[\d.]+\s*", "", title).strip()
        if 3 < len(title) < 80 and len(body) > 150:
            yield ASK[draw(title + body[:200], len(ASK))].format(title, topic), clip(body)


def entry_pairs(source: str, text: str, topic: str) -> Iterator[tuple[str, str]]:
    """Dictionary entries: a headword and the text under it."""
    pattern = r"^([A-Z][A-Z\-' ]{2,30}), ((?:[^\n]+\n?)+)"
    if source == "jargon":
        pattern = r"^([^\n:]{2,40}):[ \n]((?:[^\n]+\n?)+(?:\n[^\n:]{60,}[^\n]*\n(?:[^\n]+\n?)*)*)"
    for match in re.finditer(pattern, text, re.M):
        body = re.sub(r"\n[ \t]+", "\n", match.group(2))
        if len(body) > 100:
            yield ASK[draw(body, 3)].format(match.group(1).strip().lower() if source == "devil" else match.group(1).strip(), topic), clip(body)


def dialogues(source: str, path: str, kind: str, text: str) -> Iterator[list[list[str]]]:
    """Group the kept pairs of one file into dialogues of one to four exchanges: lists of [role, text]."""
    topic = TOPIC.get(source, "")
    if source.startswith("python-") and kind == "code":
        found = python_pairs(text)
    elif source == "python-doc":
        found = rst_pairs(text, topic)
    elif source in ("jargon", "devil"):
        found = entry_pairs(source, text, topic)
    elif kind == "code" or source not in KEEP:
        return
    else:
        found = heading_pairs(text, topic)
    kept = [pair for pair in found if draw("keep" + pair[0] + pair[1], 1000) < 1000 * KEEP[source]]
    start = 0
    while start < len(kept):
        size = 1 + draw(f"{path}{start}", 4)
        turns = [["system", SYSTEM[draw(path + str(start) + "s", len(SYSTEM))]]] if draw(f"{path}{start}sys", 10) < 3 else []
        for question, answer in kept[start : start + size]:
            turns += [["user", question], ["assistant", answer.strip()]]
        yield turns
        start += size
