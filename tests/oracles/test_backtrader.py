"""Borrow fees equal backtrader's, in the bar that is charged and in the amount.

backtrader charges a short position before its orders fill, for the days since its last charge.
Its conventions are converted here: it charges on the entry price and for years of 365 days,
`nca.backtest` on the price of the moment and for years of 365.2425 days.
"""

import numpy as np
import pandas as pd
import pytest
from drawn import random_bars

from nca_trader import Costs, backtest, read_bars

backtrader = pytest.importorskip("backtrader")

FEE, CAPITAL = 0.08, 1e6


def weekdays(bars):
    """The bars on weekdays, so that weekends are intervals of three days."""
    days = pd.bdate_range("2021-01-04", periods=len(bars)).to_numpy("datetime64[ns]")
    return pd.DataFrame(
        {name: getattr(bars, name)[:, 0] for name in ("open", "high", "low", "close", "volume")},
        index=pd.DatetimeIndex(days, name="time"),
    )


def charges(frame, trades):
    """`{date: (charge, entry price)}` of every charge that backtrader makes.

    Args:
      trades: `[N]` units to trade at each bar's open.
    """
    made = {}

    class Commission(backtrader.CommInfoBase):
        def _get_credit_interest(self, data, size, price, days, dt0, dt1):
            charge = super()._get_credit_interest(data, size, price, days, dt0, dt1)
            made[dt0] = (charge, price)
            return charge

    class Given(backtrader.Strategy):
        def next(self):
            units = trades[len(self)] if len(self) < len(trades) else 0.0
            if units > 0.0:
                self.buy(size=units)
            elif units < 0.0:
                self.sell(size=-units)

    cerebro = backtrader.Cerebro()
    cerebro.adddata(backtrader.feeds.PandasData(dataname=frame))
    cerebro.addstrategy(Given)
    cerebro.broker.set_cash(1e12)
    cerebro.broker.addcommissioninfo(Commission(interest=FEE, stocklike=True))
    cerebro.run()
    return made


def test_a_short_pays_for_the_days_that_it_was_held():
    rng = np.random.default_rng(11)
    frame = weekdays(random_bars(rng, 300, 1))
    targets = np.where(rng.random(300) < 0.6, np.nan, rng.choice([-0.8, -0.3, 0.0, 0.5], 300))
    result = backtest(read_bars(frame, symbol="A"), targets, Costs(borrow_fee=FEE), borrow=True)
    held = (result.weights.iloc[:, 0] * result.equity).to_numpy() * CAPITAL / frame["close"]
    trades = np.diff(held, prepend=0.0)
    made = charges(frame, np.where(np.abs(trades) < 1e-6, 0.0, trades))
    expected = np.zeros(300)
    for row, (time, open_) in enumerate(frame["open"].items()):
        charge, entry = made.get(time.date(), (0.0, 1.0))
        expected[row] = charge / entry * open_ * 365 / 365.2425
    ours = -CAPITAL * result.flows["borrow_fee"].to_numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-6)
    paid, monday = expected > 0.0, frame.index.day_of_week == 0
    assert paid[monday].sum() > 10 and paid[~monday].sum() > 40  # weekends are among them
