"""Mutates small bar files and reads each; a process of its own, so that a crash is seen as well.

Run as `python fuzzed.py SEED COUNT`: prints one JSON object, what happened and what must not have.
"""

import gzip
import io
import json
import pathlib
import resource
import sys
import tempfile
import time
import traceback
import zipfile

import numpy as np
import pandas as pd

from nca_trader.data.bars import read_bars
from nca_trader.errors import BarError

TOKENS = [
    b",", b'"', b"\n", b"\r", b"\0", b";", b" ", b"-", b"+", b"1e400", b"nan", b"inf", b"\x1b[2J",
    b"\xff", b"\xef\xbb\xbf", "\u202e".encode(), b"9" * 400, b"2018-01-01", b"01/02/2018", b"close",
    b"symbol", b"time", b"present", b"*", b"'", b"\n\n\n", b'"\n', b"1800000000000", b"{", b"\\",
]  # fmt: skip
OPTIONS = [
    {},
    {"repair": "sort,keep-first,drop-nan,drop-bad,widen,close-only,no-volume"},
    {"timezone": "America/New_York", "repair": "drop-bad"},
    {"columns": "close=*", "repair": "close-only,no-volume"},
    {"columns": "time=1,close=3", "repair": "close-only,no-volume,drop-bad"},
    {"symbol": "A", "dates": "dmy", "decimal": ","},
    {"every": "1d", "repair": "sort,keep-last"},
]


def frame(rng, rows=30):
    close = 10.0 * np.exp(np.cumsum(rng.normal(0, 0.01, 2 * rows)))
    days = pd.date_range("2018-01-05", periods=rows, freq="36h", tz="UTC")
    return pd.DataFrame(
        {
            "time": np.repeat(days, 2), "symbol": ["A", "B"] * rows, "open": close,
            "high": close * 1.01, "low": close * 0.99, "close": close,
            "volume": rng.integers(1, 99, 2 * rows), "bid": close * 0.999, "ask": close * 1.001,
        }
    )  # fmt: skip


def texts(rng):
    long = frame(rng)
    wide = long.pivot(index="time", columns="symbol", values="close")
    dmy = long.assign(time=long["time"].dt.strftime("%d/%m/%Y %H:%M"))
    return [
        long.to_csv(index=False), wide.to_csv(), dmy.to_csv(index=False, sep=";", decimal=","),
        wide.add_suffix("_close").to_csv(sep="\t"),
    ]  # fmt: skip


def buffer(write):
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def zipped(text):
    def write(file):
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("bars.csv", text)

    return buffer(write)


def seeds(rng):
    """Sound files by kind, as (suffix, bytes)."""
    plain, long = texts(rng), frame(rng)
    yield from ((".csv", text.encode()) for text in plain)
    yield from ((".csv.gz", gzip.compress(text.encode())) for text in plain[:2])
    yield ".zip", zipped(plain[0])
    yield ".json", long.to_json(orient="records", date_format="iso").encode()
    for packing in ("snappy", None):
        yield ".parquet", buffer(lambda f, p=packing: long.to_parquet(f, compression=p))
        name = packing and "zstd"
        yield (
            ".feather",
            buffer(lambda f, p=name: long.to_feather(f, compression=p or "uncompressed")),
        )


def mutated(rng, content):
    """A few random changes: bits, bytes, tokens, slices taken out, doubled or moved, a cut."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 5))):
        at, size = int(rng.integers(len(data) + 1)), int(rng.geometric(0.05))
        kind = int(rng.integers(7))
        if kind == 0 and at < len(data):
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1 and at < len(data):
            data[at] = int(rng.integers(256))
        elif kind == 2:
            data[at:at] = TOKENS[int(rng.integers(len(TOKENS)))]
        elif kind == 3:
            del data[at : at + size]
        elif kind == 4:
            data[at:at] = data[at : at + size] * int(rng.integers(1, 4))
        elif kind == 5:
            data[at : at + size] = rng.bytes(size)
        elif rng.random() < 0.3:
            del data[at:]
    return bytes(data)


def outcome(path, options):
    """ "" where the file is read, or refused as it must be; else what happened."""
    begin = time.monotonic()
    try:
        read_bars(path, **options)
    except BarError as error:
        lines = str(error).split("\n")
        if not all(line.isprintable() for line in lines):
            return f"raw: {lines!r}"
        if len(lines) > 1 and not lines[0].endswith(" problems"):
            return f"lines: {lines!r}"
    except Exception:
        return traceback.format_exc()
    took = time.monotonic() - begin
    return f"took {took:.1f} s" if took > 20 else ""


def main(seed, count):
    """Reads `count` mutated files."""
    resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
    bad = {}
    with tempfile.TemporaryDirectory() as folder:
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for case in range(count):
            rng = np.random.default_rng((seed, case))
            kinds = list(seeds(rng))
            suffix, content = kinds[case % len(kinds)]
            options = OPTIONS[int(rng.integers(len(OPTIONS)))]
            path = pathlib.Path(folder) / f"bars{suffix}"
            path.write_bytes(mutated(rng, content))
            # Written before the read: a crash leaves it as the last line.
            print(json.dumps([seed, case, suffix, options]), flush=True)
            said = outcome(path, options)
            if said:
                bad[f"{seed},{case}{suffix} {options}"] = said[-1500:]
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin) / 1024
    print(json.dumps({"bad": bad, "peak_mib": peak}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
