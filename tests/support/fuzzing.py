"""Fuzzing of the frame decoder: every input is rejected with a message, or it is a valid frame."""

from __future__ import annotations

import random
from dataclasses import dataclass

from draftproof.serve.ipc.decode import ReceivedGroup, decode_frame, to_step_results
from draftproof.serve.ipc.frame import FrameError
from frames import damaged, random_step, sealed

NUM_STEPS = 200  # different steps that frames are made of


@dataclass
class FuzzCounts:
    """Number of inputs by outcome."""

    rejected: int = 0  # damaged frames that were rejected
    accepted: int = 0  # damaged frames that were decoded: must stay 0
    unchanged: int = 0  # the damage changed nothing
    sealed_rejected: int = 0  # damaged, size and checksum corrected: rejected by the checks of columns
    sealed_decoded: int = 0  # the same, but the content is valid


def fuzz(count: int, seed: int) -> FuzzCounts:
    """Decode `count` damaged frames, half of them with a corrected checksum.

    Only FrameError is caught.
    """
    rng, found = random.Random(seed), FuzzCounts()
    steps = [random_step(seed * NUM_STEPS + i, n=i % 9, k=(0, 1, 5)[i % 3]) for i in range(NUM_STEPS)]
    frames = [step.frame(i) for i, step in enumerate(steps)]
    for i in range(count):
        step, frame = steps[i % NUM_STEPS], frames[i % NUM_STEPS]
        data = damaged(rng, frame, rng.choice(frames))
        seal = i % 2 == 1
        data = sealed(data) if seal else data
        if data == frame:
            found.unchanged += 1
            continue
        try:
            frame_in = decode_frame(data, step.bounds)
            results = to_step_results(
                frame_in,
                ReceivedGroup.build(frame_in.handles, step.known(), step.bounds.vocab_size),
                step.results.source_names,
                {},
            )
            list(results)  # every entry can be read
        except FrameError as error:
            assert str(error)
            found.rejected += 1
            found.sealed_rejected += seal
        else:
            assert seal or data in frames, "a damaged frame was decoded"
            found.sealed_decoded += seal
            found.accepted += not seal and data not in frames
    return found
