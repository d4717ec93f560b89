"""The view of a paper session: a pure function of what its journal said and of its vital signs."""

from __future__ import annotations

import math
import shlex
from typing import Any, NamedTuple

from nca_trader.paper.tally import NANOSECONDS, Order, Tally, number, numbers
from nca_trader.watch.dashboard.drifting import drift_table
from nca_trader.watch.dashboard.parts import (
    NOTHING,
    ago,
    amount,
    cell,
    chart,
    histogram,
    mean,
    moment,
    percent,
    points,
    quantile,
    short,
    table,
    tile,
)
from nca_trader.watch.metrics import reason_of

ASSETS = 24  # rows of a table of assets
ORDERS = 60  # rows of the table of orders
EDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds, of the latencies
CENT = 0.005  # money: less is written as 0
CLOSE_TO = 0.8  # of a limit: worth a look


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
            "positions": _positions(tally),
            "why": _why(tally),
            "orders": _orders(tally),
            "gauges": _gauges(tally),
            "latency": _latency(tally),
            "drift": drift_table(tally),
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
    equity = tally.equity[-1] if tally.equity else math.nan
    gained, held = equity - 1.0, tally.hold[-1] - 1.0 if tally.hold else math.nan
    fallen = tally.drawdown[-1] if tally.drawdown else math.nan
    weights = _weights(tally)
    gross = sum(abs(w) for w in weights.values()) if weights else math.nan
    net = sum(weights.values()) if weights else math.nan
    # Half a hundredth of a percent is what the page shows as 0.0%.
    holding = sum(1 for w in weights.values() if abs(w) > 5e-5)
    value = number(tally.snapshot.get("value"))
    capital = number(tally.started.get("capital"))
    return [
        tile("equity", "Equity", amount(value), f"{amount(capital)} at the start"),
        tile(
            "return",
            "Return",
            percent(gained, 2, True),
            f"buy and hold {percent(held, 2, True)}",
            "good" if gained > 0.0 else "bad" if gained < 0.0 else "",
        ),
        tile(
            "drawdown",
            "Below its peak",
            percent(-fallen, 2),
            f"largest {percent(-min(tally.drawdown, default=math.nan), 2)}",
        ),
        tile(
            "position",
            "Position",
            f"{percent(gross)} gross",
            f"{percent(net, signed=True)} net, {holding} of {len(tally.symbols)} assets",
        ),
        tile(
            "bar",
            "Last bar",
            moment(tally.bar_ts) if tally.bar_ts else NOTHING,
            f"{tally.counts['bar']:,} bars, {tally.counts['decision']:,} decisions"
            + ("" if tally.live else "; replay"),
        ),
        tile(
            "trading",
            "Fills",
            f"{tally.counts['fill']:,}",
            f"slippage {points(mean(tally.slippage))} on average, fees {amount(tally.commission)}",
        ),
    ]


def _charts(tally: Tally) -> dict[str, Any]:
    return {
        "equity": chart(
            tally.times,
            [("session", tally.equity, "last"), ("buy and hold", tally.hold, "last")],
        ),
        "drawdown": chart(
            tally.times,
            [("below its peak", tally.drawdown, "low")],
            percent=True,
            area=True,
        ),
    }


def _weights(tally: Tally) -> dict[str, float]:
    return dict(zip(tally.symbols, numbers(tally.snapshot.get("weight")), strict=False))


def _targets(tally: Tally, body: dict[str, Any]) -> dict[str, float]:
    return dict(zip(tally.symbols, numbers(body.get("target")), strict=False))


def _shown(tally: Tally) -> list[str]:
    """Return the symbols of a table: all of a few, else those with the largest positions."""
    if len(tally.symbols) <= ASSETS:
        return tally.symbols
    held, wanted = _weights(tally), _targets(tally, tally.decision)

    def size(symbol: str) -> float:
        pair = (held.get(symbol, 0.0), wanted.get(symbol, 0.0))
        return max(abs(w) if math.isfinite(w) else 0.0 for w in pair)

    return sorted(tally.symbols, key=size, reverse=True)[:ASSETS]


def _more(tally: Tally) -> str:
    left = len(tally.symbols) - ASSETS
    return f"The largest {ASSETS} of {len(tally.symbols)} assets." if left > 0 else ""


def _positions(tally: Tally) -> dict[str, Any]:
    held, units = _weights(tally), tally.snapshot.get("units")
    if isinstance(units, dict):  # of a venue, which may hold other symbols too
        owned = {str(s): number(u) for s, u in units.items()}
    else:
        owned = dict(zip(tally.symbols, numbers(units), strict=False))
    # What somebody else holds in the same account is shown as well.
    foreign = [s for s in owned if s not in tally.symbols]
    widest = max((abs(w) for w in held.values() if math.isfinite(w)), default=0.0)
    rows = []
    for symbol in [*_shown(tally), *foreign]:
        weight, price = held.get(symbol, math.nan), tally.closes.get(symbol, math.nan)
        unit = owned.get(symbol, math.nan)
        if abs(unit * price) < CENT:  # what floats leave of a position that was sold
            unit = 0.0
        flat = not abs(weight) > 5e-5
        rows.append(
            [
                symbol,
                cell(
                    percent(weight, signed=not flat),
                    "idle" if flat else "long" if weight > 0.0 else "short",
                    None if flat else abs(weight) / widest,
                ),
                amount(unit * price),
                short(unit),
                short(price),
            ]
        )
    if tally.snapshot:
        cash = number(tally.snapshot.get("cash"))
        rows.append(
            ["Cash", percent(cash / number(tally.snapshot.get("value"))), amount(cash), "", ""]
        )
    headers = ["Asset", "Weight", "Value", "Units", "Last close"]
    return table(headers, rows, _more(tally), "Nothing is held before the first decision.")


def _why(tally: Tally) -> dict[str, Any]:
    """Return the last decision: of each asset the probabilities that led to the target."""
    target = _targets(tally, tally.decision)
    targets, logits = numbers(tally.started.get("targets")), tally.decision.get("logits")
    actions = str(tally.started.get("actions", ""))
    empty = "No decision yet: the first bars warm up the features."
    if not tally.decision:
        return table(["Asset", "Target"], [], empty=empty)
    opinions = {}
    if isinstance(logits, list):
        labels = action_labels(actions, targets)
        for symbol, row in zip(tally.symbols, logits, strict=False):
            opinions[symbol] = probabilities(numbers(row), actions, targets)
    else:
        labels = []
    rows = []
    for symbol in _shown(tally):
        weight = target.get(symbol, math.nan)
        wanted = percent(weight, 1, True) if math.isfinite(weight) else "no order"
        # A rule has no logits, and so no opinion to draw.
        shares = opinions.get(symbol, [])
        if actions == "weights":
            says = ", ".join(percent(x, 1, True) for x in shares[:8])
            rows.append([symbol, wanted, says or NOTHING])
            continue
        best = max(shares, default=math.nan)
        rows.append(
            [symbol, wanted]
            + [cell(percent(p, 0), "agent" if p == best else "idle", p) for p in shares]
        )
    if not labels:
        note = "A rule decided: it has no probabilities."
    elif actions == "weights":
        note = "The target is the mean of the agents' own, times the size that its risk allows."
    else:
        note = "The most probable action of each asset is taken; of several agents the mean."
    return table(["Asset", "Target", *labels], rows, f"{note} {_more(tally)}".strip(), empty)


def action_labels(actions: str, targets: list[float]) -> list[str]:
    """Return a header for each action.

    >>> action_labels("direction", [-0.5, 0.0, 0.5])
    ['short 50%', 'flat', 'long 50%']
    """
    if actions == "orders":
        return ["sell", "hold", "buy"]
    if actions == "weights":
        return ["Each agent"]
    sides = {-1.0: "short ", 1.0: "long "}
    named = [(t, sides[math.copysign(1.0, t)] + percent(abs(t), 0)) for t in targets]
    return ["flat" if t == 0.0 else name for t, name in named]


def probabilities(logits: list[float], actions: str, targets: list[float]) -> list[float]:
    """Return the probability of each action, the mean over agents; with "weights" each target.

    >>> probabilities([0.0, math.log(3.0)] * 2, "direction", [0.0, 1.0])
    [0.25, 0.75]
    >>> probabilities([0.0, -1.0], "weights", [-0.5, 0.0, 0.5])
    [0.0]
    """
    if actions == "weights":
        # Every second logit is a mean and the next one its spread, which a decision leaves out.
        low, high = targets[0], targets[-1]
        return [low + (high - low) * 0.5 * (1.0 + math.tanh(mean)) for mean in logits[::2]]
    width = 3 if actions == "orders" else len(targets)
    agents = [logits[i : i + width] for i in range(0, len(logits), width)] if width else []
    agents = [one for one in agents if len(one) == width and all(map(math.isfinite, one))]
    sums = [0.0] * width
    for one in agents:
        # Less the largest, so that no exponential overflows.
        parts = [math.exp(x - max(one)) for x in one]
        sums = [s + p / sum(parts) for s, p in zip(sums, parts, strict=True)]
    return [round(s / len(agents), 12) for s in sums] if agents else []


def _orders(tally: Tally) -> dict[str, Any]:
    newest = list(tally.orders.values())[: -ORDERS - 1 : -1]
    rows = [_order_row(tally, order) for order in newest]
    headers = ["Time", "Asset", "Order", "Why", "State", "Filled", "Price", "Slippage"]
    slipped = tally.slippage
    note = ""
    if slipped:
        costs = tally.started.get("costs")
        modelled = number(costs.get("slippage") if isinstance(costs, dict) else None)
        note = (
            f"Slippage against the market's price at the fill, above 0 a loss: mean "
            f"{points(mean(slipped))}, worst {points(max(slipped))}; modelled "
            f"{points(modelled)}."
        )
    return table(headers, rows, note, "No order yet.")


def _order_row(tally: Tally, order: Order) -> list[Any]:
    symbol = str(order.body.get("symbol", ""))
    weight, units = number(order.body.get("weight")), number(order.body.get("units"))
    # A replay orders weights, and a session at a venue units.
    wanted = f"to {percent(weight, 2, True)}" if math.isfinite(weight) else _signed(units)
    if math.isfinite(weight) and math.isfinite(units):
        wanted += f" ({_signed(units)})"
    tones = {"filled": "good", "ambiguous": "bad", "rejected": "bad", "expired": "warn"}
    return [
        moment(order.ts),
        symbol,
        wanted,
        _because(tally, order, symbol),
        cell(order.state, tones.get(order.state, "idle")),
        _signed(order.units) if order.units else NOTHING,
        short(order.price),
        points(order.slippage) if order.units else NOTHING,
    ]


def _signed(units: float) -> str:
    return f"{'buy' if units > 0 else 'sell'} {short(abs(units))}" if units == units else NOTHING


def _because(tally: Tally, order: Order, symbol: str) -> str:
    """Say why an order was sent: the decision, its probability, and what the limits made of it."""
    if order.body.get("buy_only"):
        return "the rest of an earlier buy"
    said = [f"stop at {short(stop)}"] if (stop := number(order.body.get("stop"))) == stop else []
    # An order carries the time of the decision that it came from.
    body = tally.decisions.get(order.ts)
    if body is not None and symbol in tally.symbols:
        place = tally.symbols.index(symbol)
        weight = _targets(tally, body).get(symbol, math.nan)
        logits, actions = body.get("logits"), str(tally.started.get("actions", ""))
        text = f"target {percent(weight, 1, True)}"
        if isinstance(logits, list) and place < len(logits) and actions != "weights":
            targets = numbers(tally.started.get("targets"))
            shares = probabilities(numbers(logits[place]), actions, targets)
            if shares:
                best = shares.index(max(shares))
                text = f"{action_labels(actions, targets)[best]}, p {max(shares):.2f}"
        said.append(text)
    for verdict in tally.verdicts.get(order.ts, []):
        if verdict.get("symbol", symbol) == symbol:
            said.append(f"limit: {reason_of(verdict)}")
    if order.reason and order.reason != order.state:
        said.append(order.reason)
    return "; ".join(said) or NOTHING


def _gauges(tally: Tally) -> dict[str, Any]:
    weights = [w for w in _weights(tally).values() if math.isfinite(w)]
    known = bool(weights)
    last = list(tally.orders.values())[-1:]
    decided = [_targets(tally, body) for body in list(tally.decisions.values())[-2:]]
    moved = math.nan
    if last and len(decided) == 2:
        before, after = ({k: v for k, v in d.items() if math.isfinite(v)} for d in decided)
        moved = max((abs(v - before.get(k, 0.0)) for k, v in after.items()), default=math.nan)
    # Of the last order's minute, so that a replay shows one too.
    minute = [t for t in tally.sent_at if tally.sent_at[-1] - t < 60 * NANOSECONDS]
    equity = tally.equity[-1] if tally.equity else math.nan
    present = {
        "max_position": ("Largest position", max(map(abs, weights)) if known else math.nan),
        "max_gross": ("Gross position", sum(map(abs, weights)) if known else math.nan),
        "max_net": ("Net position", abs(sum(weights)) if known else math.nan),
        "max_order": ("Last change of a target", moved),
        "max_orders_per_minute": ("Orders in the last minute of trading", float(len(minute))),
        "price_collar": ("Worst slippage", max(tally.slippage, default=math.nan)),
        "max_daily_loss": ("Loss today", max(1.0 - equity / tally.day_start, 0.0)),
        "max_drawdown": ("Below its peak", -tally.drawdown[-1] if tally.drawdown else math.nan),
    }
    own, rows = tally.started.get("limits"), []
    # Those of the session replace the account's of the same name.
    limits = tally.rules | (own if isinstance(own, dict) else {})
    for name, (label, value) in present.items():
        limit = number(limits.get(name))
        write = (lambda x: short(x)) if name == "max_orders_per_minute" else percent
        used = value / limit if limit > 0.0 else math.nan
        # NaN, without a limit, is none of these comparisons and has no colour.
        tone = "bad" if used >= 1.0 else "warn" if used >= CLOSE_TO else "good"
        shown = cell(write(value), tone if math.isfinite(used) else "", used)
        rows.append([label, shown, write(limit) if math.isfinite(limit) else "no limit"])
    return table(["Risk", "Now", "Limit"], rows)


def _latency(tally: Tally) -> dict[str, Any]:
    values = list(tally.latencies)
    empty = "A replay has no latency: its clock is that of its bars."
    if not values:
        return table(["Latency", "Bars"], [], empty=empty if not tally.live else "No bar yet.")
    counts = histogram(values, EDGES)
    names = [f"to {_span(edge)}" for edge in EDGES] + [f"above {_span(EDGES[-1])}"]
    rows = [
        [name, cell(f"{n:,}", "agent", n / max(counts))]
        for name, n in zip(names, counts, strict=True)
    ]
    half, most = quantile(values, 0.5), quantile(values, 0.99)
    note = (
        f"From a bar's close to its receipt; median {_span(half)}, 99% within {_span(most)}, "
        f"of the last {len(values):,} bars."
    )
    return table(["Latency", "Bars"], rows, note)


def _span(seconds: float) -> str:
    return f"{short(1000.0 * seconds)} ms" if abs(seconds) < 1.0 else f"{short(seconds)} s"


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
        *[[f"Feed: {code}", cell(f"{n:,}", "warn")] for code, n in tally.notices.most_common(6)],
        *[[f"Risk: {code}", cell(f"{n:,}", "warn")] for code, n in tally.risks.most_common(8)],
        *[[f"Paid: {kind}", amount(paid)] for kind, paid in list(tally.flows.items())[:6]],
    ]
    return table(["Health", ""], rows)


def _halts(tally: Tally) -> dict[str, Any]:
    # A comparison with the venue that found nothing has no code.
    past = [*tally.halts, *(r for r in tally.recons if r.body.get("code"))]
    rows = [
        [
            moment(event.ts_event),
            cell(event.kind, {"halt": "bad", "resume": "good"}.get(event.kind, "warn")),
            reason_of(event.body),
        ]
        for event in sorted(past, key=lambda event: -event.seq)[:20]
    ]
    headers = ["Time", "Event", "Reason"]
    return table(headers, rows, empty="Never halted; books and venue never differed.")


def _halt(tally: Tally, vitals: Vitals) -> dict[str, Any]:
    halt = tally.halted
    on = halt is not None or vitals.halt is not None
    reason = reason_of(halt.body) if halt is not None else (vitals.halt or "no reason given")
    command = ["nca-trader", "resume", "--journal", vitals.path, "--reason", "WHY IT MAY GO ON"]
    return {
        "on": on,
        "reason": reason if on else "",
        "command": shlex.join(command) if on else "",
    }
