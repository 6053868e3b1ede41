"""Conversations on the page: turns, stop, errors, editing, versions, storage, export. Driven by keyboard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from browser import (
    CHAT_ROUTE,
    PROMPT,
    SLOW_STREAMS,
    ask,
    configure,
    opened,
    press,
    scripted,
    send_prompt,
    tiny_server,
    wait_for_end,
)
from serving import Served

ANSWER = ".message.assistant"


def sent_bodies(page: Any) -> list[Any]:
    """Return a list that receives the bodies of chat requests."""
    found: list[Any] = []
    page.on("request", lambda sent: "completions" in sent.url and found.append(json.loads(sent.post_data)))
    return found


def bottom_gap(page: Any) -> float:
    """Return the pixels between what is shown and the end of the messages."""
    return page.evaluate(
        "(s => s.scrollHeight - s.scrollTop - s.clientHeight)(document.getElementById('scroller'))"
    )


def test_second_turn_is_in_view_while_it_is_written(browser: Any, served: Served) -> None:
    for page in opened(browser, served.url, SLOW_STREAMS, viewport={"width": 1400, "height": 500}):
        ask(page, max_completion_tokens=40)
        scripted(page, [{"content": f"line {at}\n\n"} for at in range(200)])
        send_prompt(page)
        for count in (10, 20, 30):
            page.locator(f"{ANSWER} >> nth=1").locator("p", has_text=f"line {count}").wait_for()
            assert bottom_gap(page) < 80 and page.locator("#stop").is_visible()
        # a reader who scrolls up is not moved, and gets a way back
        page.evaluate("document.getElementById('scroller').scrollTop = 0")
        page.wait_for_timeout(300)
        assert page.evaluate("document.getElementById('scroller').scrollTop") == 0
        press(page, "#to-end")
        assert bottom_gap(page) < 80
        page.keyboard.press("Escape")
        wait_for_end(page, 2)


def test_stopped_answer_is_part_of_the_conversation(browser: Any, served: Served) -> None:
    for page in opened(browser, served.url, SLOW_STREAMS):
        bodies = sent_bodies(page)
        send_prompt(page, max_completion_tokens=400, temperature=1)
        page.wait_for_function("() => parseInt(document.querySelector('.figures.quiet')?.textContent) >= 8")
        page.keyboard.type("too early")
        page.keyboard.press("Enter")
        assert "still being written" in page.locator("#error").text_content()
        page.locator("#prompt").fill("")
        page.keyboard.press("Escape")
        wait_for_end(page)
        assert "Stopped" in page.locator(".note").text_content()
        partial = page.evaluate("document.querySelector('.message > .markdown').textContent")
        ask(page, "and now", 2)
        assert [m["role"] for m in bodies[1]["messages"]] == ["user", "assistant", "user"]
        words = bodies[1]["messages"][1]["content"].split()
        assert words and words[0] in partial


def test_prompt_comes_back_after_an_error_and_is_sent_once(page: Any) -> None:
    bodies = sent_bodies(page)
    send_prompt(page, temperature=-3)
    page.wait_for_selector("#error:not([hidden])")
    assert "temperature" in page.locator("#error").text_content()
    assert page.locator("#prompt").input_value() == PROMPT and page.locator(".message").count() == 0
    configure(page, temperature=0)
    page.locator("#prompt").focus()
    page.keyboard.press("Enter")
    wait_for_end(page)
    assert page.locator("#error").is_hidden() and page.locator("#prompt").input_value() == ""
    assert bodies[-1]["messages"] == [{"role": "user", "content": PROMPT}]


def test_lost_connection_before_and_during_an_answer(page: Any) -> None:
    page.route(CHAT_ROUTE, lambda route: route.abort())
    send_prompt(page)
    page.wait_for_selector("#error:not([hidden])")
    assert "does not respond" in page.locator("#error").text_content()
    assert page.locator("#prompt").input_value() == PROMPT
    page.unroute(CHAT_ROUTE)
    bodies = scripted(page, [{"content": "Half an "}, {"content": "answer"}], end=False)
    press(page, "#prompt")
    wait_for_end(page)
    assert "not complete" in page.locator(".note.error").text_content()
    ask(page, "go on", 2)
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "Half an answer"}


def test_cut_answer_is_marked(page: Any) -> None:
    ask(page, max_completion_tokens=5)
    note = page.locator(".note").text_content()
    assert note.startswith("Cut off") and "5 tokens" in note and "Maximum tokens" in note
    scripted(page, [{"content": "All of it."}])
    ask(page, "again", 2)
    assert page.locator(".note").last.is_hidden()


def test_editing_adds_a_version(page: Any) -> None:
    bodies = sent_bodies(page)
    ask(page)
    page.locator("#prompt").focus()
    page.keyboard.press("ArrowUp")  # edits the last prompt
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("four five six")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.user .text')?.textContent === 'four five six'")
    wait_for_end(page)
    assert bodies[1]["messages"] == [{"role": "user", "content": "four five six"}]
    assert "2 of 2" in page.locator(".user .versions").text_content()
    press(page, "[aria-label='Previous version']")
    assert page.locator(".user .text").text_content() == PROMPT and page.locator(ANSWER).count() == 1
    press(page, "[data-action=edit]")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.action") == "edit"


def test_failed_edit_keeps_its_text(page: Any) -> None:
    ask(page)
    configure(page, temperature=-3)
    press(page, "[data-action=edit]")
    page.keyboard.type(" more")
    page.keyboard.press("Enter")
    page.wait_for_selector("#error:not([hidden])")
    assert page.locator(".editor textarea").input_value() == f"{PROMPT} more"
    assert page.locator(ANSWER).count() == 1 and page.locator(".versions").count() == 0


def test_regenerating_adds_a_version(page: Any) -> None:
    ask(page, seed="", temperature=1)
    first = page.locator(f"{ANSWER} .markdown").last.text_content()
    press(page, "[data-action=regenerate]")
    page.wait_for_selector(f"{ANSWER} .versions")
    wait_for_end(page)
    assert page.locator(f"{ANSWER} .markdown").last.text_content() != first
    press(page, "[aria-label='Previous version']")
    assert page.locator(f"{ANSWER} .markdown").last.text_content() == first


def test_conversations_stay_in_the_browser(page: Any) -> None:
    ask(page, "one two", system="Be brief.")
    page.keyboard.press("Alt+n")
    assert page.locator(".message").count() == 0 and page.evaluate("document.activeElement.id") == "prompt"
    ask(page, "three four", system="", temperature=1)
    page.reload()
    page.wait_for_selector("#conversations button >> nth=1")
    titles = page.locator("#conversations button").all_text_contents()
    assert titles == ["three four", "one two"]
    assert page.locator(".user .text").text_content() == "three four"  # a reload shows it again
    page.locator("#conversations button").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.user .text')?.textContent === 'one two'")
    assert page.locator("#system").input_value() == "Be brief."
    assert page.locator("#temperature").input_value() == "0"
    # rename, search, delete
    page.locator("#title").fill("Renamed")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.wait_for_selector("#conversations button:has-text('Renamed')")
    page.locator("#search").fill("three")
    page.wait_for_function("() => document.querySelectorAll('#conversations li').length === 1")
    page.locator("#search").fill("")
    press(page, "#delete")
    page.wait_for_function("() => document.querySelectorAll('#conversations li').length === 1")
    assert page.locator("#conversations button").all_text_contents() == ["three four"]


def test_answer_goes_on_while_another_conversation_is_open(browser: Any, served: Served) -> None:
    for page in opened(browser, served.url, SLOW_STREAMS):
        ask(page, "first", max_completion_tokens=2)
        page.keyboard.press("Alt+n")
        send_prompt(page, "second", max_completion_tokens=60)
        page.wait_for_selector("#conversations button.running")
        page.locator("#conversations button:has-text('first')").click()
        page.wait_for_function("() => document.querySelector('.user .text')?.textContent === 'first'")
        page.wait_for_selector("#send:not([hidden])")
        assert page.locator(ANSWER).count() == 1
        page.locator("#conversations button:has-text('second')").click()
        page.wait_for_function("() => document.querySelector('.user .text')?.textContent === 'second'")
        assert page.locator(".figures.quiet").text_content().startswith("60 tokens")


def test_export(page: Any, tmp_path: Path) -> None:
    ask(page, "one two", system="Be brief.")
    exported = {}
    for kind in ("markdown", "json"):
        with page.expect_download() as download:
            press(page, f"#export-{kind}")
        exported[kind] = Path(download.value.path()).read_text()
        assert download.value.suggested_filename == f"one-two.{'md' if kind == 'markdown' else 'json'}"
    assert exported["markdown"].startswith(
        "# one two\n\n## System prompt\n\nBe brief.\n\n## You\n\none two\n\n## Model"
    )
    data = json.loads(exported["json"])
    assert [message["role"] for message in data["messages"]] == ["user", "assistant"]
    tokens = data["messages"][1]["output"]["tokens"]
    assert len(tokens) == 24 and {"id", "logprob", "provenance"} <= set(tokens[0])


def test_missing_api_key_moves_focus_to_its_field(browser: Any, tmp_path: Path) -> None:
    from draftproof.serve.settings import ApiKeys

    with tiny_server(tmp_path, api_keys=ApiKeys(("sesame",))) as locked:
        for page in opened(browser, locked.url):
            send_prompt(page)
            page.wait_for_selector("#error:not([hidden])")
            assert page.evaluate("document.activeElement.id") == "key"
            page.keyboard.type("sesame")
            press(page, "#prompt")
            wait_for_end(page)
            assert page.locator("#error").is_hidden()
