"""Compilation of element-wise chains into one kernel on a GPU, where they are memory-bound."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
# 1: without torch.compile; slope: without the gradient kernel
PLAIN = "DRAFTPROOF_TRAIN_PLAIN"


def compiled(function: Function, device: torch.device) -> Function:
    """Return the function, compiled for any shape on a GPU."""
    if device.type != "cuda" or os.environ.get(PLAIN) == "1":
        return function
    made: Function = _compile(function)
    return made


@cache
def _compile(function: Any) -> Any:
    return torch.compile(function, dynamic=True)
