"""Sizes that depend on model, machine and configuration, resolved before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass

from draftproof.config import EngineConfig
from draftproof.errors import ConfigError
from draftproof.models.config import ModelConfig
from draftproof.models.load import Checkpoint
from draftproof.models.registry import kv_layout
from draftproof.ops import Ops
from draftproof.ops.contract.kv_layout import resolve_kv_dtype

DEFAULT_MAX_LEN = 8192  # longer contexts need max_model_len
DEFAULT_KV_BYTES = 2 << 30  # if the free memory is not known
LOGITS_COPIES = 4  # of a step's logits that may live at once: raw, processed, and two temporaries


@dataclass(frozen=True, slots=True)
class Sizes:
    """Resolved sizes of an engine."""

    max_len: int  # tokens of a request
    num_seqs: int  # slots
    max_rows: int  # rows of a step
    page_size: int
    num_pages: int  # page 0, which is never allocated, included
    k: int  # maximum number of drafts of a slot

    @property
    def max_pages(self) -> int:
        """Return the pages of a request of full length."""
        return -(-self.max_len // self.page_size)

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that the page pool holds."""
        return (self.num_pages - 1) * self.page_size


def resolve_sizes(
    config: EngineConfig, checkpoint: Checkpoint, ops: Ops, drafter: tuple[int, int] = (0, 0)
) -> Sizes:
    """Return the sizes of an engine. `drafter`: bytes of the proposer per token, and fixed."""
    num_seqs = config.max_num_seqs or ops.default_seqs
    max_rows = config.max_num_batched_tokens or max(ops.default_rows, num_seqs)
    if max_rows < num_seqs:
        if config.max_num_seqs is not None:
            raise ConfigError(
                f"max_num_batched_tokens ({max_rows}) must be at least max_num_seqs "
                f"({num_seqs}): each running request needs a row a step"
            )
        num_seqs = max_rows
    max_len = _max_len(config, checkpoint.config)
    k = config.speculative.num_speculative_tokens if config.speculative else 1
    tokens = config.kv_cache_tokens
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, checkpoint.dtype)
    each = kv_layout(checkpoint.config, kv_dtype).bytes_per_token + drafter[0]
    if tokens is not None and ops.runtime.free_memory() is None:
        _check_machine_memory(tokens * each)
    if tokens is None:
        workspace = LOGITS_COPIES * num_seqs * (k + 1) * checkpoint.config.vocab_size * 4 + drafter[1]
        workspace += max_rows * _row_bytes(checkpoint)
        room = _kv_room(config, checkpoint, ops, workspace, each * max_len) // each
        tokens = min(room, num_seqs * max_len)
    return Sizes(max_len, num_seqs, max_rows, config.page_size, 1 - (-tokens // config.page_size), k)


def _max_len(config: EngineConfig, model: ModelConfig) -> int:
    requested = config.max_model_len
    if requested is None:
        return min(model.max_position, DEFAULT_MAX_LEN)
    if requested > model.max_position:
        raise ConfigError(
            f"max_model_len={requested} is beyond the {model.max_position} positions of this model"
        )
    return requested


def _row_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the activations of a row: one layer, the residual and its predecessor."""
    model = checkpoint.config
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim  # q, k, v and the result
    if model.latent is not None:  # queries before and after the key projection, and the result
        widths = model.latent.nope_dim + 2 * model.head_dim + 2 * model.latent.kv_rank
        heads = model.num_heads * (widths + model.latent.value_dim)
    return (4 * model.hidden_size + 3 * model.intermediate_size + heads) * checkpoint.dtype.itemsize


def _kv_room(config: EngineConfig, checkpoint: Checkpoint, ops: Ops, workspace: int, min_bytes: int) -> int:
    """Return the bytes for KV; ConfigError if a request of full length does not fit beside the weights."""
    free = ops.runtime.free_memory()
    if free is None:
        return max(DEFAULT_KV_BYTES, min_bytes)
    # weights quantised on the device have their memory already
    weights = sum(w.nbytes for w in checkpoint.weights.values() if w.data.is_cpu)
    room = int(free * config.memory_utilization) - weights - workspace
    if room < min_bytes:
        gib = 1 << 30
        raise ConfigError(
            f"the model does not fit: {free / gib:.1f} GiB are free on {ops.device}, of which "
            f"memory_utilization={config.memory_utilization} may be used; weights need {weights / gib:.1f}, "
            f"logits and activations {workspace / gib:.1f}, KV of one request of full length "
            f"{min_bytes / gib:.1f} GiB: lower max_model_len, max_num_seqs or max_num_batched_tokens, or use "
            "a smaller model"
        )
    return room


def _check_machine_memory(kv_bytes: int) -> None:
    """Refuse more KV than the machine has memory: on the CPU it is mapped when it is written, not before."""
    if not hasattr(os, "sysconf"):
        return
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if kv_bytes > total:
        gib = 1 << 30
        raise ConfigError(
            f"KV needs {kv_bytes / gib:.1f} GiB, the machine has {total / gib:.1f}: lower kv_cache_tokens"
        )


def sample_row_counts(max_rows: int) -> list[int]:
    """Return row counts to time: powers of two, the middle between two of them, and `max_rows`."""
    sizes = [n for power in range(12) for n in (1 << power, 3 << power)]
    return [n for n in sorted(sizes) if n < max_rows] + [max_rows]
