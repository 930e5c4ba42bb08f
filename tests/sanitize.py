"""Runs the CUDA kernels under NVIDIA's compute-sanitizer, on a reduced set of small cases.

    python -m tests.sanitize memcheck racecheck synccheck     # --jobs 4 --case SUBSTRING ...

One process of the sanitizer for each tool and share of the cases. Every case is a forward pass
and all gradients, a forward pass in float8, a call of decode_attention or one of
ragged_paged_attention (with shared pages, trees, pages of eight bits, latent pages), compared as
elsewhere; `mma.sync` cases take the kernels of GPUs other than
Hopper's. Every array is an allocation of its own, so that memcheck sees a step beyond its end;
graphs are off, so that each launch is seen; the kernels are told of a GPU with two
multiprocessors, so that each takes many tiles. racecheck and synccheck look at the kernels of this
project alone. Exits with 1 if a tool
reports anything, a result is wrong or a case raises; the others run all the same, and what failed
is printed last.

A warp gives a buffer back by one lane's arrival at an mbarrier, after __syncwarp(), a shuffle or a
wgmma wait has brought its lanes together, which orders the accesses of all 32. racecheck (2025.3)
follows only the lane that arrives: it reports accesses of lanes 1 to 31, and never one of lane 0.
So for racecheck alone every lane arrives for itself (cuda/kernels/arrivals.cuh); what is left
to report is then a hazard. --as-shipped shows the reports without that change. They come in single
CTAs, and not in every run: a kernel of an mbarrier ring and a named barrier alone has them in 5 of
64 CTAs where one lane arrives, and none where all do (H100, 2026-11-27). Caches of eight bits once
had 194 in three of eight cases, as that kernel has them, and none in two later runs.

compute-sanitizer 2025.3 itself ends with a segmentation fault, or stops, in about one of 100 cases
while several run on one GPU. What it had to report of finished cases it has printed by then; the
others run in a new process, and what ended the first is printed: its signal, or the silence after
which it was killed, and its last lines, with Python's stack where the signal came to the program
under the tool. RESTARTS bounds that, so a case that ends so each time fails.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn
from unittest import mock

import jax

from jax_flash import _gpu, _native
from jax_flash._gpu import copies, paged
from jax_flash._gpu.sm90 import forward_order, forward_rows

from . import (
    decode_cases,
    float8_cases,
    latent_rows_cases,
    quantized_cases,
    ragged_cases,
    serving_cases,
)
from .cases import BOTTOM_RIGHT, Case
from .compare import compare_copies, compare_parts
from .other_kernels import AsIfLong

C = functools.partial(Case, dtype="bfloat16", batch=(1,), N=2, T=150, S=210, with_lse=True)
SEGMENTS_AND_LENGTHS = {
    "segments": "packed", "q_lengths": (140,), "kv_lengths": (201,), "N": 4, "K": 2,
    "causal": True, "align": BOTTOM_RIGHT,
}  # fmt: skip

CASES = (
    C("64", H=64),
    C("64 causal", H=64, causal=True, T=333, S=333),
    C("64 softcap segments", H=64, segments="packed", softcap=3.0),
    C("64 positions", H=64, positions="offset", causal=True, T=333, S=333),
    C("128 positions window", H=128, positions="permuted", window=(90, 5), deterministic=True),
    C("256 positions segments", H=256, positions="striped", causal=True, segments="packed"),
    C("64 heads packed", H=64, N=8, K=1, T=9),
    C("64 whole tiles deterministic", H=64, causal=True, deterministic=True, T=384, S=401),
    C("64 causal deterministic", H=64, causal=True, deterministic=True, T=401, S=401),
    # Logits that differ by hundreds: rows overflow, and their tiles are walked again.
    C("64 causal second walk", H=64, causal=True, T=333, S=333, spread=150.0),
    C("96 window", H=96, window=(40, 20)),
    C("128", H=128, T=129, S=257),
    C("128 causal", H=128, causal=True, T=333, S=333),
    C("128 gqa causal", H=128, causal=True, N=4, K=2, align=BOTTOM_RIGHT),
    C("128 segments lengths", H=128, **SEGMENTS_AND_LENGTHS),
    C("128 sinks softcap", H=128, sinks=True, softcap=3.0, kv_lengths=(133,)),
    C("128 whole tiles causal", H=128, causal=True, T=320, S=333),
    C("128 float16", H=128, dtype="float16", causal=True),
    C("128 causal deterministic", H=128, causal=True, deterministic=True, T=333, S=333),
    # Units of one of eight query heads: several add to a block of keys.
    C("128 mqa causal", H=128, N=8, K=1, causal=True, T=384, S=401),
    C("64 mqa causal deterministic", H=64, N=8, K=1, causal=True, T=384, S=401, deterministic=True),
    C("128 deterministic gqa segments", H=128, deterministic=True, **SEGMENTS_AND_LENGTHS),
    C("128 second walk segments", H=128, segments="returning", T=200, S=400, spread=150.0),
    C("192 128 causal", H=192, Hv=128, causal=True),
    C("192 128 causal deterministic", H=192, Hv=128, causal=True, deterministic=True, T=200, S=200),
    C("256", H=256),
    C("256 causal gqa", H=256, causal=True, N=4, K=2),
    # More units than CTAs, in pairs; an odd number of blocks.
    C("192 pairs causal", H=192, N=24, K=12, causal=True, T=130, S=610),
    C("256 pairs", H=256, N=24, K=12, T=70, S=530),
    C("192 pairs in turns", H=192, N=24, K=12, causal=True, T=130, S=610, deterministic=True),
    C("256 segments lengths", H=256, **SEGMENTS_AND_LENGTHS),
    C("256 mqa causal", H=256, N=8, K=1, causal=True, T=256, S=256),
    # CTAs share the queries of a unit.
    C("few keys", H=128, N=1, T=2048, S=40),
    C("256 causal deterministic", H=256, causal=True, deterministic=True, T=200, S=200),
    C("256 whole tiles deterministic", H=256, N=4, K=2, deterministic=True, T=192, S=200),
    C("40 72", H=40, Hv=72, causal=True),
    C("unaligned 36 33 causal", H=36, Hv=33, causal=True, T=333, S=333),
    C("unaligned 100 gqa deterministic", H=100, N=4, K=2, causal=True, deterministic=True),
    C("unaligned 127 segments lengths", H=127, Hv=64, **SEGMENTS_AND_LENGTHS),
    C("unaligned 62 heads packed", H=62, N=8, K=1, T=9, S=75),
    C("unaligned 255 1 window", H=255, Hv=1, window=(40, 20), N=3),
    C("unaligned 1 250 deterministic", H=1, Hv=250, deterministic=True, N=1, T=201, S=129),
    C("one token", H=128, T=1, S=300, N=4, K=2),
    C("nothing seen", H=128, segments="apart"),
    C("dropout", dropout=0.3, causal=True, N=4, K=2),
    C("dropout 128 segments", H=128, dropout=0.3, **SEGMENTS_AND_LENGTHS),
    C("dropout 256 deterministic softcap", H=256, dropout=0.3, softcap=3.0, deterministic=True),
    C("bias", bias="1nts"),
    C("bias float32 wide", H=256, bias="bn1s", bias_dtype="float32"),
    C("bias odd", S=131, bias="11ts", bias_hides=True, softcap=5.0, deterministic=True),
    C("mask", H=128, mask="b1ts", mask_density=0.01),
    C("mask wide causal", H=256, mask="bn1s", causal=True),
    C("mask deterministic segments", mask="1nts", segments="packed", deterministic=True),
    C("blocks causal", blocks=("bn", 64), H=64, causal=True),
    C("blocks wide mask of keys", blocks=("11", 48), H=256, mask="b11s", deterministic=True),
    C("score relative segments", score="relative", H=128, segments="packed", N=4, K=2),
    C("score gate wide", score="gate", H=256, causal=True, dropout=0.3),
    C("float32 in halves", dtype="float32", precision="highest", H=72, causal=True, N=4, K=2),
    # Scratch arrays of the rows and columns that there are.
    C("few rows", H=16, T=3, S=5, N=4, K=1),
    C("few rows deterministic", H=200, T=70, S=5, N=4, K=1, deterministic=True),
    C("few rows in halves", dtype="float32", precision="highest", H=24, T=3, S=5, N=4, K=1),
    # Rows of one tile: a warpgroup has one, forward three of a CTA; sums of a bias by two queries.
    C("one tile, bias and mask", H=32, N=4, T=64, S=64, batch=(9,), bias="1nts", mask="b11s"),
    C("one tile, bias", H=64, N=3, T=50, S=40, batch=(5,), bias="bnts"),
    C("one tile, mask", H=40, N=4, K=2, T=64, S=33, batch=(3,), mask="b1ts"),
    C("narrow, bias and mask", H=32, T=200, S=200, batch=(2,), bias="1nts", mask="b11s"),
)
LONG = (  # as calls of many queries and keys
    C("three warpgroups 128", H=128, T=300, S=333, N=4, K=2, causal=True),
    C("three warpgroups 72", H=72, T=390, S=250, sinks=True, kv_lengths=(201,)),
)
# Units of 64 rows where they are few.
FEW = (
    C("few units", T=200, S=300, N=4, K=2, causal=True),
    C("few units 192", H=192, T=100, S=200, sinks=True, kv_lengths=(150,)),
    C("few units in parts", T=70, S=4100, N=1, causal=True, align=BOTTOM_RIGHT),
)
# With as many units a multiprocessor as large batches have.
GROUPED = (C("three warpgroups, grouped heads", H=128, T=1024, S=1024, N=8, K=2, causal=True),)
# float32 at default precision: float16 copies, and what they do not hold.
CARRIED = (
    C("float32", dtype="float32", H=64, causal=True, N=4, K=2),
    C("float32 few rows", dtype="float32", H=24, T=3, S=5, N=4, K=1),
)
# By the kernels of mma.sync everywhere.
IN_PARTS = (
    C("float32 high", dtype="float32", precision="high", H=64, causal=True, N=4, K=2),
    C("float32 highest", dtype="float32", precision="highest", H=33, Hv=7, T=70, S=90, dropout=0.2,
      mask="b1ts", bias="11ts", sinks=True, segments="packed", kv_lengths=(80,)),
    C("head dim 512", H=512, T=70, S=100, N=1, causal=True),
)  # fmt: skip
MMA_SYNC = (
    C("64 causal", H=64, causal=True, T=200, S=200),
    C("128 segments lengths", H=128, **SEGMENTS_AND_LENGTHS),
    C("256 positions deterministic", H=256, positions="permuted", window=(90, 5),
      deterministic=True),
    C("unaligned 33 7 everything", H=33, Hv=7, T=70, S=90, dropout=0.2, mask="b1ts", bias="11ts",
      sinks=True, segments="packed", softcap=3.0),
    C("score gate blocks", score="gate", H=128, T=70, blocks=("1n", 48), causal=True),
    C("few rows", H=72, T=70, S=3, N=4, K=1),
)  # fmt: skip
DECODING = {case.name: decode_cases.fit(case, "cuda") for case in decode_cases.CASES}
# By parts of a line, as for long caches: rows as short as these have a cluster of CTAs each.
LINES = ("softcap and sinks", "pages of 128 and all", "64 tokens of 16 heads, window, 16 bits")
MMA_SYNC_DECODING = (
    "group of 3, odd dims",
    "64 tokens of 16 heads, window, 16 bits",
    "pages of 128 and all",
    "latent, several tokens",
)
# Requests of more tokens than one, by a family; requests of one token are decoded beside them.
OVER_PAGES = {
    **{f"pages {batch.name}": (batch, "pages") for batch, _ in ragged_cases.OVER_PAGES},
    **{f"mma.sync pages {x.name}": (x, "pages_sm80") for x in ragged_cases.OVER_PAGES_80},
    **{
        f"requests, {x.name}": (x, None)
        for x in (
            *serving_cases.IN_COMMON,
            *serving_cases.WITH_TAILS,
            *serving_cases.EIGHT_BITS,
            *serving_cases.TREES,
            *serving_cases.LATENT,
        )
    },
    **{f"requests, copied, {x.name}": (x, None) for x in quantized_cases.COPIED},
}


@dataclasses.dataclass(frozen=True)
class EightBits:
    """A call of decode_attention with a cache of eight bits."""

    case: decode_cases.Case
    dtype: str
    varied: bool

    def draw(self) -> decode_cases.Arguments:
        return quantized_cases.quantize(self.case, self.dtype, varied=self.varied)


@dataclasses.dataclass(frozen=True)
class LatentRows:
    """A call of decode_attention with packed rows of latent attention."""

    lengths: tuple[int, ...]
    heads: int
    tokens: int = 1
    page: int | None = None
    chosen: int | None = None

    def check(self) -> None:
        case = latent_rows_cases.draw(**vars(self))
        case.compare(case.run("cuda"))


LATENT_ROWS = {
    "16 heads": LatentRows((300, 1, 0, 130), 16),
    "16 heads, two tokens, pages of 16": LatentRows((290, 2), 16, tokens=2, page=16),
    "8 heads, chosen": LatentRows((90, 170), 8, chosen=70),
}


@dataclasses.dataclass(frozen=True)
class Float8:
    """A call of flash_attention in float8, or an array that is quantised."""

    name: str

    def check(self) -> None:
        if self.name in float8_cases.QUANTISED:
            array = float8_cases.QUANTISED[self.name]
            float8_cases.agree_in_bits(array.run("cuda"), array.run("xla"))
        else:
            call = float8_cases.CALLS[self.name]
            float8_cases.agree(call.run("cuda"), call.run("xla"), lse=float8_cases.LSE)


@dataclasses.dataclass(frozen=True)
class Check:
    """One case, by the kernels that are taken for it or by a family that is put first."""

    case: (
        Case
        | decode_cases.Case
        | EightBits
        | Float8
        | ragged_cases.Batch
        | serving_cases.InCommon
        | serving_cases.EightBitPages
        | serving_cases.Tree
        | quantized_cases.Copied
        | LatentRows
    )
    family: str | None = None
    tiling: dict[str, int] | None = None  # of decode_attention
    long: bool = False  # as of many queries and keys

    def run(self) -> None:
        """Raises AssertionError if a result is wrong."""
        jax.clear_caches()  # of the same case by another family
        if isinstance(self.case, Float8 | LatentRows | serving_cases.InCommon):
            self.case.check()
            return
        first = contextlib.nullcontext() if self.family is None else _gpu.prefer(self.family)
        arguments = self.case.draw()
        with first:
            if isinstance(self.case, quantized_cases.Copied):
                with self.case.chosen():
                    arguments.compare(arguments.run("cuda"))
            elif isinstance(arguments, ragged_cases.Drawn):
                arguments.compare(arguments.run("cuda"))
            elif isinstance(self.case, EightBits):
                quantized_cases.check(arguments, arguments.run("cuda"))
            elif isinstance(arguments, decode_cases.Arguments):
                call = (
                    arguments if self.tiling is None else decode_cases.Tiled(arguments, self.tiling)
                )
                decode_cases.compare(arguments, call.run("cuda"))
            elif self.long:
                compare_parts(arguments, AsIfLong(arguments, "consumers", 3).run("cuda"))
            elif self.case in GROUPED:
                with mock.patch.object(forward_rows, "has_many_rounds", return_value=True):
                    compare_parts(arguments, arguments.run("cuda"))
            elif self.case in FEW:
                with mock.patch.object(forward_rows, "is_round", is_round):
                    compare_parts(arguments, arguments.run("cuda"))
            elif self.case in CARRIED:
                compare_copies(arguments, arguments.run("cuda"))
            else:
                compare_parts(arguments, arguments.run("cuda"))


is_round = forward_rows.is_round
CHECKS = {
    **{case.name: Check(case) for case in (*CASES, *FEW, *GROUPED, *CARRIED, *IN_PARTS)},
    **{case.name: Check(case, long=True) for case in LONG},
    **{f"mma.sync {case.name}": Check(case, "sm80") for case in MMA_SYNC},
    **{f"decode {name}": Check(case) for name, case in DECODING.items()},
    **{f"decode line {x}": Check(DECODING[x], tiling={"cluster": 1}) for x in LINES},
    **{f"decode ring {x.name}": Check(x, tiling=tiling) for x, tiling in decode_cases.RINGS},
    **{
        f"mma.sync decode {x}": Check(DECODING[x], "decode_sm80", tiling={"cluster": 1})
        for x in MMA_SYNC_DECODING
    },
    **{f"decode {case.name}": Check(case) for case in decode_cases.UNALIGNED},
    **{f"decode eight bits, {x[0].name}": Check(EightBits(*x)) for x in quantized_cases.CASES},
    **{f"float8 {x}": Check(Float8(x)) for x in (*float8_cases.CALLS, *float8_cases.QUANTISED)},
    **{f"decode packed rows, {name}": Check(case) for name, case in LATENT_ROWS.items()},
    **{name: Check(*of_family) for name, of_family in OVER_PAGES.items()},
}

OWN_KERNELS = tuple(
    word
    for name in ("flash_", "segment_", "mask_", "request_")
    for word in ("--kernel-name", f"kns={name}")
)
TOOLS = {
    "memcheck": (),
    "racecheck": ("--racecheck-report", "all", *OWN_KERNELS),
    "synccheck": OWN_KERNELS,
    "initcheck": OWN_KERNELS,
}
REPORT = re.compile(r"^========= (?:Error|Warn|Invalid|Race|Out-of|Misaligned|Barrier)", re.M)
SILENCE = 45  # seconds: the longest case takes 10
RESTARTS, LAST_LINES = 2, 30  # the lines of a process that a signal ended
OUTCOME = re.compile(r"^(right|wrong): (.*) \(\d", re.M)
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def every_lane(sources: dict[str, str]) -> dict[str, str]:
    """The kernels with the arrivals that racecheck follows."""
    name = "arrivals.cuh"
    if name not in sources:
        raise ValueError(f"the kernels have no {name}, where kEveryLaneArrives would be")
    text = "namespace ptx {\ninline constexpr bool kEveryLaneArrives = true;\n}\n"
    return sources | {name: text}


def prepare(with_every_lane: bool) -> None:
    """Tells the kernels of few processors, and which of them run."""
    _native.pretend_multiprocessors(2)  # small cases: blocks take several tiles
    forward_order.is_one_round = lambda facts: False  # from the counter, too
    forward_rows.is_round = lambda *_: False  # tiles of many units
    paged.FEWEST = 0  # by forward kernels over pages, however few the tokens
    copies.FEWEST_ROWS = 1 << 30  # pages of eight bits in pieces, but where a case says so
    sources = _native.kernel_sources()
    sources = every_lane(sources) if with_every_lane else sources
    _native.configure_cuda(_native.cache_folder(), _native.CACHE_BYTES, sources)


def run_cases(names: list[str], with_every_lane: bool) -> bool:
    """Runs cases in this process, all of them; tells whether they are right."""
    prepare(with_every_lane)
    right = True
    for name in names:
        begin, outcome = time.perf_counter(), "right"
        try:
            CHECKS[name].run()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            right, outcome = False, "wrong"
        print(f"{outcome}: {name} ({time.perf_counter() - begin:.1f} s)", flush=True)
    return right


def start(
    sanitizer: str, tool: str, names: list[str], with_every_lane: bool
) -> subprocess.Popen[str]:
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", "9"]
    command += ["--show-backtrace", "no", sys.executable, "-P"]
    command += ["-X", "faulthandler", "-m", "tests.sanitize"]
    command += [*([] if with_every_lane else ["--as-shipped"]), "--run", *names]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
    }
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    """Kills a tool and the program under it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


RUNNING: set[subprocess.Popen[str]] = set()


def end_all(number: int, _frame: object) -> NoReturn:
    """Ends this program by a signal, and the tools under it: each is a session of its own."""
    for process in tuple(RUNNING):
        end(process)
    os._exit(128 + number)


def follow(tool: str, process: subprocess.Popen[str]) -> tuple[str, str]:
    """Returns what a process prints and what ended it; passes on what cases and tool report."""
    output, since, silent = "", "", threading.Event()  # since: behind the case before

    def kill() -> None:
        silent.set()
        end(process)

    watchdog = threading.Timer(SILENCE, kill)
    watchdog.start()
    for line in process.stdout or ():
        watchdog.cancel()
        output += line
        since += line
        if line.startswith(("right: ", "wrong: ")) or REPORT.match(line):
            print(f"{tool}: {since if line.startswith('wrong: ') else line}", end="", flush=True)
            since = ""
        watchdog = threading.Timer(SILENCE, kill)
        watchdog.start()
    watchdog.cancel()
    process.wait()
    end(process)
    if silent.is_set():
        return output, f"killed after {SILENCE} seconds of silence"
    code = process.returncode
    return output, f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


@dataclasses.dataclass
class Share:
    """What became of the cases that one process at a time runs under one tool."""

    right: int = 0
    reports: int = 0
    restarts: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)  # texts to be printed last


def run_share(sanitizer: str, tool: str, names: list[str], with_every_lane: bool) -> Share:
    """Runs cases under one tool, and those after a crash of the tool itself in a new process."""
    share = Share()
    while names:
        process = start(sanitizer, tool, names, with_every_lane)
        RUNNING.add(process)
        output, ending = follow(tool, process)
        RUNNING.discard(process)
        outcomes = {name: outcome for outcome, name in OUTCOME.findall(output)}
        wrong = [name for name in names if outcomes.get(name) == "wrong"]
        summary = [int(count) for count in SUMMARY.findall(output)]
        share.right += len(outcomes) - len(wrong)
        share.reports += sum(summary) or len(REPORT.findall(output))
        names = [name for name in names if name not in outcomes]
        crashed = process.returncode < 0 and not summary
        left = f"in {names[0]}, which runs again" if names else "after its last case"
        if crashed:
            last = "".join(output.splitlines(keepends=True)[-LAST_LINES:])
            print(f"{tool}: {ending} {left}; its last lines:\n{last}", flush=True)
        again = crashed and share.restarts < RESTARTS and not REPORT.search(output)
        what = [f"{name} is wrong" for name in wrong]
        if not again:
            what += [f"{name} did not end" for name in names]
        if what or (not again and (process.returncode or not summary)):
            share.failures.append(f"{tool}, {ending}: {', '.join(what) or 'reports'}\n{output}")
        if not again:
            break
        share.restarts += 1
    return share


def check(sanitizer: str, tool: str, names: list[str], jobs: int, as_shipped: bool) -> list[str]:
    """Runs cases under one tool, in several processes; returns what failed."""
    begin = time.perf_counter()
    parts = [part for i in range(jobs) if (part := names[i::jobs])]
    with_every_lane = tool == "racecheck" and not as_shipped
    with ThreadPoolExecutor(len(parts)) as pool:
        shares = list(
            pool.map(lambda part: run_share(sanitizer, tool, part, with_every_lane), parts)
        )
    right = sum(share.right for share in shares)
    reports = sum(share.reports for share in shares)
    print(
        f"{tool}: {right} of {len(names)} cases right, {reports} reports, "
        f"{sum(share.restarts for share in shares)} restarts, "
        f"{time.perf_counter() - begin:.0f} s",
        flush=True,
    )
    return [failure for share in shares for failure in share.failures]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="*", help=f"of {', '.join(TOOLS)}; the first two if none")
    parser.add_argument(
        "--case", nargs="+", default=[""], help="cases whose name holds one of these"
    )
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time for each tool")
    parser.add_argument("--as-shipped", action="store_true", help="racecheck on the kernels as is")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        return not run_cases(arguments.run, with_every_lane=not arguments.as_shipped)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        parser.error("compute-sanitizer is not on the PATH (it comes with the CUDA toolkit)")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end_all)
    if not (names := [name for name in CHECKS if any(x in name for x in arguments.case)]):
        parser.error(f"no case has one of {arguments.case} in its name")
    tools = arguments.tools or ("memcheck", "racecheck")
    rest = names, arguments.jobs, arguments.as_shipped
    failures = [failure for tool in tools for failure in check(sanitizer, tool, *rest)]
    print(f"==== failures: {len(failures)}", *failures, sep="\n==== ", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
