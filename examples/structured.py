"""Output that follows a JSON schema, a regular expression, or a list of choices, with drafts or without."""

import json

from draftproof import LLM, SamplingParams

llm = LLM("smollm2-135m", speculative_config={"method": "ngram", "num_speculative_tokens": 5})
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2026},
        "fields": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "born", "fields"],
}
chat = [{"role": "user", "content": "Who was Ada Lovelace? Answer with name, born and fields."}]
params = SamplingParams(max_tokens=120, seed=3, structured_outputs={"json": SCHEMA, "max_whitespace": 1})
output = llm.chat(chat, params)[0]
print(json.loads(output.outputs[0].text))
print(f"  {output.metrics.acceptance_length:.2f} tokens a step, strategy {output.strategy}")

for constraint in (
    {"regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"},
    {"choice": ["poet", "mathematician", "engineer"]},
    {"grammar": 'root ::= item (", " item)*\nitem ::= [a-z]+'},  # or a Lark grammar with a `start` rule
    {"choice": ["yes", "no"], "reasoning_end": "."},  # free up to the first full stop
):
    output = llm.chat(chat, SamplingParams(temperature=0, max_tokens=40, structured_outputs=constraint))[0]
    print(constraint, "->", repr(output.outputs[0].text))
