"""A market with gaps and missing bars, and agents simple enough to follow by hand."""

import hashlib
import types

import numpy as np
import pytest
from drawn import bars_of
from made_up import rules_of

from nca_trader.paper.feeds.feed import ReplayFeed
from nca_trader.paper.journal.journal import Journal, read_events
from nca_trader.paper.session.agents import policy_agent
from nca_trader.paper.session.trade import open_session
from nca_trader.paper.venues.exchange import Exchange
from nca_trader.types import Costs, EnvSpec

COSTS = Costs(commission=5e-4, slippage=2e-4)
RECEPTIVE_FIELD = 5
FIRST_DECISION = 7


class LastReturn:
    """One feature, log(close / last close), and only that of bars that are there."""

    names = ("last_return",)
    warmup = 1

    def init(self, num_assets):
        return np.full(num_assets, np.nan)

    def step(self, state, bar):
        value = np.where(bar.present, np.log(bar.close) - np.log(state), 0.0)
        value = np.nan_to_num(value).astype(np.float32)[:, None]
        return np.where(bar.present, bar.close, state), value


def momentum(window, present, account):
    """Logits (short, flat, long): along the sum of the window's returns, flat when it is small."""
    total = window.sum(axis=(0, 2))
    return np.stack([-total, np.full_like(total, 0.004), total], axis=-1)


def make_bars(num_bars=80, symbols=("AAA", "BBB"), seed=0, missing=0.0, start="2020-01-01"):
    rng = np.random.default_rng(seed)
    shape = (num_bars, len(symbols))
    present = rng.random(shape) >= missing
    present[0] = True
    present[(~present).all(1), 0] = True  # a bar with no asset at all is no bar
    close = 100.0 * np.exp(np.cumsum(0.01 * rng.standard_normal(shape), axis=0))
    open_ = np.vstack([close[:1], close[:-1]]) * np.exp(0.004 * rng.standard_normal(shape))
    for row in range(1, num_bars):  # a missing bar carries the last close
        open_[row] = np.where(present[row], open_[row], close[row - 1])
        close[row] = np.where(present[row], close[row], close[row - 1])
    high, low = np.maximum(open_, close) * 1.001, np.minimum(open_, close) * 0.999
    high, low = (np.where(present, x, close) for x in (high, low))
    more = {"high": high, "low": low, "volume": np.where(present, 1000.0, 0.0)}
    more |= {"symbols": symbols, "present": present, "source": "made here"}
    return bars_of(close, open_, start, **more)


def make_agent(
    symbols=("AAA", "BBB"), targets=(-0.4, 0.0, 0.5), costs=COSTS, features=None, decide=momentum,
    **rules
):  # fmt: skip
    """An agent by `decide(window [RF, A, F], present [RF, A], account)`: its stream keeps both."""

    source = features or LastReturn()
    spec = EnvSpec(symbols=symbols, features=("return_1",), targets=targets, warmup=0)

    def begin():
        shape = (RECEPTIVE_FIELD, len(symbols))
        window = np.zeros((*shape, 1), np.float32), np.zeros(shape, bool)
        return source.init(len(symbols)), window

    def see(memory, bar):
        state, row = source.step(memory[0], bar)
        new = row, np.asarray(bar.present)
        window = tuple(
            np.concatenate([old[1:], last[None]]) for old, last in zip(memory[1], new, strict=True)
        )
        return (state, window), row

    def think(memory, bar, account):
        memory, row = see(memory, bar)
        logits = decide(*memory[1], account)
        target = np.take(targets, np.argmax(logits, -1))  # of actions that are the targets
        return memory, row, logits, target

    return policy_agent(
        spec=spec,
        names=source.names,
        begin=begin,
        see=see,
        think=think,
        receptive_field=RECEPTIVE_FIELD,
        first_decision=FIRST_DECISION,
        rules=rules_of(costs, **{"max_gross": 1.0, **rules}),
        identity={"agent": "made here"},
    )


def replay(path, bars, agent, capital=1e5, start=None, venue=None, journal=Journal):
    """A whole session over `bars`; its result."""
    feed = ReplayFeed(bars)
    venue = venue or exchange(agent, capital)
    with journal(path, feed.now) as opened:
        return open_session(agent, feed, venue, opened, capital, start).trade()


class Given(ReplayFeed):
    """A replay of given bars, also of bars that no file would have; `before(row)` comes first."""

    def __init__(self, bars, before=lambda row: None):
        self.given, self.before = list(bars), before
        self.symbols, self._now = ("AAA", "BBB"), 0

    def __len__(self):
        return len(self.given)

    def __iter__(self):
        for row, bar in enumerate(self.given):
            self.before(row)
            yield bar


def exchange(agent, capital=1e5, kind=Exchange):
    """A simulated exchange in memory for an agent."""
    return kind(None, capital, agent.symbols, agent.rules)


def decided(path, bars):
    """`[N, A]` targets of the journal's decisions, NaN at bars without one."""
    targets = np.full(bars.close.shape, np.nan)
    for event in read_events(path, "decision"):
        row = int(np.searchsorted(bars.time, np.datetime64(event.ts_event, "ns")))
        targets[row] = [np.nan if t is None else t for t in event.body["target"]]
    return targets


@pytest.fixture(autouse=True)
def _quick_disk(request, monkeypatch):
    """No waiting for the disk: only a power cut could tell. Tests of the journal itself wait."""
    if "journal" not in request.path.parts:
        monkeypatch.setattr("nca_trader.paper.journal.journal.SYNCHRONOUS", "OFF")
        monkeypatch.setattr("os.fdatasync", lambda descriptor: None)


@pytest.fixture(scope="session")
def stage():
    """The functions above, for tests to reach."""
    return types.SimpleNamespace(
        bars=make_bars, agent=make_agent, replay=replay, exchange=exchange, decided=decided,
        momentum=momentum, Given=Given, LastReturn=LastReturn, costs=COSTS,
        first_decision=FIRST_DECISION,
    )  # fmt: skip


@pytest.fixture(scope="session")
def digest():
    """The SHA-256 of what a journal says, but for the times at which it was written."""

    def of(path):
        text = "\n".join(repr(event._replace(ts_recv=0)) for event in read_events(path))
        return hashlib.sha256(text.encode()).hexdigest()

    return of


@pytest.fixture
def path(tmp_path):
    """Where a test's journal is."""
    return tmp_path / "paper.db"


@pytest.fixture
def keys(monkeypatch):
    """The keys of every venue, and nothing else of this machine's settings."""
    # Here, as a killed child loads this file without the folder of tests on its path.
    from fake_venue import CANARY, KEY

    monkeypatch.setenv("APCA_API_KEY_ID", KEY)
    monkeypatch.setenv("APCA_API_SECRET_KEY", CANARY)
    for name in ("APCA_API_BASE_URL", "NCA_TRADER_CCXT_URL", "NCA_TRADER_KEYS"):
        monkeypatch.delenv(name, raising=False)
