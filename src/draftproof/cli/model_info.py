"""`draftproof info`: describe a model without loading its weights."""

from __future__ import annotations

import argparse
import math

from rich.console import Console
from rich.table import Table

from draftproof.errors import DraftproofError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("model", help="a built-in name, a folder, a .gguf file or a hub id")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Print sizes, tokenizer and source of a model."""
    import torch

    from draftproof.models.load import load_config
    from draftproof.models.registry import expected_tensors, kv_layout
    from draftproof.text.tokenizer import load_tokenizer

    config, source = load_config(options.model)
    parameters = sum(math.prod(shape) for shape in expected_tensors(config).values())
    kv = kv_layout(config, torch.bfloat16).bytes_per_token
    table = Table(show_header=False, box=None)
    rows: list[tuple[str, object]] = [
        ("architecture", config.architecture),
        ("parameters", f"{parameters:,}"),
        ("stored as", config.dtype),
        ("layers", config.num_layers),
        ("hidden", config.hidden_size),
        ("heads", f"{config.num_heads} query, {config.num_kv_heads} key/value, of {config.head_dim}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("positions", f"{config.max_position:,}"),
        ("rope", f"theta {config.rope_theta:g}, scaling {config.rope_scaling.kind}"),
        ("KV per token", f"{kv:,} bytes in bf16"),
        ("source", source),
    ]
    try:
        tokenizer = load_tokenizer(source)
        rows.append(("tokenizer", f"{tokenizer.vocab_size:,} tokens, ends with {tokenizer.eos_token_ids}"))
        rows.append(("chat template", "yes" if tokenizer.chat_template else "no"))
    except DraftproofError as error:
        rows.append(("tokenizer", f"none: {error}"))
    for name, value in rows:
        table.add_row(name, str(value))
    console.print(table)
    return 0
