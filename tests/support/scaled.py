"""Markets in which rewards are scaled by a number that a test chooses."""

import dataclasses

from nca_trader.learner.ppo import reward_scale


def scaled(market, setup, scale):
    """`market` with the volatility for which `reward_scale` is `scale`."""
    now = float(reward_scale(setup, market))
    return dataclasses.replace(market, volatility=market.volatility * (now / scale))
