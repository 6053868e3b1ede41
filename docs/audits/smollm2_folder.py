"""Write SmolLM2-135M-Instruct as a Hugging Face folder in bf16 from its GGUF file: GGUF OUT_FOLDER.

The generation config samples: `transformers serve` decodes greedily at every temperature without it.
"""

import json
import sys
from pathlib import Path

from draftproof.models.load import load_checkpoint
from draftproof.models.quantized.write import config_to_hf, write_tensors
from draftproof.text.tokenizer_export import write_tokenizer

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
folder.mkdir(parents=True)
checkpoint = load_checkpoint(source)
write_tokenizer(source, folder)
write_tensors(folder, checkpoint.tensors.items())
(folder / "config.json").write_text(json.dumps(config_to_hf(checkpoint.config), indent=2))
path = folder / "generation_config.json"
path.write_text(json.dumps({**json.loads(path.read_text()), "do_sample": True}))
