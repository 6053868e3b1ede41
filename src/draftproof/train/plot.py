"""The curve of a training run as a picture: loss on the left, acceptance length on the right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from draftproof.train.png import BLACK, GREY, Canvas, Colour

COLOURS: tuple[Colour, ...] = (
    (31, 119, 180), (214, 90, 20), (44, 140, 44), (190, 40, 40), (120, 80, 170), (110, 80, 60), (90, 90, 90),
)  # fmt: skip
Line = Sequence[tuple[float, float]]
NAMES = {
    "greedy": "temperature 0",
    "coupled": "temperature 1, shared noise",
    "argmax": "temperature 1, argmax",
}


def curve_png(curve: Sequence[Mapping[str, Any]]) -> bytes:
    """One point an examination, as `Trainer.examine` puts them down."""
    canvas = Canvas(1500, 560)
    steps = max((len(point["loss"]) for point in curve), default=0)
    losses = {
        f"draft {j + 1}": [(point["step"], point["loss"][j]) for point in curve if point["loss"]]
        for j in range(steps)
    }
    _axes(canvas, 20, "loss by step: divergence of each draft of a chain", losses)
    lengths = {
        words: [
            (point["step"], point["acceptance"][name]["length"])
            for point in curve
            if name in point["acceptance"]
        ]
        for name, words in NAMES.items()
    }
    shown = {words: line for words, line in lengths.items() if line}
    _axes(canvas, 770, "held-out acceptance length by step", shown, names_at=420)
    return canvas.png()


def _axes(canvas: Canvas, left: int, title: str, lines: Mapping[str, Line], names_at: int = 70) -> None:
    """One diagram, 710 wide, with its lines and, from `names_at` down, their names."""
    x0, x1, y0, y1 = left + 80, left + 690, 60, 500
    canvas.text(x0, 20, title)
    points = [point for line in lines.values() for point in line]
    if not points:
        canvas.text(x0 + 200, 260, "nothing yet")
        return
    most = max(1.0, max(x for x, _ in points))
    low, high, gap = _scale(min(y for _, y in points), max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        return x0 + (x1 - x0) * x / most, y1 - (y1 - y0) * (y - low) / (high - low)

    for tick in range(round((high - low) / gap) + 1):
        y = low + tick * gap
        canvas.line(place(0, y), place(most, y), GREY)
        canvas.text(left, place(0, y)[1] - 7, f"{y:6.2f}")
    for part in range(5):
        x = most * part / 4
        canvas.line(place(x, low), (place(x, low)[0], y1 + 6), BLACK)
        canvas.text(place(x, low)[0] - 6 * len(f"{x:.0f}"), y1 + 14, f"{x:.0f}")
    canvas.line((x0, y0), (x0, y1), BLACK)
    canvas.line((x0, y1), (x1, y1), BLACK)
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        for begin, end in zip(line, line[1:], strict=False):
            canvas.line(place(*begin), place(*end), colour, thick=2)
        for x, y in line if len(line) < 40 else ():
            across, down = place(x, y)
            canvas.line((across - 2, down), (across + 2, down), colour, thick=4)
        canvas.text(x0 + 240, names_at + 20 * number, name, colour)


def _scale(low: float, high: float) -> tuple[float, float, float]:
    """Round numbers around the values, and the gap between two marks."""
    span = max(high - low, 1e-3 * max(1.0, abs(high)))
    power = 10 ** math.floor(math.log10(span / 4))
    gap = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= span / 6)
    return gap * math.floor(low / gap), gap * math.ceil(high / gap + 1e-9), gap
