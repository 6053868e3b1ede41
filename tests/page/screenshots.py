"""Take the screenshots of docs/page from a running server: `screenshots.py URL FOLDER`.

Needs Chromium and the packages `playwright` and `pillow`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

PROMPTS = (
    "Write a Python function that reverses a list, in a fenced code block.",
    "Repeat your code, and use the name flip for the function.",
)
NUM_COLORS = 256


def select_token(page: Any) -> None:
    page.locator("#show-tokens").check()
    page.locator(".output").last.locator(".t.recovered, .t.accepted").nth(4).click()


def show_server(page: Any) -> None:
    """Show the server while an answer is written."""
    page.locator("#tab-server").click()
    page.locator("[data-action=regenerate]").last.click()
    page.wait_for_timeout(9000)


def open_list(page: Any) -> None:
    page.locator("#toggle-list").click()


def wait_only(page: Any) -> None:
    page.wait_for_timeout(200)


SCENES: dict[str, tuple[int, int, str, Callable[[Any], None]]] = {
    "wide-light": (1440, 900, "light", select_token),
    "wide-dark": (1440, 900, "dark", show_server),
    "tablet-light": (820, 1180, "light", wait_only),
    "tablet-dark": (820, 1180, "dark", open_list),
    "phone-light": (390, 844, "light", wait_only),
    "phone-dark": (390, 844, "dark", select_token),
}


def main(url: str, folder: Path) -> None:
    """Write one picture per scene; conversations are generated once and shared between the scenes."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(has_touch=True).new_page()
        page.set_default_timeout(600_000)
        page.goto(url)
        for name, value in {"#temperature": "0", "#max_completion_tokens": "160", "#seed": "7"}.items():
            page.locator(name).fill(value)
        for count, prompt in enumerate(PROMPTS, 1):
            page.locator("#prompt").fill(prompt)
            page.locator("#prompt").press("Enter")
            page.locator(".message.assistant [data-action=compare]").nth(count - 1).wait_for()
        page.locator("[data-action=compare]").last.click()
        page.locator(".comparison.same").wait_for()
        for name, (width, height, theme, act) in SCENES.items():
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=theme)
            page.evaluate("localStorage.setItem('show-tokens', 'false')")
            page.reload()
            page.locator("#health[data-state=ok]").wait_for()
            page.locator(".message.assistant").last.wait_for()
            act(page)
            page.wait_for_timeout(400)
            path = folder / f"{name}.png"
            page.screenshot(path=path)
            picture = Image.open(path).convert("RGB")
            picture.quantize(NUM_COLORS, Image.Quantize.FASTOCTREE).save(path, optimize=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
