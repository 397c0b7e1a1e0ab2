"""The page at / in a real browser: real typing, real streaming, by mouse and by keyboard; pictures go to build/page.

Needs Debian's chromium, and playwright to drive it; both are part of what CI installs.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Serving, serving
from waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "checkpoints" / "demo"
PICTURES = ROOT / "build" / "page"
CHROMIUM = shutil.which("chromium")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = playwright.expect
pytestmark = [
    pytest.mark.skipif(not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here"),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; apt-get install chromium"),
]
PROMPT = "A virtual table is an object that presents an SQL interface. "
KINDS = ("accepted", "recovered", "bonus", "target")
PATIENCE = 1000 * PATIENCE_S  # as the browser counts
expect.set_options(timeout=PATIENCE)


class Page:
    """A page of the browser, with what went wrong on it and where it sent requests."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(PATIENCE)
        self.troubles: list[str] = []
        self.addresses: list[str] = []
        self.tab.on("console", lambda one: self.troubles.append(one.text) if one.type in ("error", "warning") else None)
        self.tab.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.tab.on("request", lambda request: self.addresses.append(request.url))
        self.tab.goto(url)

    def ready(self) -> Page:
        self.tab.wait_for_selector("#proposer option", state="attached")
        return self

    def look(self, expression: str) -> Any:
        """The value of a script; the page itself may not evaluate any, so the browser is asked."""
        session = self.context.new_cdp_session(self.tab)
        return session.send("Runtime.evaluate", {"expression": expression, "returnByValue": True})["result"].get(
            "value"
        )

    def tab_to(self, name: str) -> None:
        """Press Tab until the element of that name has the focus."""
        for _ in range(100):
            if self.look("document.activeElement.id") == name:
                return
            self.tab.keyboard.press("Tab")
        raise AssertionError(f"{name} cannot be reached")

    def finished(self) -> None:
        expect(self.tab.locator("#status")).to_have_text("Done.")

    def texts(self, where: str = "#text") -> list[tuple[str, str]]:
        """Kind and text of every token."""
        script = f"[...document.querySelectorAll('{where} .token')].map(t => [t.className, t.textContent])"
        return [(name.split()[1], text) for name, text in self.look(script)]

    def written(self, where: str = "#text") -> str:
        return "".join(text for kind, text in self.texts(where) if kind != "prompt")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(spec="mtp:3") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET, timeout=PATIENCE)
        yield chromium
        chromium.close()


@pytest.fixture
def page(server: Serving, browser: Any) -> Iterator[Page]:
    """Nothing may go wrong on it, and no request may leave the machine."""
    page = Page(browser, server.url).ready()
    yield page
    page.context.close()
    assert page.troubles == []
    assert all(address.startswith((server.url, "data:")) for address in page.addresses)
    wait_for(lambda: server.idle)


def test_typing_and_streaming(page: Page, server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    tab, runner = page.tab, server.service.llm.engine.runner
    start, steps, go_on = runner.start, itertools.count(1), threading.Event()

    def held(plan: Any) -> Any:
        """The eighth step of about twenty waits until the tokens before it are seen."""
        assert next(steps) != 8 or go_on.wait(PATIENCE_S)
        return start(plan)

    monkeypatch.setattr(runner, "start", held)
    tab.fill("#input", "")
    tab.locator("#input").press_sequentially("A virtual table is an object that")
    tab.fill("#max-tokens", "48")
    tab.press("#input", "Control+Enter")
    written = tab.locator("#text .token:not(.prompt)")
    expect(written).not_to_have_count(0)
    assert tab.locator("#status").text_content() == "Running." and written.count() < 48
    go_on.set()
    page.finished()
    body = {
        "prompt": "A virtual table is an object that", "max_tokens": 48, "temperature": 0, "return_token_origins": True,
    }  # fmt: skip
    whole = server.post("/v1/completions", body).json()
    (choice,) = whole["choices"]
    assert page.written() == choice["text"]
    prompt = "".join(text for kind, text in page.texts() if kind == "prompt")
    assert prompt == "<|bos|>A virtual table is an object that"
    drafting = whole["metrics"]["speculative_decoding"]
    for kind in KINDS:
        count = choice["token_origins"].count(kind)
        assert [one for one, _ in page.texts()].count(kind) == count
        assert tab.locator(f"#legend [data-origin={kind}] b").text_content() == str(count)
    assert f"{drafting['num_accepted_draft_tokens']} of {drafting['num_draft_tokens']}" in tab.inner_text("#numbers")
    assert tab.locator("#strip i").count() == drafting["num_spec_steps"]
    histogram = drafting["acceptance_histogram"]
    shares = [f"{round(100 * sum(histogram[i:]) / sum(histogram))} %" for i in (1, 2, 3)]
    assert tab.locator("#positions .value").all_text_contents() == shares


def test_k_and_proposer(page: Page) -> None:
    tab = page.tab
    tab.fill("#input", PROMPT)
    tab.fill("#max-tokens", "16")
    texts = []
    for k in ("3", "1", "0"):
        tab.fill("#k", k)
        tab.click("#run")
        page.finished()
        texts.append(page.written())
        kinds = {kind for kind, _ in page.texts()} - {"prompt"}
        assert kinds == {"target"} if k == "0" else "accepted" in kinds
        tab.fill("#input", PROMPT + " ")  # so that the state is seen to change
        tab.fill("#input", PROMPT)
    assert len(set(texts)) == 1
    tab.fill("#k", "3")
    tab.select_option("#proposer", "off")
    tab.click("#run")
    page.finished()
    assert page.written() == texts[0] and {kind for kind, _ in page.texts()} == {"prompt", "target"}
    assert tab.locator("#compare").is_disabled()


def test_keys_alone(page: Page) -> None:
    """From the first Tab to a token's heat map, without a mouse."""
    tab = page.tab
    tab.keyboard.press("Tab")
    assert page.look("document.activeElement.className") == "skip"
    page.tab_to("input")
    tab.keyboard.press("Control+A")
    tab.keyboard.type(PROMPT * 20)
    page.tab_to("max-tokens")
    tab.keyboard.press("Control+A")
    tab.keyboard.type("24")
    page.tab_to("run")
    tab.keyboard.press("Enter")
    page.finished()
    page.tab_to("text")
    assert page.look("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for key in ("End", "ArrowLeft", "ArrowLeft", "Enter"):
        tab.keyboard.press(key)
    tab.wait_for_selector("#map-frame:not([hidden])")
    position = len(page.texts()) - 3
    note = tab.inner_text("#read-note")
    assert f"at position {position}" in note and "8 of" in note and "Layer 0 read everything" in note
    assert tab.locator("#row option").count() == 1 + 5 * 2  # layers and groups
    read = page.look("[...document.querySelectorAll('#text .token')].map(t => t.classList.contains('read'))")
    assert any(read) and not all(read[:position]) and not any(read[position:])
    assert len({i // 32 for i, one in enumerate(read) if one}) == 8
    colours = page.look(
        "(() => { const c = document.getElementById('map'); const d = c.getContext('2d').getImageData(0, 0, c.width,"
        " c.height).data; const s = new Set(); for (let i = 0; i < d.length; i += 4) s.add(d.slice(i, i + 4).join());"
        " return s.size; })()"
    )
    assert colours > 3
    assert tab.locator("#likely .value").count() == 6
    tab.focus("#row")
    tab.keyboard.press("ArrowUp")  # to "nothing"
    expect(tab.locator("#text .read")).to_have_count(0)


def test_side_by_side(page: Page) -> None:
    tab = page.tab
    tab.fill("#input", PROMPT)
    tab.fill("#max-tokens", "40")
    tab.fill("#temperature", "0.8")
    tab.fill("#seed", "5")
    tab.click("#compare")
    tab.wait_for_selector("#verdict[data-same]")
    verdict = tab.inner_text("#verdict")
    assert tab.get_attribute("#verdict", "data-same") == "true"
    assert re.fullmatch(
        r"The same text \(\d+ tokens\)\. With k = 3: [\d.]+ s (saved|lost), [\d.]+ times as fast\.", verdict
    )
    assert page.written("#left") == page.written("#right") != ""
    assert {kind for kind, _ in page.texts("#left")} == {"target"}
    assert "accepted" in {kind for kind, _ in page.texts("#right")}
    assert [bool(re.search(r"\d s, \d+ tokens/s", tab.inner_text(bar))) for bar in ("#bar-left", "#bar-right")] == [
        True
    ] * 2
    tab.locator("#right .token").nth(2).click()
    tab.wait_for_selector("#map-frame:not([hidden])")


def test_stop_frees_the_place(page: Page, server: Serving) -> None:
    tab = page.tab
    tab.fill("#input", PROMPT * 3)
    tab.fill("#max-tokens", "3000")
    for stop in (lambda: tab.click("#stop"), lambda: tab.keyboard.press("Escape")):
        tab.click("#run")
        wait_for(lambda: server.service.stats().running == 1)  # until then the last text is shown
        tab.wait_for_selector("#text .accepted")
        stop()
        wait_for(lambda: server.service.stats().running == 0)
        expect(tab.locator("#status")).to_have_text("Stopped.")
        assert tab.locator("#stop").is_disabled()


def test_chat(page: Page, server: Serving) -> None:
    tab = page.tab
    tab.check("input[value=chat]", force=True)
    tab.fill("#max-tokens", "12")
    said, conversation = [], []
    for question in ("What does zip() do?", "And <script>document.title = 'hit'</script> map()?"):
        tab.fill("#input", question)
        tab.click("#run")
        page.finished()
        conversation.append({"role": "user", "content": question})
        body = {"messages": conversation, "max_tokens": 12, "temperature": 0}
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        conversation.append({"role": "assistant", "content": message["content"]})
        said.append(message["content"])
        tokens = [text for kind, text in page.texts() if kind != "prompt"]
        assert "".join(tokens[:-1] if tokens[-1].startswith("<|") else tokens) == said[-1]
        assert tab.input_value("#input") == ""
    assert said[0] in tab.locator("#text").text_content()
    assert "<script>document.title" in tab.locator("#text").text_content() and tab.title() == "skipstone"
    tab.click("#reset")
    assert tab.locator("#text .token").count() == 0 and not tab.locator("#reset").is_visible()


def test_errors_are_shown(page: Page) -> None:
    tab = page.tab
    tab.fill("#max-tokens", "9999")
    tab.click("#run")
    tab.wait_for_selector("#notice:not([hidden])")
    assert "context holds 4096" in tab.inner_text("#notice")
    tab.fill("#max-tokens", "2")
    tab.click("#run")
    page.finished()
    assert not tab.locator("#notice").is_visible()
    assert any("400" in trouble for trouble in page.troubles)  # the browser's own note of the answer
    page.troubles.clear()


def test_the_server_card(page: Page, server: Serving) -> None:
    tab = page.tab
    expect(tab.locator("#server")).to_contain_text("tokens written")
    tab.fill("#max-tokens", "5")
    tab.click("#run")
    page.finished()
    total = f"{server.service.stats().generated_tokens:,}"
    expect(tab.locator("#server")).to_contain_text(total)
    tab.click("summary")
    shown = tab.inner_text("#curl")
    body = json.loads(shown.split("-d '")[1].removesuffix("'"))
    assert server.url + "/v1/completions" in shown
    assert server.post("/v1/completions", body).status_code == 200


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_themes_and_widths(server: Serving, browser: Any, theme: str, width: int) -> None:
    """Nothing sticks out, everything has a name, colours follow the system or the switch; a picture of each is kept."""
    size = {"width": width, "height": 844}
    page = Page(browser, server.url, color_scheme=theme, viewport=size, reduced_motion="reduce").ready()
    tab = page.tab
    tab.fill("#input", PROMPT * 30)
    tab.fill("#max-tokens", "64")
    tab.click("#run")
    page.finished()
    tab.locator("#text .token").nth(-12).click()
    tab.wait_for_selector("#map-frame:not([hidden])")
    PICTURES.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=PICTURES / f"run-{theme}-{width}.png", full_page=True)
    assert page.look("document.documentElement.scrollWidth") <= width
    unnamed = (
        "[...document.querySelectorAll('input, select, textarea, button')].filter(e => !(e.labels?.length ||"
        " e.getAttribute('aria-label') || e.textContent.trim())).map(e => e.id)"
    )
    assert page.look(unnamed) == []
    assert page.look("getComputedStyle(document.querySelector('.track i')).transitionDuration") == "0s"
    shade = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0] > 128"
    assert page.look(shade) is (theme == "light")
    tab.click("#compare")
    tab.wait_for_selector("#verdict[data-same=true]")
    tab.screenshot(path=PICTURES / f"compare-{theme}-{width}.png", full_page=True)
    assert page.look("document.documentElement.scrollWidth") <= width
    tab.click("#theme")
    assert page.look(shade) is True
    tab.click("#theme")
    assert page.look(shade) is False
    tab.reload()
    assert page.look(shade) is False, "the choice is kept"
    tab.click("#theme")
    assert page.look(shade) is (theme == "light")
    assert page.troubles == []
    page.context.close()


def test_a_key_is_asked_for(browser: Any) -> None:
    with serving(server={"api_key": "a-secret-key"}) as server:
        page = Page(browser, server.url)
        page.tab.wait_for_selector("#key-field:not([hidden])")
        page.tab.fill("#key", "a-secret-key")
        page.tab.press("#key", "Enter")
        page.ready()
        page.tab.fill("#max-tokens", "2")
        page.tab.click("#run")
        page.finished()
        assert len(page.texts()) > 2 and not page.tab.locator("#key-field").is_visible()
        assert page.look("JSON.stringify({...localStorage, ...sessionStorage})").find("secret") < 0
        page.context.close()


def test_the_files_may_do_nothing_but_talk_to_their_server(server: Serving) -> None:
    for path, kind in (("/", "text/html"), ("/page/page.js", "text/javascript"), ("/page/page.css", "text/css")):
        answer = server.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert "http" not in re.sub(r"xmlns='http://www.w3.org/2000/svg'|HTTP \$", "", answer.text)
    total = sum(file.stat().st_size for file in (ROOT / "skipstone" / "server" / "page").iterdir())
    assert total < 60_000
    assert server.get("/page/../cli.py").status_code == 404
    assert server.get("/page/nothing.js").status_code == 404


def test_it_can_be_left_out() -> None:
    with serving(server={"ui": False, "api_key": "k"}) as server:
        assert server.get("/").status_code == 401
        assert server.get("/", headers={"authorization": "Bearer k"}).status_code == 404
