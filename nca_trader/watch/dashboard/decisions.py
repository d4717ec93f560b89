"""The tables of what a session holds, why, and what it ordered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nca_trader.paper.journal.tally import OrderLine, Tally, number, numbers, reason_of
from nca_trader.watch.dashboard.parts import (
    NOTHING,
    amount,
    cell,
    mean,
    moment,
    percent,
    points,
    short,
    table,
)

ASSETS = 24  # rows of a table of assets
ORDERS = 60  # rows of the table of orders
CENT = 0.005  # money: less is written as 0
FLAT = 5e-5  # weight: half a hundredth of a percent, which is written as 0.0%
TONES = {"filled": "good", "ambiguous": "bad", "rejected": "bad", "expired": "warn"}


def by_symbol(tally: Tally, values: Any) -> dict[str, float]:
    """Return a list of numbers of a journal's body by symbol; {} where it holds something else."""
    return dict(zip(tally.symbols, numbers(values), strict=False))


def modelled(tally: Tally, *names: str) -> float:
    """Return the sum of modelled costs by name, as fractions of the price; NaN where one is not."""
    costs = tally.started.get("costs")
    known = costs if isinstance(costs, dict) else dict.fromkeys(names, math.nan)
    return sum(number(known.get(name, 0.0)) for name in names)


def positions(tally: Tally) -> dict[str, Any]:
    """Return the table of positions and cash."""
    held, units = by_symbol(tally, tally.snapshot.get("weight")), tally.snapshot.get("units")
    if isinstance(units, dict):  # of a venue, which may hold other symbols too
        owned = {str(s): number(u) for s, u in units.items()}
    else:
        owned = by_symbol(tally, units)
    # What somebody else holds in the same account is shown as well.
    foreign = [s for s in owned if s not in tally.symbols]
    widest = max((abs(w) for w in held.values() if math.isfinite(w)), default=0.0)
    rows = []
    for symbol in [*_shown(tally), *foreign]:
        weight, price = held.get(symbol, math.nan), tally.closes.get(symbol, math.nan)
        unit = owned.get(symbol, math.nan)
        if abs(unit * price) < CENT:  # what floats leave of a position that was sold
            unit = 0.0
        if abs(weight) > FLAT:
            side = "long" if weight > 0.0 else "short"
            shown = cell(percent(weight, signed=True), side, abs(weight) / widest)
        else:
            shown = cell(percent(weight), "idle")
        rows.append([symbol, shown, amount(unit * price), short(unit), short(price)])
    if tally.snapshot:
        cash, value = number(tally.snapshot.get("cash")), number(tally.snapshot.get("value"))
        rows.append(["Cash", percent(cash / value), amount(cash), "", ""])
    headers = ["Asset", "Weight", "Value", "Units", "Last close"]
    return table(headers, rows, _more(tally), "Nothing is held before the first decision.")


def decision(tally: Tally) -> dict[str, Any]:
    """Return the last decision: of each asset the probabilities that led to the target."""
    empty = "No decision yet: the first bars warm up the features."
    if not tally.decision:
        return table(["Asset", "Target"], [], empty=empty)
    actions, targets = _actions(tally)
    wanted = by_symbol(tally, tally.decision.get("target"))
    # A rule has no logits, and so no probabilities to draw.
    ruled = not isinstance(tally.decision.get("logits"), list)
    rows = []
    for symbol in _shown(tally):
        weight = wanted.get(symbol, math.nan)
        target = percent(weight, 1, True) if math.isfinite(weight) else "no order"
        shares = _shares(tally, tally.decision, symbol)
        if actions == "weights":
            row = [", ".join(percent(x, 1, True) for x in shares[:8]) or NOTHING]
        else:
            best = max(shares, default=math.nan)
            row = [cell(percent(p, 0), "agent" if p == best else "idle", p) for p in shares]
        rows.append([symbol, target, *row])
    if ruled:
        note = "A rule decided: it has no probabilities."
    elif actions == "weights":
        note = "The target is the mean of the agents' own, times the size that its risk allows."
    else:
        note = "The most probable action of each asset is taken; of several agents the mean."
    labels = [] if ruled else action_labels(actions, targets)
    return table(["Asset", "Target", *labels], rows, f"{note} {_more(tally)}".strip(), empty)


def orders(tally: Tally) -> dict[str, Any]:
    """Return the newest orders, the last one first."""
    newest = list(tally.lines.values())[: -ORDERS - 1 : -1]
    headers = ["Time", "Asset", "Order", "Why", "State", "Filled", "Price", "Slippage"]
    slipped, note = tally.slippage, ""
    if slipped:
        note = (
            "Slippage against the market's price at the fill, above 0 a loss: mean "
            f"{points(mean(slipped))}, worst {points(max(slipped))}; modelled "
            f"{points(modelled(tally, 'slippage'))}."
        )
    return table(headers, [_order_row(tally, line) for line in newest], note, "No order yet.")


def _order_row(tally: Tally, line: OrderLine) -> list[Any]:
    symbol, order = str(line.body.get("symbol", "")), line.order
    weight, units = number(line.body.get("weight")), number(line.body.get("units"))
    # A replay orders weights, and a session at a venue units.
    wanted = f"to {percent(weight, 2, True)}" if math.isfinite(weight) else _signed(units)
    if math.isfinite(weight) and math.isfinite(units):
        wanted += f" ({_signed(units)})"
    why, state = _because(tally, line, symbol), cell(line.state, TONES.get(line.state, "idle"))
    paid = [short(order.price), points(line.slippage)]
    filled = _signed(order.filled) if order.filled else NOTHING
    return [moment(line.ts), symbol, wanted, why, state, filled, *paid]


def _signed(units: float) -> str:
    return f"{'buy' if units > 0 else 'sell'} {short(abs(units))}" if units == units else NOTHING


def _because(tally: Tally, line: OrderLine, symbol: str) -> str:
    """Say why an order was sent: the decision, its probability, and what the limits made of it."""
    if line.body.get("buy_only"):
        return "the rest of an earlier buy"
    said = [f"stop at {short(stop)}"] if (stop := number(line.body.get("stop"))) == stop else []
    # An order carries the time of the decision that it came from.
    body = tally.decisions.get(line.ts)
    if body is not None and symbol in tally.symbols:
        shares, (actions, targets) = _shares(tally, body, symbol), _actions(tally)
        if shares and actions != "weights":
            best = max(shares)
            label = action_labels(actions, targets)[shares.index(best)]
            said.append(f"{label}, p {best:.2f}")
        else:
            weight = by_symbol(tally, body.get("target")).get(symbol, math.nan)
            said.append(f"target {percent(weight, 1, True)}")
    for verdict in tally.verdicts.get(line.ts, []):
        if verdict.get("symbol", symbol) == symbol:
            said.append(f"limit: {reason_of(verdict)}")
    if line.why:
        said.append(line.why)
    return "; ".join(said) or NOTHING


def _shown(tally: Tally) -> list[str]:
    """Return the symbols of a table: all of a few, else those with the largest positions."""
    if len(tally.symbols) <= ASSETS:
        return tally.symbols
    pairs = tally.snapshot.get("weight"), tally.decision.get("target")
    held, wanted = (by_symbol(tally, values) for values in pairs)

    def size(symbol: str) -> float:
        both = (held.get(symbol, 0.0), wanted.get(symbol, 0.0))
        return max(abs(w) if math.isfinite(w) else 0.0 for w in both)

    return sorted(tally.symbols, key=size, reverse=True)[:ASSETS]


def _more(tally: Tally) -> str:
    left = len(tally.symbols) - ASSETS
    return f"The largest {ASSETS} of {len(tally.symbols)} assets." if left > 0 else ""


def _actions(tally: Tally) -> tuple[str, list[float]]:
    """Return the kind of the agent's actions, and its targets."""
    return str(tally.started.get("actions", "")), numbers(tally.started.get("targets"))


def _shares(tally: Tally, body: dict[str, Any], symbol: str) -> list[float]:
    """Return the `probabilities` of a decision on a symbol; [] of a rule."""
    logits, place = body.get("logits"), tally.symbols.index(symbol)
    if not isinstance(logits, list) or place >= len(logits):
        return []
    return probabilities(numbers(logits[place]), *_actions(tally))


def action_labels(actions: str, targets: Sequence[float]) -> list[str]:
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


def probabilities(logits: Sequence[float], actions: str, targets: Sequence[float]) -> list[float]:
    """Return the probability of each action, the mean over agents; with "weights" each target.

    >>> probabilities([0.0, math.log(3.0)] * 2, "direction", [0.0, 1.0])
    [0.25, 0.75]
    >>> probabilities([0.0, -1.0], "weights", [-0.5, 0.0, 0.5])
    [0.0]
    """
    if not targets:
        return []
    if actions == "weights":
        # Every second logit is a mean and the next one its spread, which a decision leaves out.
        low, high = targets[0], targets[-1]
        return [low + (high - low) * 0.5 * (1.0 + math.tanh(mean)) for mean in logits[::2]]
    width = 3 if actions == "orders" else len(targets)
    agents = np.reshape(logits[: len(logits) // width * width], (-1, width))
    agents = agents[np.isfinite(agents).all(1)]
    if not len(agents):
        return []
    # Less the largest, so that no exponential overflows.
    powers = np.exp(agents - agents.max(1, keepdims=True))
    return (powers / powers.sum(1, keepdims=True)).mean(0).round(12).tolist()
