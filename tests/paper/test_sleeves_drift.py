"""Drift of an account that sleeves share: found in the sleeve where it was put, and in no other."""

import dataclasses

import numpy as np
import pytest
from livedesk import Still, Tape
from sleeveledger import CAPITAL, alternating, sleeve, told

from nca_trader.paper.agents import strategy_agent
from nca_trader.paper.drift import UNKNOWN, Usual
from nca_trader.paper.exchange import Exchange
from nca_trader.paper.feed import ReplayFeed
from nca_trader.paper.journal import Journal
from nca_trader.paper.live import LiveSession
from nca_trader.paper.session import trade_replay
from nca_trader.paper.sleeved import SleevedVenueHolder
from nca_trader.paper.sleeves import members_of
from nca_trader.paper.subjects import Subject
from nca_trader.runs.reference import WINDOW, reference_of
from nca_trader.watch.dashboard.sources import Sources

BARS = WINDOW + 40
KINDS = ("features", "schema", "slippage", "turnover")


@pytest.fixture(autouse=True)
def _quick(quick_disk):
    pass


@pytest.fixture(scope="module")
def usual(stage):
    """What 1,500 bars of training say of a feature, and a turnover that a backtest might have."""
    bars = stage.bars(num_bars=1500, seed=3)
    moves = np.diff(np.log(bars.close), axis=0, prepend=np.nan)[:, :, None].astype(np.float32)
    return Usual(reference_of(moves, bars.present, ("return_1",), 1), (0.0, 2.0))


class Known:
    """The feature under a name that the package has, so that its schema has a hash."""

    def __init__(self, stage):
        self._inner, self.names, self.warmup = stage.LastReturn(), ("return_1",), 1
        self.init, self.step = self._inner.init, self._inner.step


def account(stage, bars, **agents):
    """The subject of sleeves with equal shares."""
    sleeves = [sleeve(name, 1.0 / len(agents), alternating(0.0, 0.0)) for name in agents]
    agents = [one._replace(identity={"strategy": name}) for name, one in agents.items()]
    members, whole = members_of(sleeves, agents, bars.symbols)
    return Subject(whole, members)


def rule(stage, bars, first, second, every, usual=None):
    made = strategy_agent(alternating(first, second, every), bars, stage.costs, stage.agent().rules)
    return made if usual is None else made._replace(usual=usual)


def wilder(bars):
    """Bars whose moves are three times as large."""
    names = ("open", "high", "low", "close")
    prices = {name: 100.0 * (getattr(bars, name) / 100.0) ** 3 for name in names}
    return dataclasses.replace(bars, **prices)


def drifts(path):
    """(code, sleeve) of the journal's warnings, in order; "" is the account."""
    bodies = [body for kind, _, body, _ in told(path) if kind == "risk"]
    return [(b["code"], b.get("sleeve", "")) for b in bodies if b["code"].startswith("drift-")]


def shown(path):
    """The page's table of drift: its last column by its first."""
    sources = Sources(journals=[str(path)])
    (source,) = sources.all()
    table = source.view()["tables"]["drift"]
    sources.close()
    return {row[0]["text"]: row[2]["text"] for row in table["rows"]}


@pytest.mark.slow
def test_each_sleeve_of_a_replay_is_watched_and_the_journal_says_for_what(stage, tmp_path, usual):
    bars, path = wilder(stage.bars(num_bars=BARS)), tmp_path / "paper.db"
    policy = stage.agent(features=Known(stage), order="rebalance")
    other = dataclasses.replace(usual.features, schema="0" * 64)
    subject = account(
        stage, bars,
        moved=policy._replace(usual=usual),
        strange=policy._replace(usual=usual._replace(features=other)),
        busy=rule(stage, bars, 0.4, -0.3, 1, Usual(None, (0.001, 0.01))),
        calm=rule(stage, bars, 0.3, 0.3, 1, Usual(None, (0.0, 0.1))),
    )  # fmt: skip
    trade_replay(subject, ReplayFeed(bars), path, CAPITAL, None)
    assert sorted(drifts(path)) == [
        ("drift-feature", "moved"), ("drift-schema", "strange"), ("drift-turnover", "busy"),
    ]  # fmt: skip
    (body,) = [body for kind, _, body, _ in told(path) if kind == "watched"]
    status = {name: [own[kind] for kind in KINDS] for name, own in body["sleeves"].items()}
    none, differs = "a rule sees no features", "the features are not those of training"
    assert status == {
        "moved": ["", "", "", ""], "strange": [differs, "", "", ""],
        "busy": [none, none, "", ""], "calm": [none, none, "", ""],
    }  # fmt: skip
    page = shown(path)
    assert "index " in page["moved: Feature return_1"]
    assert "in training" in page["strange: Feature schema"]
    assert page["strange: Feature"] == f"not watched: {differs}"
    assert "outside the backtest's range" in page["busy: Turnover"]
    calm = [text for name, text in page.items() if name.startswith("calm: ")]
    assert calm == [f"not watched: {none}", "no warning", "no warning", f"not watched: {none}"]

    # A session that starts again writes nothing twice, and what changed meanwhile once more.
    before = path.read_bytes()
    trade_replay(subject, ReplayFeed(bars), path, CAPITAL, None)
    assert path.read_bytes() == before
    unsaved = [m._replace(agent=m.agent._replace(usual=Usual())) for m in subject.members]
    for _ in range(2):
        trade_replay(subject._replace(members=unsaved), ReplayFeed(bars), path, CAPITAL, None)
    later = [body for kind, _, body, _ in told(path) if kind == "watched"]
    assert len(later) == 2 and later[1]["sleeves"]["moved"]["features"] == UNKNOWN
    assert shown(path)["moved: Turnover"] == "not watched: no saved backtest to compare with"


@pytest.mark.parametrize("extra", [2e-3, 0.0])
def test_slippage_at_a_venue_is_of_the_sleeves_whose_orders_it_filled(stage, tmp_path, extra):
    """One sleeve trades at each bar, what another asks for crosses with it, and a third holds."""
    bars, path = stage.bars(num_bars=80), tmp_path / "paper.db"
    one, two = (bars.select(symbol) for symbol in ("AAA", "BBB"))
    subject = account(
        stage, bars,
        busy=rule(stage, one, 0.6, -0.4, 1),
        against=rule(stage, one, -0.2, 0.2, 1),
        calm=rule(stage, two, 0.3, 0.3, 1),
    )  # fmt: skip
    # What the agents were told, and 20 bp more.
    costs = dataclasses.replace(stage.costs, slippage=stage.costs.slippage + extra)
    desk = Exchange(tmp_path / "books", CAPITAL, costs, bars.symbols, subject.agent.rules)
    for until in (30, 55, len(bars)):  # it ends and starts again
        tape = Tape(bars, tmp_path / "tape", 12)
        with Journal(path, tape.now) as journal:
            holder = SleevedVenueHolder(subject.agent, subject.members)
            session = LiveSession(subject.agent, tape, desk, journal, CAPITAL, warmup=8,
                                  clock=Still(), holder=holder)  # fmt: skip
            done = session.trade(lambda tape=tape, until=until: tape.place > until)
    desk.close()
    assert done["fills"] > 50
    expected = [("drift-slippage", ""), ("drift-slippage", "busy")] if extra else []
    assert drifts(path) == expected
    events = told(path)
    assert [kind for kind, *_ in events].count("watched") == 1
    parts = [body["units"] for kind, _, body, _ in events if kind == "allocation"]
    assert sum(bool(own.get("against")) for own in parts) > 50  # it did trade
