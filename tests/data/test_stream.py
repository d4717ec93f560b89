"""Shards hold the bars bit for bit, are split by name, and stream in order while others compute."""

import dataclasses
import hashlib
import json
import sys
import threading
import time
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars, rich_bars

from nca_trader.config import EnvConfig
from nca_trader.config.records import seal_record
from nca_trader.data.shards import MANIFEST, Shard, Shards, open_shards, stream, write_shards
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import BarError, ConfigError, StateError

ROWS = 30


def close(bars):
    """The smallest `prepare`: an array that no one else has."""
    return bars.close.astype(np.float32)


def joined(shards):
    """Every field of all shards, one below the other."""
    pieces = [shards.read(shard) for shard in shards]
    return {
        name: np.concatenate([getattr(piece, name) for piece in pieces])
        for name in ("time", *pieces[0].fields)
    }


def late(bars, first=35):
    """The bars of which the last asset has none before row `first`: its prices are NaN there."""
    fields = {name: getattr(bars, name).copy() for name in bars.fields}
    for name in ("open", "high", "low", "close"):
        fields[name][:first, -1] = np.nan
    fields["volume"][:first, -1], fields["present"][:first, -1] = 0.0, False
    return dataclasses.replace(bars, **fields)


def readers():
    return [t.name for t in threading.enumerate() if t.name.startswith("stream-")]


@pytest.fixture(scope="module")
def bars():
    return rich_bars(np.random.default_rng(0), 100, 3)


@pytest.fixture
def shards(bars, tmp_path):
    return write_shards(bars, tmp_path / "shards", rows=ROWS)


@pytest.mark.parametrize(("length", "rows"), [(5, 1), (100, 30), (100, 100), (100, 1000)])
@pytest.mark.parametrize("make", [random_bars, rich_bars])
def test_bars_come_back_bit_for_bit(make, length, rows, tmp_path):
    bars = late(make(np.random.default_rng(1), 100, 3, missing=0.2))[:length]
    shards = write_shards(bars, tmp_path, rows=rows)
    assert len(shards) == -(-length // rows) and shards.rows == length
    got = joined(shards)
    assert set(got) == {"time", *bars.fields}
    for name, values in got.items():
        there = getattr(bars, name)
        assert values.dtype == there.dtype and values.tobytes() == there.tobytes(), name
    if rows >= length:
        assert shards.read(shards[0]).digest() == bars.digest()


def test_the_manifest_says_what_is_in_each_shard(bars, shards):
    manifest = json.loads((shards.folder / MANIFEST).read_text())
    assert manifest["format"] == 2
    for k, entry in enumerate(manifest["shards"]):
        piece = bars[k * ROWS : (k + 1) * ROWS]
        content = (shards.folder / entry["path"]).read_bytes()
        assert entry["rows"] == len(piece)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
        assert entry["span"] == [str(piece.time[0]), str(piece.time[-1])]
        assert tuple(entry["symbols"]) == bars.symbols
    assert shards[1].span == (str(bars.time[ROWS]), str(bars.time[2 * ROWS - 1]))
    assert not list(shards.folder.glob("*.part"))


def test_several_series_are_written_one_after_the_other(bars, tmp_path):
    shards = write_shards((bars.select(s) for s in bars.symbols), tmp_path, rows=60)
    assert [shard.symbols for shard in shards] == [(s,) for s in bars.symbols for _ in range(2)]
    assert shards.symbols == bars.symbols
    for symbol in bars.symbols:
        own = Shards(tmp_path, [shard for shard in shards if shard.symbols == (symbol,)])
        assert joined(own)["close"].tobytes() == bars.select(symbol).close.tobytes()


def test_a_crash_before_the_manifest_leaves_no_shards_and_may_be_repeated(bars, tmp_path):
    def crashing():
        yield bars
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(crashing(), tmp_path, rows=ROWS)
    with pytest.raises(BarError, match=r"shards\.json: can't be read"):
        open_shards(tmp_path)
    assert len(write_shards(bars, tmp_path, rows=ROWS)) == 4
    with pytest.raises(StateError, match="is there already; choose another folder"):
        write_shards(bars, tmp_path)


def test_a_missing_and_a_changed_shard_are_named_with_the_remedy(shards):
    missing, changed = (shards.folder / shards[k].path for k in (1, 2))
    missing.unlink()
    content = bytearray(changed.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    with pytest.raises(BarError, match=rf"{missing}: a shard of .*; copy it again[^\n]*$"):
        shards.read(shards[1])
    with pytest.raises(StateError, match=rf"{changed}: not the bytes that were .*; copy[^\n]*$"):
        shards.read(shards[2])
    with pytest.raises(BarError) as found:
        shards.verify()
    assert [str(path) in str(found.value) for path in (missing, changed)] == [True, True]
    assert len(str(found.value).splitlines()) == 2
    assert len(shards.read(shards[0])) == ROWS


def test_a_shard_is_hashed_once_and_again_when_it_changes(shards, monkeypatch):
    hashed = []
    sha256 = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data: hashed.append(1) or sha256(data))
    for _ in range(2):
        shards.read(shards[0])
    assert len(hashed) == 1
    path = shards.folder / shards[0].path
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(StateError):
        shards.read(shards[0])
    assert len(hashed) == 2


def change(key, value):
    def apply(manifest):
        manifest["shards"][0][key] = value

    return apply


@pytest.mark.parametrize(
    ("damage", "error", "say"),
    [
        (lambda m: m.pop("shards"), StateError, "is not a manifest"),
        (lambda m: m.update(format=99), BarError, "has format 99, this version reads 2"),
        (change("path", "../x.parquet"), StateError, "lies outside the folder"),
        (change("path", "/etc/passwd"), StateError, "lies outside the folder"),
        (change("span", []), StateError, "is not a manifest"),
        (change("rows", 31), StateError, "is not a shard of 31 rows and 3 symbols"),
        (change("symbols", ["A"]), StateError, "is not a shard of 30 rows and 1 symbols"),
    ],
)
def test_a_damaged_manifest_is_refused(shards, damage, error, say):
    path = shards.folder / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    damage(manifest)
    path.write_text(seal_record(manifest))
    with pytest.raises(error, match=say):
        opened = open_shards(shards.folder)
        opened.read(opened[0])


def test_a_manifest_that_is_not_the_text_that_was_written_is_refused_in_one_line(shards):
    path = shards.folder / MANIFEST
    written = path.read_bytes()
    # In the last one a stranger has taken the checksum out.
    stripped = {k: v for k, v in json.loads(written).items() if k != "checksum"}
    for content, say in (
        (written[:100], "not JSON"),
        (written.replace(b'"rows": 30', b'"rows": 31', 1), "changed since it was written"),
        (written.replace(b'"S1"', b'"S2"', 1), "changed since it was written"),
        (json.dumps(stripped).encode(), "has no 'checksum'"),
    ):
        assert content != written
        path.write_bytes(content)
        with pytest.raises(StateError, match=rf"^{path}: is not a man[^\n]*{say}[^\n]*copy it"):
            open_shards(shards.folder)


def test_a_manifest_of_the_format_without_a_checksum_is_read(shards):
    path = shards.folder / MANIFEST
    manifest = json.loads(path.read_text()) | {"format": 1}
    del manifest["checksum"]
    path.write_text(json.dumps(manifest))
    assert list(open_shards(shards.folder)) == list(shards)


def named(*symbols, depth=0):
    """Shards that are only names: one for each tuple of symbols."""
    alike = {"rows": 2, "sha256": "", "span": ("2020", "2021"), "source": "", "note": ""}
    listed = [Shard(path=f"{k}.parquet", symbols=own, **alike) for k, own in enumerate(symbols)]
    return Shards(None, listed, depth)


def cells(shards):
    return {(shard.path, symbol) for shard in shards for symbol in shard.symbols}


@pytest.mark.parametrize("by", ["symbol", "file"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_parts_are_disjoint_and_together_everything_in_any_order(count, by):
    random = Random(count)
    shards = named(*(tuple(random.sample("ABCDEFGHI", random.randint(1, 4))) for _ in range(12)))
    parts = [cells(shards.part(k, count, by)) for k in range(count)]
    assert sum(map(len, parts)) == len(cells(shards))
    assert set().union(*parts) == cells(shards)
    mixed = list(shards)
    random.shuffle(mixed)
    kept = mixed[: len(mixed) // 2]
    for k, part in enumerate(parts):
        assert cells(Shards(None, mixed).part(k, count, by)) == part
        assert cells(Shards(None, kept).part(k, count, by)) == part & cells(kept)
    names = [{symbol for _, symbol in part} for part in parts]
    files = [{path for path, _ in part} for part in parts]
    for own in names if by == "symbol" else files:
        assert sum(bool(own & other) for other in (names if by == "symbol" else files)) <= 1


def test_a_symbols_part_is_what_it_always_was():
    # By hand: the first eight bytes of sha256("0:AAPL"), modulo the count.
    shards = named(("AAPL",), ("MSFT",), ("BTC/USD",))
    for symbol in shards.symbols:
        k = int(hashlib.sha256(f"0:{symbol}".encode()).hexdigest()[:16], 16) % 5
        assert symbol in shards.part(k, 5).symbols


def test_parts_of_parts_are_drawn_anew_and_sizes_are_fair():
    shards = named(*((f"S{k}",) for k in range(4000)))
    for host in range(2):
        own = shards.part(host, 2)
        sizes = [len(own.part(k, 2)) for k in range(2)]
        # Each of 4,000 goes to one of four quarters: four standard deviations of a binomial.
        assert all(abs(size - 1000) < 4 * np.sqrt(4000 * 0.25 * 0.75) for size in sizes)


def test_a_part_by_symbol_reads_its_own_columns_alone(bars, shards):
    for k in range(2):
        part = shards.part(k, 2)
        for shard in part:
            got = part.read(shard)
            assert got.symbols == shard.symbols == part.symbols
    assert {len(shards.part(k, 2).symbols) for k in range(2)} == {1, 2}
    part = shards.part(0, 2)
    own = joined(part)
    for name in bars.fields:
        assert own[name].tobytes() == getattr(bars.select(*part.symbols), name).tobytes()


@pytest.mark.parametrize(
    ("call", "say"),
    [
        (lambda s: s.part(2, 2), "part 2 of 2"),
        (lambda s: s.part(0, 0), "part 0 of 0"),
        (lambda s: s.part(0, 2, by="bar"), "by='bar'"),
        (lambda s: stream(s, close, readers=0), "readers=0"),
        (lambda s: stream(s, close, prefetch=-1), "prefetch=-1"),
        (lambda s: write_shards([], s.folder / "new", rows=0), "rows=0"),
    ],
)
def test_options_out_of_range_are_refused(shards, call, say):
    with pytest.raises(ConfigError, match=say):
        call(shards)


@pytest.mark.parametrize(("threads", "prefetch"), [(1, 0), (1, 1), (2, 3), (5, 50)])
def test_pieces_come_in_order_on_the_device_whatever_the_readers(bars, tmp_path, threads, prefetch):
    shards = write_shards(bars, tmp_path, rows=7)

    def slow_at_first(piece):  # the earlier the shard, the later it is ready
        time.sleep(0.002 * (len(bars) - int(np.searchsorted(bars.time, piece.time[0]))) / 7)
        return {"close": close(piece), "none": None}

    pieces = list(stream(shards, slow_at_first, readers=threads, prefetch=prefetch))
    assert [piece.shard for piece in pieces] == list(shards)
    arrays = [piece.arrays["close"] for piece in pieces]
    assert all(isinstance(array, jax.Array) for array in arrays)
    np.testing.assert_array_equal(np.concatenate(arrays), close(bars))
    assert pieces[-1].bars.digest() == bars[98:].digest()
    assert not readers()


def test_a_device_and_the_precision_of_the_consumer_are_kept(shards):
    device = jax.devices()[3]
    for prefetch in (0, 2):
        for piece in stream(shards, close, prefetch=prefetch, device=device):
            assert piece.arrays.devices() == {device}
        with jax.default_device(device), jax.enable_x64(True):
            for piece in stream(shards, lambda bars: bars.close, prefetch=prefetch):
                assert piece.arrays.devices() == {device} and piece.arrays.dtype == jnp.float64
                np.testing.assert_array_equal(piece.arrays, piece.bars.close)


def test_a_market_of_the_environment_streams_as_it_is_built(tmp_path):
    config = EnvConfig(features=("return_1", "day_of_week_sin"))
    bars = rich_bars(np.random.default_rng(3), 160, 2)
    shards = write_shards(bars, tmp_path, rows=80)
    pieces = list(stream(shards, lambda piece: TradingEnv(piece, config).market))
    assert len(pieces) == 2
    for k, piece in enumerate(pieces):
        market = TradingEnv(bars[80 * k : 80 * (k + 1)], config).market
        jax.tree.map(np.testing.assert_array_equal, piece.arrays, market)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_what_a_reader_raises_comes_in_its_shards_place(shards, prefetch):
    (shards.folder / shards[2].path).unlink()
    pieces = stream(shards, close, readers=3, prefetch=prefetch)
    assert [next(pieces).shard.path for _ in range(2)] == [shard.path for shard in shards[:2]]
    with pytest.raises(BarError, match=shards[2].path):
        next(pieces)
    assert list(pieces) == [] and not readers()


@pytest.mark.parametrize("stop", ["close", "forget", "raise"])
def test_no_thread_is_left_when_the_consumer_stops_early(bars, tmp_path, stop):
    shards = write_shards(bars, tmp_path, rows=5)
    prepared, stopping = [], threading.Event()

    def prepare(piece):
        prepared.append(1)
        assert piece.time[0] == bars.time[0] or stopping.wait(60)
        return close(piece)

    pieces = stream(shards, prepare, readers=2, prefetch=15)
    next(pieces)
    assert readers()
    threading.Timer(0.2, stopping.set).start()
    if stop == "close":
        pieces.close()
    elif stop == "raise":
        with pytest.raises(ZeroDivisionError):
            pieces.throw(ZeroDivisionError())
    else:
        del pieces
    assert not readers()
    # The one that was taken and those that were being read; of the others none was begun.
    assert len(prepared) <= 3


def test_no_more_is_read_ahead_than_asked_for(bars, tmp_path):
    shards = write_shards(bars, tmp_path, rows=5)
    prepared = []
    pieces = stream(shards, lambda b: prepared.append(1) or close(b), readers=4, prefetch=3)
    for taken in range(1, 10):
        next(pieces)
        until = time.monotonic() + 60
        while len(prepared) < taken + 3 and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.005)
        assert len(prepared) == taken + 3
    pieces.close()


def test_shards_are_read_while_the_consumer_computes(shards):
    """The consumer waits for a later shard than its own: without reading ahead this never ends."""
    begun = {np.datetime64(shard.span[0]): threading.Event() for shard in shards}

    def prepare(bars):
        begun[bars.time[0]].set()
        return close(bars)

    for k, _ in enumerate(stream(shards, prepare, readers=1, prefetch=2)):
        if k + 2 < len(shards):
            assert begun[np.datetime64(shards[k + 2].span[0])].wait(60)


def test_the_stream_keeps_no_piece_that_was_handed_out(shards):
    pieces = stream(shards, close, prefetch=2)
    piece = next(pieces)
    assert sys.getrefcount(piece) <= 2


def test_a_buffer_that_is_used_again_is_refused(shards):
    """What the device reads of it would change under the consumer."""
    buffer = np.zeros((ROWS, 3), np.float32)

    def reuse(bars):
        buffer[: len(bars)] = bars.close
        return buffer[: len(bars)]

    pieces = stream(shards, reuse, readers=1)
    first = next(pieces)
    with pytest.raises(ValueError, match="read-only"):
        next(pieces)
    np.testing.assert_array_equal(first.arrays, close(first.bars))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_stream_may_begin_anywhere_and_go_round(shards, prefetch):
    order = [shard.path for shard in shards]
    assert [p.shard.path for p in stream(shards, close, start=3, prefetch=prefetch)] == order[3:]
    round_and_round = stream(shards, close, start=2, repeat=True, prefetch=prefetch)
    got = [next(round_and_round).shard.path for _ in range(7)]
    round_and_round.close()
    assert got == (order * 3)[2:9] and len(order) == 4
