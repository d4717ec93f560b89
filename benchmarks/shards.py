"""Shards streamed against shards loaded and computed one after the other, in one run.

    python -m benchmarks.shards --shards 12 --rows 50000 --assets 4 --out shards.json

Three consumers: one that computes on every core, one that leaves the cores alone (it sleeps, as a
host does that waits for an accelerator), one that takes no time. `hidden` is the share of the
shorter of loading and computing that the stream hid behind the longer. `--out` writes the spans
of one stream, as jax.profiler saw them, for chrome://tracing or ui.perfetto.dev.
"""

import argparse
import glob
import gzip
import json
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.data.features import feature_set
from nca_trader.data.shards import open_shards, stream, write_shards
from nca_trader.types import Bars

OPTIONS = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8)]  # readers, prefetch
FEATURES = feature_set(("return_1", "return_5", "return_20", "rsi"))


def walk(rng, rows, assets):
    """Bars of a random walk."""
    close = 100.0 * np.exp(np.cumsum(rng.normal(0, 1e-3, (rows, assets)), axis=0))
    return Bars(
        time=np.datetime64("2020-01-01", "ns") + np.arange(rows) * np.timedelta64(60, "s"),
        symbols=tuple(f"S{i}" for i in range(assets)),
        open=close,
        high=close * 1.001,
        low=close * 0.999,
        close=close,
        volume=rng.lognormal(7.0, 1.0, (rows, assets)),
        present=np.ones((rows, assets), bool),
    )


def columns(bars):
    """All that the bars hold, in float32: what costs least to prepare."""
    return {name: getattr(bars, name).astype(np.float32) for name in ("open", "close", "volume")}


def features(bars):
    """The features of an environment: scanned, so that preparing costs more than reading."""
    return {"close": FEATURES.batch(bars)}


@jax.jit
def products(x, weights):
    """Matrix products, on all cores of a CPU."""
    total, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), weights[0], weights)
    return total.sum() + x.sum()


def computing(seconds):
    """Consumers by name; each takes about `seconds` a piece when it runs alone."""
    weights = jax.random.normal(jax.random.key(0), (1, 512, 512)) / 23
    one = jnp.zeros((4, 4))
    products(one, weights).block_until_ready()
    begin = time.perf_counter()
    for _ in range(20):
        products(one, weights).block_until_ready()
    count = max(round(seconds / ((time.perf_counter() - begin) / 20)), 1)
    many = jnp.tile(weights, (count, 1, 1))

    def cores(piece):
        with jax.profiler.TraceAnnotation("compute"):
            products(piece.arrays["close"], many).block_until_ready()

    def elsewhere(piece):
        with jax.profiler.TraceAnnotation("compute"):
            jax.block_until_ready(piece.arrays)
            time.sleep(seconds)

    def nothing(piece):
        jax.block_until_ready(piece.arrays)

    return {"nothing": nothing, "elsewhere": elsewhere, "cores": cores}


def seconds_of(pieces, consume):
    """Seconds for all pieces."""
    begin = time.perf_counter()
    for piece in pieces:
        consume(piece)
    return time.perf_counter() - begin


def table(shards, prepare, options, repeats):
    """A row for each consumer and option: seconds of all shards, and of the sequence."""
    idle = computing(1e-3)["nothing"]
    seconds_of(stream(shards, prepare, prefetch=0), idle)  # compiles, and warms the page cache
    load = seconds_of(stream(shards, prepare, prefetch=0), idle)
    consumers = computing(load / len(shards))
    for consume in consumers.values():  # compiles
        seconds_of(stream(shards[:1], prepare, prefetch=0), consume)
    for name, consume in consumers.items():
        # Sequence and streams in turn, so that the machine's other load falls on all of them.
        every = [(1, 0), *options]
        taken = {option: [] for option in every}
        for _ in range(repeats):
            for readers, prefetch in every:
                pieces = stream(shards, prepare, readers=readers, prefetch=prefetch)
                taken[readers, prefetch].append(seconds_of(pieces, consume))
        median = {option: float(np.median(some)) for option, some in taken.items()}
        alone = median[1, 0]
        if name == "nothing":
            load = alone
        for readers, prefetch in every:
            seconds, computed = median[readers, prefetch], max(alone - load, 1e-9)
            yield {
                "prepare": prepare.__name__,
                "consumer": name,
                "readers": readers if prefetch else 0,
                "prefetch": prefetch,
                "seconds": seconds,
                "times": alone / seconds,
                "hidden": 0.0 if name == "nothing" else (alone - seconds) / min(load, computed),
            }


def spans(shards, prepare, consume):
    """What each thread did when: events of the chrome trace format of one stream."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # its calls would crowd out the rest
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            seconds_of(stream(shards, prepare), consume)
        (path,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            events = [e for e in json.load(file)["traceEvents"] if "name" in e]
    ours = [e for e in events if e["name"].startswith("stream_") or e["name"] == "compute"]
    threads = {(e["pid"], e["tid"]) for e in ours}
    return [
        *(e for e in events if e["name"] == "thread_name" and (e["pid"], e["tid"]) in threads),
        *sorted(ours, key=lambda e: e["ts"]),
    ]


def timeline(events, width=72):
    """The spans as text, a line a thread: r reads, p prepares, d puts on the device, C computes."""
    letters = {"stream_read": "r", "stream_prepare": "p", "stream_place": "d", "compute": "C"}
    marked = [e for e in events if e["name"] in letters]
    begin = min(e["ts"] for e in marked)
    scale = width / (max(e["ts"] + e["dur"] for e in marked) - begin)
    lines = {}
    for e in marked:
        line = lines.setdefault(e["tid"], [" "] * width)
        first, last = (int((t - begin) * scale) for t in (e["ts"], e["ts"] + e["dur"]))
        for k in range(first, min(max(last, first + 1), width)):
            line[k] = letters[e["name"]]
    return "\n".join("|" + "".join(line) + "|" for line in lines.values())


def main(words=None):
    """Prints the rows and a timeline; writes the trace where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--assets", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="write a chrome trace here (.json)")
    args = parser.parse_args(words)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        series = (walk(rng, args.rows, args.assets) for _ in range(args.shards))
        write_shards(series, folder, rows=args.rows)
        size = sum(path.stat().st_size for path in pathlib.Path(folder).iterdir())
        print(f"{args.shards} shards of {args.rows:,} x {args.assets}, {size / 1e6:.0f} MB in all")
        shards = open_shards(folder)
        begin = time.perf_counter()
        shards.verify()
        print(f"verify {time.perf_counter() - begin:.3f} s")
        for prepare, some, options in (
            (columns, shards, OPTIONS),
            (features, shards[:2], [(1, 1), (1, 2), (2, 2)]),
        ):
            for row in table(some, prepare, options, args.repeats):
                print(
                    "{prepare:8} {consumer:9} readers {readers} prefetch {prefetch} "
                    "{seconds:7.3f} s {times:5.2f} x, hidden {hidden:5.0%}".format(**row),
                    flush=True,
                )
        begin = time.perf_counter()
        seconds_of(stream(shards, columns, prefetch=0), lambda piece: None)
        one = (time.perf_counter() - begin) / len(shards)
        events = spans(shards, columns, computing(one)["elsewhere"])
        print(timeline(events))
        if args.out:
            pathlib.Path(args.out).write_text(json.dumps({"traceEvents": events}))


if __name__ == "__main__":
    main()
