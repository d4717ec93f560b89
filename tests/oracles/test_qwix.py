"""Weights of 4 and 8 bits are those of qwix, but for ties."""

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("qwix") is None:
    pytest.skip("qwix is not installed here", allow_module_level=True)

import jax.numpy as jnp
import qwix

from nca_trader.agents.quantise import on_grid


@pytest.mark.parametrize(("bits", "dtype"), [(4, jnp.int4), (8, jnp.int8)])
def test_weights_are_those_of_qwix_but_for_ties(bits, dtype):
    rng = np.random.default_rng(bits)
    w = (rng.normal(size=(257, 6)) * 10.0 ** np.arange(-4, 2)).astype(np.float32)
    w[:, 1] = 0.0
    theirs = qwix.quantize(jnp.asarray(w), dtype, channelwise_axes=[1])
    whole, step = on_grid(w, bits)
    np.testing.assert_allclose(step, np.asarray(theirs.scale)[0], rtol=2e-7)
    # Half-way between two steps, the last digit of a step decides; a channel's largest is there.
    tie = np.abs(np.abs(w / step) % 1.0 - 0.5) < 1e-4
    assert tie.mean() < 0.02
    other = np.asarray(theirs.qvalue.astype(jnp.int8))
    np.testing.assert_array_equal(whole[~tie], other[~tie])
    assert (np.abs(whole.astype(int) - other) <= tie).all()
