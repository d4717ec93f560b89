"""What tests that call the TPU compiler in this process need."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from nca_trader.scale.compiled import ENVIRONMENT


@pytest.fixture
def environment(monkeypatch):
    """What the compiler needs to be told; and no cache: what it wrote cannot be read back."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    # Importing libtpu replaces an empty path; here it is imported already, and jax would warn.
    monkeypatch.delenv("TPU_LIBRARY_PATH")
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()
