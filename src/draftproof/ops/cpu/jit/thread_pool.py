"""Thread pool that runs a program (a table of kernel calls) with a barrier after each call.

The workers run native code and never take the GIL. They spin briefly after a program and then
sleep on a condition variable, so waking one is cheap while decoding and free while idle. No OpenMP:
torch's own pool is in the same process and is not used.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import weakref
from typing import Any

import numpy as np
from numba import types

from draftproof.ops.cpu.jit.compile import (
    Kernel,
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    cpu_pause,
    device,
    load_i64,
    store_i64,
)

INSTRUCTION_WORDS = 24  # int64 words of an instruction: the kernel's address, then its arguments
INITIAL_SCRATCH_BYTES = 1 << 20  # initial bytes per thread

# Shared state: byte offsets, each frequently written word in its own cache line. `run` writes the six words
# from TABLE on at once.
GENERATION, ARRIVED, RELEASED, SLEEPERS, STOP = 0, 64, 128, 192, 256
TABLE, COUNT, ROWS, THREADS, SCRATCH_BASE, SCRATCH_SIZE = 320, 328, 336, 344, 352, 360
MUTEX, CONDITION, STATE_BYTES = 384, 512, 640  # both are smaller than 128 bytes on every libc
RUN_WORDS = struct.Struct("=6q")  # from TABLE on

# A pause is 10 to 140 cycles: the workers sleep some 50 microseconds after the last program.
SPINS_BEFORE_SLEEP = 1000
SPINS_BEFORE_YIELD = 300  # at a barrier; so that an oversubscribed machine makes progress

_int32, _int64 = types.int32, types.int64
_sched_yield = types.ExternalFunction("sched_yield", _int32())
_mutex_lock = types.ExternalFunction("pthread_mutex_lock", _int32(_int64))
_mutex_unlock = types.ExternalFunction("pthread_mutex_unlock", _int32(_int64))
_cond_wait = types.ExternalFunction("pthread_cond_wait", _int32(_int64, _int64))
_cond_broadcast = types.ExternalFunction("pthread_cond_broadcast", _int32(_int64))


@device
def _barrier(state: int, threads: int) -> None:
    turn = atomic_load(state + RELEASED)
    if atomic_add(state + ARRIVED, 1) == threads - 1:
        store_i64(state + ARRIVED, 0)
        atomic_store(state + RELEASED, turn + 1)
        return
    spins = 0
    while atomic_load(state + RELEASED) == turn:
        cpu_pause()
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            _sched_yield()


@device
def _execute(state: int, thread: int) -> None:
    table, count = load_i64(state + TABLE), load_i64(state + COUNT)
    rows, threads = load_i64(state + ROWS), load_i64(state + THREADS)
    scratch = load_i64(state + SCRATCH_BASE) + thread * load_i64(state + SCRATCH_SIZE)
    for i in range(count):
        line = table + i * (INSTRUCTION_WORDS * 8)
        call_kernel(load_i64(line), line + 8, rows, thread, threads, scratch)
        _barrier(state, threads)


def _run_alone(state: int) -> None:
    """Run the program on the calling thread alone."""
    table, count = load_i64(state + TABLE), load_i64(state + COUNT)
    rows, scratch = load_i64(state + ROWS), load_i64(state + SCRATCH_BASE)
    for i in range(count):
        line = table + i * (INSTRUCTION_WORDS * 8)
        call_kernel(load_i64(line), line + 8, rows, 0, 1, scratch)


def _run_with_workers(state: int) -> None:
    """Start the workers on the program, take part, and return when all are done."""
    atomic_add(state + GENERATION, 1)
    if atomic_load(state + SLEEPERS) > 0:
        _mutex_lock(state + MUTEX)
        _cond_broadcast(state + CONDITION)
        _mutex_unlock(state + MUTEX)
    if atomic_load(state + STOP) == 0:
        _execute(state, 0)


def _worker_loop(state: int, thread: int) -> None:
    """Run the loop of a worker thread."""
    seen = 0
    while True:
        spins = 0
        while atomic_load(state + GENERATION) == seen:
            cpu_pause()
            spins += 1
            if spins > SPINS_BEFORE_SLEEP:
                _mutex_lock(state + MUTEX)
                atomic_add(state + SLEEPERS, 1)
                while atomic_load(state + GENERATION) == seen:
                    _cond_wait(state + CONDITION, state + MUTEX)
                atomic_add(state + SLEEPERS, -1)
                _mutex_unlock(state + MUTEX)
        seen += 1
        if atomic_load(state + STOP) != 0:
            return
        _execute(state, thread)


_RUN_ALONE = Kernel(_run_alone, types.void(_int64))
_RUN_WITH_WORKERS = Kernel(_run_with_workers, types.void(_int64))
_WORKER_LOOP = Kernel(_worker_loop, types.void(_int64, _int64))


def aligned_bytes(size: int, align: int = 64) -> np.ndarray:
    """Allocate zeroed bytes whose address is a multiple of `align`."""
    raw = np.zeros(size + align, dtype=np.uint8)
    skip = -raw.ctypes.data % align
    return raw[skip : skip + size]


def _stop(state: np.ndarray, lead: Any, workers: list[threading.Thread], pid: int) -> None:
    if workers and os.getpid() == pid:  # a forked child has no workers to stop
        state[STOP : STOP + 8].view(np.int64)[0] = 1
        lead(state.ctypes.data)
        for worker in workers:
            worker.join()


class ThreadPool:
    """Pool of `threads` threads, the caller's included."""

    def __init__(self, threads: int) -> None:
        # the workers sleep on pthread conditions; without pthreads the caller runs alone
        self.threads = max(1, threads) if sys.platform != "win32" else 1
        self._lock = threading.Lock()
        self._scratch_size = INITIAL_SCRATCH_BYTES
        self._scratch = aligned_bytes(self.threads * INITIAL_SCRATCH_BYTES)
        self._scratch_address = self._scratch.ctypes.data
        self._start()

    def _start(self) -> None:
        """Create state and workers; repeated in a forked child, which has none."""
        self._pid = os.getpid()
        self._state = aligned_bytes(STATE_BYTES)
        self._address = self._state.ctypes.data
        one = ctypes.CFUNCTYPE(None, ctypes.c_int64)
        self._run_alone = one(_RUN_ALONE.address)
        self._run_with_workers: Any = None
        workers: list[threading.Thread] = []
        if self.threads > 1:
            libc = ctypes.CDLL(None)
            libc.pthread_mutex_init(ctypes.c_void_p(self._address + MUTEX), None)
            libc.pthread_cond_init(ctypes.c_void_p(self._address + CONDITION), None)
            self._run_with_workers = one(_RUN_WITH_WORKERS.address)
            work = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(_WORKER_LOOP.address)
            for thread in range(1, self.threads):
                name = f"draftproof-cpu-{thread}"
                args = (self._address, thread)
                workers.append(threading.Thread(target=work, args=args, name=name, daemon=True))
                workers[-1].start()
        weakref.finalize(self, _stop, self._state, self._run_with_workers, workers, self._pid)

    def run(
        self, table: bytearray | np.ndarray, count: int, rows: int, scratch: int = 0, alone: bool = False
    ) -> None:
        """Run `count` instructions of INSTRUCTION_WORDS words with at least `scratch` bytes per thread."""
        with self._lock:
            if self._pid != os.getpid():
                self._start()
            if scratch > self._scratch_size:
                self._scratch_size = -(-scratch // 4096) * 4096
                self._scratch = aligned_bytes(self.threads * self._scratch_size)
                self._scratch_address = self._scratch.ctypes.data
            RUN_WORDS.pack_into(
                self._state,
                TABLE,
                ctypes.addressof(ctypes.c_char.from_buffer(table)),
                count,
                rows,
                self.threads,
                self._scratch_address,
                self._scratch_size,
            )
            if alone or self.threads == 1:
                self._run_alone(self._address)
            else:
                self._run_with_workers(self._address)
