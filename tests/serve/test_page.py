"""The page at /, in headless Chromium, by keyboard, mouse and touch.

The browser's part needs Chromium and the package `playwright`; elsewhere it is skipped.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftproof.serve.settings import ApiKeys, Settings
from serving import NGRAM, Served, make_folder, serving, tiny

PAGE = Path(__file__).parents[2] / "src" / "draftproof" / "serve" / "http" / "page"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROMPT = "one two three one two three one two three"
SAME, DIFFERENT = ".verdict.same", ".verdict.different"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_folder(tmp_path_factory.mktemp("page"))
    with serving(tiny(folder, NGRAM)) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    yield from opened(browser, served.url)


def opened(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page that complains of nothing and asks nobody but the server."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith((url, "data:")) or wrong.append(asked.url))
    page.goto(url)
    yield page
    context.close()
    assert wrong == []


def ask(page: Any, prove: bool = False, **options: Any) -> None:
    """By keyboard alone, from the top of the page; options by their fields."""
    settings = {"temperature": 0, "most": 24, "seed": 7, **options}
    page.evaluate(
        "s => { for (const [k, v] of Object.entries(s)) document.getElementById(k).value = v }", settings
    )
    if prove:
        page.locator("#prove").focus()
        page.keyboard.press("Space")
    page.locator("body").focus()
    page.locator("#prompt").focus()
    page.keyboard.type(PROMPT)
    page.keyboard.press("Enter")


def ended(page: Any) -> None:
    page.wait_for_selector(".t")
    page.wait_for_selector("#send:enabled")


def test_what_it_needs_comes_with_the_package(served: Served) -> None:
    index = served.http.get("/")
    assert index.headers["content-type"].startswith("text/html")
    named = set(re.findall(r'(?:src|href)="(/[^"]+)"', index.text))
    for script in PAGE.glob("*.js"):
        named |= set(re.findall(r'from "([^"]+)"', script.read_text()))
    assert named == {f"/page/{p.name}" for p in PAGE.iterdir() if p.name != "index.html"}
    for path in named:
        assert served.http.get(path).content == (PAGE / path.removeprefix("/page/")).read_bytes()
    for file in PAGE.iterdir():  # the network is not needed, and nothing of a model's text becomes markup
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text and "innerHTML" not in text and "eval(" not in text


@needs_browser
def test_an_answer_by_keyboard(page: Any, served: Served) -> None:
    """Its tokens, colours, steps and figures are those that the API tells."""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    ask(page)
    ended(page)
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_completion_tokens": 24,
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 5,
        "return_token_ids": True,
        "speculative": False,
    }
    plain = served.post("/v1/chat/completions", body).json()["choices"][0]
    assert page.locator(".said").text_content() == plain["message"]["content"]
    looks = page.eval_on_selector_all(".said .t", "all => all.map(x => x.className.split(' ')[1])")
    assert len(looks) == len(plain["token_ids"]) and "accepted" in looks
    columns = page.locator("#strip .step").count()
    own = page.locator("#strip .own").count()
    assert page.locator("#strip .stood").count() == looks.count("accepted") and 0 < own <= columns < len(
        looks
    )
    length = float(page.locator("#f-length").text_content())
    assert length == pytest.approx(len(looks) / columns, abs=0.006)
    drafts = page.locator("#strip .stood, #strip .fell").count()
    assert page.locator("#f-drafts").text_content() == f"{looks.count('accepted')} of {drafts}"
    # walking through it: the card shows the logprob of each token as the API gives it
    page.locator(".said").focus()
    for at, line in enumerate(plain["logprobs"]["content"][:4]):
        page.keyboard.press("ArrowRight")
        card = page.locator("#token")
        assert f"Token {at + 1} of" in card.text_content()
        assert f"{line['logprob']:.4f}" in card.locator("tr.it").text_content()
        assert card.locator("tr").count() in (5, 6)
    page.keyboard.press("End")
    assert f"Token {len(looks)} of" in page.locator("#token").text_content()
    page.keyboard.press("ArrowUp")
    assert page.locator("#strip .step.chosen").count() == 1
    page.keyboard.press("Home")
    assert "Token 1 of" in page.locator("#token").text_content()


@needs_browser
def test_pointing_and_clicking(page: Any) -> None:
    ask(page)
    ended(page)
    page.locator(".t").nth(3).hover()
    assert "Token 4 of" in page.locator("#token").text_content()
    page.locator("#strip .step").nth(1).click()
    assert "Step 2," in page.locator("#token").text_content()
    page.locator("#clear").click()
    assert page.locator(".turn").count() == 0 and page.locator("#empty").is_visible()


@needs_browser
def test_the_switch_shows_that_nothing_differs(page: Any) -> None:
    ask(page, prove=True, temperature=1, seed="")
    page.wait_for_selector(f"{SAME}, {DIFFERENT}")
    assert "Nothing differs: 24 tokens" in page.locator(SAME).text_content()


@needs_browser
def test_control_a_difference_is_shown(page: Any) -> None:
    """One logprob of the answer without speculation is changed on its way."""

    def meddle(route: Any) -> None:
        if json.loads(route.request.post_data).get("speculative") is not False:
            route.continue_()
            return
        reply = route.fetch()
        parts = reply.text().split("\n\n")
        parts[5] = re.sub(r'"logprob":-\d', '"logprob":-9', parts[5], count=1)
        route.fulfill(response=reply, body="\n\n".join(parts))

    page.route("**/v1/chat/completions", meddle)
    ask(page, prove=True, temperature=1)
    page.wait_for_selector(f"{SAME}, {DIFFERENT}")
    assert page.locator(DIFFERENT).text_content().startswith("1 of 24 tokens differ")
    assert page.locator(".t.off").count() == 1


@needs_browser
def test_refusals_are_told(page: Any) -> None:
    ask(page, temperature=-3)
    page.wait_for_selector("#problem:not([hidden])")
    assert "temperature" in page.locator("#problem").text_content() and page.locator("#send").is_enabled()


@needs_browser
def test_a_key_is_asked_for(browser: Any, tmp_path: Path) -> None:
    with serving(tiny(make_folder(tmp_path), NGRAM), Settings(api_keys=ApiKeys(("sesame",)))) as locked:
        for page in opened(browser, locked.url):
            ask(page)
            page.wait_for_selector("#problem:not([hidden])")
            assert page.evaluate("document.activeElement.id") == "key"
            page.keyboard.type("sesame")
            page.locator("#prompt").focus()
            ask(page)
            ended(page)
            assert page.locator("#problem").is_hidden()


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_can_be_read(browser: Any, served: Served, theme: str) -> None:
    """Contrast of at least 4.5 between every text and what lies behind it, in either theme."""
    for page in opened(browser, served.url, color_scheme=theme):
        ask(page)
        ended(page)
        page.locator(".t").first.hover()
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        assert page.evaluate(POOR_CONTRAST) == []
        page.evaluate("document.documentElement.style.setProperty('--quiet', '#777')")
        assert page.evaluate(POOR_CONTRAST)  # control: a grey that is none of either theme
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "light"


@needs_browser
def test_on_a_phone(browser: Any, served: Served) -> None:
    for page in opened(browser, served.url, has_touch=True):
        page.set_viewport_size({"width": 360, "height": 740})
        ask(page)
        ended(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.locator(".t").nth(2).tap()
        card = page.locator("#inspect").bounding_box()
        assert card["y"] + card["height"] == pytest.approx(740, abs=1) and card["height"] <= 740 * 0.46
        page.keyboard.press("Escape")
        assert page.locator("#close").is_hidden()
        small = page.eval_on_selector_all(
            "button", "all => all.filter(x => x.offsetHeight && x.offsetHeight < 32)"
        )
        assert small == []


# [text, contrast] of every element with text of its own whose contrast is below 4.5
POOR_CONTRAST = """() => {
  const light = (c) => { const v = c.map(x => (x /= 255) <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
                         return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
  const parts = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const behind = (e) => { for (; e; e = e.parentElement) {
                            const c = parts(getComputedStyle(e).backgroundColor);
                            if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
  const out = [];
  for (const e of document.body.querySelectorAll("*")) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || !e.offsetParent || e.disabled || e.closest(".hidden, noscript")) continue;
    const a = light(parts(getComputedStyle(e).color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) out.push([e.textContent.slice(0, 40), ratio]);
  }
  return out;
}"""
