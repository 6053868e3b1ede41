"""Fuzzing the receiver of frames: whatever comes in, it is refused with a reason, or it is a whole frame."""

from __future__ import annotations

import random
from dataclasses import dataclass

from draftproof.serve.ipc.decode import Guests, read, results_of
from draftproof.serve.ipc.frame import FrameError
from frames import damaged, random_step, sealed

STEPS = 200  # different steps that frames are made of


@dataclass
class Found:
    refused: int = 0  # damaged frames
    believed: int = 0  # damaged frames that were read as one: none may be
    unchanged: int = 0  # the damage did nothing
    sealed_refused: int = 0  # damaged, with size and checksum made right again: refused by what they say
    sealed_read: int = 0  # or they say something that could be


def fuzz(count: int, seed: int) -> Found:
    """Half of them as they are, half sealed again. Anything but a FrameError goes through to the caller."""
    chance, found = random.Random(seed), Found()
    steps = [random_step(seed * STEPS + i, n=i % 9, k=(0, 1, 5)[i % 3]) for i in range(STEPS)]
    frames = [step.frame(i) for i, step in enumerate(steps)]
    for i in range(count):
        step, frame = steps[i % STEPS], frames[i % STEPS]
        data = damaged(chance, frame, chance.choice(frames))
        seal = i % 2 == 1
        data = sealed(data) if seal else data
        if data == frame:
            found.unchanged += 1
            continue
        try:
            told = read(data, step.bounds, step.results.sources)
            results = results_of(
                told, Guests.of(told.handles, step.known(), step.bounds.vocab_size), step.results.sources, {}
            )
            list(results)  # all of it can be used
        except FrameError as error:
            assert str(error)
            found.refused += 1
            found.sealed_refused += seal
        else:
            assert seal or data in frames, "a damaged frame was believed"
            found.sealed_read += seal
            found.believed += not seal and data not in frames
    return found
