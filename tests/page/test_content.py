"""What messages of the page contain: Markdown, code, reasoning, tools, files, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from browser import ask, configure, press, scripted, send_prompt, wait_for_end

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
MARKDOWN = """# Title

Some **bold** text and `code`.

```python
def f(x):
    return "<b>" + x  # comment
```

| a | b |
|---|---|
| 1 | 2 |

- [x] done
"""
HOSTILE = """<img src=x onerror="window.broken = 1"><script>window.broken = 1</script>
<style>body { display: none }</style><iframe src="https://example.com"></iframe>

![pixel](https://example.com/pixel.png) [link](javascript:window.broken=1) [good](https://example.com/)

```html"><img src=x onerror=window.broken=1>
<script>window.broken = 1</script>
```
"""


def test_markdown_code_and_copy(page: Any) -> None:
    scripted(page, [{"content": part} for part in MARKDOWN.splitlines(keepends=True)])
    ask(page)
    answer = page.locator(".message.assistant > .markdown")
    for selector in ("h1", "strong", "table td", "li input:disabled:checked", "p code"):
        assert answer.locator(selector).count() > 0, selector
    assert answer.locator(".code .hljs-keyword").all_text_contents() == ["def", "return"]
    press(page, ".code button")
    page.wait_for_function("() => document.querySelector('.code button').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return "<b>" + x  # comment\n'
    press(page, ".assistant .actions button >> nth=0")
    page.wait_for_function("() => navigator.clipboard.readText().then(text => text.startsWith('# Title'))")


def test_markup_of_a_model_is_shown_as_text(page: Any) -> None:
    """The fixture checks that no request leaves the server."""
    scripted(page, [{"content": HOSTILE}])
    ask(page)
    answer = page.locator(".message.assistant > .markdown")
    assert page.evaluate("window.broken") is None
    assert answer.locator("img, script, style, iframe").count() == 0
    assert '<img src=x onerror="window.broken = 1">' in answer.text_content()
    assert answer.locator("a[href]").evaluate_all("all => all.map(x => [x.href, x.rel])") == [
        ["https://example.com/", "noopener noreferrer"]
    ]


def test_reasoning_is_folded_and_not_sent_back(page: Any) -> None:
    bodies = scripted(
        page, [{"reasoning_content": "Let me "}, {"reasoning_content": "think."}, {"content": "Yes."}]
    )
    ask(page)
    fold = page.locator("details.reasoning")
    assert (
        fold.get_attribute("open") is None
        and fold.locator(".markdown").text_content().strip() == "Let me think."
    )
    press(page, "details.reasoning summary")
    assert fold.locator(".markdown").is_visible()
    assert page.locator(".message.assistant > .markdown").text_content().strip() == "Yes."
    ask(page, "more", 2)
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_tool_calls_and_results(page: Any) -> None:
    """The tiny model calls a tool because a grammar requires it."""
    bodies: list[Any] = []
    page.on("request", lambda sent: "completions" in sent.url and bodies.append(json.loads(sent.post_data)))
    one_call = '{"parallel_tool_calls": false}'
    configure(page, **{"tools": json.dumps(TOOLS), "tool-choice": "required", "extra": one_call})
    ask(page, max_completion_tokens=200)
    call = page.locator(".call")
    assert "get_weather" in call.locator("h4").text_content()
    arguments = json.loads(call.locator("pre").text_content())
    assert arguments["city"] in ("Oslo", "Rome")
    configure(page, **{"tool-choice": "none", "extra": ""})
    page.locator(".results textarea").focus()
    page.keyboard.type('{"celsius": 21}')
    press(page, "#show-tokens", "Space")
    press(page, "#show-tokens", "Space")
    assert page.locator(".results textarea").input_value() == '{"celsius": 21}'  # it is not drawn again
    page.locator(".results textarea").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    wait_for_end(page, 2)
    assert bodies[0]["tools"] == TOOLS and bodies[0]["tool_choice"] == "required"
    calling, result = bodies[1]["messages"][1:]
    assert json.loads(calling["tool_calls"][0]["function"]["arguments"]) == arguments
    assert result == {
        "role": "tool",
        "tool_call_id": calling["tool_calls"][0]["id"],
        "content": '{"celsius": 21}',
    }
    assert "celsius" in page.locator(".message.tool").text_content() and page.locator(".results").count() == 0


def test_wrong_json_of_tools_is_named(page: Any) -> None:
    configure(page, tools='{"type": ')
    assert "not valid JSON" in page.locator("#tools-error").text_content()
    send_prompt(page)
    page.wait_for_selector("#error:not([hidden])")
    assert page.locator("#error").text_content().startswith("Tools:")
    assert page.locator("#prompt").input_value() != ""


def test_files_are_attached(page: Any, text_file: Path, tmp_path: Path) -> None:
    bodies = scripted(page, [{"content": "ok"}])
    binary = tmp_path / "picture.png"
    binary.write_bytes(b"\x89PNG\x00\xff")
    with page.expect_file_chooser() as chooser:
        press(page, "#attach")
    chooser.value.set_files([text_file, binary])
    page.wait_for_selector("#error:not([hidden])")
    assert page.locator("#error").text_content() == "picture.png is not a text file in UTF-8."
    assert page.locator("#attachments li").count() == 1
    ask(page, "summarize")
    content = bodies[0]["messages"][0]["content"]
    assert content == "File notes.md:\n````\none\n```\ntwo\n```\n````\n\nsummarize"
    assert page.locator("#attachments li").count() == 0
    press(page, "details.file summary")
    assert page.locator("details.file pre").text_content() == text_file.read_text()


def test_settings_reach_the_request(page: Any) -> None:
    bodies = scripted(page, [{"content": "ok"}])
    values = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1}
    values |= {"repetition_penalty": 1.1, "temperature": 0.5, "seed": 3, "max_completion_tokens": 9}
    other = {"drafts": 2, "alternatives": 0, "system": "S", "extra": '{"stop": ["x"]}'}
    ask(page, **values, **other)
    assert bodies[0].items() >= values.items()
    assert bodies[0]["messages"][0] == {"role": "system", "content": "S"}
    assert bodies[0]["top_logprobs"] == 0 and bodies[0]["stop"] == ["x"]
    assert bodies[0]["speculative"] == {"enabled": True, "num_speculative_tokens": 2}
    assert (
        page.locator("#summary").text_content() == "temperature 0.5 · up to 9 tokens · seed 3 · system prompt"
    )
    ask(page, "more", 2, **dict.fromkeys(values, ""), speculation=False)
    assert not bodies[1].keys() & (values.keys() - {"seed"})
    assert bodies[1]["speculative"] is False and bodies[1]["seed"] >= 0
    press(page, "#summary")
    assert page.evaluate("document.activeElement.id") == "system"
