"""A live session warns of what was planted, in its journal and on its page, and of nothing else."""

import dataclasses

import numpy as np
import pytest
from livedesk import Room

import nca_trader as nca
from nca_trader.paper.journal.journal import read_events
from nca_trader.paper.session.core import Usual
from nca_trader.paper.session.drift import usual_turnover
from nca_trader.paper.venues.exchange import Exchange
from nca_trader.runs.reference import WINDOW, reference_of
from nca_trader.watch.dashboard.sources import FollowedSessions

BARS = 20 + WINDOW + 20  # history, the window that is compared, and some
FEWER = {"schema": 60, "slippage": 110}  # which do not need the window


def known(stage):
    """The feature under the name of one that the package has, so that its schema has a hash."""
    made = stage.LastReturn()
    made.names = ("return_1",)
    return made


@pytest.fixture(scope="module")
def usual(stage, tmp_path_factory):
    """What 1,500 bars of training say: the feature's values, and the turnover of a backtest."""
    bars = stage.bars(num_bars=1500, seed=3)
    moves = np.diff(np.log(bars.close), axis=0, prepend=np.nan)[:, :, None].astype(np.float32)
    reference = reference_of(moves, bars.present, ("return_1",), 1)
    path = tmp_path_factory.mktemp("usual") / "paper.db"
    stage.replay(path, bars[:500], stage.agent())
    targets = stage.decided(path, bars[:500])
    found = nca.backtest(bars[:500], targets, stage.costs, order="on_change", max_gross=1.0)
    return Usual(reference, usual_turnover(np.asarray(found.turnover)[10:]))


class Flips:
    """Short and long in turn: the agent trades at every bar."""

    def __init__(self):
        self.side = 1.0

    def __call__(self, window, present, account):
        self.side = -self.side
        row = [-self.side, 0.0, self.side]
        return np.array([row, row])


def session(stage, tmp_path, usual, plant):
    """Trade at an exchange; return the journal's drift warnings and the page's table."""
    agent = stage.agent(
        features=known(stage), **({"decide": Flips()} if plant == "turnover" else {})
    )
    if plant == "schema":
        usual = Usual(dataclasses.replace(usual.features, schema="0" * 64), usual.turnover)
    room = Room(stage, tmp_path, agent._replace(usual=usual), num_bars=FEWER.get(plant, BARS))
    if plant == "features":  # every move is three times as large
        names = ("open", "high", "low", "close")
        prices = {name: 100.0 * (getattr(room.bars, name) / 100.0) ** 3 for name in names}
        room.bars = dataclasses.replace(room.bars, **prices)
    rules = agent.rules
    if plant == "slippage":  # what the agent was trained to pay, and 20 bp more
        costs = dataclasses.replace(rules.costs, slippage=rules.costs.slippage + 2e-3)
        rules = dataclasses.replace(rules, costs=costs)
    room.desk = Exchange(tmp_path / "books", 1e5, agent.symbols, rules)
    room.trade()
    room.desk.close()
    sources = FollowedSessions(journals=[str(room.path)])
    (shown,) = sources.all()
    table = shown.view()["tables"]["drift"]
    sources.close()
    said = [e.body for e in read_events(room.path, "risk") if e.body["code"].startswith("drift-")]
    return said, [[cell["text"] for cell in row] for row in table["rows"]]


@pytest.mark.heavy
def test_nothing_is_said_where_nothing_drifts(stage, tmp_path, usual):
    said, rows = session(stage, tmp_path, usual, "nothing")
    assert said == []
    assert [row[2] for row in rows] == ["no warning"] * 4
    # The exchange's slippage is the modelled one, against the open at which it fills.
    assert rows[1][1] == "2.0 bp, modelled 2.0 bp"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("plant", "label", "words"),
    [
        ("features", "Feature return_1", "index "),
        ("slippage", "Slippage", "20.0 bp above the model"),
        ("turnover", "Turnover", "a bar, outside the backtest's range"),
        ("schema", "Feature schema", "in training"),
    ],
)
def test_what_drifts_is_in_the_journal_once_and_on_the_page(
    stage, tmp_path, usual, plant, label, words
):
    said, rows = session(stage, tmp_path, usual, plant)
    code = {"features": "feature"}.get(plant, plant)
    assert [body["code"] for body in said] == [f"drift-{code}"]
    shown = {name: text for name, _, text in rows}
    assert words in shown.pop(label)
    if plant == "schema":  # other features cannot be compared
        assert shown.pop("Feature") == "not watched: the features are not those of training"
    assert set(shown.values()) == {"no warning"}
