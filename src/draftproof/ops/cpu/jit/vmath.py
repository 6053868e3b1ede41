"""Vector exp and silu with the same bits on every machine, independent of a math library."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftproof.ops.cpu.jit.compile import inlined
from draftproof.ops.cpu.jit.simd import (
    as_float,
    iadd,
    ishl,
    isplat,
    splat,
    to_int,
    vadd,
    vdiv,
    vfma,
    vge,
    vgt,
    vmax,
    vmin,
    vmul,
    vround,
    vselect,
    vsub,
)

_F = np.float32
LOG2E = _F(1.44269504088896341)
LN2_HIGH = _F(-0.693359375)
LN2_LOW = _F(2.12194440e-4)
SMALLEST = _F(-87.33654)  # exp below this is less than the smallest normal number: 0
LARGEST = _F(88.37626)
C1, C2, C3 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
C4, C5, C6 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
SILU_ZERO_BELOW = _F(-88.0)
ONE, ZERO = _F(1.0), _F(0.0)


@inlined
def vexp(x: Any) -> Any:
    """Return exp of 16 floats, relative error about 1e-7; exactly 0 below -87.3 and for NaN."""
    inside = vge(x, splat(SMALLEST))
    x = vmin(vmax(x, splat(SMALLEST)), splat(LARGEST))
    n = vround(vmul(x, splat(LOG2E)))
    r = vfma(n, splat(LN2_LOW), vfma(n, splat(LN2_HIGH), x))
    y = vfma(splat(C1), r, splat(C2))
    y = vfma(y, r, splat(C3))
    y = vfma(y, r, splat(C4))
    y = vfma(y, r, splat(C5))
    y = vfma(y, r, splat(C6))
    y = vadd(vfma(y, vmul(r, r), r), splat(ONE))
    power = as_float(ishl(iadd(to_int(n), isplat(127)), isplat(23)))
    return vselect(inside, vmul(y, power), splat(ZERO))


@inlined
def vsilu(x: Any) -> Any:
    """Return x * sigmoid(x); 0 where that is below the smallest normal number."""
    y = vdiv(x, vadd(splat(ONE), vexp(vsub(splat(ZERO), x))))
    return vselect(vgt(splat(SILU_ZERO_BELOW), x), splat(ZERO), y)
