"""`draftproof info`: describe a model without loading its weights."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from draftproof.errors import DraftproofError

if TYPE_CHECKING:
    from draftproof.models.config import ModelConfig
    from draftproof.models.tensor_sizes import TensorKind


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("model", help="a built-in name, a folder, a .gguf file or a hub id")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Print sizes, tokenizer, source and tensors of a model, and the memory floor of this machine."""
    import torch

    from draftproof.models.load import load_config
    from draftproof.models.registry import expected_tensors, kv_layout
    from draftproof.models.tensor_sizes import stored_tensors
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
        ("heads", _heads(config)),
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
    kinds = stored_tensors(source, config)
    if kinds:
        print_tensors(kinds, console)
    return 0


def _heads(config: ModelConfig) -> str:
    """Describe the heads of attention."""
    if config.latent is not None:
        return f"{config.num_heads} query, a latent row of {config.latent.kv_rank + config.head_dim} for all"
    return f"{config.num_heads} query, {config.num_kv_heads} key/value, of {config.head_dim}"


def print_tensors(kinds: list[TensorKind], console: Console) -> None:
    """Print bytes and memory by kind of tensor, and how fast this machine can read them."""
    from draftproof.models.tensor_sizes import read_bandwidth

    table = Table(box=None)
    for name in ("tensors", "number", "format", "MB in the file", "MB in memory"):
        table.add_column(name, justify="left" if name in ("tensors", "format") else "right")
    for kind in kinds:
        stored, resident = kind.file_bytes / 1e6, kind.memory_bytes / 1e6
        table.add_row(kind.name, str(kind.count), kind.format, f"{stored:,.1f}", f"{resident:,.1f}")
    stored, resident = sum(kind.file_bytes for kind in kinds), sum(kind.memory_bytes for kind in kinds)
    table.add_row(
        "all", str(sum(kind.count for kind in kinds)), "", f"{stored / 1e6:,.1f}", f"{resident / 1e6:,.1f}"
    )
    console.print()
    console.print(table)
    read, bandwidth = sum(kind.bytes_per_token for kind in kinds), read_bandwidth()
    console.print()
    console.print(
        f"memory floor on this CPU: {bandwidth / read:,.1f} tokens/s at batch 1 without drafts "
        f"({read / 1e6:,.1f} MB a token at {bandwidth / 1e9:.1f} GB/s)"
    )
