"""Kernels for training; serving does not need them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor


def kl_grad_kernel(device: torch.device, width: int) -> Callable[..., Tensor] | None:
    """Return a kernel for the gradient of the loss by logits of `width` ids, or None."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from draftproof.ops.triton import kl_grad

    return kl_grad.kl_grad_in_place if width <= kl_grad.MAX_VOCAB else None
