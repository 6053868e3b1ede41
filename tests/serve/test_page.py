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
from serving import NGRAM, Served, serving, tiny

PAGE = Path(__file__).parents[2] / "src" / "draftproof" / "serve" / "http" / "page"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROMPT = "one two three one two three one two three"
SAME, DIFFERENT = ".comparison.same", ".comparison.different"


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(tiny(folder, NGRAM)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    yield from opened(browser, served.url)


def opened(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """Yield a page, and check that it raises no error and sends requests to the server only."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda sent: sent.url.startswith((url, "data:")) or wrong.append(sent.url))
    page.goto(url)
    yield page
    context.close()
    assert wrong == []


def send_prompt(page: Any, compare: bool = False, **options: Any) -> None:
    """Type and send the prompt with the keyboard; `options` are values of fields."""
    settings = {"temperature": 0, "max-tokens": 24, "seed": 7, **options}
    page.evaluate(
        "s => { for (const [k, v] of Object.entries(s)) document.getElementById(k).value = v }", settings
    )
    if compare:
        page.locator("#compare").focus()
        page.keyboard.press("Space")
    page.locator("body").focus()
    page.locator("#prompt").focus()
    page.keyboard.type(PROMPT)
    page.keyboard.press("Enter")


def wait_for_end(page: Any) -> None:
    page.wait_for_selector(".t")
    page.wait_for_selector("#send:enabled")


def test_page_files_are_packaged_and_load_nothing_else(served: Served) -> None:
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


def test_output_tokens_steps_and_figures_equal_the_api(page: Any, served: Served) -> None:
    """Use the keyboard only."""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    send_prompt(page)
    wait_for_end(page)
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "seed": 7}
    body |= {"max_completion_tokens": 24, "logprobs": True, "top_logprobs": 5}
    body |= {"return_token_ids": True, "speculative": False}
    plain = served.post("/v1/chat/completions", body).json()["choices"][0]
    assert page.locator(".output").text_content() == plain["message"]["content"]
    classes = page.eval_on_selector_all(".output .t", "all => all.map(x => x.className.split(' ')[1])")
    assert len(classes) == len(plain["token_ids"]) and "accepted" in classes
    columns = page.locator("#strip .step").count()
    sampled = page.locator("#strip .sampled").count()
    assert page.locator("#strip .accepted").count() == classes.count("accepted")
    assert 0 < sampled <= columns < len(classes)
    length = float(page.locator("#f-length").text_content())
    assert length == pytest.approx(len(classes) / columns, abs=0.006)
    drafts = page.locator("#strip .accepted, #strip .rejected").count()
    assert page.locator("#f-drafts").text_content() == f"{classes.count('accepted')} of {drafts}"
    # move through the output: the details show the logprob of each token as the API returns it
    page.locator(".output").focus()
    for at, line in enumerate(plain["logprobs"]["content"][:4]):
        page.keyboard.press("ArrowRight")
        card = page.locator("#token")
        assert f"Token {at + 1} of" in card.text_content()
        assert f"{line['logprob']:.4f}" in card.locator("tr.sampled").text_content()
        assert card.locator("tr").count() in (5, 6)
    page.keyboard.press("End")
    assert f"Token {len(classes)} of" in page.locator("#token").text_content()
    page.keyboard.press("ArrowUp")
    assert page.locator("#strip .step.selected").count() == 1
    page.keyboard.press("Home")
    assert "Token 1 of" in page.locator("#token").text_content()


def test_pointing_at_a_token_or_step_shows_its_details(page: Any) -> None:
    send_prompt(page)
    wait_for_end(page)
    page.locator(".t").nth(3).hover()
    assert "Token 4 of" in page.locator("#token").text_content()
    page.locator("#strip .step").nth(1).click()
    assert "Step 2," in page.locator("#token").text_content()
    page.locator("#clear").click()
    assert page.locator(".turn").count() == 0 and page.locator("#empty").is_visible()


def test_comparison_without_speculation_is_identical(page: Any) -> None:
    send_prompt(page, compare=True, temperature=1, seed="")
    page.wait_for_selector(f"{SAME}, {DIFFERENT}")
    assert "Identical: 24 tokens" in page.locator(SAME).text_content()


def test_control_changed_logprob_is_shown_as_a_difference(page: Any) -> None:
    """Change one logprob of the response without speculation on its way."""

    def change(route: Any) -> None:
        if json.loads(route.request.post_data).get("speculative") is not False:
            route.continue_()
            return
        response = route.fetch()
        parts = response.text().split("\n\n")
        parts[5] = re.sub(r'"logprob":-\d', '"logprob":-9', parts[5], count=1)
        route.fulfill(response=response, body="\n\n".join(parts))

    page.route("**/v1/chat/completions", change)
    send_prompt(page, compare=True, temperature=1)
    page.wait_for_selector(f"{SAME}, {DIFFERENT}")
    assert page.locator(DIFFERENT).text_content().startswith("1 of 24 tokens differ")
    assert page.locator(".t.different").count() == 1


def test_api_error_is_shown(page: Any) -> None:
    send_prompt(page, temperature=-3)
    page.wait_for_selector("#error:not([hidden])")
    assert "temperature" in page.locator("#error").text_content() and page.locator("#send").is_enabled()


def test_missing_api_key_moves_focus_to_its_field(browser: Any, folder: Path) -> None:
    with serving(tiny(folder, NGRAM), Settings(api_keys=ApiKeys(("sesame",)))) as locked:
        for page in opened(browser, locked.url):
            send_prompt(page)
            page.wait_for_selector("#error:not([hidden])")
            assert page.evaluate("document.activeElement.id") == "key"
            page.keyboard.type("sesame")
            page.locator("#prompt").focus()
            send_prompt(page)
            wait_for_end(page)
            assert page.locator("#error").is_hidden()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_have_readable_contrast(browser: Any, served: Served, theme: str) -> None:
    """Check a contrast of at least 4.5 between every text and its background."""
    for page in opened(browser, served.url, color_scheme=theme):
        send_prompt(page)
        wait_for_end(page)
        page.locator(".t").first.hover()
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        assert page.evaluate(POOR_CONTRAST) == []
        page.evaluate("document.documentElement.style.setProperty('--quiet', '#777')")
        assert page.evaluate(POOR_CONTRAST)  # control: a grey with too little contrast
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_page_fits_a_phone(browser: Any, served: Served) -> None:
    for page in opened(browser, served.url, has_touch=True):
        page.set_viewport_size({"width": 360, "height": 740})
        send_prompt(page)
        wait_for_end(page)
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
