"""A canvas of pixels with lines and small letters, and the PNG of it: a plot needs no library."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int]
BLACK, GREY = (40, 40, 40), (215, 215, 215)

# Five columns a letter, from the left; bit 0 of a column is its top pixel, bit 6 the bottom one.
_LETTERS = {
    "0": "3e5149453e", "1": "00427f4000", "2": "4261514946", "3": "2141454b31", "4": "1814127f10",
    "5": "2745454539", "6": "3c4a494930", "7": "0171090503", "8": "3649494936", "9": "064949291e",
    "a": "2054545478", "b": "7f48444438", "c": "3844444420", "d": "384444487f", "e": "3854545418",
    "f": "087e090102", "g": "0c5252523e", "h": "7f08040478", "i": "00447d4000", "j": "2040443d00",
    "k": "7f10284400", "l": "00417f4000", "m": "7c04180478", "n": "7c08040478", "o": "3844444438",
    "p": "7c14141408", "q": "081414187c", "r": "7c08040408", "s": "4854545420", "t": "043f444020",
    "u": "3c4040207c", "v": "1c2040201c", "w": "3c4030403c", "x": "4428102844", "y": "0c5050503c",
    "z": "4464544c44", ".": "0060600000", ",": "0050300000", "-": "0808080808", ":": "0036360000",
    "(": "001c224100", ")": "0041221c00", "=": "1414141414", "/": "2010080402", " ": "0000000000",
}  # fmt: skip


class Canvas:
    """White at first. x goes right, y goes down."""

    def __init__(self, width: int, height: int) -> None:
        self.pixels: NDArray[np.uint8] = np.full((height, width, 3), 255, np.uint8)

    def line(
        self, begin: tuple[float, float], end: tuple[float, float], colour: Colour, thick: int = 1
    ) -> None:
        count = int(max(abs(end[0] - begin[0]), abs(end[1] - begin[1]))) + 1
        xs = np.rint(np.linspace(begin[0], end[0], count)).astype(int)
        ys = np.rint(np.linspace(begin[1], end[1], count)).astype(int)
        height, width, _ = self.pixels.shape
        for right in range(thick):
            for down in range(thick):
                x, y = xs + right, ys + down
                inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
                self.pixels[y[inside], x[inside]] = colour

    def text(self, x: float, y: float, words: str, colour: Colour = BLACK, scale: int = 2) -> None:
        """Small letters; what has no shape here is a gap."""
        for number, letter in enumerate(words.lower()):
            columns = bytes.fromhex(_LETTERS.get(letter, _LETTERS[" "]))
            for column, bits in enumerate(columns):
                for row in range(7):
                    if bits >> row & 1:
                        left, top = int(x) + (number * 6 + column) * scale, int(y) + row * scale
                        self.pixels[max(0, top) : top + scale, max(0, left) : left + scale] = colour

    def png(self) -> bytes:
        height, width, _ = self.pixels.shape
        rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with its filter: none
        rows[:, 1:] = self.pixels.reshape(height, -1)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        data = zlib.compress(rows.tobytes(), 9)
        return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
