"""Makes a library for the host of a CUDA program: what NVRTC does for a GPU.

A folder holds program.cu, and in its folder "headers" the files that it includes, as NVRTC would
get them; program.so comes to lie beside it. The text stays what it is but for what a C++ compiler
cannot know:

- an `asm` statement becomes a call of `emulator::run` with its PTX, which ptx.cc executes;
- an `extern __shared__` array becomes a reference to the CTA's dynamic shared memory, a
  `__shared__` variable a static one in a section of its own;
- a table of the kernels follows the text.

machine.cc calls `compile_folder`, from several threads at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
# Each CTA that runs has a copy of the library, whose variables must stay its own. Compiling is most
# of what a small case takes, a quarter more of it with -Og, and PTX, which ptx.cc executes, most of
# its run. Clang compiles in two thirds of the time, what it makes looks at twice as many places: of
# float32 in halves 59 s of a core, by g++ 60, of mma.sync 41 and 43.
FLAGS = ["-std=c++17", "-O0", "-fPIC", "-shared", "-w", "-Wno-psabi", "-fno-strict-aliasing"]
# Each load and store is a call of the machine's, which knows what may be touched.
CHECKED = ["-fsanitize=kernel-address"]
CHECKED += [f"--param=asan-{name}=0" for name in ("stack", "globals")]
CHECKED += ["--param=asan-instrumentation-with-call-threshold=0"]
OWN = ["-fno-gnu-unique", "-Wl,-Bsymbolic"]
OWN += ["-nostdlib"]  # the machine has loaded what a kernel needs: a tenth of the time

_STRING = r'"(?:[^"\\]|\\.)*"'


def translate(text: str) -> str:
    """The preprocessed program as C++ for the host; line markers keep its places."""
    pieces, codes, at = [], [], 0
    for match in re.finditer(r"\basm\s*(?:volatile\s*)?\(", text):
        if match.start() < at:
            continue
        end = _closing(text, match.end() - 1)
        statement = text[match.end() : end]
        ptx, listed = _instruction(statement)
        pieces.append(text[at : match.start()])
        if ptx.strip():
            pieces.append(f"emulator::run(emulator_codes[{len(codes)}], {{{listed}}})")
            codes.append(ptx)
        else:  # a hint to the GPU's compiler
            pieces.append("(void)0")
        pieces.append("\n" * statement.count("\n"))
        at = end + 1
    pieces.append(text[at:])
    text = "".join(pieces)
    text = re.sub(
        r"extern\s+__shared__\s+(?:__align__\([^)]*\)\s+|alignas\([^)]*\)\s+)?([\w\s]+?)\s*"
        r"\b(\w+)\[\]\s*;",
        r"static \1 (&\2)[emulator::kSharedBytes] = "
        r"*reinterpret_cast<\1(*)[emulator::kSharedBytes]>(emulator_shared);",
        text,
    )
    text = re.sub(
        r"__shared__\s+(alignas\([^)]*\)\s+)?", r"\1 static EMULATOR_SHARED_VARIABLE ", text
    )
    table = "".join(f"    {_quoted(code)},\n" for code in codes)
    kernels = "".join(
        f'    {{"{name}", &emulator::Entry<{name}>::run, emulator::Entry<{name}>::kBytes, '
        f"{threads or 1024}}},\n"
        for name, threads in _kernels(text)
    )
    return (
        '#include "device.h"\n'
        f"static emulator::Code emulator_codes[] = {{\n{table}    {{nullptr}}}};\n"
        f"{text}\n"
        'extern "C" const emulator::Kernel emulator_kernels[] = {\n'
        f"{kernels}    {{nullptr, nullptr, 0, 0}}}};\n"
    )


@functools.cache  # programs have most of their text in common
def _instruction(statement: str) -> tuple[str, str]:
    """The PTX of an `asm` statement, and its operands as arguments of `emulator::run`."""
    template, *lists = _sections(statement)
    ptx = "".join(_unquoted(string) for string in re.findall(_STRING, template))
    operands = [
        f"emulator::{'output' if '=' in constraint or '+' in constraint else 'input'}({expression})"
        for operands in lists[:2]
        for constraint, expression in _operands(operands)
    ]
    return ptx, ", ".join(operands) or "{}"


def _kernels(text: str) -> Iterator[tuple[str, str]]:
    """The name of each kernel and its launch bound, as C++."""
    for match in re.finditer(r"__global__\s+void\s+(?:__launch_bounds__\s*(?=\())?", text):
        at, threads = match.end(), ""
        if text[at] == "(":
            end = _closing(text, at)
            threads = next(_split(text[at + 1 : end], ","))
            at = end + 1
        name = re.compile(r"\s*(\w+)").match(text, at)
        assert name is not None
        yield name[1], " ".join(threads.split())


def _closing(text: str, at: int) -> int:
    """Where the bracket that opens at `at` closes."""
    depth = 0
    for match in re.compile(rf"{_STRING}|[()\[\]{{}}]").finditer(text, at):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
            if depth == 0:
                return match.start()
    raise ValueError(f"a bracket is not closed: {text[at : at + 80]!r}")


def _split(text: str, separator: str) -> Iterator[str]:
    """The parts between separators that are in no bracket."""
    depth = start = 0
    for match in re.finditer(rf"{_STRING}|[()\[\]{{}}]|{separator}", text):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
        elif match[0][0] != '"' and depth == 0:
            yield text[start : match.start()]
            start = match.end()
    yield text[start:]


def _sections(statement: str) -> list[str]:
    """Template, outputs, inputs, clobbers: `::` between them is an empty section."""
    return list(_split(statement, ":"))


def _operands(text: str) -> Iterator[tuple[str, str]]:
    for operand in _split(text, ","):
        if operand.strip():
            match = re.fullmatch(rf"\s*({_STRING})\s*\((.*)\)\s*", operand, re.DOTALL)
            assert match is not None, operand
            yield match[1], match[2]


def _unquoted(string: str) -> str:
    return string[1:-1].replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{"{escaped}"}}'


def compile_folder(folder: Path) -> bool:
    """Makes program.so, or the file "log", which says why not."""
    try:
        _compile(folder)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        (folder / "log").write_text(f"{error}\n{getattr(error, 'stderr', '')}")
        return False
    return True


def _compile(folder: Path) -> None:
    headers = folder / "headers"
    preprocess = [*COMPILER, "-E", "-std=c++17", "-x", "c++", "-I", str(headers), "-nostdinc"]
    preprocessed = _output([*preprocess, str(folder / "program.cu")])
    text = translate(preprocessed.replace(f"{headers}/", "").replace(f"{folder}/", ""))
    given = os.environ.get("JAX_FLASH_EMULATOR_FLAGS", "").split()
    flags = (*COMPILER, *FLAGS, *OWN, *CHECKED, *given)
    digest = hashlib.sha256(text.encode() + (HERE / "device.h").read_bytes())
    digest.update((HERE / "api.h").read_bytes())
    digest.update(" ".join(flags).encode())
    cache = os.environ.get("JAX_FLASH_EMULATOR_CACHE")
    kept = Path(cache, f"{digest.hexdigest()}.so") if cache else None
    with _lock(kept):  # another process may be at it: of two workers one compiles
        if kept is not None and kept.exists():
            shutil.copy(kept, folder / "program.so")
        else:
            _build(folder, text, flags, kept)


@contextlib.contextmanager
def _lock(kept: Path | None) -> Iterator[None]:
    """Holds what is to be `kept` for one thread of one process."""
    if kept is None:
        yield
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path, text: str, flags: tuple[str, ...], kept: Path | None) -> None:
    built = folder / "program.so"
    (folder / "program.cc").write_text(text)
    include = ["-I", str(HERE)]
    if kept is not None:
        include = ["-I", str(_precompiled(kept.parent, flags)), *include]
    _output([*flags, *include, str(folder / "program.cc"), "-lgcc", "-o", str(built)])
    if kept is not None:
        own = kept.with_suffix(".made")
        shutil.copy(built, own)
        own.replace(kept)


@functools.cache
def _precompiled(cache: Path, flags: tuple[str, ...]) -> Path:
    """A folder with device.h as the compiler has it after reading: a tenth of the time."""
    digest = hashlib.sha256((HERE / "device.h").read_bytes() + (HERE / "api.h").read_bytes())
    digest.update(" ".join(flags).encode() + os.fsencode(HERE))
    folder = cache / f"device-{digest.hexdigest()[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache))
        header = str(HERE / "device.h")
        _output([*flags, "-c", "-x", "c++-header", header, "-o", str(made / "device.h.gch")])
        try:
            made.rename(folder)
        except OSError:  # another was faster
            shutil.rmtree(made)
    return folder


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
