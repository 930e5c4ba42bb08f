"""What the tests of compiled kernels share."""

from __future__ import annotations

import pytest

from jax_flash import _native

from . import compile_cases


@pytest.fixture(scope="module")
def asserted_shared_memory():
    """Sources of the compiler that assert the shared memory which a launch gives."""
    reason = _native.available("cuda")
    if reason is not None:
        pytest.skip(reason)
    folder = _native.cache_folder()
    _native.configure_cuda(folder, _native.CACHE_BYTES, compile_cases.asserting_sources())
    yield
    _native.configure_cuda(folder, _native.CACHE_BYTES)


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """None is among the quick ones, and to list the programs takes 3 s of each worker."""
    return True if config.option.markexpr == "quick" else None
