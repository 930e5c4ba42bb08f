"""The cache of compiled kernels: what is found, whom it trusts, where it lies. Needs NVRTC."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import jax_flash
from jax_flash import _native

from ..fake_cuda import COMPILER
from ..processes import child_environment
from .scale_kernel import SOURCES, compile_scale, configure

pytestmark = [
    pytest.mark.skipif(
        _native.available("cuda") is not None, reason=f"{_native.available('cuda')}"
    ),
    pytest.mark.usefixtures("restore_configuration"),
]


def test_finds_the_kernel_on_disk(tmp_path: Path):
    configure(tmp_path)
    cold = compile_scale()
    configure(tmp_path)
    warm = compile_scale()
    assert not cold.from_disk
    assert warm.from_disk
    assert (warm.cubin, warm.log) == (cold.cubin, cold.log)


def test_key_covers_source_header_and_arch(tmp_path: Path):
    configure(tmp_path)
    compile_scale()
    assert not compile_scale("constexpr int kUnused = 1;\n").from_disk
    assert not _native.compile_kernel("scale.cuh", "", "sm_80").from_disk
    configure(tmp_path, sources=SOURCES | {"factor.h": "constexpr float kFactor = 4.0f;\n"})
    assert not compile_scale().from_disk
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign"])
def test_recompiles_a_damaged_entry(tmp_path: Path, damage: str):
    configure(tmp_path)
    cold = compile_scale()
    [entry] = tmp_path.iterdir()
    content = bytearray(entry.read_bytes())
    if damage == "truncate":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[-100] ^= 1
    elif damage == "empty":
        content = bytearray()
    else:
        content = bytearray(b"something else\n" * 10)
    entry.write_bytes(content)

    configure(tmp_path)
    repaired = compile_scale()
    assert not repaired.from_disk
    assert repaired.cubin == cold.cubin
    configure(tmp_path)
    assert compile_scale().from_disk


def test_bound_removes_the_least_recently_used(tmp_path: Path):
    configure(tmp_path)
    compile_scale()
    [oldest] = tmp_path.iterdir()
    size = oldest.stat().st_size
    compile_scale("constexpr int kSecond = 2;\n")
    [second] = set(tmp_path.iterdir()) - {oldest}
    os.utime(second, (1, 1))
    os.utime(oldest, (2, 2))
    configure(tmp_path, size=3 * size - size // 2)
    assert compile_scale().from_disk  # a use makes the oldest the newest
    compile_scale("constexpr int kThird = 3;\n")
    assert oldest.exists()
    assert not second.exists()
    assert sum(entry.stat().st_size for entry in tmp_path.iterdir()) <= 3 * size


def test_abandoned_files_are_removed(tmp_path: Path):
    abandoned = tmp_path / "key.kernel.1.2.tmp"
    abandoned.write_bytes(b"half")
    os.utime(abandoned, (1, 1))
    fresh = tmp_path / "key.kernel.3.4.tmp"
    fresh.write_bytes(b"half")
    configure(tmp_path)
    compile_scale()
    assert not abandoned.exists()
    assert fresh.exists()


def test_folder_and_entries_are_of_this_user_alone(tmp_path: Path):
    cache = tmp_path / "above" / "cache"
    configure(cache)
    mask = os.umask(0)
    try:
        compile_scale()
    finally:
        os.umask(mask)
    assert [stat.S_IMODE(x.stat().st_mode) for x in (cache.parent, cache)] == [0o700, 0o700]
    [entry] = cache.iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


BY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def loosen(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWOTH)


def share(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWGRP)


def give_away(path: Path) -> None:
    os.chown(path, 12345, -1)


UNTRUSTED = [
    (loosen, "others than its owner may write it"),
    (share, "others than its owner may write it"),
    pytest.param(give_away, "it belongs to user 12345, not to user 0", marks=BY_ROOT),
]


@pytest.mark.parametrize(("change", "why"), UNTRUSTED)
def test_entry_that_others_can_write_is_ignored(tmp_path: Path, capfd, change, why: str):
    configure(tmp_path)
    compile_scale()
    compile_scale("constexpr int kSecond = 2;\n")
    for entry in tmp_path.iterdir():
        change(entry)
    capfd.readouterr()
    configure(tmp_path)
    assert not compile_scale().from_disk
    assert not compile_scale("constexpr int kSecond = 2;\n").from_disk
    [warning] = capfd.readouterr().err.splitlines()
    assert f"jax_flash: ignoring {tmp_path}/" in warning
    assert why in warning
    configure(tmp_path)  # they have been replaced
    assert compile_scale().from_disk
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("change", "why"), UNTRUSTED)
def test_folder_that_others_can_write_is_ignored(tmp_path: Path, capfd, change, why: str):
    cache = tmp_path / "cache"
    configure(cache)
    compile_scale()
    change(cache)
    [entry] = cache.iterdir()
    before = entry.stat()
    capfd.readouterr()
    configure(cache)
    assert not compile_scale().from_disk
    assert not compile_scale("constexpr int kSecond = 2;\n").from_disk
    [warning] = capfd.readouterr().err.splitlines()
    assert f"jax_flash: ignoring {cache} " in warning
    assert why in warning
    assert "JAX_FLASH_CACHE_DIR may name another folder" in warning
    assert list(cache.iterdir()) == [entry]
    assert entry.stat() == before


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


@pytest.mark.parametrize(
    ("make", "is_replaced"),
    [
        pytest.param(Path.mkdir, False, id="folder"),
        pytest.param(os.mkfifo, True, id="FIFO"),
        pytest.param(link_to("/dev/zero"), True, id="link to a device"),
        pytest.param(link_to("nowhere"), True, id="link to nowhere"),
        pytest.param(make_huge, True, id="huge"),
    ],
)
def test_entry_that_cannot_be_read_is_absent(tmp_path: Path, make, is_replaced: bool):
    configure(tmp_path)
    cold = compile_scale()
    [entry] = tmp_path.iterdir()
    entry.unlink()
    make(entry)
    configure(tmp_path)
    again = compile_scale()
    assert (again.from_disk, again.cubin) == (False, cold.cubin)
    assert [x.name for x in tmp_path.iterdir()] == [entry.name]  # and no unfinished file
    configure(tmp_path)
    assert compile_scale().from_disk == is_replaced


def test_links_to_entries_are_not_followed(tmp_path: Path):
    """Nor written through: the file elsewhere stays as it is."""
    configure(tmp_path / "cache")
    compile_scale()
    [entry] = (tmp_path / "cache").iterdir()
    elsewhere = tmp_path / "elsewhere"
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    configure(tmp_path / "cache")
    assert not compile_scale().from_disk
    assert not entry.is_symlink()
    assert elsewhere.read_bytes() == before


def test_cache_that_cannot_be_written_is_no_error(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    configure(file / "cache")
    assert not compile_scale().from_disk


PROCESS = """
import sys
from pathlib import Path
from jax_flash import _native
sources = {"scale.cuh": Path(sys.argv[2]).read_text()}
_native.configure_cuda(Path(sys.argv[1]), 1 << 20, sources)
print("ready", flush=True)
sys.stdin.readline()
for i in range(4):
    kernel = _native.compile_kernel("scale.cuh", f"constexpr int kVariant = {i};\\n", "sm_90a")
    print(kernel.from_disk, flush=True)
"""


def test_processes_starting_at_once(tmp_path: Path):
    cache = tmp_path / "cache"
    source = tmp_path / "scale.cuh"
    source.write_text('extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= kVariant; }')
    command = [sys.executable, "-c", PROCESS, str(cache), str(source)]
    package = str(Path(jax_flash.__file__).parents[1])  # not the checkout that pytest runs in
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    processes = [start() for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # all compile from here on
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert len(list(cache.iterdir())) == 4  # no unfinished file is left

    later = start()
    output, errors = later.communicate("go\n", timeout=120)
    assert output.split() == ["ready", "True", "True", "True", "True"], errors


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("JAX_FLASH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _native.cache_folder() == tmp_path / "jax_flash"
    for base in ("", "relative/cache"):  # as if it were not set
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert _native.cache_folder() == tmp_path / "home/.cache/jax_flash"
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "mine"))
    assert _native.cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", "")
    assert _native.cache_folder() is None


IS_CONFIGURED = """
from jax_flash import _native
assert _native._cuda_is_configured
"""
NO_HOME = """
import os, pwd
def none(uid):
    raise KeyError(uid)
pwd.getpwuid = none
os.environ.pop("HOME", None)
"""
COMPILE = """
from jax_flash import _native
sources = {"scale.cuh": 'extern "C" __global__ void scale(float* x) { x[0] *= 3; }'}
_native.configure_cuda(_native.cache_folder(), 1 << 20, sources)
print(_native.compile_kernel("scale.cuh", "", "sm_90a").from_disk, _native.cache_folder())
"""


FAULTY_DISK = """
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
extern "C" ssize_t read(int file, void* data, size_t size) {
  static auto* next = reinterpret_cast<ssize_t (*)(int, void*, size_t)>(dlsym(RTLD_NEXT, "read"));
  char link[64], name[PATH_MAX] = "";
  snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
  if (readlink(link, name, sizeof(name) - 1) > 0 && strstr(name, ".kernel") != nullptr) {
    puts("refused");
    fflush(stdout);
    errno = EIO;
    return -1;
  }
  return next(file, data, size);
}
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_entry_on_a_faulty_disk_is_absent(tmp_path: Path):
    assert COMPILER is not None
    cache, library = tmp_path / "cache", tmp_path / "faulty.so"
    command = [COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", library, "-ldl"]
    subprocess.run(command, input=FAULTY_DISK, text=True, check=True)
    environment = child_environment(tmp_path, JAX_PLATFORMS="cpu", JAX_FLASH_CACHE_DIR=str(cache))
    outputs = []
    for preloaded in ("", str(library)):
        process = subprocess.run(
            [sys.executable, "-P", "-c", COMPILE],
            env=environment | {"LD_PRELOAD": preloaded},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        outputs.append(process.stdout.split())
    assert outputs == [["False", str(cache)], ["refused", "False", str(cache)]]


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("script", "chosen", "warning"),
    [
        (NO_HOME, None, ""),
        (NO_HOME, "~/kernels", "home directory"),
        ("", "~nobody_such/kernels", "home directory"),
        ("", b"/tmp/kernels\xff", "can't encode"),
    ],
    ids=["no home", "no home, ~", "unknown user", "no UTF-8"],
)
def test_imports_without_a_folder_where_a_driver_is(tmp_path: Path, script, chosen, warning: str):
    assert COMPILER is not None
    library = tmp_path / "libcuda.so.1"
    subprocess.run([COMPILER, "-shared", "-x", "c", "/dev/null", "-o", library], check=True)
    path = os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")])
    environment: dict = child_environment(tmp_path, LD_LIBRARY_PATH=path, JAX_PLATFORMS="cpu")
    del environment["JAX_FLASH_CACHE_DIR"]
    environment.pop("XDG_CACHE_HOME", None)
    if chosen is not None:
        environment["JAX_FLASH_CACHE_DIR"] = chosen
    process = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", script + IS_CONFIGURED + COMPILE],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["False", "None"]
    said = [line for line in process.stderr.splitlines() if "JAX_FLASH_CACHE_DIR" in line]
    assert bool(said) == bool(warning)
    assert all(warning in line for line in said)
