"""Chains of element-wise ops in one kernel, on a GPU: there they are bound by what they read and write."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
# set it to 1 where torch.compile does not work, to slope where the kernel for slopes does not
PLAIN = "DRAFTPROOF_TRAIN_PLAIN"


def fused(function: Function, device: torch.device) -> Function:
    """The function, compiled for any shape where that pays."""
    if device.type != "cuda" or os.environ.get(PLAIN) == "1":
        return function
    made: Function = _compiled(function)
    return made


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)
