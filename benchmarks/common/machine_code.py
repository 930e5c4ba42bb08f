"""Owns the comparison of two versions' machine code, `compare.py --code`; needs NVRTC and no GPU.

Compiles the kernels of a list of problems from both, each with its own tiles, and prints for every
entry point "identical", or how many instructions and opcodes changed, registers and spills. What is
identical needs no timing; what is not, compare.py times. Disassembles with nvdisasm, from the PATH,
a CUDA toolkit or the package nvidia-cuda-nvdisasm; without it programs are compared as PTX alone.
As a script it answers with the programs of the jax_flash on its path.
"""

import collections
import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LENGTHS = ("query_lengths", "key_value_lengths")
SEGMENTS = ("query_segments", "key_value_segments")
CAUSAL = {"window": (None, 0)}
MASK = {"terms": ("mask",), "mask": ("bool", 2, 1, 4096, 4096)}
BIAS = {"terms": ("bias",), "bias": ("bfloat16", 1, 16, 4096, 4096)}
DROPOUT = {"terms": ("dropout_state",), "dropout_rate": 0.1}
SHORT = {"batch": 32, "q_len": 1024, "kv_len": 1024}
# Changes of a plain bfloat16 problem, by head dims; the fields of Problem, Shapes and TermShape.
FEATURES: dict[tuple[int, int], dict[str, dict[str, Any]]] = {
    (64, 64): {
        "full": {},
        "causal": CAUSAL,
        "short": SHORT,
        "short causal": SHORT | CAUSAL,
        "segments": CAUSAL | {"terms": SEGMENTS},
        "lengths": {"terms": LENGTHS},
        "window": {"window": (1024, 0)},
        "softcap": {"softcap": 30.0},
        "sinks": {"terms": ("sinks",)},
        "deterministic": CAUSAL | {"deterministic": True},
        "heads packed": {"q_len": 16, "kv_heads": 4},
        "mask": MASK,
        "bias": BIAS,
        "dropout": DROPOUT,
    },
    (96, 96): {"causal": CAUSAL},
    (128, 128): {
        "full": {},
        "causal": CAUSAL,
        "short": SHORT,
        "short causal": SHORT | CAUSAL,
        "window": {"window": (1024, 0)},
        "segments": CAUSAL | {"terms": SEGMENTS},
        "lengths": {"terms": LENGTHS},
        "softcap": {"softcap": 30.0},
        "sinks": {"terms": ("sinks",)},
        "scale 0": {"scale": 0.0},
        "float16 causal": CAUSAL | {"dtype": "float16"},
        "deterministic": {"deterministic": True},
        "deterministic segments": CAUSAL | {"deterministic": True, "terms": SEGMENTS},
        "dlse": {"with_dlse": True},
        "odd length": CAUSAL | {"q_len": 4095},
        "mask": MASK | CAUSAL,
        "mask deterministic": MASK | {"deterministic": True},
        "bias": BIAS | {"bias": ("float32", 1, 16, 4096, 4096)},
        "bias of keys": BIAS | {"bias": ("bfloat16", 2, 1, 1, 4096)},
        "dropout": DROPOUT | CAUSAL,
        "dropout deterministic": DROPOUT | {"deterministic": True},
    },
    (192, 128): {"causal": CAUSAL},
    (256, 256): {
        "full": {},
        "causal": CAUSAL,
        "segments": CAUSAL | {"terms": SEGMENTS},
        "deterministic": CAUSAL | {"deterministic": True},
        "softcap": {"softcap": 30.0},
        "mask": MASK,
        "bias": BIAS,
        "dropout": DROPOUT | CAUSAL,
    },
    (100, 100): {
        "causal": CAUSAL,
        "segments": {"terms": (*LENGTHS, *SEGMENTS)},
        "bias, mask": MASK | BIAS | {"terms": ("bias", "mask")},
        "dropout deterministic": DROPOUT | CAUSAL | {"deterministic": True},
    },
    (127, 63): {
        "everything": {
            "window": (1024, 0),
            "bottom_right": True,
            "softcap": 30.0,
            "terms": (*LENGTHS, *SEGMENTS, "sinks"),
        },
    },
    (255, 255): {"causal": CAUSAL},
}
# Calls of decoding with 32 heads: fields of Decode, Problem and Shapes.
EVERYTHING = {"window": (1024, None), "softcap": 30.0, "terms": ("sinks",), "paged": True,
              "appends": True, "q_len": 16, "page_size": 16}  # fmt: skip
DECODING: dict[tuple[int, int], dict[str, dict[str, Any]]] = {
    (64, 64): {"plain": {}, "everything": EVERYTHING | {"rotary_base": 1e4}},
    (128, 128): {
        "plain": {},
        "short": {"batch": 1, "appends": True},
        "float16 everything": EVERYTHING | {"rotary_base": 1e4, "dtype": "float16"},
        "by cp.async": {"family": "decode_sm80"},
        "by cp.async everything": EVERYTHING | {"rotary_base": 1e4, "family": "decode_sm80"},
    },
    (72, 40): {"new": {"appends": True, "q_len": 8}},
    (256, 256): {"plain": {}},
    (576, 512): {"latent": {"value_dim": 512, "kv_heads": 1}},
}
FORWARD_ALONE = ("sinks", "scale 0", "heads packed")
BACKWARD_ALONE = ("deterministic", "deterministic segments", "mask deterministic",
                  "dropout deterministic", "dlse", "odd length")  # fmt: skip


def compare_versions(versions: Sequence[str], only: str) -> None:
    """Compares every cell whose name matches, of two revisions or checkouts: prints one table."""
    with tempfile.TemporaryDirectory() as folder:
        compare(*(read(version, Path(folder) / str(i), only)
                  for i, version in enumerate(versions)))  # fmt: skip


def answer(only: str) -> None:
    """Prints the programs of this process's version."""
    from jax_flash import _native

    files = _native.kernel_sources()
    json.dump({"files": files, "programs": [*programs(only), *decoding(only)]}, sys.stdout)


@dataclasses.dataclass(frozen=True)
class Program:
    """What NVRTC compiles."""

    name: str
    source: str
    header: str
    files: tuple[tuple[str, str], ...]


def read(version: str, folder: Path, only: str) -> list[Program]:
    """Reads the programs of a version in a process of its own."""
    tree = Path(version)
    if not (tree / "jax_flash").is_dir():
        tree = folder
        archive = subprocess.run(["git", "archive", version, "jax_flash", "cuda"],
                                 check=True, stdout=subprocess.PIPE)  # fmt: skip
        folder.mkdir()
        subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    command = [sys.executable, "-P", __file__, only]
    environment = os.environ | {"PYTHONPATH": str(tree.resolve()), "JAX_PLATFORMS": "cpu"}
    child = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    answer = json.loads(child.stdout)
    files = tuple(answer["files"].items())
    return [Program(**fields, files=files) for fields in answer["programs"]]


def programs(only: str) -> Iterator[dict[str, str]]:
    """Plans as this process's jax_flash does."""
    from jax_flash import _gpu
    from jax_flash._problem import Problem, Shapes, TermShape

    try:
        from jax_flash._ops import passes
    except ImportError:  # an older version, to compare with
        from jax_flash._primitives import passes  # pyright: ignore[reportMissingImports]

    gpu = _gpu.spec.GPUS["H200"]
    for (head_dim, value_dim), features in FEATURES.items():
        for name, change in features.items():
            change = dict(change)
            with_dlse = change.pop("with_dlse", False)
            fields = ("batch", "q_len", "kv_len", "kv_heads")
            sizes = {field: change.pop(field) for field in fields if field in change}
            shapes = Shapes(2, 4096, 4096, 16, 16, head_dim, value_dim)
            for term in ("mask", "bias"):
                if term in change:
                    sizes[term] = TermShape(*change.pop(term))
            shapes = dataclasses.replace(shapes, **sizes)
            problem = Problem(**({"dtype": "bfloat16", "scale": 0.125} | change))
            cell = f"{head_dim}/{value_dim} {name}"
            for which, call in passes(problem, with_dlse=with_dlse).items():
                alone = BACKWARD_ALONE if which == "forward" else FORWARD_ALONE
                if name not in alone and re.search(only, f"{cell} {which}"):
                    plan = _gpu.plan(call, shapes, gpu)
                    yield {
                        "name": f"{cell} {which}", "source": plan.source, "header": plan.header
                    }  # fmt: skip
                    if getattr(plan, "beside", ""):
                        yield {
                            "name": f"{cell} {which}, beside", "source": plan.beside,
                            "header": plan.header
                        }  # fmt: skip


def decoding(only: str) -> Iterator[dict[str, str]]:
    """The programs of decoding whose names match."""
    from jax_flash import _gpu
    from jax_flash._ops.decode import Decode
    from jax_flash._problem import Problem, Shapes

    for (head_dim, value_dim), features in DECODING.items():
        for name, change in features.items():
            cell = f"decode {head_dim}/{value_dim} {name}"
            if not re.search(only, cell):
                continue
            fields = {"dtype": "bfloat16", "scale": 0.125, "bottom_right": True} | change
            shapes = Shapes(64, 1, 65536, 32, 8, head_dim, value_dim)
            sizes, flags, of_problem = (
                {field.name: fields[field.name] for field in dataclasses.fields(of)
                 if field.name in fields and (field.name != "value_dim" or of is Decode)}
                for of in (Shapes, Decode, Problem)
            )  # fmt: skip
            call = Decode(Problem(**of_problem), None, **flags)
            with _gpu.prefer(fields.get("family", "decode")):
                plan = _gpu.plan(call, dataclasses.replace(shapes, **sizes), _gpu.spec.GPUS["H200"])
            yield {"name": cell, "source": plan.source, "header": plan.header}


# ---- compiling ----------------------------------------------------------------------------------


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """The NVRTC that jax_flash would use."""
    from cuda import pathfinder

    chosen = os.environ.get("JAX_FLASH_NVRTC")
    return ctypes.CDLL(chosen or pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)


def compile_program(program: Program, kind: str) -> tuple[bytes, str]:
    """Returns the PTX or the CUBIN of a program and the log; keeps both for the next time."""
    options = ["--std=c++17", "-default-device", "--ptxas-options=-v"]
    options.append(f"--gpu-architecture={'sm' if kind == 'CUBIN' else 'compute'}_90a")
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    version = (major.value, minor.value)
    if kind == "PTX":
        key: tuple[Any, ...] = (program.source, program.header, program.files)
    else:
        key = (compile_program(program, "PTX")[0],)
    cache = os.environ.get("JAX_FLASH_CACHE_DIR") or str(Path(tempfile.gettempdir()) / "jax_flash")
    kept = (
        Path(cache)
        / "same_code"
        / hashlib.sha256(repr((version, options, key)).encode()).hexdigest()
    )
    if kept.is_file():
        return pickle.loads(kept.read_bytes())
    handle = ctypes.c_void_p()
    text = f'{program.header}#include "{program.source}"\n'.encode()
    names = (ctypes.c_char_p * len(program.files))(*(n.encode() for n, _ in program.files))
    texts = (ctypes.c_char_p * len(program.files))(*(t.encode() for _, t in program.files))
    nvrtc().nvrtcCreateProgram(ctypes.byref(handle), text, b"program.cu", len(names), texts, names)
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc().nvrtcCompileProgram(handle, len(words), words)

    def fetch(what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(nvrtc(), f"nvrtcGet{what}Size")(handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc(), f"nvrtcGet{what}")(handle, buffer)
        return buffer.raw

    log = fetch("ProgramLog").decode()
    if failed:
        raise SystemExit(f"{program.name}\n{log}")
    result = (fetch(kind), log)
    nvrtc().nvrtcDestroyProgram(ctypes.byref(handle))
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}")
    partial.write_bytes(pickle.dumps(result))
    partial.rename(kept)
    return result


# ---- comparing ----------------------------------------------------------------------------------


def code_of(program: Program) -> list[str]:
    """Compiles to PTX, less constants of the header: all are in it, though nothing reads them."""
    lines = compile_program(program, "PTX")[0].decode().splitlines()
    uses = collections.Counter(word for line in lines for word in re.findall(r"[\w$]+", line))
    constant = re.compile(r"\.global \.align \d+ \.[a-z]\d+ (\w+)( = [^;]*)?;")
    names = (constant.fullmatch(line) for line in lines)
    return [line for line, name in zip(lines, names, strict=True) if not name or uses[name[1]] > 1]


@functools.cache
def disassembler() -> str | None:
    """Finds nvdisasm."""
    places = [*sys.path, *(os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH"))]
    places += ["/usr/local/cuda"]
    found = [shutil.which("nvdisasm")]
    for place in places:
        found += [*Path(place).glob("bin/nvdisasm"), *Path(place).glob("nvidia/cu*/bin/nvdisasm")]
    return next((str(path) for path in found if path), None)


@dataclasses.dataclass
class Entry:
    """One entry point."""

    instructions: list[str]  # without addresses and labels
    usage: str  # registers, and what is slow

    @property
    def opcodes(self) -> collections.Counter[str]:
        words = (re.sub(r"@!?U?P\w+ ", "", line).split() for line in self.instructions)
        return collections.Counter(line[0] for line in words)


def entries(program: Program) -> dict[str, Entry]:
    """Compiles and disassembles."""
    cubin, log = compile_program(program, "CUBIN")
    tool = disassembler()
    assert tool is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True)
    usages = {}
    for match in re.finditer(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        log,
        re.S,
    ):
        spills = int(match[2]) + int(match[3])
        usages[match[1]] = f"{match[4]} registers" + f", {spills} bytes of spills" * (spills > 0)
    warnings = re.findall(r"C75\d\d|Potential Performance Loss", log)
    result = {}
    for section in re.split(r"\.section\s+\.text\.", text.stdout)[1:]:
        name = re.match(r"\w+", section)
        assert name is not None
        code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", section)
        code = [re.sub(r"`\(.*?\)", "label", " ".join(line.split())) for line in code]
        usage = usages.get(name[0], "") + "".join(f", {warning}" for warning in warnings)
        result[name[0]] = Entry(code, usage)
    return result


def compare(old: list[Program], new: list[Program]) -> None:
    """Prints a line for each entry point that differs, and one for each program that does not."""
    others = {program.name: program for program in new}
    for program in old:
        if program.name not in others:
            continue
        other = others[program.name]
        same_ptx = code_of(program) == code_of(other)
        if same_ptx or disassembler() is None:
            print(f"{program.name:42s} {'identical' if same_ptx else 'other PTX'}", flush=True)
            continue
        before, after = entries(program), entries(other)
        lines = []
        for name in before | after:
            lines += describe(name, before.get(name), after.get(name))
        print(f"{program.name:42s} {'identical' if not lines else ''}", *lines, sep="\n  ",
              flush=True)  # fmt: skip


def describe(name: str, old: Entry | None, new: Entry | None) -> list[str]:
    if old is None or new is None:
        return [f"{name:24s} {'new' if old is None else 'gone'}"]
    if old == new:
        return []
    if old.instructions == new.instructions:
        return [f"{name:24s} same instructions; {old.usage} -> {new.usage}"]
    changed = (old.opcodes - new.opcodes).total() + (new.opcodes - old.opcodes).total()
    differ = sum(a != b for a, b in zip(old.instructions, new.instructions, strict=False))
    return [
        f"{name:24s} {len(old.instructions)} -> {len(new.instructions)} instructions; at {differ} "
        f"places another one, {changed} opcodes more or fewer; {old.usage} -> {new.usage}"
    ]


if __name__ == "__main__":
    answer(sys.argv[1])
