"""The paper loop: bar in to order sent, bars per second of a replay, and what a journal weighs.

    python -m benchmarks.stream
    python -m benchmarks.stream --folder /mnt/disk
    python -m benchmarks.stream --only live
    python -m benchmarks.stream --soak 200000

Each agent has drawn parameters. `order` rows commit every bar before its orders, as with a venue
outside this process, on the disk and without waiting for it (`no fsync`): the difference is the
disk's. `split` says where that time went, in microseconds (p50, p99) of the bars with an order:

    policy   features, policy and account
    journal  rows: JSON, hashes, SQLite
    fsync    waits for the disk, of the head file and of SQLite's commit
    send     the broker takes the orders
    rest     the gate, and all else

`fsync` rows are of the disk alone: 512 bytes written and waited for, which a commit does twice.
`load` is the machine's, of the last minute: a p99 on a machine that does other work is that work's.
`replay` commits in batches of 256 events.

`live` rows are of a live session at the simulated exchange: from the moment the feed's thread hands
a bar over to the moment its first order goes to the exchange. In between are the exchange's books,
which it writes to its file, the decision, and every commit of that path. `answered` is the
exchange's answer to that order, which is in its file by then.
"""

import argparse
import contextlib
import os
import pathlib
import resource
import tempfile
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from nca_trader.agents import load_agent
from nca_trader.data.bars import sample_bars
from nca_trader.envs import load_env
from nca_trader.envs.trading import TradingEnv
from nca_trader.learner.programs import Compilations
from nca_trader.paper.clock import NANOSECONDS
from nca_trader.paper.feeds.feed import ReplayFeed
from nca_trader.paper.journal import journal as journals
from nca_trader.paper.journal.journal import Journal
from nca_trader.paper.session.agents import run_agent
from nca_trader.paper.session.trade import open_session
from nca_trader.paper.venues.exchange import Exchange
from nca_trader.runs.checkpoint import Checkpoints
from nca_trader.runs.manifest import Run
from nca_trader.runs.opening import open_run
from nca_trader.types import Bars

AGENTS = ("nano", "base")
BARS = 1500  # of each measurement
LIVE_BARS = 4500  # nano's drawn parameters order at one bar in seven
WARM = 300  # bars that are not timed: the warm-up, and what is compiled
WARM_ORDERS = 20  # of a live session, likewise


class State(NamedTuple):
    """What a run reads of a training state."""

    params: Any


class Venue(Exchange):
    """An exchange in memory that notes when it is sent orders."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sent_at = 0.0

    def work(self, orders):
        found = super().work(orders)
        self.sent_at = time.perf_counter()
        return found


class Split:
    """Seconds since `begin` by part of the loop; what a part calls counts as the inner part's."""

    PARTS = ("policy", "journal", "fsync", "send")

    def __init__(self):
        self.seconds = dict.fromkeys(self.PARTS, 0.0)
        self._inner = [0.0]

    def begin(self):
        self.seconds.update(dict.fromkeys(self.PARTS, 0.0))

    def timed(self, part, function):
        """The function, whose time counts as `part`."""

        def run(*args, **options):
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                taken = time.perf_counter() - began
                self.seconds[part] += taken - self._inner.pop()
                self._inner[-1] += taken

        return run

    @contextlib.contextmanager
    def watching(self, session, journal, venue):
        """Time the parts of a session inside the block."""
        core, wait = session._core, os.fdatasync
        core.step = self.timed("policy", core.step)
        journal.record = self.timed("journal", journal.record)
        # Of a commit SQLite's wait is all but the head file's writes and the look at the files.
        journal.commit = self.timed("fsync", journal.commit)
        venue.work = self.timed("send", venue.work)
        os.fdatasync = self.timed("fsync", wait)
        try:
            yield
        finally:
            os.fdatasync = wait


def disk(folder, count=1000):
    """Seconds of each of `count` waits for 512 bytes, in a file of the folder."""
    taken = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for row in range(count):
            os.pwrite(file.fileno(), os.urandom(512), row % 3 * 512)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - began)
    return np.array(taken)


def agent_of(name, folder):
    """The agent of a run in `index_daily` with parameters drawn at random."""
    run = open_run(
        TradingEnv(sample_bars("sp500")[:600], load_env("index_daily")), load_agent(name), folder,
        seed=0,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: np.asarray(x + 0.5 * rng.standard_normal(x.shape), np.float32),
        run.policy.init(jax.random.key(1)),
    )
    with Checkpoints(run.path / "checkpoints") as checkpoints:
        checkpoints.save(1, State(params))
    run = Run(run.path)
    return run_agent(run, run.account)


def quiet(agent):
    """The agent, computing and recording all that it does, but ordering nothing."""

    def act(*args):
        memory, account, decision = agent.act(*args)
        if decision is not None:
            decision = decision._replace(target=np.full_like(decision.target, np.nan))
        return memory, account, decision

    return agent._replace(act=act)


@contextlib.contextmanager
def unsynced():
    """Commits without waiting for the disk."""
    full, wait = journals.SYNCHRONOUS, os.fdatasync
    journals.SYNCHRONOUS, os.fdatasync = "OFF", lambda descriptor: None
    try:
        yield
    finally:
        journals.SYNCHRONOUS, os.fdatasync = full, wait


def session(agent, bars, path, batch, each=lambda row: None, split=None):
    """Trades the bars; returns seconds per bar, and per order sent, both after `WARM` bars.

    `split` gets a list of the seconds of each order by part, under the key of the part.
    """
    venue, feed = Venue(None, 1e5, agent.symbols, agent.rules), ReplayFeed(bars)
    sent, all_bars, parts = [], [], Split()
    with Journal(path, feed.now, batch) as journal, contextlib.ExitStack() as stack:
        trading = open_session(agent, feed, venue, journal, 1e5)
        if split is not None:
            stack.enter_context(parts.watching(trading, journal, venue))
            take = venue.work

            def work(orders):  # what comes after the orders is not on their way
                found = take(orders)
                at_send.update(parts.seconds)
                return found

            at_send, venue.work = {}, work
        for row, bar in enumerate(feed):
            before = trading.counts["orders"]
            parts.begin()
            began = time.perf_counter()
            trading.on_bar(bar)
            if row >= WARM:
                all_bars.append(time.perf_counter() - began)
                if trading.counts["orders"] > before:
                    sent.append(venue.sent_at - began)
                    if split is not None:
                        rest = sent[-1] - sum(at_send.values())
                        for part, taken in (at_send | {"rest": rest}).items():
                            split.setdefault(part, []).append(taken)
            each(row)
    return np.array(all_bars), np.array(sent)


class Closing:
    """A live feed of a file: a bar closes as soon as the session asks for the next one."""

    period = 86_400

    def __init__(self, bars, history):
        self.symbols, self._bars, self._at, self.given = bars.symbols, bars, history, 0.0

    def now(self):
        opened = self._bars.time[self._at - 1].astype("datetime64[s]").astype(np.int64)
        return (int(opened) + self.period) * NANOSECONDS

    def history(self, count):
        return self._bars[max(self._at - count, 0) : self._at]

    def __iter__(self):
        rows = self._bars.as_bar()
        while self._at < len(self._bars):
            at = self._at
            self._at += 1
            bar = jax.tree.map(lambda field, at=at: np.array(field[at]), rows)
            self.given = time.perf_counter()
            yield bar

    def close(self):
        pass


class Timed:
    """A venue that notes when the first order of each bar went out, and when it was answered."""

    def __init__(self, venue, feed):
        self._venue, self._feed = venue, feed
        self.sent, self.answered = {}, {}  # seconds after the bar, by its moment

    def __getattr__(self, name):
        return getattr(self._venue, name)

    def submit(self, ticket):
        moment = self._feed.given
        first = moment not in self.sent
        self.sent.setdefault(moment, time.perf_counter() - moment)
        answer = self._venue.submit(ticket)
        if first:
            self.answered[moment] = time.perf_counter() - moment
        return answer


def live(agent, bars, folder):
    """Trades the bars live; returns seconds from bar to order, and from bar to the answer."""
    feed, path = Closing(bars, WARM), pathlib.Path(folder) / "live.db"
    venue: Any = Timed(Exchange(f"{path}.books", 1e5, agent.symbols, agent.rules), feed)
    with contextlib.closing(venue), Journal(path, feed.now) as journal:
        open_session(agent, feed, venue, journal, 1e5, warmup=WARM).trade()
    # The first orders wait for what is compiled.
    return tuple(
        np.array(list(taken.values())[WARM_ORDERS:]) for taken in (venue.sent, venue.answered)
    )


def row_of(name, seconds, compilations, **facts):
    """A row of times: a rate, and percentiles in microseconds."""
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
    return {
        "name": name, "envs": None, "envs_per_segment": None,
        "steps_per_s": float(1.0 / seconds.mean()), "compile_s": compilations.seconds,
        "first_call_s": None,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "retraces": None, "peer": None, "ratio": None, "device": jax.devices()[0].device_kind,
        "p50_us": float(p50), "p99_us": float(p99),
    } | facts  # fmt: skip


def rows(args=None, where=None, only=None):
    """Yields a row per agent and measurement; journals are in a new folder of `where`."""
    # As the command does. Where a benchmark before this one has used the CPU it comes too late.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    bars = sample_bars("sp500")[:BARS]
    for name in AGENTS:
        with tempfile.TemporaryDirectory(dir=where) as folder, Compilations() as compilations:
            path = pathlib.Path(folder)
            agent = agent_of(name, path / "run")
            sent, answered = live(agent, sample_bars("sp500")[:LIVE_BARS], path)
            facts: dict[str, Any] = {"load": os.getloadavg()[0], "orders": len(sent)}
            facts["answered"] = tuple((np.percentile(answered, (50, 99)) * 1e6).round(1).tolist())
            yield row_of(f"{name} live", sent, compilations, **facts)
            if only == "live":
                continue
            for label, around in (("FULL", contextlib.nullcontext), ("no fsync", unsynced)):
                split: dict[str, list[float]] = {}
                with around():
                    _, sent = session(agent, bars, path / f"{label}.db", False, split=split)
                by_part = {
                    part: tuple(np.percentile(taken, (50, 99)).round(1).tolist())
                    for part, taken in ((p, np.array(t) * 1e6) for p, t in split.items())
                }
                facts = {"split": by_part, "load": os.getloadavg()[0]}
                yield row_of(f"{name} order, {label}", sent, compilations, **facts)
            yield row_of(f"{name} fsync alone", disk(folder), compilations)
            began = time.process_time()
            taken, _ = session(agent, bars, path / "batch.db", True)
            cpu = (time.process_time() - began) / len(bars)
            session(quiet(agent), bars, path / "quiet.db", True)
            size = (path / "quiet.db").stat().st_size / len(bars)
            yield row_of(
                f"{name} replay, batches", taken, compilations, cpu_us=cpu * 1e6,
                bytes_per_bar=size,
            )  # fmt: skip


def walk(num_bars, symbols=("NASDAQ", "SP500")):
    """Minute bars of a random walk."""
    rng = np.random.default_rng(0)
    close = 1000.0 * np.exp(np.cumsum(rng.normal(0, 1e-4, (num_bars, len(symbols))), axis=0))
    return Bars(
        time=np.datetime64("2020-01-01", "ns") + np.arange(num_bars) * np.timedelta64(60, "s"),
        symbols=symbols,
        open=close,
        high=close * 1.0001,
        low=close * 0.9999,
        close=close,
        volume=np.full(close.shape, 1000.0),
        present=np.ones(close.shape, bool),
    )


def soak(num_bars):
    """Prints memory, descriptors and the journal's size as a session of many bars goes on."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        began = time.perf_counter()

        def report(row):
            if (row + 1) % (num_bars // 10) == 0:
                with open("/proc/self/statm") as file:
                    pages = int(file.read().split()[1])
                open_now = len(os.listdir("/proc/self/fd"))
                size = sum(f.stat().st_size for f in path.glob("paper.db*")) / 1e6
                print(
                    f"{row + 1:>9,} bars {(row + 1) / (time.perf_counter() - began):8,.0f} bars/s "
                    f"{pages * resource.getpagesize() / 2**20:7.1f} MiB {open_now:3} descriptors "
                    f"{size:8.1f} MB of journal",
                    flush=True,
                )

        # It orders nothing: drawn parameters would trade until it is bankrupt.
        agent = quiet(agent_of("nano", path / "run"))
        session(agent, walk(num_bars), path / "paper.db", True, report)
        began = time.process_time()
        head = journals.verify(path / "paper.db")
        print(f"verify: {head.seq:,} events in {time.process_time() - began:.1f} s of CPU")


def main(words=None):
    """Prints the rows, or the soak."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--soak", type=int, metavar="BARS")
    parser.add_argument("--folder", help="of the journals, which says the disk; the default is tmp")
    parser.add_argument("--only", choices=["live"], help="leave the other measurements out")
    args = parser.parse_args(words)
    if args.soak:
        return soak(args.soak)
    for row in rows(where=args.folder, only=args.only):
        print({k: v for k, v in row.items() if v is not None}, flush=True)


if __name__ == "__main__":
    main()
