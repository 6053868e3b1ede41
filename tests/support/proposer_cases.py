"""Slot columns with histories, and proposers built alone."""

import torch

import tiny
from draftproof.engine.slots import Slots
from draftproof.ops import resolve
from draftproof.propose import ProposerEnv

CPU = torch.device("cpu")


def lines(ops, k, histories, max_len=128):
    """Return columns with history i committed in slot i; the rest is poisoned."""
    slots = Slots(len(histories), max_len, k, 1, tiny.VOCAB, ops)
    slots.poison()
    for slot, tokens in enumerate(histories):
        slots.columns.tokens[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        slots.columns.length[slot] = len(tokens)
    return slots.columns


def make(kind, k=4, **options):
    env = ProposerEnv(
        ops=resolve("torch", CPU),
        k=k,
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        num_slots=2,
        num_pages=8,
        page_size=16,
        max_len=128,
        max_rows=64,
    )
    return kind(env, options)
