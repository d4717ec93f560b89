"""What must hold of a journal and the venue's books, read from both files without the package."""

import hashlib
import json
import sqlite3


def rows(path, query):
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def events(journal):
    """(seq, run, ts_event, ts_recv, kind, key, body) in order; the chain is checked on the way."""
    names = "seq, run, ts_event, ts_recv, kind, key, body, hash"
    query = f"SELECT {names} FROM event JOIN series ON id = series ORDER BY seq"
    last, found = "0" * 64, []
    for row in rows(journal, query):
        *fields, link = row
        assert fields[0] == len(found) + 1, f"the chain breaks at {fields[0]}"
        text = json.dumps([last, *fields], sort_keys=True, separators=(",", ":"))
        last = hashlib.sha256(text.encode()).hexdigest()
        assert last == link.hex(), f"the hash of {fields[0]} is wrong"
        found.append((*fields[:6], json.loads(fields[6])))
    return found


def books(journal):
    """The venue's cash and units, its orders and its fills."""
    ((state,),) = rows(f"{journal}.books", "SELECT value FROM state WHERE name = 'books'")
    state = json.loads(state)
    units = dict(zip(state["symbols"], state["units"], strict=True))
    orders = rows(f"{journal}.books", "SELECT client_id, units, filled, status FROM orders")
    names = "client_id, execution_id, symbol, units, price, commission"
    return state["cash"], units, orders, rows(f"{journal}.books", f"SELECT {names} FROM fills")


def check(journal, pending=False):
    """Assert what must hold at any time; with `pending`, of a session that was just killed."""
    told = events(journal)
    cash, units, orders, fills = books(journal)
    intents = {e[5]: e[6] for e in told if e[4] == "order_intent"}
    sent = {e[5].partition("#")[0] for e in told if e[4] == "order_sent"}
    # At most one order of the venue for each id, and none that was not in the journal first.
    names = [order[0] for order in orders]
    assert len(names) == len(set(names))
    assert set(names) <= sent <= set(intents)
    for name, wanted, filled, _ in orders:
        assert wanted == intents[name]["units"]
        assert abs(filled) <= abs(wanted) * (1 + 1e-9)
        assert abs(sum(f[3] for f in fills if f[0] == name) - filled) < 1e-9
    halted = any(e[4] == "halt" for e in told)
    if pending or halted:
        return told
    # The journal's cash and units, by plain sums, are the venue's.
    here, held = 0.0, {}
    for *_, kind, _, body in told:
        if kind == "recon" and "cash" in body:
            here, held = body["cash"], dict(body["units"])
        elif kind == "fill":
            here -= body["units"] * body["price"] + body["commission"]
            held[body["symbol"]] = held.get(body["symbol"], 0.0) + body["units"]
        elif kind == "cash":
            here += body["amount"]
    for symbol in {*units, *held}:
        assert abs(units.get(symbol, 0.0) - held.get(symbol, 0.0)) < 1e-9
    assert abs(here - cash) < 1e-6
    open_ = set(intents) - {e[5] for e in told if e[4] == "order_terminal"}
    assert open_ == {name for name, _, _, status in orders if status == "working"}
    return told


def outcome(journal):
    """What two sessions over the same bars must have in common, however they got there."""
    told, (cash, units, orders, _) = events(journal), books(journal)
    decisions = [(e[2], e[6]) for e in told if e[4] == "decision"]
    bars = [(e[2], e[6]) for e in told if e[4] == "bar"]
    # A client id has the time of the bar; the hash in it is that of the session.
    names = sorted((name[12:], units_, filled) for name, units_, filled, _ in orders)
    return {"bars": bars, "decisions": decisions, "orders": names, "cash": cash, "units": units}
