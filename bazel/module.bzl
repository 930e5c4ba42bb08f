"""Gives MODULE.bazel the repository of python.bzl."""

load("//bazel:python.bzl", repository = "python_environment")

def _python_environment_impl(_ctx):
    repository(name = "python_environment")

python_environment = module_extension(implementation = _python_environment_impl)
