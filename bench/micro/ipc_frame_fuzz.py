"""Decode a million damaged frames: none may crash or hang the receiver, or be accepted.

    python bench/micro/ipc_frame_fuzz.py --frames 1000000

The last line is JSON. `tests/support/fuzzing.py` describes the damage; the tests use 20,000 frames.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

from common.measure import finish

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from fuzzing import fuzz

FRAMES_PER_SEED = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began, total = time.monotonic(), dict.fromkeys(asdict(fuzz(0, 0)), 0)
    for turn, first in enumerate(range(0, options.frames, FRAMES_PER_SEED)):
        found = asdict(fuzz(min(FRAMES_PER_SEED, options.frames - first), options.seed + turn))
        total = {name: total[name] + found[name] for name in total}
    assert total["accepted"] == 0
    seconds = round(time.monotonic() - began, 1)
    finish("ipc_frame_fuzz", {"frames": options.frames, **total, "seconds": seconds})


if __name__ == "__main__":
    main()
