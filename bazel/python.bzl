"""Owns @python_environment: the headers that the native module needs, from the active Python.

The interpreter is `python3` on PATH, or PYTHON_BIN_PATH. It must have nanobind and jaxlib installed,
which also provide the headers of a build with pip, so both builds see the same ones.
"""

_LOCATE = """
import importlib.util, sysconfig
print(sysconfig.get_path("include"))
for name in ("nanobind", "jaxlib"):
    print(importlib.util.find_spec(name).submodule_search_locations[0])
"""

# `includes` makes them system headers: gcc warns inside them.
_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "xla_ffi",
    hdrs = glob(["jaxlib/include/xla/ffi/api/*.h"]),
    includes = ["jaxlib/include"],
)

cc_library(
    name = "python_headers",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h"]),
    textual_hdrs = glob([
        "nanobind/src/*.cpp",
        "nanobind/src/*.h",
        "nanobind/ext/**/*.h",
    ], exclude = ["nanobind/src/nb_combined.cpp"]),
    copts = [
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
        "-w",
    ],
    local_defines = ["NB_COMPACT_ASSERTIONS"],
    includes = [
        "nanobind/include",
        "nanobind/ext/robin_map/include",
    ],
    deps = [":python_headers"],
)
"""

def _python_environment_impl(ctx):
    python = ctx.os.environ.get("PYTHON_BIN_PATH") or ctx.which("python3")
    result = ctx.execute([python, "-c", _LOCATE])
    if result.return_code:
        fail("%s needs nanobind and jaxlib (pip install nanobind jaxlib):\n%s" % (python, result.stderr))
    headers, nanobind, jaxlib = result.stdout.splitlines()
    ctx.symlink(headers, "python")
    ctx.symlink(nanobind, "nanobind")
    ctx.symlink(jaxlib + "/include", "jaxlib/include")
    ctx.file("BUILD", _BUILD)

python_environment = repository_rule(
    implementation = _python_environment_impl,
    environ = ["PATH", "PYTHON_BIN_PATH"],
    configure = True,
    local = True,
)
