"""Sizes, themes, keyboard and screen readers."""

from __future__ import annotations

from typing import Any

import pytest

from browser import ask, opened, press, scripted
from serving import Served

SIZES = {"wide": (1440, 900), "tablet": (820, 1180), "phone": (360, 740)}
ANSWER = "Text, `code`, [a link](https://example.com/).\n\n```python\ndef f(): return 'x' + 1  # note\n```\n"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_have_readable_contrast(browser: Any, served: Served, theme: str) -> None:
    """Check a contrast of at least 4.5 between every text and its background, in all tabs."""
    for page in opened(browser, served.url, color_scheme=theme):
        ask(page, max_completion_tokens=5)
        scripted(page, [{"reasoning_content": "Hm."}, {"content": ANSWER}])
        ask(page, "code", 2)
        press(page, "details.reasoning summary")
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        for tab in ("settings", "server", "output"):
            page.locator(f"#tab-{tab}").click()
            assert page.evaluate(POOR_CONTRAST) == []
        press(page, "#show-tokens", "Space")
        page.locator(".output .t").first.click()
        assert page.evaluate(POOR_CONTRAST) == []
        page.evaluate("document.documentElement.style.setProperty('--quiet', '#777')")
        assert page.evaluate(POOR_CONTRAST)  # control: a grey with too little contrast
        press(page, "#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"


@pytest.mark.parametrize("size", SIZES)
def test_page_fits_the_screen(browser: Any, served: Served, size: str) -> None:
    width, height = SIZES[size]
    for page in opened(browser, served.url, viewport={"width": width, "height": height}, has_touch=True):
        scripted(
            page,
            [
                {
                    "content": "wide " * 40
                    + "\n\n```\n"
                    + "x" * 300
                    + "\n```\n\n|a|b|\n|-|-|\n|"
                    + "y" * 300
                    + "|2|\n"
                }
            ],
        )
        ask(page, "w" * 300)
        for script in (
            "document.documentElement.scrollWidth",
            "document.getElementById('scroller').scrollWidth",
        ):
            assert page.evaluate(script) <= width
        prompt = page.locator("#prompt").bounding_box()
        assert prompt["y"] + prompt["height"] < height
        small = page.eval_on_selector_all(
            "button", "all => all.filter(x => x.offsetHeight && x.offsetHeight < 32).map(x => x.outerHTML)"
        )
        assert small == []


def test_drawers_on_a_phone(browser: Any, served: Served) -> None:
    for page in opened(browser, served.url, viewport={"width": 360, "height": 740}, has_touch=True):
        ask(page)
        assert page.locator("#list").is_hidden() and page.locator("#panel").is_hidden()
        press(page, "#toggle-list")
        assert page.locator("#toggle-list").get_attribute("aria-expanded") == "true"
        assert page.evaluate("document.getElementById('list').contains(document.activeElement)")
        page.keyboard.press("Escape")
        assert (
            page.locator("#list").is_hidden() and page.evaluate("document.activeElement.id") == "toggle-list"
        )
        page.locator("#show-tokens").tap()
        assert page.locator("#panel").is_hidden()  # the tokens are in view
        page.locator(".output .t").nth(2).tap()
        sheet = page.locator("#panel").bounding_box()
        assert sheet["y"] + sheet["height"] == pytest.approx(740, abs=1) and sheet["height"] <= 740 * 0.61
        token = page.locator(".output .t.selected").bounding_box()
        assert 0 < token["y"] < sheet["y"] - token["height"]  # neither is hidden by the other
        details = page.locator("#token table").bounding_box()
        assert details["y"] < 740 and "Token 3 of" in page.locator("#token").text_content()
        page.keyboard.press("Escape")
        assert page.locator("#panel").is_hidden()


def test_keyboard_reaches_every_control_in_order(page: Any) -> None:
    ask(page)
    press(page, "#toggle-list", "Shift+Tab")
    reached = []
    for _ in range(80):
        name = page.evaluate(FOCUSED)
        if name in reached[:1]:
            break
        reached.append(name)
        page.keyboard.press("Tab")
    assert reached[0] == "skip"
    wanted = [
        "toggle-list",
        "theme",
        "toggle-panel",
        "new",
        "search",
        "title",
        "show-tokens",
        "export-markdown",
    ]
    wanted += [
        "export-json",
        "delete",
        "do edit",
        "do regenerate",
        "do details",
        "do compare",
        "prompt",
        "attach",
        "summary",
    ]
    wanted += ["send", "tab-settings", "system", "temperature", "tools", "extra", "key"]
    assert [name for name in reached if name in wanted] == wanted


def test_names_and_announcements_for_screen_readers(page: Any) -> None:
    scripted(page, [{"content": "Spoken **text**."}])
    ask(page)
    page.wait_for_function("() => document.getElementById('announcer').textContent.includes('Spoken')")
    assert page.locator("#announcer").get_attribute("aria-live") == "polite"
    for tab in ("settings", "output", "server"):
        page.locator(f"#tab-{tab}").click()
        assert page.evaluate(WITHOUT_NAME) == []
    page.evaluate("document.querySelector('label[for=search]').remove()")
    page.evaluate("document.getElementById('search').removeAttribute('placeholder')")
    assert page.evaluate(WITHOUT_NAME) == ["search"]  # control


FOCUSED = """() => (e => e.id || (e.dataset.action ? `do ${e.dataset.action}` : e.className || e.textContent))
  (document.activeElement)"""

# ids of visible controls without a name
WITHOUT_NAME = """() => [
    ...document.querySelectorAll("button, input, select, textarea, summary, [tabindex='0']")]
  .filter(e => e.offsetParent && !e.labels?.length && !e.ariaLabel && !e.getAttribute("aria-labelledby")
               && !e.textContent.trim())
  .map(e => e.id || e.outerHTML)"""

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
