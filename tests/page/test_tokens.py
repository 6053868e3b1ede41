"""Tokens by origin, steps, logprobs, the comparison without speculation, and the view of the server."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from browser import CHAT_ROUTE, PROMPT, ask, press, send_prompt
from serving import Served

SAME, DIFFERENT = ".comparison.same", ".comparison.different"


def show_tokens(page: Any) -> None:
    press(page, "#show-tokens", "Space")
    page.wait_for_selector(".output .t")


def test_output_tokens_steps_and_figures_equal_the_api(page: Any, served: Served) -> None:
    """Use the keyboard only."""
    page.keyboard.press("Shift+Tab")
    ask(page)
    show_tokens(page)
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "seed": 7}
    body |= {"max_completion_tokens": 24, "logprobs": True, "top_logprobs": 5}
    body |= {"return_token_ids": True, "speculative": False}
    plain = served.post("/v1/chat/completions", body).json()["choices"][0]
    text = b"".join(bytes(row["bytes"]) for row in plain["logprobs"]["content"]).decode(errors="replace")
    assert page.locator(".output").text_content().strip("\ufffd") == text.strip("\ufffd")
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
    ask(page)
    show_tokens(page)
    assert page.locator("#tab-output").get_attribute("aria-selected") == "true"
    page.locator(".output .t").nth(3).hover()
    assert "Token 4 of" in page.locator("#token").text_content()
    page.locator("#strip .step").nth(1).click()
    assert "Step 2," in page.locator("#token").text_content()


def test_stored_tokens_are_shown_again(page: Any) -> None:
    ask(page)
    show_tokens(page)
    before = page.locator(".output").text_content()
    page.reload()
    page.wait_for_selector(".output .t")
    assert page.locator(".output").text_content() == before
    assert page.locator("#strip .step").count() > 0


def test_comparison_without_speculation_is_identical(page: Any) -> None:
    ask(page, temperature=1, seed="")
    press(page, "[data-action=compare]")
    page.wait_for_selector(f"{SAME}, {DIFFERENT}")
    assert "Identical: 24 tokens" in page.locator(SAME).text_content()


def test_every_answer_is_compared_if_set(page: Any) -> None:
    send_prompt(page, temperature=1, compare=True)
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

    page.route(CHAT_ROUTE, change)
    send_prompt(page, compare=True, temperature=1)
    page.wait_for_selector(f"{SAME}, {DIFFERENT}")
    assert page.locator(DIFFERENT).text_content().startswith("1 of 24 tokens differ")
    show_tokens(page)
    assert page.locator(".t.different").count() == 1


def test_view_of_the_server_follows_its_metrics(page: Any, served: Served) -> None:
    ask(page)
    read: list[str] = []
    page.on("request", lambda sent: sent.url.endswith("/metrics") and read.append(sent.url))
    page.locator("#tab-settings").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.getElementById('s-speed').textContent !== '–'")
    metrics = served.http.get("/metrics").text
    pages = re.search(r"draftproof:kv_pages{[^}]*} (\d+)", metrics)
    assert pages and page.locator("#s-pages").text_content().endswith(f"free of {pages[1]}")
    assert page.locator("#s-running").text_content() == page.locator("#s-waiting").text_content() == "0"
    assert re.fullmatch(r"\d+ %", page.locator("#s-rate").text_content())
    assert float(page.locator("#s-length").text_content()) > 1
    assert page.locator("#s-tokens").text_content() != "0"
    assert len(read) >= 2
    page.keyboard.press("Home")
    count = len(read)
    page.wait_for_timeout(2500)
    assert len(read) == count  # not read while the tab is hidden
