"""The page in headless Chromium, for tests: a server, a page that reports errors, and the keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftproof.serve.settings import Settings
from serving import NGRAM, Served, make_folder, serving, tiny

PROMPT = "one two three one two three one two three"
CHAT_ROUTE = "**/v1/chat/completions"
# delay every chunk of a stream, so that it can be stopped and watched
SLOW_STREAMS = """const send = window.fetch;
window.fetch = async (...sent) => {
  const response = await send(...sent);
  if (!String(sent[0]).includes("chat/completions") || !response.ok) return response;
  const slow = new TransformStream({ transform: async (chunk, out) => {
    for (const event of new TextDecoder().decode(chunk).split(/(?<=\\n\\n)/)) {
      await new Promise((done) => setTimeout(done, 25));
      out.enqueue(new TextEncoder().encode(event));
    }
  } }, undefined, { highWaterMark: 0 });
  return new Response(response.body.pipeThrough(slow), response);
};"""


@contextmanager
def tiny_server(folder: Path, **settings: Any) -> Iterator[Served]:
    """Serve a tiny model with room for long conversations and tool calls in text."""
    make_folder(folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 8192}))
    with serving(tiny(folder, NGRAM), Settings(tool_call_parser="hermes", **settings)) as running:
        yield running


def opened(browser: Any, url: str, script: str = "", **options: Any) -> Iterator[Any]:
    """Yield a page, and check that it raises no error and sends requests to the server only."""
    options = {"viewport": {"width": 1400, "height": 900}, "accept_downloads": True, **options}
    context = browser.new_context(**options)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.set_default_timeout(60_000)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: "Content Security" in line.text and wrong.append(line.text))
    page.on("request", lambda sent: sent.url.startswith((url, "blob:")) or wrong.append(sent.url))
    page.on("dialog", lambda dialog: dialog.accept())
    if script:
        context.add_init_script(script)
    page.goto(url)
    page.wait_for_selector("#health[data-state=ok]")
    yield page
    context.close()
    assert wrong == []


def configure(page: Any, **values: Any) -> None:
    """Set fields of the settings as a user does, with change events."""
    page.evaluate(
        """values => { for (const [id, value] of Object.entries(values)) {
             const field = document.getElementById(id);
             if (field.type === "checkbox") field.checked = value; else field.value = value;
             field.dispatchEvent(new Event("input", { bubbles: true }));
             field.dispatchEvent(new Event("change", { bubbles: true })); } }""",
        values,
    )


def send_prompt(page: Any, text: str = PROMPT, **options: Any) -> None:
    """Type and send a prompt with the keyboard; `options` are values of settings."""
    configure(page, **{"temperature": 0, "max_completion_tokens": 24, "seed": 7, **options})
    page.locator("#prompt").focus()
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def wait_for_end(page: Any, count: int = 1) -> None:
    """Wait until `count` answers are complete."""
    page.wait_for_function(
        """count => document.querySelectorAll(".message.assistant [data-action=regenerate]").length >= count
                    && !document.getElementById("send").hidden""",
        arg=count,
    )


def ask(page: Any, text: str = PROMPT, count: int = 1, **options: Any) -> None:
    """Send a prompt and wait for the end of answer number `count`."""
    send_prompt(page, text, **options)
    wait_for_end(page, count)


def press(page: Any, selector: str, key: str = "Enter") -> None:
    """Focus an element and press a key."""
    page.locator(selector).last.focus()
    page.keyboard.press(key)


def scripted(
    page: Any, deltas: Sequence[dict[str, Any]], finish: str = "stop", end: bool = True
) -> list[Any]:
    """Answer chat requests with one event per delta; return the list of bodies that the page sends."""
    bodies: list[Any] = []

    def answer(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        events = []
        for at, delta in enumerate(deltas):
            text = json.dumps(delta)
            row = {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}
            choice = {"index": 0, "delta": delta, "token_ids": [at], "logprobs": {"content": [row]}}
            choice |= {"provenance": ["plain"], "step_end": True, "num_draft": 0}
            if end and at == len(deltas) - 1:
                choice["finish_reason"] = finish
            events.append(json.dumps({"choices": [choice]}))
        body = "".join(f"data: {event}\n\n" for event in [*events, *(["[DONE]"] if end else [])])
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route(CHAT_ROUTE, answer)
    return bodies
