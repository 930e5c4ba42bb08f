"""Owns processes that compile ahead: what one process compiles behind a lock, many do at once.

NVRTC compiles one program of a process at a time, and Python traces and lowers one. Each process
here has its own of both, writes kernels to the cache on disk, which all share, and hands on XLA's
programs as bytes. They yield the processor to who measures.

Read next: drawn_programs.py for what is compiled.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from types import TracebackType
from typing import Any, Self

PROCESSES = max(1, min(len(os.sched_getaffinity(0)) - 3, 14))  # three are left to who measures
NICE = 10


class Processes:
    """Some processes, which end with the block; what they have not begun then is dropped.

    None, for tests: all is done in this one.
    """

    def __init__(self, platform: str, count: int = PROCESSES) -> None:
        self._pool = None
        if count == 0:
            return
        spawn = multiprocessing.get_context("spawn")  # a fork has no CUDA
        self._pool = ProcessPoolExecutor(count, spawn, _begin, (platform,))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._pool is None:
            return
        running = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()

    def each(
        self, function: Callable[[Any], Any], items: Sequence[Any], until: float | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """Yields items and the function's results, the first that are done first.

        Ends at `until` of `time.perf_counter`. A process that dies raises BrokenProcessPool.
        """
        if self._pool is None:
            yield from ((item, function(item)) for item in items)
            return
        asked: dict[Future[Any], Any] = {self._pool.submit(function, item): item for item in items}
        wait = None if until is None else max(0.0, until - time.perf_counter())
        try:
            for future in as_completed(asked, wait):
                yield asked.pop(future), future.result()
        except TimeoutError:
            return


def _begin(platform: str) -> None:
    os.nice(NICE)
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_force_compilation_parallelism=1"
    import jax  # after the flags

    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    jax.devices()
