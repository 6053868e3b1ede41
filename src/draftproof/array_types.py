"""Aliases of numpy array types."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats32 = NDArray[np.float32]
Floats64 = NDArray[np.float64]
