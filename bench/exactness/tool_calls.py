"""Required tool calls at temperature 1: validity, equal bits, and steps with drafts from the schema's text.

    python bench/exactness/tool_calls.py [--cases 500] [--compared 500] [--model smollm2-135m] [--batch 16]
        [--bounded] [--device cuda] [--quantization gguf]

Each case has a question, tools and a seed. The first outputs are generated three times: without drafts, with
n-gram drafts, and with n-gram drafts beside the text of the schema; the others in the last way only. A call
is valid if its arguments are JSON that follows the schema of its function. Steps are generated tokens minus
accepted drafts.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import json
import time
from typing import Any

import jsonschema
from common.measure import finish
from exactness.schema_drafts import draft_parts

from draftproof import LLM, SamplingParams, StructuredOutputs
from draftproof.serve.api.generation.tool_options import tool_messages_as_text
from draftproof.text.tool_calls.formats import FORMATS
from draftproof.text.tool_calls.grammar import CallGrammar

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
STRING, INTEGER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
MAX_STRING_CHARS, MAX_ARRAY_ITEMS, MAX_INTEGER = 30, 2, 10**6  # of --bounded


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties, all required."""
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


UNIT = {"enum": ["celsius", "fahrenheit"]}
PERSON = closed(first_name=STRING, last_name=STRING, email_address=STRING)
TOOLS = {
    "get_current_weather": closed(city=STRING, country=STRING, temperature_unit=UNIT),
    "search_flights": closed(
        departure_airport=STRING, destination_airport=STRING, number_of_passengers=INTEGER, is_direct=BOOLEAN
    ),
    "create_calendar_event": closed(
        title=STRING, start_time=STRING, attendees={"type": "array", "items": PERSON}
    ),
    "convert_currency": closed(amount={"type": "number"}, source_currency=STRING, target_currency=STRING),
    "set_thermostat": closed(room={"enum": ["kitchen", "bedroom", "office"]}, degrees=INTEGER, unit=UNIT),
}
QUESTIONS = [
    "What is the weather in Paris in celsius?",
    "Find a direct flight from Oslo to Rome for two people.",
    "Plan a meeting with Ada Lovelace tomorrow at nine.",
    "How many dollars are 250 euros?",
    "Make the bedroom 21 degrees warm.",
    "I travel to Tokyo next week. Do I need a coat?",
]


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with limits on strings, arrays and integers: every call is then of finite length."""
    limits = {
        "string": {"maxLength": MAX_STRING_CHARS},
        "array": {"maxItems": MAX_ARRAY_ITEMS},
        "integer": {"minimum": 0, "maximum": MAX_INTEGER},
        "number": {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER},
    }
    found = {**schema, **limits.get(schema.get("type", ""), {})}
    if "properties" in schema:
        found["properties"] = {name: bounded(inner) for name, inner in schema["properties"].items()}
    if "items" in schema:
        found["items"] = bounded(schema["items"])
    return found


def cases(llm: LLM, count: int, tools: dict[str, Any]) -> list[tuple[list[int], dict[str, Any], int]]:
    """Return prompts in tokens, the schemas of their tools, and seeds."""
    tokenizer, names, found = llm.get_tokenizer(), list(tools), []
    for seed in range(count):
        few = [names[(seed + i) % len(names)] for i in range(1 + seed % 3)]
        schemas = {name: tools[name] for name in few}
        listed = [
            {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
            for name, schema in schemas.items()
        ]
        messages = [{"role": "user", "content": QUESTIONS[seed % len(QUESTIONS)]}]
        text = tokenizer.apply_chat_template(tool_messages_as_text(messages, listed))
        found.append((tokenizer.encode(text, add_special_tokens=False), schemas, seed))
    return found


def schema_ids(llm: LLM, structure: dict[str, Any]) -> list[int]:
    """Return the tokens of the schema's text."""
    encode, ids = llm.get_tokenizer().encode, []
    for part in draft_parts(StructuredOutputs(**structure)):
        ids += [part] if isinstance(part, int) else encode(part, add_special_tokens=False)
    return ids


def is_valid(text: str, schemas: dict[str, Any]) -> bool:
    """Return whether an output is one call whose arguments follow the schema."""
    parsed = FORMATS["hermes"].parse_text(text, schemas)
    if parsed.content or len(parsed.calls) != 1:
        return False
    try:
        jsonschema.validate(json.loads(parsed.calls[0].arguments), schemas[parsed.calls[0].name])
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    """Run all cases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--compared", type=int, default=500)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--bounded", action="store_true", help="schemas with limits on strings and arrays")
    parser.add_argument("--quantization")
    parser.add_argument("--max-tokens", type=int, default=400)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        device=args.device,
        quantization=args.quantization,
        speculative_config=NGRAM,
        max_num_seqs=args.batch,
        max_model_len=2048,
    )
    sides = {
        name: {"tokens": 0, "steps": 0, "drafted": 0, "seconds": 0.0} for name in ("plain", "ngram", "schema")
    }
    num_valid = num_cut = num_compared = 0
    is_equal = True
    tools = {name: bounded(schema) if args.bounded else schema for name, schema in TOOLS.items()}
    work = cases(llm, args.cases, tools)
    for start in range(0, len(work), args.batch):
        group, outputs = work[start : start + args.batch], {}
        is_compared = start < args.compared
        num_compared += len(group) if is_compared else 0
        for name, side in sides.items():
            if name != "schema" and not is_compared:
                continue
            options = []
            for _, schemas, seed in group:
                tag = CallGrammar(FORMATS["hermes"].syntax, schemas, True, {}).required()
                structure = {"structural_tag": tag}
                options.append(
                    SamplingParams(
                        temperature=1.0,
                        seed=seed,
                        max_tokens=args.max_tokens,
                        logprobs=0,
                        structured_outputs=structure,
                        speculative=name != "plain",
                        prediction=schema_ids(llm, structure) if name == "schema" else None,
                    )
                )
            begin = time.perf_counter()
            made = llm.generate([{"prompt_token_ids": ids} for ids, _, _ in group], options)
            side["seconds"] += time.perf_counter() - begin if is_compared else 0.0
            outputs[name] = [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in made]
            for output in made if is_compared else ():
                num = len(output.outputs[0].token_ids)
                side["tokens"] += num
                side["steps"] += num - output.metrics.num_accepted_tokens
                side["drafted"] += output.metrics.num_draft_tokens
        is_equal = is_equal and all(each == outputs["schema"] for each in outputs.values())
        num_cut += sum(o.outputs[0].finish_reason != "stop" for o in made)
        num_valid += sum(is_valid(o.outputs[0].text, g[1]) for o, g in zip(made, group, strict=True))
        print(start + len(group), num_valid, num_cut, is_equal, sides, flush=True)
    for side in sides.values():
        side["seconds"] = round(side["seconds"], 1)
    saved = 1 - sides["schema"]["steps"] / sides["ngram"]["steps"] if sides["ngram"]["steps"] else 0.0
    finish(
        "tool_calls",
        {
            "cases": len(work),
            "bounded_schemas": args.bounded,
            "compared": num_compared,
            "valid": num_valid,
            "cut_off": num_cut,
            "outputs_are_equal": is_equal,
            "sides": sides,
            "steps_saved_by_the_schema": round(saved, 3),
        },
    )


if __name__ == "__main__":
    main()
