"""The compiled module; its only importer is `_native`. Source: cuda/runtime/bindings.cc."""

version: str
ffi_version: tuple[int, int]

def targets() -> dict[str, dict[str, object]]: ...
