"""Generate greedily with and without prompt lookup and show where a stop string ends the output: MODEL_FOLDER."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

PASSAGE = (
    "The river begins high in the mountains, where the snow melts in spring and fills a hundred small "
    "streams. The streams run down over grey stones and meet in a quiet valley."
)
PROMPT = f"{PASSAGE}\n\nThe same text again:\n\n{PASSAGE}\n\nThe same text again:\n\nThe river begins"
STOPS = ("ills ", "hundred", " the snow", "in")
LOOKUP_TOKENS = 5
MAX_TOKENS = 24

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
inputs = tokenizer(PROMPT, return_tensors="pt")
length = inputs["input_ids"].shape[1]
print(f"transformers {__version__}, torch {torch.__version__}, at most {MAX_TOKENS} tokens")
for stop in (None, *STOPS):
    for lookup in (None, LOOKUP_TOKENS):
        options = {"stop_strings": [stop], "tokenizer": tokenizer} if stop else {}
        if lookup:
            options["prompt_lookup_num_tokens"] = lookup
        with torch.inference_mode():
            ids = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS, **options)[0, length:]
        print(f"stop {stop!r}, prompt lookup {lookup}: {len(ids)} tokens, {tokenizer.decode(ids)!r}")
