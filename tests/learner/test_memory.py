"""As few micro-batches as fit: chosen by what the compiled program needs, said, same result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_trader import ConfigError, make_mesh
from nca_trader.learner.memory import bytes_needed, fitting, memory_limit, piece_counts

ROWS = np.random.default_rng(0).normal(size=(64, 512)).astype("f4")
BUILT = []


def build(pieces):
    """The norm of all rows' outer products, a piece of the rows at a time."""
    BUILT.append(pieces)

    def of_piece(rows):
        return jnp.sin(rows[:, :, None] * rows[:, None, :]) @ jnp.ones((512, 8))

    def step(rows):
        split = rows.reshape(pieces, -1, 512)
        return jax.lax.map(lambda piece: (of_piece(piece) ** 2).sum(), split).sum()

    return jax.jit(step)


@pytest.fixture(scope="module")
def needs():
    return {n: bytes_needed(build(n).lower(ROWS).compile()) for n in piece_counts(1, 64)}


def test_pieces_are_halved_again_and_again():
    assert piece_counts(1, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert piece_counts(1, 12) == [1, 2, 4, 12]
    assert piece_counts(3, 9) == [3, 9]
    assert piece_counts(4, 4) == [4]


def test_what_does_not_fit_is_done_in_smaller_pieces(needs, caplog):
    assert needs[1] > 2 * needs[8] > 0
    step = fitting(build, piece_counts(1, 64), needs[8])
    with caplog.at_level("WARNING"):
        got = step(ROWS)
    assert "micro_batches = 4" in caplog.text and "trying 8, with the same result" in caplog.text
    np.testing.assert_allclose(got, build(1)(ROWS), rtol=1e-5)
    BUILT.clear()
    step(ROWS)
    assert BUILT == []  # what was chosen stays


def test_where_nothing_fits_it_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="micro-batch is one segment already; raise") as error:
        fitting(build, [32, 64], 1000)(ROWS)
    assert "\n" not in str(error.value)


def test_an_allocation_that_fails_is_tried_in_smaller_pieces():
    class Exhausted:
        """A compiled program that says it fits, and then does not."""

        def __init__(self, pieces):
            self.pieces = pieces

        def lower(self, rows):
            return self

        def compile(self):
            return self

        def memory_analysis(self):
            return build(self.pieces).lower(ROWS).compile().memory_analysis()

        def __call__(self, rows):
            if self.pieces < 4:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return self.pieces

    assert fitting(Exhausted, [1, 2, 4, 8], 1e12)(jnp.asarray(ROWS)) == 4
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE"):
        fitting(Exhausted, [1, 2], 1e12)(jnp.asarray(ROWS))


def test_a_cpu_is_not_bounded_unless_told():
    assert memory_limit(None, make_mesh(1)) is None
    assert memory_limit(0.5, make_mesh(1)) == 5e8
    BUILT.clear()
    fitting(build, [2, 4], None)
    assert BUILT == [2]
