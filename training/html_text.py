"""HTML to plain text for documentation pages: paragraphs, code blocks, and tables as `a | b` rows.

Knows tags. Does not know sources, licences or tokens.
"""

import re
from html.parser import HTMLParser

BLOCKS = {"p", "div", "ul", "ol", "table", "section", "blockquote", "dl", "dt", "dd", "h1", "h2", "h3", "h4", "h5", "h6",
          "center", "hr", "form", "fieldset", "thead", "tbody"}
SKIPPED = {"script", "style", "svg", "head", "noscript"}
SKIPPED_CLASSES = ("navheader", "navfooter", "nosearch", "menu", "tagline", "fancy_toc", "toc", "searchmenu")
HEADINGS = {"h1", "h2", "h3", "h4"}
VOID = {"br", "hr", "img", "link", "meta", "input", "col", "path", "area", "base", "source", "wbr"}


class TextExtractor(HTMLParser):
    """Collect text; `headings` holds (offset into the pieces, title) for chat pairs."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.skip_depth = 0
        self.skip_tag = ""
        self.pre_depth = 0
        self.cell = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skip_depth:
            self.skip_depth += tag == self.skip_tag
            return
        classes = (dict(attrs).get("class") or "").split()
        if tag in SKIPPED or (tag not in VOID and any(name in SKIPPED_CLASSES for name in classes)):
            self.skip_tag, self.skip_depth = tag, 1
        elif tag == "pre":
            self.pre_depth += 1
            self.pieces.append("\n\n")
        elif tag == "br":
            self.pieces.append("\n")
        elif tag == "li":
            self.pieces.append("\n\n* ")
        elif tag == "tr":
            self.cell = 0
            self.pieces.append("\n")
        elif tag in {"td", "th"}:
            self.pieces.append(" | " if self.cell else "")
            self.cell += 1
        elif tag in HEADINGS:
            self.pieces.append("\n\n" + "#" * int(tag[1]) + " ")
        elif tag in BLOCKS:
            self.pieces.append("" if self.cell else "\n\n")

    def handle_endtag(self, tag: str) -> None:
        if self.skip_depth:
            self.skip_depth -= tag == self.skip_tag
        elif tag == "pre":
            self.pre_depth = max(0, self.pre_depth - 1)
            self.pieces.append("\n\n")
        elif tag == "table":
            self.cell = 0
            self.pieces.append("\n\n")
        elif tag in BLOCKS and not self.cell:
            self.pieces.append("\n\n")

    def handle_data(self, data: str) -> None:
        if self.skip_depth:
            return
        if self.pre_depth:
            self.pieces.append(data)
        else:
            self.pieces.append(re.sub(r"\s+", " ", data))


def tidy(text: str) -> str:
    """Trim line ends, collapse runs of blank lines, drop leading blanks of prose lines, drop control characters."""
    text = text.replace("\r\n", "\n").replace("\u00a0", " ").replace("\ufeff", "")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n (?! )", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def html_to_text(html: str) -> str:
    """Plain text of one page; pages without an end tag for `li`, `td` or `p` are fine."""
    extractor = TextExtractor()
    extractor.feed(html)
    extractor.close()
    return tidy("".join(extractor.pieces))
