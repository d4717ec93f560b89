"""The learner's own surrogate, estimates, epochs and optimiser balance a pole with an MLP."""

import cartpole
import numpy as np
import pytest

# 16 seeds of other good implementations, same sizes: median and worst environment steps until
# the mean of the newest episodes is 195, and 475.
MEDIAN, WORST = {195: 20_000, 475: 166_000}, {195: 33_000, 475: 195_000}


@pytest.mark.slow
def test_sixteen_seeds_balance_as_fast_as_others():
    lengths = [cartpole.train(seed, updates=100) for seed in range(16)]
    for least in MEDIAN:
        steps = [cartpole.steps_until(each, least) for each in lengths]
        assert np.median(steps) <= MEDIAN[least] and max(steps) <= WORST[least]
