"""Orders in weights at the simulated exchange: what none of them may break."""

import re

import numpy as np
import pytest
from made_up import rules_of

from nca_trader.envs.account.state import Quote
from nca_trader.errors import ConfigError
from nca_trader.paper.venue import TargetOrder, client_id
from nca_trader.paper.venues.exchange import Exchange
from nca_trader.types import Bar, Costs

COSTS = Costs(commission=5e-4, slippage=2e-4)
HERE = Quote(np.array([True, True]))


def order(symbol, weight, buy_only=False):
    return TargetOrder(f"id-{symbol}-{weight}", symbol, weight, buy_only)


def broker_of(capital=1000.0, costs=COSTS, symbols=("A", "B"), **options):
    return Exchange(None, capital, symbols, rules_of(costs, **options))


@pytest.mark.parametrize("path", [None, "books"])
def test_fills_are_kept_in_a_file_and_not_in_memory(tmp_path, path):
    """A replay of years would keep all of them; it takes them from `quote` and `work`."""
    where = None if path is None else tmp_path / path
    exchange = Exchange(where, 1000.0, ("A",), rules_of(Costs(interest_lend=0.1), fill="close"))
    made = []
    for day in range(1, 4):
        price, here = np.full(1, 50.0 + day), np.ones(1, bool)
        bar = Bar(np.array([day * 86_400]), *[price] * 5, present=here)
        made += exchange.quote(bar, day * 86_400 * 10**9).fills
        made += exchange.work([order("A", 0.25 * day)])[1]
    kept = exchange.activity(0)
    assert len(made) == 3
    assert (kept.fills, len(kept.flows)) == (([], 0) if path is None else (made, 2))
    exchange.close()


def test_what_is_left_of_a_cut_order_never_sells():
    broker = broker_of(costs=Costs())
    broker.work([order("A", 0.5)])
    broker.advance(np.array([50.0, 20.0]), HERE, 0)
    broker.work([order("A", 0.2, buy_only=True)])
    assert broker.advance(np.array([50.0, 20.0]), HERE, 1) == []
    broker.work([order("A", 0.2)])
    assert broker.advance(np.array([50.0, 20.0]), HERE, 2)[0].units == pytest.approx(-6.0)


def test_an_order_that_is_withdrawn_does_not_fill():
    broker = broker_of()
    assert broker.work([order("A", 0.5)])[0] == ["id-A-0.5"]
    assert broker.work([order("A", 0.5)])[0] == []  # the same id twice is one order
    assert broker.work([])[0] == []
    assert broker.advance(np.array([50.0, 20.0]), HERE, 0) == []


def test_an_order_for_an_unknown_symbol_or_two_for_one_are_refused():
    for orders in ([order("C", 0.5)], [order("A", 0.5), order("A", 0.1)]):
        with pytest.raises(ConfigError, match="one order for each of A, B"):
            broker_of().work(orders)


@pytest.mark.parametrize("capital", [0.0, -1.0, np.nan, np.inf])
def test_capital_must_be_money(capital):
    with pytest.raises(ConfigError, match="capital"):
        broker_of(capital=capital)


def test_client_ids_are_short_plain_and_told_apart():
    symbols = [
        "SPY",
        "BTC/USDT",
        "BTC-USDT",
        "A-VERY-LONG-SYMBOL-NAME-1",
        "A-VERY-LONG-SYMBOL-NAME-2",
    ]
    ids = [client_id("0123456789abcdef", 1_700_000_000, s) for s in symbols]
    assert ids[0] == "nca-01234567-1700000000-SPY-0"
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9-_]{1,36}", i) for i in ids)
    assert ids == [client_id("0123456789abcdef", 1_700_000_000, s) for s in symbols]
    assert client_id("0123456789abcdef", 1_700_000_000, "SPY", leg=1) != ids[0]
