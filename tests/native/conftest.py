"""What tests of the native module share."""

import pytest

from jax_flash import _native


@pytest.fixture
def restore_configuration():
    """Gives the compiler its cache and its sources back after the test."""
    yield
    _native.configure_cuda(_native.cache_folder(), _native.CACHE_BYTES)
