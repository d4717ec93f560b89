"""Several agents on one account: books that sum, nets that are not sent, halts of one's own.

The ledger reads the journal's tables with sqlite3 and imports nothing of the package.
"""

import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from sleeveledger import CAPITAL, Ledger, alternating, sleeve, told

import nca_trader as nca
from nca_trader.errors import ConfigError, HaltError
from nca_trader.paper.rebuild import rebuild
from nca_trader.paper.risk import Lifts, resume
from nca_trader.watch.metrics import Watched

COSTS = nca.Costs(commission=5e-4, slippage=2e-4)


@pytest.fixture(autouse=True)
def _quick(quick_disk):
    pass


class Room:
    def __init__(self, stage, folder, **bars):
        self.folder, self.bars = folder, stage.bars(**{"num_bars": 90, **bars})
        nca.write_bars(self.bars, folder / "bars.parquet")

    def trade(self, what, name="paper.db", **options):
        self.path = self.folder / name
        options = {"costs": COSTS, "reading": {"repair": "keep-gaps,keep-jumps"}} | options
        feed = f"replay:{self.folder}/bars.parquet"
        return nca.paper_trade(what, feed, self.path, capital=CAPITAL, **options)

    def of(self, kind, name=None):
        path = self.path if name is None else self.folder / name
        return [body for k, _, body, _ in told(path) if k == kind]


@pytest.fixture
def room(stage, tmp_path):
    return Room(stage, tmp_path, missing=0.15)


TREND, STEADY = nca.rules.sma_cross(3, 10), alternating(0.4, -0.3)


def test_one_sleeve_is_a_session_without_sleeves_bit_for_bit(room):
    alone = room.trade(STEADY, "alone.db")
    one = room.trade([sleeve("one", 1.0, STEADY)])
    for name in ("orders", "fills", "decisions", "equity", "value"):
        assert one[name] == alone[name]
    assert alone["fills"] > 30

    def without(body):  # the ids have another session's hash
        return {k: v for k, v in body.items() if k not in ("sleeves", "client_id", "execution_id")}

    for kind in ("fill", "order_intent", "order_terminal", "cash", "snapshot"):
        there, here = (list(map(without, room.of(kind, n))) for n in ("alone.db", "paper.db"))
        assert here == there, kind
    mine = [body["sleeves"]["one"] for body in room.of("decision")]
    assert mine == room.of("decision", "alone.db")
    assert Ledger(room.path).worst == 0.0


@pytest.mark.parametrize("fill", ["next_open", "close"])
def test_a_sleeve_with_symbols_of_its_own_trades_as_if_alone(room, fill):
    """The account next to it changes nothing."""
    both = [
        sleeve("trend", 0.25, TREND, symbols=("AAA",)),
        sleeve("other", 0.75, STEADY, symbols=("BBB",)),
    ]
    room.trade(both, fill=fill)
    for name, symbol, rule in (
        ("trend", "AAA", TREND),
        ("other", "BBB", STEADY),
    ):
        expected = nca.backtest(room.bars.select(symbol), rule, COSTS, fill=fill)
        mine = [body["sleeves"][name]["equity"] for body in room.of("snapshot")]
        np.testing.assert_allclose(mine, expected.equity, rtol=1e-12)
        assert mine[-1] != 1.0
    assert Ledger(room.path).worst < 1e-12


def test_sleeves_in_the_same_symbols_sum_to_the_account(room):
    three = [
        sleeve("trend", 0.5, TREND),
        sleeve("steady", 0.3, STEADY),
        sleeve("against", 0.2, alternating(-0.5, 0.5, every=3), order="rebalance"),
    ]
    result = room.trade(three)
    ledger = Ledger(room.path)
    assert ledger.bars == result["decisions"] == 90 and ledger.worst < 1e-9
    assert len(ledger.crossed) > 10
    # What crosses is paid at the open, in both directions.
    opens = {(k, s): row[0] for kind, k, b, _ in told(room.path) if kind == "bar"
             for s, row in b.items() if row}  # fmt: skip
    for key, body in ledger.crossed:
        assert body["price"] == opens[key.partition("@")[2], body["symbol"]]


def test_two_opposite_sleeves_send_no_order_and_pay_nothing(stage, tmp_path):
    room = Room(stage, tmp_path)
    both = [
        sleeve("up", 0.5, alternating(0.4, 0.4)),
        sleeve("down", 0.5, alternating(-0.4, -0.4)),
    ]
    result = room.trade(both)
    assert result["orders"] == result["fills"] == 0
    assert result["value"] == pytest.approx(CAPITAL, rel=1e-12)
    ledger = Ledger(room.path)
    assert len(ledger.crossed) == 2 and ledger.worst < 1e-12
    # Each bought or sold 0.4 of its money in both at the second bar's open, at the market's price.
    for name, side in (("up", 1.0), ("down", -1.0)):
        value = 5e4 * (1.0 + side * 0.4 * sum(
            room.bars.close[-1, i] / room.bars.open[1, i] - 1.0 for i in (0, 1)
        ))  # fmt: skip
        assert room.of("snapshot")[-1]["sleeves"][name]["value"] == pytest.approx(value, rel=1e-9)


def test_costs_are_those_of_the_net_order_alone(room):
    """Two sleeves that want opposite sizes save what crossing saves, and no more."""
    both = [
        sleeve("big", 0.75, alternating(0.8, 0.2), symbols=("AAA",)),
        sleeve("small", 0.25, alternating(0.2, 0.8), symbols=("AAA",)),
    ]
    room.trade(both)
    fees = sum(body["commission"] for body in room.of("fill"))
    shared = sum(sum(b["commission"].values()) for b in room.of("allocation") if "commission" in b)
    assert shared == pytest.approx(fees, rel=1e-12)
    for body in room.of("fill"):
        assert body["commission"] == pytest.approx(
            abs(body["units"]) * body["price"] * COSTS.commission, rel=1e-12
        )
    crossed = sum(
        sum(abs(n) for n in body["units"].values()) * body["price"]
        for _, body in Ledger(room.path).crossed
    )
    traded = sum(abs(body["units"] * body["price"]) for body in room.of("fill"))
    alone = 0.0
    for share, rule in ((0.75, alternating(0.8, 0.2)), (0.25, alternating(0.2, 0.8))):
        found = nca.backtest(room.bars.select("AAA"), rule, COSTS)
        alone += CAPITAL * share * float(found.equity.iloc[-1])
    saved = room.of("snapshot")[-1]["value"] - alone
    assert crossed > 0.1 * traded
    assert saved == pytest.approx(crossed * (COSTS.commission + COSTS.slippage), rel=0.05)


def falling(stage, folder):
    """Bars that fall by half after the middle."""
    room = Room(stage, folder)
    close = room.bars.close.copy()
    factor = np.where(np.arange(len(close)) < 45, 1.0, 0.98 ** (np.arange(len(close)) - 44))
    fields = {n: getattr(room.bars, n) * factor[:, None] for n in ("open", "high", "low", "close")}
    import dataclasses

    room.bars = dataclasses.replace(room.bars, **fields)
    nca.write_bars(room.bars, folder / "bars.parquet")
    return room


@pytest.mark.parametrize("on_halt", ["hold", "flatten"])
def test_a_drawdown_halts_one_sleeve_alone_and_survives_a_restart(stage, tmp_path, on_halt):
    room = falling(stage, tmp_path)
    both = [
        sleeve("long", 0.5, alternating(0.5, 0.3), limits=nca.Limits(max_drawdown=0.1),
               on_halt=on_halt),
        sleeve("short", 0.5, alternating(-0.2, 0.2)),
    ]  # fmt: skip
    whole = room.trade(both, "whole.db")
    assert whole["decisions"] == 90  # the session went on
    news = [b for b in room.of("risk") if b["code"] == "sleeve-halted"]
    assert [(b["sleeve"], b["limit"], b["on_halt"]) for b in news] == [
        ("long", "max-drawdown", on_halt)
    ]
    assert news[0]["loss"] > 0.1
    snapshots = room.of("snapshot")
    halted = [b["sleeves"]["long"]["halted"] for b in snapshots]
    row = halted.index("max-drawdown")
    assert 45 < row < 80 and set(halted[row:]) == {"max-drawdown"}
    # What `watch` looks at: the metric has the sleeve's name, and says why.
    watched = Watched(None, room.path)
    samples, name = watched.look(), 'paper_halted{sleeve="long"}'
    assert samples[name] == 1.0 and samples['paper_halted{sleeve="short"}'] == 0.0
    assert watched.why[name].startswith("max-drawdown, loss 0.1")
    assert watched.why[name].endswith(f"on_halt {on_halt}")
    units = [b["sleeves"]["long"]["units"] for b in snapshots[row:]]
    if on_halt == "hold":
        assert all(u == units[0] for u in units) and any(units[0])
    else:
        assert any(units[0]) and all(u == [0.0, 0.0] for u in units[1:])
    others = [tuple(b["sleeves"]["short"]["units"]) for b in snapshots[row:]]
    assert len(set(others)) > 5
    assert Ledger(room.path).worst < 1e-9

    # Stopped before and after the halt, it is the same session.
    for upto in (row - 3, row + 2):
        bars = iter(range(10**6))
        room.trade(both, "cut.db", stop=lambda upto=upto, bars=bars: next(bars) >= upto)
    cut = room.trade(both, "cut.db")
    assert cut["equity"] == whole["equity"]
    assert [b["sleeves"] for b in room.of("snapshot")] == [b["sleeves"] for b in snapshots]


def test_a_resumed_sleeve_trades_again_and_its_losses_count_from_there(
    stage, tmp_path, monkeypatch
):
    room = falling(stage, tmp_path)
    both = [
        sleeve("long", 0.5, alternating(0.5, 0.3), limits=nca.Limits(max_drawdown=0.1)),
        sleeve("short", 0.5, alternating(-0.2, 0.2)),
    ]
    bars = iter(range(10**6))
    room.trade(both, stop=lambda: next(bars) >= 70)
    with pytest.raises(ConfigError, match="short is not halted"):
        resume(room.path, "checked", 0, sleeve="short")
    with pytest.raises(ConfigError, match="no sleeve 'lang'"):
        resume(room.path, "checked", 0, sleeve="lang")
    resume(room.path, "checked", 0, sleeve="long")
    with pytest.raises(ConfigError, match="long is not halted"):  # it goes on already
        resume(room.path, "checked", 0, sleeve="long")
    for _ in range(2):  # what a restart repeats is the same
        room.trade(both)
        seen = [b["sleeves"]["long"]["halted"] for b in room.of("snapshot")]
        assert seen[70] == "max-drawdown" and seen[71] is None
        assert seen[-1] == "max-drawdown"  # ten per cent further down
    assert Ledger(room.path).worst < 1e-9
    # Lifted after the same bar, the journal's own bars repeat it; not lifted, they do not.
    found = rebuild(room.path, both, costs=COSTS)
    assert (found.difference, found.bars, found.decisions) == ("", 90, 90)
    monkeypatch.setattr("nca_trader.paper.rebuild.lifts_of", lambda events: Lifts(frozenset(), {}))
    bar = int(room.bars.time[71].astype("datetime64[s]").astype(int))
    assert f"{bar}" in rebuild(room.path, both, costs=COSTS).difference


def test_the_accounts_limits_cut_the_sum(room):
    """A cut takes the same share of every sleeve's order in the direction of the net one."""
    both = [
        sleeve("big", 0.6, alternating(0.6, 0.5, every=40), symbols=("AAA",)),
        sleeve("small", 0.4, alternating(0.5, 0.4, every=40), symbols=("AAA",)),
    ]
    room.trade(both, risk=nca.Limits(max_position=0.28))
    first = room.of("allocation")[0]["units"]
    weights = [body["weight"][0] for body in room.of("snapshot")]
    opened = next(w for w in weights if w)
    assert opened == pytest.approx(0.28, abs=0.01)  # but for the move of one bar
    # Both asked for 0.56 of the account, and half of it is allowed.
    assert first["big"] / first["small"] == pytest.approx(0.36 / 0.2, rel=1e-6)
    assert {b["code"] for b in room.of("risk")} == {"max-position"}
    assert Ledger(room.path).worst < 1e-9


def test_an_accounts_drawdown_halts_the_session(stage, tmp_path):
    room = falling(stage, tmp_path)
    both = [sleeve("a", 0.5, alternating(0.5, 0.4)), sleeve("b", 0.5, alternating(0.4, 0.5))]
    limits = nca.Limits(max_drawdown=0.2)
    for _ in range(2):  # the second 20 per cent further down
        with pytest.raises(HaltError, match="max-drawdown"):
            room.trade(both, risk=limits)
        assert Ledger(room.path).worst < 1e-9
        assert rebuild(room.path, both, costs=COSTS, risk=limits).difference == ""
        resume(room.path, "accepted", 0)
    assert len(room.of("halt")) == 2


SIZED = dict(lot=1.0, tick=0.05, min_notional=300.0, max_participation=0.02)
HOLDING = nca.Costs(commission=5e-4, borrow_fee=0.5, interest_lend=0.2, interest_borrow=0.7,
                    funding=0.4, liquidation_fee=0.01)  # fmt: skip
TRADING = nca.Costs(commission=5e-4, slippage=2e-4, half_spread=3e-4, impact=0.02, fixed_fee=1.0)


@pytest.mark.parametrize(
    ("costs", "rules"),
    [
        (TRADING, SIZED),
        pytest.param(TRADING, dict(fill="close") | SIZED, marks=pytest.mark.slow),
        (HOLDING, dict(delist_after=4, delist_haircut=0.3)),
        (HOLDING, dict(borrow=True, maintenance_margin=0.55, max_gross=None)),
        pytest.param(
            HOLDING,
            dict(borrow=True, maintenance_margin=0.55, max_gross=None, fill="close"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sized", "sized at the close", "holding", "margin", "margin at the close"],
)
def test_books_sum_under_every_cost_and_rule(stage, tmp_path, costs, rules):
    room = Room(stage, tmp_path, missing=0.2)
    large = 1.0 if "maintenance_margin" not in rules else 2.6
    three = [
        sleeve("trend", 0.5, alternating(0.5 * large, 0.2 * large, every=2)),
        sleeve("steady", 0.3, alternating(-0.2, 0.45 * large, every=3)),
        sleeve("against", 0.2, alternating(0.4, -0.3, every=5)),
    ]
    room.trade(three, costs=costs, **rules)
    ledger = Ledger(room.path)
    assert ledger.worst < 1e-9 and ledger.crossed
    kinds = {body["client_id"][:6] for body in room.of("fill")}
    if "maintenance_margin" in rules:
        assert "margin" in kinds
    if "max_participation" in rules:
        assert all(body["units"] == round(body["units"]) for body in room.of("fill"))
    if costs is HOLDING:
        assert len([b for b in room.of("allocation") if "amount" in b]) > 50
    one = room.trade([sleeve("one", 1.0, STEADY)], "one.db", costs=costs, **rules)
    alone = room.trade(STEADY, "alone.db", costs=costs, **rules)
    assert (one["fills"], one["value"], one["equity"]) == tuple(
        alone[n] for n in ("fills", "value", "equity")
    )


def test_what_borrowing_inside_the_account_saves_goes_to_the_borrower(room):
    """A share that one sleeve sold short and another one owns is not borrowed from anybody."""
    both = [
        sleeve("owner", 0.5, alternating(0.8, 0.8), symbols=("AAA",)),
        sleeve("seller", 0.5, alternating(-0.4, -0.4), symbols=("AAA",)),
    ]
    room.trade(both, costs=nca.Costs(borrow_fee=0.5))
    assert room.of("cash") == []
    assert all("amount" not in body or not any(body["amount"].values())
               for body in room.of("allocation"))  # fmt: skip


def test_a_policy_that_fails_halts_its_sleeve_alone(room):
    def act(n, bar):
        import jax.numpy as jnp

        return n + 1, jnp.where(n < 20, 0.3, jnp.inf) * jnp.ones_like(bar.close)

    broken = nca.Strategy(lambda num_assets: 0, act, "broken")
    result = room.trade([sleeve("bad", 0.5, broken), sleeve("good", 0.5, STEADY)])
    assert result["decisions"] == 90
    assert room.of("snapshot")[-1]["sleeves"]["bad"]["halted"] == "policy-not-finite"
    assert Ledger(room.path).worst < 1e-9


@pytest.mark.parametrize(
    ("sleeves", "match"),
    [
        ([], "sleeves: none"),
        ([("a", 0.5), ("a", 0.5)], "a, a; give each another name"),
        ([("a", 0.5), ("b", 0.6)], "sum to 1.1; let them sum to 1"),
    ],
)
def test_sleeves_that_are_not_an_account_are_refused(room, sleeves, match):
    with pytest.raises(ConfigError, match=match):
        room.trade([sleeve(name, share, STEADY) for name, share in sleeves])
    assert not room.path.exists()


def test_a_sleeve_whose_orders_carry_stops_is_refused_in_one_line(room):
    stopped = nca.rules.sma_cross(3, 9).with_stop(0.05)
    with pytest.raises(
        ConfigError, match=r"^sleeve a: strategy .* carry stops or targets"
    ) as caught:
        room.trade([sleeve("a", 1.0, stopped)])
    assert len(str(caught.value).splitlines()) == 1 and not room.path.exists()


def test_a_sleeve_that_is_wrong_is_named(room):
    with pytest.raises(ConfigError, match="share"):
        sleeve("a", 1.5, STEADY)
    with pytest.raises(ConfigError, match="name 'A B'"):
        sleeve("A B", 1.0, STEADY)
    for symbols in (("AAA", "AAA"), (), ("AAA", "")):
        with pytest.raises(ConfigError, match=r"symbols: .*; name each symbol of the sleeve once"):
            sleeve("a", 1.0, STEADY, symbols=symbols)
    with pytest.raises(ConfigError, match="sleeve a: the feed has no ZZZ"):
        room.trade([sleeve("a", 1.0, STEADY, symbols=("ZZZ",))])
    with pytest.raises(ConfigError, match="sleeves"):
        room.trade([STEADY])
    with pytest.raises(ConfigError, match="sleeve a: run"):
        room.trade([sleeve("a", 1.0, 7)])


CHILD = """
import os, signal, sys
import nca_trader.paper.journal as journal
sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
import test_sleeves
journal.SYNCHRONOUS = "OFF"
inner, seen, fatal = journal.Journal.record, [0], int(sys.argv[4])

def record(self, *args):
    found = inner(self, *args)
    seen[0] += found
    if seen[0] == fatal:
        self.commit() if fatal % 2 else None
        os.kill(os.getpid(), signal.SIGKILL)
    return found

journal.Journal.record = record
test_sleeves.again(sys.argv[2], sys.argv[3])
"""


def again(folder, name):
    """Trade the sleeves of the test below, in this process or in one that is killed."""
    folder = pathlib.Path(folder)
    both = [
        sleeve("trend", 0.5, TREND, limits=nca.Limits(max_drawdown=0.02), on_halt="flatten"),
        sleeve("steady", 0.5, STEADY),
    ]
    return nca.paper_trade(both, f"replay:{folder}/bars.parquet", folder / name, costs=COSTS,
                           reading={"repair": "keep-gaps,keep-jumps"})  # fmt: skip


@pytest.mark.slow
def test_a_killed_session_of_sleeves_ends_as_if_it_had_not_been(room):
    whole = again(room.folder, "whole.db")
    here = str(pathlib.Path(__file__).parent)
    for fatal in (301, 102):
        command = [sys.executable, "-c", CHILD, here, str(room.folder), "cut.db", str(fatal)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert again(room.folder, "cut.db") == whole  # the head of the chain too
    assert "sleeve-halted" in [b["code"] for b in room_risks(room)]
    assert Ledger(room.folder / "cut.db").worst < 1e-9


def room_risks(room):
    return room.of("risk", "cut.db")


BOOK = """
[trend]
share = 0.5
strategy = "sma_cross"
params = { fast = 3, slow = 10 }
limits = { max_drawdown = 0.02 }
on_halt = "flatten"

[hold]
share = 0.5
strategy = "buy_and_hold"
symbols = ["BBB"]
"""


def test_the_commands_take_a_file_of_sleeves(room, capsys):
    from nca_trader.cli import main

    book, journal = room.folder / "book.toml", room.folder / "book.db"
    book.write_text(BOOK)

    def said(*words):
        code = main([str(word) for word in words])
        return code, capsys.readouterr()

    terms = ("--sleeves", book, "--commission", 5e-4, "--limit", "max_gross=0.9")
    reading = ("--feed", f"replay:{room.folder}/bars.parquet", "--repair", "keep-gaps,keep-jumps")
    code, out = said("paper", *terms, *reading, "--journal", journal)
    assert code == 0, out.err
    lines = [line.split() for line in out.out.splitlines()]
    last = [b for k, _, b, _ in told(journal) if k == "snapshot"][-1]["sleeves"]
    for name in ("trend", "hold"):
        (row,) = [line for line in lines if line[:1] == [name]]
        assert row[1:3] == ["50.00%", f"{last[name]['equity'] - 1.0:+.2%}"]
        assert row[5] == f"{last[name]['value']:,.2f}"
    assert last["trend"]["halted"] == "max-drawdown" and "halted: max-drawdown" in out.out
    code, out = said("journal", "verify", journal)
    assert code == 0 and "trend: drift watched: slippage; not features, schema (a rule" in out.out
    code, out = said("journal", "replay", journal, *terms)
    assert code == 0 and "bit for bit" in out.out
    assert Ledger(journal).worst < 1e-9
    resume = ("resume", "--journal", journal, "--reason", "seen")
    assert said(*resume, "--sleeve", "hold")[0] == 2
    assert said(*resume, "--sleeve", "trend")[0] == 0
    for text, says in (  # another account
        (BOOK.replace("0.02", "0.03"), "(sleeves.trend.limits.max_drawdown 0.02 there, 0.03 here)"),
        (BOOK.replace("[hold]", "[held]"), "(sleeves hold, trend there, held, trend here)"),
    ):
        book.write_text(text)
        code, out = said("paper", *terms, *reading, "--journal", journal)
        assert code == 2 and says in out.err and len(out.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "names no sleeve"),
        ("[a]\nshare = 1.0\n", "[a] needs run or strategy"),
        ("[a]\nshare = 'x'\nstrategy = 'sma_cross'\n", "[a] share: give a fraction"),
        ("[a]\nshare = 1.0\nstrategy = 'sma_kross'\n", "sma_cross"),
        ("[a]\nshare = 1.0\nstrategy = 'sma_cross'\nlimit = {}\n", "limit: no such key; did"),
        ("[a]\nshare = 1.0\nrun = 'x'\nparams = {}\n", "[a] params: is of a strategy"),
        ("[a]\nshare = 1.0\nstrategy = 'sma_cross'\nseed = 1\n", "[a] seed: is of a run"),
        ("[a]\nshare = 1.0\nrun = 'x'\nseed = true\n", "[a] seed: give one of type int"),
        ("[a]\nshare = 1.0\nstrategy = 'sma_cross'\nlimits = {max_gros = 1}\n", "max_gros"),
        ("a = 1\n", "a is not a table"),
    ],
)
def test_a_file_of_sleeves_that_is_wrong_is_refused_in_one_line(tmp_path, text, match, capsys):
    from nca_trader.cli import main

    book = tmp_path / "book.toml"
    book.write_text(text)
    (tmp_path / "bars.csv").write_text("")
    code = main(["paper", "--sleeves", str(book), "--feed", f"replay:{tmp_path}/bars.csv",
                 "--journal", str(tmp_path / "j.db")])  # fmt: skip
    said = capsys.readouterr().err
    assert code == 2 and match in said and "Traceback" not in said
