"""The view of a paper session: a pure function of what its journal said and of its vital signs."""

from __future__ import annotations

import math
import shlex
from typing import Any, NamedTuple

from nca_trader.errors import printable
from nca_trader.paper.clock import NANOSECONDS
from nca_trader.paper.journal.tally import RECENT, Tally, number, reason_of
from nca_trader.watch.dashboard import decisions
from nca_trader.watch.dashboard.decisions import FLAT, by_symbol, modelled
from nca_trader.watch.dashboard.parts import (
    NOTHING,
    ago,
    amount,
    cell,
    chart,
    histogram,
    last,
    mean,
    moment,
    percent,
    points,
    quantile,
    short,
    table,
    tile,
)

EDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds, of the latencies
CLOSE_TO = 0.8  # of a limit: worth a look
# Of what may drift the code of its warning, its name in a journal's `watched`, and its label.
DRIFTS = (
    ("drift-feature", "features", "Feature"),
    ("drift-slippage", "slippage", "Slippage"),
    ("drift-turnover", "turnover", "Turnover"),
    ("drift-schema", "schema", "Feature schema"),
)
DRIFT_ROWS = 8  # features of the table at most
DRIFT_FILLS = 50  # that the mean slippage is of, as in `paper.drift`


class Vitals(NamedTuple):
    """What the machine says about a journal.

    path: of it. now, written: seconds since 1970, of this look and of the last write. holder:
    the process that writes, "" if none does. halt: the text of the halt file, None without one.
    fault: why it cannot be read or trusted, "" where it can. checked: what the last walk of the
    hash chain found.
    """

    path: str
    now: float
    written: float = math.nan
    holder: str = ""
    halt: str | None = None
    fault: str = ""
    checked: str = ""


def session_view(tally: Tally, vitals: Vitals) -> dict[str, Any]:
    """Return the view model of a session.

    Args:
      tally: what its journal said.
      vitals: of its file and its process.
    """
    return {
        "path": vitals.path,
        "state": state_of(tally, vitals),
        "tiles": _tiles(tally),
        "charts": _charts(tally),
        "tables": {
            "positions": decisions.positions(tally),
            "why": decisions.decision(tally),
            "orders": decisions.orders(tally),
            "gauges": _gauges(tally),
            "latency": _latency(tally),
            "drift": _drift(tally),
            "quality": _quality(tally, vitals),
            "halts": _halts(tally),
        },
        "halt": _halt(tally, vitals),
    }


def state_of(tally: Tally, vitals: Vitals) -> dict[str, str]:
    """Return the state in a word, its tone, and a sentence with the evidence."""
    age = ago(max(vitals.now - vitals.written, 0.0))
    since = {"now": "just now", NOTHING: NOTHING}.get(age, f"{age} ago")
    written = f"last write {since}"
    # From the worst to the best: the first that is true is what a person must know.
    if vitals.fault:
        return _state("Damaged", "bad", vitals.fault)
    halt = tally.halted
    if halt is not None:
        return _state("Halted", "bad", f"{reason_of(halt.body)}, at {moment(halt.ts_event)} UTC")
    if vitals.halt is not None:
        waits = "the session stops before its next order" if vitals.holder else "no session runs"
        return _state("Halt requested", "bad", f"{vitals.halt or 'no reason given'}; {waits}")
    if not tally.seq:
        there = "the journal has no event yet" if vitals.holder else "there is no journal yet"
        return _state("Waiting", "idle", there)
    if not vitals.holder:
        if tally.stopped:
            return _state("Stopped", "idle", f"the same command continues the session; {written}")
        if tally.ended:
            return _state("Ended", "idle", f"the session came to its end; {written}")
        # A process that is killed writes no last event and frees its lock.
        return _state("Gone", "warn", f"no process writes, and the session did not end; {written}")
    # The feed's own word comes first: it knows the hours of its market.
    if tally.stale:
        return _state("Stale", "warn", f"the feed says that it is stale; {written}")
    bar_age = vitals.now - tally.bar_ts / NANOSECONDS
    if tally.live and bar_age > tally.patience:
        return _state("Stale", "warn", f"a bar is overdue; the last one opened {ago(bar_age)} ago")
    return _state("Running", "good", f"{written}; {vitals.holder}")


def _state(word: str, tone: str, sentence: str) -> dict[str, str]:
    return {"word": word, "tone": tone, "sentence": sentence}


def _tiles(tally: Tally) -> list[dict[str, str]]:
    now = {name: value for name, (_, value) in gauges(tally).items()}
    gained, held = last(tally.equity) - 1.0, last(tally.hold) - 1.0
    weights = by_symbol(tally, tally.snapshot.get("weight")).values()
    net = percent(sum(weights) if weights else math.nan, signed=True)
    holding = sum(1 for w in weights if abs(w) > FLAT)
    value, capital = (number(tally.snapshot.get("value")), number(tally.started.get("capital")))
    hold = f"buy and hold {percent(held, 2, True)}"
    tone = "good" if gained > 0.0 else "bad" if gained < 0.0 else ""
    largest = f"largest {percent(-min(tally.drawdown, default=math.nan), 2)}"
    bars = f"{tally.counts['bar']:,} bars, {tally.counts['decision']:,} decisions"
    opened = moment(tally.bar_ts) if tally.bar_ts else NOTHING
    paid = f"slippage {points(mean(tally.slippage))} on average, fees {amount(tally.commission)}"
    assets = f"{net} net, {holding} of {len(tally.symbols)} assets"
    return [
        tile("equity", "Equity", amount(value), f"{amount(capital)} at the start"),
        tile("return", "Return", percent(gained, 2, True), hold, tone),
        tile("drawdown", "Below its peak", percent(now["max_drawdown"], 2), largest),
        tile("position", "Position", f"{percent(now['max_gross'])} gross", assets),
        tile("bar", "Last bar", opened, bars + ("" if tally.live else "; replay")),
        tile("trading", "Fills", f"{tally.counts['fill']:,}", paid),
    ]


def _charts(tally: Tally) -> dict[str, Any]:
    equity = {"session": tally.equity, "buy and hold": tally.hold}
    drawdown = {"below its peak": tally.drawdown}
    return {
        "equity": chart(tally.times, equity, last),
        "drawdown": chart(tally.times, drawdown, min, percent=True, area=True),
    }


def gauges(tally: Tally) -> dict[str, tuple[str, float]]:
    """Return what each limit is about, and its present value; NaN where there is none."""
    weights = by_symbol(tally, tally.snapshot.get("weight")).values()
    weights = [w for w in weights if math.isfinite(w)] or [math.nan]
    decided = [by_symbol(tally, body.get("target")) for body in [*tally.decisions.values()][-2:]]
    moved = math.nan
    if tally.lines and len(decided) == 2:
        before, after = ({k: v for k, v in d.items() if math.isfinite(v)} for d in decided)
        moved = max((abs(v - before.get(k, 0.0)) for k, v in after.items()), default=math.nan)
    # Of the last order's minute, so that a replay shows one too.
    minute = [t for t in tally.sent_at if tally.sent_at[-1] - t < 60 * NANOSECONDS]
    return {
        "max_position": ("Largest position", max(map(abs, weights))),
        "max_gross": ("Gross position", sum(map(abs, weights))),
        "max_net": ("Net position", abs(sum(weights))),
        "max_order": ("Last change of a target", moved),
        "max_orders_per_minute": ("Orders in the last minute of trading", float(len(minute))),
        "price_collar": ("Worst slippage", max(tally.slippage, default=math.nan)),
        "max_daily_loss": ("Loss today", max(1.0 - last(tally.equity) / tally.day_start, 0.0)),
        "max_drawdown": ("Below its peak", -last(tally.drawdown)),
    }


def _gauges(tally: Tally) -> dict[str, Any]:
    own, rows = tally.started.get("limits"), []
    # Those of the session replace the account's of the same name.
    limits = tally.rules | (own if isinstance(own, dict) else {})
    for name, (label, value) in gauges(tally).items():
        limit = number(limits.get(name))
        write = short if name == "max_orders_per_minute" else percent
        used = value / limit if limit > 0.0 else math.nan
        # NaN, without a limit, is none of these comparisons and has no colour.
        tone = "bad" if used >= 1.0 else "warn" if used >= CLOSE_TO else "good"
        shown = cell(write(value), tone if math.isfinite(used) else "", used)
        rows.append([label, shown, write(limit) if math.isfinite(limit) else "no limit"])
    return table(["Risk", "Now", "Limit"], rows)


def _latency(tally: Tally) -> dict[str, Any]:
    values, headers = list(tally.latencies), ["Latency", "Bars"]
    if not values:
        replayed = "A replay has no latency: its clock is that of its bars."
        return table(headers, [], empty="No bar yet." if tally.live else replayed)
    counts = histogram(values, EDGES)
    names = [f"to {_span(edge)}" for edge in EDGES] + [f"above {_span(EDGES[-1])}"]
    rows = [
        [name, cell(f"{n:,}", "agent", n / max(counts))]
        for name, n in zip(names, counts, strict=True)
    ]
    note = (
        f"From a bar's close to its receipt; median {_span(quantile(values, 0.5))}, 99% within "
        f"{_span(quantile(values, 0.99))}, of the last {len(values):,} bars."
    )
    return table(headers, rows, note)


def _span(seconds: float) -> str:
    return f"{short(1000.0 * seconds)} ms" if abs(seconds) < 1.0 else f"{short(seconds)} s"


def _drift(tally: Tally) -> dict[str, Any]:
    """Return what drifts: the present value where a journal tells it, and the newest warning."""
    model = points(modelled(tally, "slippage", "half_spread"))
    now = {
        "drift-slippage": f"{points(mean(tally.slippage[-DRIFT_FILLS:]))}, modelled {model}",
        "drift-turnover": f"{percent(mean(tally.traded[-RECENT:]), 2)} a bar",
    }
    rows = []
    for code, kind, label in DRIFTS:
        # `Tally` moves a repeated warning to the end.
        found = [pair for name, pair in reversed(tally.drifts.items()) if name[0] == code]
        for ts, body in found[:DRIFT_ROWS]:
            name = f"{label} {printable(body.get('feature', ''))}".strip()
            said = f"{moment(ts)}: {_drifted(code, body)}"
            rows.append([name, now.get(code, ""), cell(said, "warn")])
        # A silent watch and an absent one look alike, so the row says which it is.
        if not found:
            why = printable(tally.watched.get(kind, ""))
            said = f"not watched: {why}" if why else "no warning"
            rows.append([label, now.get(code, ""), cell(said, "idle")])
    note = "A warning comes once as its limit is crossed, and again only after the value came back."
    return table(["Drift", "Now", "Last warning"], rows, note)


def _drifted(code: str, body: dict[str, Any]) -> str:
    """Say a warning of the drift watch in words."""

    def value(name: str) -> float:
        return number(body.get(name))

    if code == "drift-feature":
        return f"index {short(value('psi'))}, limit {short(value('limit'))}"
    if code == "drift-slippage":
        error = points(value("error"))
        return f"{points(value('excess'))} above the model (standard error {error})"
    if code == "drift-turnover":
        return f"{percent(value('per_bar'), 2)} a bar, outside the backtest's range"
    return f"{body.get('here')} here, {body.get('there')} in training"


def _quality(tally: Tally, vitals: Vitals) -> dict[str, Any]:
    rejected = sum(tally.rejected.values())
    chain = cell(vitals.fault or vitals.checked or "being checked", "bad" if vitals.fault else "")
    rows: list[list[Any]] = [
        ["Hash chain", chain],
        ["Events", f"{tally.seq:,}"],
        ["Bars used", f"{tally.counts['bar']:,}"],
        ["Bars rejected", cell(f"{rejected:,}", "warn" if rejected else "good")],
        *[[f"· {code}", f"{n:,}"] for code, n in tally.rejected.most_common(6)],
        ["Assets without a bar", f"{tally.missing:,}"],
        *[["Events not readable", cell(f"{n:,}", "bad")] for n in [tally.unread] if n],
        *[[f"Feed: {code}", cell(f"{n:,}", "warn")] for code, n in tally.notices.most_common(6)],
        *[[f"Risk: {code}", cell(f"{n:,}", "warn")] for code, n in tally.risks.most_common(8)],
        *[[f"Paid: {kind}", amount(paid)] for kind, paid in list(tally.flows.items())[:6]],
    ]
    return table(["Health", ""], rows)


def _halts(tally: Tally) -> dict[str, Any]:
    # A comparison with the venue that found nothing has no code.
    past = [*tally.halts, *(r for r in tally.recons if r.body.get("code"))]
    tones = {"halt": "bad", "resume": "good"}
    rows = [
        [moment(each.ts_event), cell(each.kind, tones.get(each.kind, "warn")), reason_of(each.body)]
        for each in sorted(past, key=lambda event: -event.seq)[:20]
    ]
    headers = ["Time", "Event", "Reason"]
    return table(headers, rows, empty="Never halted; books and venue never differed.")


def _halt(tally: Tally, vitals: Vitals) -> dict[str, Any]:
    halt = tally.halted
    on = halt is not None or vitals.halt is not None
    reason = reason_of(halt.body) if halt is not None else (vitals.halt or "no reason given")
    command = ["nca-trader", "resume", "--journal", vitals.path, "--reason", "WHY IT MAY GO ON"]
    return {"on": on, "reason": reason if on else "", "command": shlex.join(command) if on else ""}
