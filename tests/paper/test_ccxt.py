"""A spot account through ccxt against a local server of Binance's protocol."""

import logging
import time

import pytest
from fake_exchange import FakeExchange
from fake_venue import CANARY, KEY, UNCLEAR, UNREAD

from nca_trader.errors import ConfigError
from nca_trader.paper import ccxt_venue, net
from nca_trader.paper.venue import Instrument, Outcome, Ticket, Unreachable

ORDER = "/api/v3/order"
BUY = Ticket("nca-1-a", "BTC/USDT", 0.1)


pytestmark = pytest.mark.usefixtures("keys")


@pytest.fixture
def fake():
    with FakeExchange(CANARY) as fake:
        yield fake


@pytest.fixture
def venue(fake):
    symbols = ["BTC/USDT", "ETH/USDT"]
    venue = ccxt_venue.open_venue("binance", symbols, url=fake.url, timeout=0.4)
    yield venue
    venue.close()


def test_books_follow_from_fills_with_fees_in_coins_and_in_money(fake, venue):
    """The hand ledger: the fee of a buy is taken from the coins, that of a sale from the cash."""
    assert venue.submit(BUY).outcome is Outcome.ACCEPTED
    assert venue.submit(Ticket("nca-1-b", "BTC/USDT", -0.05)).outcome is Outcome.ACCEPTED
    bought, sold = venue.activity(0).fills
    assert (bought.client_id, bought.units, bought.price) == ("nca-1-a", 0.1 - 0.0001, 50_000.0)
    assert bought.commission == pytest.approx(5.0)
    assert (sold.client_id, sold.units, sold.commission) == ("nca-1-b", -0.05, 2.5)
    held = venue.holdings()
    cash = 10_000.0 - sum(f.units * f.price + f.commission for f in (bought, sold))
    assert held.cash == pytest.approx(cash, abs=1e-9) == 7_497.5
    assert held.units == {"BTC/USDT": pytest.approx(0.0499), "XYZ": 7.0}
    order = venue.look_up("nca-1-a")
    assert (order.status, order.units, order.filled) == ("filled", 0.1, bought.units)


@pytest.mark.parametrize(("fault", "reason", "sent"), UNCLEAR)
def test_an_unclear_answer_is_ambiguous_and_the_look_up_decides(fake, venue, fault, reason, sent):
    fake.fail("POST", ORDER, fault)
    answer = venue.submit(BUY)
    assert (answer.outcome, answer.reason) == (Outcome.AMBIGUOUS, reason)
    found = venue.look_up("nca-1-a")
    assert (found is not None) == sent
    assert venue.submit(BUY).outcome is Outcome.ACCEPTED
    assert len(fake.orders) == 1
    assert fake.count("POST", ORDER) == 1 + (not sent)


def test_an_id_whose_order_has_filled_is_not_sent_again(fake, venue):
    """Binance itself would take it: the fake is asked without the adapter's look-up."""
    venue.submit(BUY)
    answer = venue.submit(BUY)
    assert (answer.outcome, answer.reason) == (Outcome.ACCEPTED, "duplicate-id")
    assert len(fake.orders) == 1
    venue._client.create_order("BTC/USDT", "market", "buy", 0.01, None,
                               {"clientOrderId": "nca-1-a"})  # fmt: skip
    assert len(fake.orders) == 2


def test_an_answer_about_another_order_says_nothing_of_ours(fake, venue, monkeypatch):
    submit, query = fake._submit, fake._query

    def other(method):
        return lambda data: (200, method(data)[1] | {"clientOrderId": "x"})

    monkeypatch.setattr(fake, "_submit", other(submit))
    answer = venue.submit(BUY)
    assert (answer.outcome, answer.reason) == (Outcome.AMBIGUOUS, "unreadable-body")
    monkeypatch.setattr(fake, "_query", other(query))
    with pytest.raises(Unreachable, match="unreadable-body"):
        venue.look_up("nca-1-a")


def test_a_resting_stop_is_sent_as_one(fake, venue):
    fake.resting = True
    assert venue.submit(BUY._replace(units=-0.1, stop=45_000.0)).outcome is Outcome.ACCEPTED
    (order,) = fake.orders
    assert (order["type"], order["side"], float(order["stopPrice"])) == ("STOP_LOSS", "SELL", 45e3)


def test_minus_2010_is_decided_by_the_look_up(fake, venue):
    answer = venue.submit(Ticket("nca-big", "BTC/USDT", 9.0))
    assert answer.outcome is Outcome.REJECTED and "insufficient balance" in answer.reason
    # A duplicate that the look-up before the sending did not see yet.
    fake.resting = True
    venue._client.create_order("BTC/USDT", "market", "buy", 0.01, None,
                               {"clientOrderId": "nca-late"})  # fmt: skip
    answers, query = [], fake._query

    def late(data):
        answers.append(data)
        return query(data) if len(answers) > 1 else (400, {"code": -2013, "msg": "none"})

    fake._query = late
    assert venue.submit(Ticket("nca-late", "BTC/USDT", 0.01)).outcome is Outcome.ACCEPTED
    assert len(fake.orders) == 1


@pytest.mark.parametrize("code", [-1007, -1006, -1001])
def test_a_code_that_leaves_execution_unknown_is_ambiguous(fake, venue, code):
    fake.code = {"code": code, "msg": "Timeout waiting for response; execution status unknown."}
    assert venue.submit(BUY).outcome is Outcome.AMBIGUOUS


def test_rate_limits_are_busy(fake, venue):
    fake.fail("POST", ORDER, "429-before")
    answer = venue.submit(BUY)
    assert (answer.outcome, answer.retry_after) == (Outcome.BUSY, 7.0)
    fake.code = {"code": -1015, "msg": "Too many new orders."}
    assert venue.submit(BUY).outcome is Outcome.BUSY
    assert fake.orders == []


def test_a_clock_that_is_off_is_named_and_sends_nothing(fake, venue):
    fake.skew = 3600.0
    answer = venue.submit(BUY)
    assert (answer.outcome, answer.reason) == (Outcome.AMBIGUOUS, "clock-skew")
    with pytest.raises(Unreachable, match="clock-skew"):
        venue.look_up("nca-1-a")
    assert fake.orders == []
    assert venue.now() / 1e9 == pytest.approx(time.time() + 3600.0, abs=5.0)
    fake.answer = lambda *call: (200, {"a clock": "without a time"})
    with pytest.raises(Unreachable, match="unreadable-body"):
        venue.now()


@pytest.mark.parametrize("fault", UNREAD)
def test_reading_without_an_answer_is_unreachable(fake, venue, fault):
    for path, call in [
        ("account", venue.holdings),
        ("openOrders", venue.working),
        ("time", venue.now),
        ("myTrades", lambda: venue.activity(0)),
        ("order", lambda: venue.look_up("nca-1-a")),
    ]:
        fake.fail("GET", f"/api/v3/{path}", fault)
        with pytest.raises(Unreachable):
            call()


def test_cancelling_and_foreign_orders(fake, venue):
    fake.resting = True
    venue.submit(BUY)
    by_hand = {"symbol": "ETHUSDT", "quantity": "1", "side": "SELL", "type": "LIMIT"}
    fake.now = 0
    fake._submit({**by_hand, "newClientOrderId": "by-hand"})
    assert {o.client_id: o.units for o in venue.working()} == {"nca-1-a": 0.1, "by-hand": -1.0}
    assert venue.cancel("nca-1-a").outcome is Outcome.ACCEPTED
    assert venue.cancel("nca-1-a").reason == "not-cancellable"
    assert venue.cancel("nca-none").reason == "unknown-order"
    fake.fail("DELETE", ORDER, "504-after")
    assert venue.cancel("by-hand").outcome is Outcome.AMBIGUOUS
    assert venue.working() == []


def test_a_new_process_finds_orders_of_any_symbol(fake, venue):
    venue.submit(Ticket("nca-eth", "ETH/USDT", 1.0))
    again = ccxt_venue.open_venue("binance", ["BTC/USDT", "ETH/USDT"], url=fake.url)
    assert again.look_up("nca-eth").symbol == "ETH/USDT"
    assert again.look_up("nca-none") is None
    (fill,) = again.activity(0).fills
    assert (fill.client_id, fill.symbol, fill.units) == ("nca-eth", "ETH/USDT", 0.999)
    again.close()


def test_trades_of_many_pages_come_once(fake, venue, monkeypatch):
    monkeypatch.setattr(ccxt_venue, "PAGE", 3)
    ticks = iter(range(10**6))
    start = time.time()
    fake.clock = lambda: start + 0.01 * next(ticks)
    for i in range(8):
        venue.submit(Ticket(f"nca-{i}", "BTC/USDT", 0.01))
    fills = venue.activity(0).fills
    assert [fill.client_id for fill in fills] == [f"nca-{i}" for i in range(8)]
    venue.submit(Ticket("nca-eth", "ETH/USDT", 0.1))  # trades are counted anew for each symbol
    assert len({fill.execution_id for fill in venue.activity(0).fills}) == 9


def test_units_are_sent_exactly_as_lots(fake, venue):
    assert venue.instrument("BTC/USDT") == Instrument("BTC/USDT", 0.001, 0.01, 5.0, False)
    assert 0.3 - 0.2 < 0.1  # ccxt would cut it to 0.099
    venue.submit(Ticket("nca-lot", "BTC/USDT", 0.3 - 0.2))
    assert fake.orders[-1]["origQty"] == "0.1"
    answer = venue.submit(Ticket("nca-odd", "BTC/USDT", 0.0015))
    assert answer.reason == "not-a-multiple-of-the-lot"
    assert len(fake.orders) == 1


def test_without_a_url_orders_have_the_test_host_alone():
    client, session = ccxt_venue.open_client("binance", keys=net.Keys(KEY, CANARY))
    assert session.hosts == {"testnet.binance.vision", "testnet.binancefuture.com"}
    client.urls["api"]["private"] = "https://api.binance.com/api/v3"
    with pytest.raises(net.HostError, match=r"api\.binance\.com: not called"):
        client.fetch_order(None, "BTC/USDT", {"clientOrderId": "a"}) if client.markets else (
            client.private_post_order({"symbol": "BTCUSDT"})
        )
    client.session.close()


def test_no_exchange_takes_orders_at_a_production_host():
    """Where ccxt lists production hosts as test hosts, as of OKX, there is no venue."""
    with pytest.raises(ConfigError, match="no test host of its own"):
        ccxt_venue.open_client("okx", keys=net.Keys(KEY, CANARY))
    says = "'kraken' are not in this version; give ccxt:binance, simulated, or .* module:name"
    with pytest.raises(ConfigError, match=says):
        ccxt_venue.open_venue("kraken", ["BTC/USDT"])


def test_market_data_comes_without_keys_and_only_by_get():
    client, session = ccxt_venue.open_client("binance")
    assert not client.apiKey and "api.binance.com" in session.hosts
    client.apiKey, client.secret = KEY, CANARY
    with pytest.raises(net.HostError, match="only GET"):
        client.private_post_order({"symbol": "BTCUSDT"})
    client.session.close()


def test_a_redirect_takes_neither_order_nor_keys_elsewhere(fake, venue):
    with FakeExchange(CANARY) as other:
        fake.elsewhere = other.url
        fake.fail("POST", ORDER, "redirect-before")
        fake.fail("GET", "/api/v3/account", "redirect-before")
        assert venue.submit(BUY).reason == "redirected"
        with pytest.raises(Unreachable, match="redirected"):
            venue.holdings()
        assert other.calls == []


def test_symbols_that_cannot_be_traded_are_named(fake):
    with pytest.raises(ConfigError, match="DOGE/USDT: no spot market"):
        ccxt_venue.open_venue("binance", ["DOGE/USDT"], url=fake.url)
    with pytest.raises(ConfigError, match="cash would be BTC and USDT"):
        ccxt_venue.open_venue("binance", ["BTC/USDT", "ETH/BTC"], url=fake.url)
    with pytest.raises(net.HostError, match="not called"):
        ccxt_venue.open_venue("binance", ["BTC/USDT"], url="https://api.binance.com")
    with pytest.raises(ConfigError, match="no exchange 'nasdaq'"):
        ccxt_venue.open_client("nasdaq")


def test_no_key_shows_in_logs_or_messages(fake, venue, caplog):
    caplog.set_level(logging.DEBUG)
    texts = [repr(venue._keys)]
    fake.code = {"code": -1013, "msg": f"bad order of {CANARY}"}
    texts.append(repr(venue.submit(BUY)))
    assert "bad order of ***" in texts[-1]
    for fault in ("504-after", "html", "reset-before", "redirect-before", "401-before"):
        fake.fail("POST", ORDER, fault)
        fake.fail("GET", "/api/v3/account", fault)
        texts.append(repr(venue.submit(BUY)))
        with pytest.raises(Unreachable) as caught:
            venue.holdings()
        texts.append(repr(caught.value))
        assert caught.value.__suppress_context__ and "http" not in str(caught.value)[7:]
    assert any(call[4].get("X-MBX-APIKEY") == KEY for call in fake.calls)
    texts += [str(call[1:4]) for call in fake.calls] + [caplog.text]
    for word in (CANARY, KEY):
        assert word not in "".join(texts)
