"""An Alpaca account through alpaca-py against a local server of its protocol."""

import logging
import os
import time

import pytest
import requests
from fake_alpaca import FakeAlpaca, iso
from fake_venue import CANARY, KEY, UNCLEAR, UNREAD, FakeVenue

from nca_trader.errors import ConfigError
from nca_trader.paper.venue import Instrument, Outcome, Ticket, Unreachable
from nca_trader.paper.venues import alpaca, net

pytestmark = pytest.mark.usefixtures("keys")


@pytest.fixture
def fake():
    with FakeAlpaca() as fake:
        yield fake


@pytest.fixture
def venue(fake):
    venue = alpaca.open_venue(["SPY", "QQQ"], url=fake.url, timeout=0.3)
    yield venue
    venue.close()


BUY = Ticket("nca-1-a", "SPY", 3.0)


def test_an_accepted_order_is_found_filled_and_held(fake, venue):
    fake.parts = 3
    assert venue.submit(BUY).outcome is Outcome.ACCEPTED
    order = venue.look_up("nca-1-a")
    assert (order.units, order.filled, order.status, order.symbol) == (3.0, 3.0, "filled", "SPY")
    fills = venue.activity(0).fills
    assert [(f.client_id, f.units, f.price, f.commission) for f in fills] == [
        ("nca-1-a", 1.0, 500.0, 0.0)
    ] * 3
    assert len({fill.execution_id for fill in fills}) == 3
    held = venue.holdings()
    assert (held.cash, held.units) == (98_500.0, {"SPY": 3.0})
    # The hand ledger: cash at the start less what the fills cost.
    assert held.cash == 100_000.0 - sum(fill.units * fill.price for fill in fills)


@pytest.mark.parametrize(("fault", "reason", "sent"), UNCLEAR)
def test_an_unclear_answer_is_ambiguous_and_the_look_up_decides(fake, venue, fault, reason, sent):
    fake.fail("POST", "/v2/orders", fault)
    began = time.monotonic()
    answer = venue.submit(BUY)
    assert (answer.outcome, answer.reason) == (Outcome.AMBIGUOUS, reason)
    assert time.monotonic() - began < 1.2  # three times the deadline, on a busy machine
    found = venue.look_up("nca-1-a")
    assert (found is not None) == sent
    if found is None:
        assert venue.submit(BUY).outcome is Outcome.ACCEPTED
    assert len(fake.orders) == 1
    # alpaca-py itself would send again on 504.
    assert fake.count("POST", "/v2/orders") == 1 + (not sent)


def test_alpaca_py_without_the_guard_makes_two_orders_of_one(fake):
    """The trap that the adapter is against: if this fails, alpaca-py has changed."""
    client = alpaca.TradingClient("a", "b", url_override=fake.url, raw_data=True)
    client._retry_wait = 0
    fake.fail("POST", "/v2/orders", "504-after")
    order = alpaca.MarketOrderRequest(symbol="SPY", qty=1, side="buy", time_in_force="day")
    client.submit_order(order)
    client._session.close()
    assert len(fake.orders) == 2


def test_a_rate_limit_is_busy_and_says_how_long(fake, venue):
    fake.fail("POST", "/v2/orders", "429-before")
    answer = venue.submit(BUY)
    assert (answer.outcome, answer.retry_after) == (Outcome.BUSY, 7.0)
    assert fake.count("POST", "/v2/orders") == 1


def test_a_refusal_counts_once_the_look_up_agrees(fake, venue):
    fake.refuse = f"insufficient buying power of {CANARY}" + 300 * "."
    answer = venue.submit(BUY)
    assert answer.outcome is Outcome.REJECTED
    assert "insufficient buying power" in answer.reason and CANARY not in answer.reason
    assert len(answer.reason) == 200
    fake.fail("GET", "/v2/orders:by_client_order_id", "hang-before")
    assert venue.submit(BUY).outcome is Outcome.AMBIGUOUS


def test_an_answer_about_another_order_is_ambiguous(fake, venue, monkeypatch):
    submit = fake._submit
    monkeypatch.setattr(fake, "_submit", lambda d: (200, submit(d)[1] | {"client_order_id": "x"}))
    answer = venue.submit(BUY)
    assert (answer.outcome, answer.reason) == (Outcome.AMBIGUOUS, "unreadable-body")


def test_a_duplicate_id_is_success(fake, venue):
    assert venue.submit(BUY).outcome is Outcome.ACCEPTED
    answer = venue.submit(BUY)
    assert (answer.outcome, answer.reason) == (Outcome.ACCEPTED, "duplicate-id")
    assert len(fake.orders) == 1 and fake.units == {"SPY": 3.0}


def test_a_proxy_that_finds_no_page_is_not_alpaca_that_finds_no_order(fake, venue):
    assert venue.look_up("nca-none") is None
    fake.fail("GET", "/v2/orders:by_client_order_id", "html404")
    with pytest.raises(Unreachable, match="http-404"):
        venue.look_up("nca-none")


@pytest.mark.parametrize("fault", UNREAD)
def test_reading_without_an_answer_is_unreachable(fake, venue, fault):
    for path, call in [
        ("/v2/positions", venue.holdings),
        ("/v2/orders", venue.working),
        ("/v2/clock", venue.now),
        ("/v2/account/activities", lambda: venue.activity(0)),
    ]:
        fake.fail("GET", path, fault)
        with pytest.raises(Unreachable) as caught:
            call()
        assert caught.value.reason


def test_cancelling(fake, venue):
    fake.resting = True
    venue.submit(BUY)
    assert [order.client_id for order in venue.working()] == ["nca-1-a"]
    fake.fail("DELETE", "/v2/orders", "504-before", "429-before")
    assert venue.cancel("nca-1-a").outcome is Outcome.AMBIGUOUS
    assert venue.cancel("nca-1-a").outcome is Outcome.BUSY
    assert venue.cancel("nca-1-a").outcome is Outcome.ACCEPTED
    assert venue.look_up("nca-1-a").status == "cancelled"
    assert venue.working() == []
    assert venue.cancel("nca-1-a").reason == "not-cancellable"
    assert venue.cancel("nca-none").reason == "unknown-order"


def test_partial_then_cancelled(fake, venue):
    fake.resting = True
    venue.submit(BUY)
    fake.fill("nca-1-a", 1.0, last=False)
    venue.cancel("nca-1-a")
    order = venue.look_up("nca-1-a")
    assert (order.filled, order.units, order.status) == (1.0, 3.0, "cancelled")


def test_foreign_orders_and_their_fills_are_listed(fake, venue):
    fake.resting = True
    for i in range(3):
        order = {"symbol": "QQQ", "qty": "1", "side": "sell", "type": "limit"}
        fake._submit({**order, "client_order_id": f"by-hand-{i}"})
    fake.fill("by-hand-1", 1.0)
    assert {o.client_id for o in venue.working()} == {"by-hand-0", "by-hand-2"}
    (fill,) = venue.activity(0).fills
    assert (fill.client_id, fill.units) == ("by-hand-1", -1.0)


def test_working_orders_of_many_pages_are_all_there(fake, venue, monkeypatch):
    monkeypatch.setattr(alpaca, "ORDERS", 2)
    fake.resting = True
    for i in range(5):
        fake.clock += 1.0
        venue.submit(Ticket(f"nca-{i}", "SPY", 1.0))
    assert {o.client_id for o in venue.working()} == {f"nca-{i}" for i in range(5)}
    for order in fake.orders.values():  # of one moment: no page shows them all
        order["submitted_at"] = iso(fake.clock)
    with pytest.raises(Unreachable, match="too-many-orders"):
        venue.working()


def test_activities_of_many_pages_and_each_cash_flow_once(fake, venue, monkeypatch):
    monkeypatch.setattr(alpaca, "PAGE", 2)
    venue.submit(BUY)
    for kind, amount in [("DIVNRA", 12.5), ("INT", -3.0), ("FEE", -0.02), ("CSD", 100.0)]:
        fake.pay(kind, amount, "SPY" if kind[:3] == "DIV" else "")
    fake.pay("SPLIT", 0.0, "SPY")  # moves no money
    found = venue.activity(1_749_999_000 * 10**9)
    assert [(f.kind, f.amount) for f in found.flows] == [
        ("dividend", 12.5), ("interest", -3.0), ("fee", -0.02), ("other", 100.0)
    ]  # fmt: skip
    assert len(found.fills) == 1
    spent = sum(f.units * f.price + f.commission for f in found.fills)
    paid = sum(flow.amount for flow in found.flows)
    assert venue.holdings().cash == pytest.approx(100_000.0 - spent + paid, abs=1e-9)


def test_holdings_that_change_between_two_answers_are_asked_for_again(fake, venue):
    answers, answer = [], fake.answer

    def moving(method, path, query, body):
        if path == "/v2/positions" and not answers:
            answers.append(1)
            found = answer(method, path, query, body)
            fake._submit({"symbol": "SPY", "qty": 2, "side": "buy", "type": "market"})
            return found
        return answer(method, path, query, body)

    fake.answer = moving
    held = venue.holdings()
    assert (held.cash, held.units) == (99_000.0, {"SPY": 2.0})


def test_the_clock_is_alpacas(fake, venue):
    fake.skew = 3600.0
    assert venue.now() / 1e9 == pytest.approx(fake.clock + 3600.0, abs=1.0)


def test_instruments(fake):
    whole = alpaca.open_venue(["SPY"], url=fake.url)
    assert whole.instrument("SPY") == Instrument("SPY", 1.0, 0.01, 0.0, True)
    parts = alpaca.open_venue(["SPY"], url=fake.url, fractional=True)
    assert parts.instrument("SPY") == Instrument("SPY", 1e-9, 0.01, 1.0, False)
    with pytest.raises(Unreachable):
        whole.instrument("NONE")
    for venue in (whole, parts):
        venue.close()


def test_a_resting_stop_is_sent_as_one(fake, venue):
    venue.submit(Ticket("nca-stop", "SPY", -2.0, stop=480.0))
    order = fake.orders["nca-stop"]
    assert (order["type"], order["side"], order["status"]) == ("stop", "sell", "new")
    assert order["time_in_force"] == "gtc"  # it rests over night


# --- hosts and keys ---


@pytest.mark.parametrize(
    "url",
    [
        "https://api.alpaca.markets",
        "https://broker-api.alpaca.markets",
        "http://paper-api.alpaca.markets",
        "https://paper-api.alpaca.markets:8443",
        "https://paper-api.alpaca.markets@api.alpaca.markets",
        "https://paper-api.alpaca.markets.evil.example",
        "https://api.alpaca.markets\\@paper-api.alpaca.markets",
        "https://127.0.0.1.evil.example",
        "file:///etc/passwd",
        "paper-api.alpaca.markets",
    ],
)
def test_only_the_paper_host_and_this_machine_take_orders(url, monkeypatch):
    with pytest.raises(net.HostError, match="not called"):
        alpaca.open_venue(["SPY"], url=url)
    monkeypatch.setenv("APCA_API_BASE_URL", url)
    with pytest.raises(net.HostError, match="not called"):
        alpaca.open_venue(["SPY"])


def test_the_host_is_checked_at_every_call(fake, venue):
    venue._client._base_url = "https://api.alpaca.markets"
    with pytest.raises(net.HostError, match="not called"):
        venue.submit(BUY)
    with pytest.raises(net.HostError, match="not called"):
        venue.look_up("a")
    assert fake.calls == []


def test_a_redirect_takes_neither_order_nor_keys_elsewhere(fake, venue):
    with FakeAlpaca() as other:
        fake.elsewhere = other.url
        fake.fail("POST", "/v2/orders", "redirect-before")
        fake.fail("GET", "/v2/positions", "redirect-before")
        assert venue.submit(BUY).reason == "redirected"
        with pytest.raises(Unreachable, match="redirected"):
            venue.holdings()
        assert other.calls == []


def test_keys_of_a_live_account_are_refused(monkeypatch):
    monkeypatch.setenv("APCA_API_KEY_ID", "AKLIVE")
    with pytest.raises(ConfigError, match="live account"):
        alpaca.open_venue(["SPY"])


def test_missing_keys_are_named(monkeypatch):
    monkeypatch.delenv("APCA_API_SECRET_KEY")
    with pytest.raises(ConfigError, match="APCA_API_SECRET_KEY: not set"):
        alpaca.open_venue(["SPY"])


def test_keys_come_from_a_file_that_only_its_owner_reads(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text(f'# mine\nAPCA_API_KEY_ID={KEY}\nAPCA_API_SECRET_KEY = "{CANARY}"\n')
    monkeypatch.delenv("APCA_API_KEY_ID")
    monkeypatch.delenv("APCA_API_SECRET_KEY")
    monkeypatch.setenv("NCA_TRADER_KEYS", str(path))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        alpaca.paper_keys()
    os.chmod(path, 0o600)
    keys = alpaca.paper_keys()
    assert (keys.key, keys.secret) == (KEY, CANARY)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: 12345)  # the file is another user's
        with pytest.raises(ConfigError, match="chmod 600"):
            alpaca.paper_keys()
    path.unlink()
    with pytest.raises(ConfigError, match="can't be read"):
        alpaca.paper_keys()


def test_no_key_shows_in_logs_messages_or_urls(fake, venue, caplog):
    caplog.set_level(logging.DEBUG)
    texts = [repr(venue._keys), str(venue._keys)]
    for fault in ("504-after", "html", "reset-before", "redirect-before", "401-before"):
        fake.fail("POST", "/v2/orders", fault)
        fake.fail("GET", "/v2/positions", fault)
        texts.append(repr(venue.submit(BUY)))
        try:
            texts.append(repr(venue.holdings()))
        except Unreachable as error:
            texts += [repr(error), repr(error.__cause__)]
            assert error.__suppress_context__
    fake._missing = lambda: (404, {"code": 40410000, "message": f"nothing of {CANARY} here"})
    with pytest.raises(Unreachable, match=r"nothing of \*\*\* here") as caught:
        venue.instrument("NONE")
    texts += [str(call[1:4]) for call in fake.calls] + [caplog.text, repr(caught.value)]
    assert fake.calls[0][4]["APCA-API-SECRET-KEY"] == CANARY  # it was used
    for word in (CANARY, KEY):
        assert word not in "".join(texts)


def test_coins_are_refused_by_name():
    with pytest.raises(ConfigError, match="ccxt"):
        alpaca.open_venue(["BTC/USD"])


def test_market_data_is_only_read(fake):
    with net.GuardedSession({"data.alpaca.markets"}, read_only=True) as session:
        with pytest.raises(net.HostError, match="only GET"):
            session.post(fake.url + "/v2/orders", json={})
    assert fake.calls == []


def test_a_body_without_a_length_that_is_cut_is_not_taken_as_whole():
    class Drip(FakeVenue):
        def handle(self, request):
            request.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + b'{"a": 1}')
            while not self.over.wait(0.02):  # so often that no single read takes too long
                request.wfile.write(b" ")
                request.wfile.flush()
            request.close_connection = True

    with Drip() as fake, net.GuardedSession((), timeout=0.2) as session:
        with pytest.raises(requests.RequestException):
            session.get(fake.url)
        assert session.fault == "timeout"
