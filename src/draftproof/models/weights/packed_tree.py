"""Packed weights as trees of tensors: the tensors in them, and copies into their storage.

Captured graphs and recorded passes hold the addresses of packed weights, so new values are copied into the
storage that is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import LoadError


def children(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of what a packed weight, a layer or a container of them consists of."""
    if is_dataclass(node) and not isinstance(node, type):
        yield from ((field.name, getattr(node, field.name)) for field in fields(node))
    elif isinstance(node, Mapping):
        yield from ((str(key), value) for key, value in node.items())
    elif isinstance(node, (list, tuple)):
        yield from ((str(i), value) for i, value in enumerate(node))


def tensors_in(node: Any) -> Iterator[Tensor]:
    """Yield every tensor of a tree."""
    if isinstance(node, Tensor):
        yield node
    for _, child in children(node):
        yield from tensors_in(child)


def check_alike(target: Any, source: Any, where: str) -> None:
    """Raise LoadError unless both trees have the same form, so that one can be copied into the other."""
    if isinstance(target, Tensor) and isinstance(source, Tensor):
        if target.shape != source.shape or target.dtype != source.dtype:
            forms = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (target, source)]
            raise LoadError(f"{where}: packed as {forms[0]} at the start, and as {forms[1]} now")
        return
    mine, new = list(children(target)), list(children(source))
    if type(target) is not type(source) or [name for name, _ in mine] != [name for name, _ in new]:
        raise LoadError(f"{where}: packed as {type(target).__name__}, and as {type(source).__name__} now")
    if not mine and target != source:
        raise LoadError(f"{where}: packed with {target!r} at the start, and with {source!r} now")
    for (name, child), (_, other) in zip(mine, new, strict=True):
        check_alike(child, other, f"{where}.{name}")


def copy_into(target: Any, source: Any, mask: Any = None) -> None:
    """Copy every tensor of `source` into the storage of `target`, a tree of the same form.

    `mask`: a pair of such trees; only elements in which both differ are copied.
    """
    if isinstance(target, Tensor):
        if mask is None:
            target.copy_(source)
        else:
            target.copy_(torch.where(mask[0] != mask[1], source, target))
        return
    new, masks = list(children(source)), [list(children(tree)) for tree in mask or ()]
    for i, (_, child) in enumerate(children(target)):
        copy_into(child, new[i][1], None if mask is None else [tree[i][1] for tree in masks])
