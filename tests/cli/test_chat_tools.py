"""Tools from files: schemas, calls, errors, confirmation."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pytest import CaptureFixture, MonkeyPatch

from draftproof.cli.chat.python_tools import function_tool
from draftproof.cli.chat.tools import MAX_RESULT_CHARACTERS, ToolError, cut_result, load_tools
from draftproof.cli.main import main
from draftproof.errors import ConfigError
from scripted_chat import call, pieces, scripted_chat


def area(width: float, height: float, unit: str = "m", names: list[str] | None = None) -> str:
    """Return an area.

    The result has its unit.

    Args:
        width: The width
            of the field.
        height: The height.
        unit: The unit.
        names: Names of the field.
    """
    return f"{width * height:g} {unit}2"


async def later(count: int) -> dict[str, int]:
    """Return a number.

    Args:
        count: The number.
    """
    return {"count": count}


def fails(count: int) -> None:
    """Fail.

    Args:
        count: The number.
    """
    raise KeyError(count)


@pytest.mark.parametrize("function", [area, later, fails])
def test_schema_equals_that_of_transformers(function: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    expected = get_json_schema(function)["function"]
    made = function_tool(function, "here")
    assert made.name == expected["name"] and made.description == expected["description"]
    theirs = expected["parameters"]["properties"]
    for name, ours in made.parameters["properties"].items():
        assert ours["description"] == theirs[name]["description"]
        if name != "names":  # pydantic writes a union where transformers writes `nullable`
            assert ours["type"] == theirs[name]["type"]
    assert made.parameters["required"] == expected["parameters"]["required"]


def test_function_is_called_with_checked_arguments() -> None:
    tool = function_tool(area, "here")
    assert tool.call({"width": 2, "height": "3.5"}) == "7 m2"
    assert tool.show({"width": 2, "unit": "km"}) == "area(width=2, unit='km')"
    assert function_tool(later, "here").call({"count": 3}) == '{"count": 3}'
    for arguments, message in (({"width": 2}, "height: Field required"), ({"wide": 1}, "wide: Extra")):
        with pytest.raises(ToolError, match=message):
            tool.call(arguments)
    with pytest.raises(ToolError, match="KeyError: 3"):
        function_tool(fails, "here").call({"count": 3})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "def f(x):\n    pass\n", "needs an annotation"),
        ("a.py", "def f(*x: int):\n    pass\n", "cannot be given by name"),
        ("a.py", "import nothing_of_this_name\n", "cannot be imported: ModuleNotFoundError"),
        ("a.py", "def _hidden():\n    pass\n", "defines no tool"),
        ("a.txt", "", ".json or a .py file"),
        ("a.json", "{", "is not JSON"),
        ("a.json", '{"name": "f"}', "must be a list"),
        ("a.json", '[{"name": "f", "comand": "ls"}]', "did you mean 'command'"),
        ("a.json", '[{"name": "f"}]', "command must be"),
        ("a.json", '[{"name": "a b", "command": "ls"}]', "name must be"),
        ("a.json", '[{"name": "f", "command": "ls", "timeout_seconds": 0}]', "timeout_seconds"),
        ("a.json", '[{"name": "f", "command": "a"}, {"name": "f", "command": "b"}]', "the same name"),
    ],
)
def test_wrong_file_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tools(path)


def commands(tmp_path: Path, **entries: Any) -> dict[str, Any]:
    properties = {"text": {"type": "string"}, "count": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties}
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([{"name": n, "parameters": parameters, **e} for n, e in entries.items()]))
    return dict(load_tools(path))


def test_command_receives_quoted_arguments(tmp_path: Path) -> None:
    tools = commands(
        tmp_path,
        shell={"command": "printf '%s|' {text} {count} ${HOME:+set}"},
        listed={"command": ["printf", "%s|", "{text}", "{count}"]},
        stdin={"command": "cat"},
        fails={"command": "echo wrong >&2; exit 3"},
        slow={"command": ["sleep", "9"], "timeout_seconds": 0.05},
        missing={"command": ["/no/such/program"]},
    )
    dangerous = "a b'; echo $(id) #"
    for name in ("shell", "listed"):
        assert tools[name].call({"text": dangerous, "count": 2}).startswith(f"{dangerous}|2|")
    assert tools["listed"].call({"text": "x"}) == "x|"  # an argument that is not given is left out
    assert json.loads(tools["stdin"].call({"text": "x"})) == {"text": "x"}
    assert tools["listed"].show({"text": "a b"}) == "printf '%s|' 'a b'"
    for name, message in (
        ("fails", "exit status 3\nwrong"),
        ("slow", "longer"),
        ("missing", "cannot be run"),
    ):
        with pytest.raises(ToolError, match=message):
            tools[name].call({})
    assert len(cut_result("x" * 10**6)) < MAX_RESULT_CHARACTERS + 100


def test_unconfirmed_calls_need_yes(
    tmp_path: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    path = tmp_path / "t.py"
    path.write_text("def f(x: int) -> int:\n    return x\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert main(["chat", "--url", "http://127.0.0.1:1", "--tools", str(path)]) == 2
    assert "add --yes" in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:1", "--yes"]) == 2


def test_results_and_errors_are_sent_back(
    tmp_path: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    """Check the results of a call, an unknown tool and invalid arguments, in `run` with piped input."""
    path = tmp_path / "t.py"
    path.write_text("import math\n\ndef root(x: int) -> float:\n    return math.sqrt(x)\n")
    replies = [
        call("root", '{"x": 2}', "1"),
        call("nothing", "{}", "2"),
        call("root", "{broken", "3"),
        call("root", '{"x": -1}', "4"),
        [{"reasoning_content": "Thought.\n"}, *pieces("Done: **1.41**\n")],
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("of two\n"))
    with scripted_chat(replies) as server:
        assert main(["run", server.url, "Root", "of", "--tools", str(path), "--yes", "--stats"]) == 0
    output = capsys.readouterr()
    assert output.out == "Thought.\nDone: **1.41**\n"  # exactly the text, since this is no terminal
    assert "root(x=2)" in output.err and "prompt tokens:" in output.err
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Root of\n\nof two"}]
    results = [body["messages"][-1] for body in server.bodies[1:]]
    assert [result["tool_call_id"] for result in results] == ["1", "2", "3", "4"]
    assert float(results[0]["content"]) == math.sqrt(2)
    assert "there is no tool 'nothing'" in results[1]["content"]
    assert "not JSON" in results[2]["content"] and "math domain" in results[3]["content"]
    sent = server.bodies[3]["messages"][-2]["tool_calls"][0]["function"]
    assert sent["arguments"] == "{}"  # a template needs an object
