"""Bar files and shards in an object store: the same bars, under their own name, never stale."""

import dataclasses
import re

import numpy as np
import pytest
from drawn import random_bars

from nca_trader.cli import main
from nca_trader.data.bars import read_bars, write_bars
from nca_trader.data.shards import open_shards, stream, write_shards
from nca_trader.errors import BarError, ConfigError, StateError, StoreError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bars():
    return random_bars(np.random.default_rng(0), 50, 2)


def same(found, wanted):
    assert found.symbols == wanted.symbols and len(found) == len(wanted)
    assert found.digest() == wanted.digest()


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet", ".feather"])
def test_a_file_by_its_url_is_the_same_bars(suffix, bars, objects, tmp_path):
    path = tmp_path / f"bars{suffix}"
    write_bars(bars, path)
    objects[f"in/bars{suffix}"] = path.read_bytes()
    found, here = read_bars(f"s3://b/in/bars{suffix}"), read_bars(path)
    same(found, here)
    assert found.source == here.source.replace(str(path), f"s3://b/in/bars{suffix}") != here.source
    read_bars(f"s3://b/in/bars{suffix}")
    assert len(objects.gets) == 1


def test_a_parquet_folder_by_its_url_is_the_same_bars(bars, objects, tmp_path):
    write_bars(bars, tmp_path / "0.parquet")
    objects["all.parquet/part-0.parquet"] = (tmp_path / "0.parquet").read_bytes()
    same(read_bars("gs://b/all.parquet"), read_bars(tmp_path / "0.parquet"))


def test_a_fault_names_the_url_and_its_line(objects, cache):
    text = "time,open,high,low,close\n2020-01-01,1,1,1,1\n2020-01-02,1,2,3,1\n"
    objects["x.csv"] = text.encode()
    with pytest.raises(BarError, match=r"^s3://b/x\.csv: ") as error:
        read_bars("s3://b/x.csv")
    assert "line 3" in str(error.value) and str(cache) not in str(error.value)
    # The broken file is mended where it lies, and read again.
    objects["x.csv"] = text.replace(",2,3,1", ",3,1,1").encode()
    assert len(read_bars("s3://b/x.csv", repair="no-volume")) == 2
    objects["x.csv"] = b"time,close\n1,2,3\n"
    with pytest.raises(BarError, match=r"^s3://b/x\.csv: D022 line 2"):
        read_bars("s3://b/x.csv")
    objects["x.csv"] = b""
    with pytest.raises(BarError, match=r"^s3://b/x\.csv: D002 the file is empty"):
        read_bars("s3://b/x.csv")


def test_what_is_not_there_is_one_line(objects, capsys):
    with pytest.raises(BarError, match=r"^gs://b/no\.csv: D001 no such object"):
        read_bars("gs://b/no.csv")
    with pytest.raises(
        BarError, match=re.escape("gs://b/none/shards.json: can't be read (No such")
    ):
        open_shards("gs://b/none")
    with pytest.raises(ConfigError, match=r"^gs://no: there is no such bucket"):
        open_shards("gs://no/shards")
    assert main(["data", "check", "gs://no/bars.csv"]) == 2
    assert main(["data", "check", "http://host/bars.csv"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2][:30] for line in lines] == [
        "gs://no: there is no such buck",
        "http://host/bars.csv: http:// ",
    ]


def test_a_network_that_fails_is_exit_code_1(objects, capsys):
    def fail(what, key):
        raise RuntimeError("connection reset\nDebug source: ...")

    objects.before = fail
    assert main(["data", "check", "gs://b/bars.csv"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "nca-trader data: gs://b/bars.csv: the store failed or cannot be reached"
    )


def test_the_command_checks_a_file_by_its_url(bars, objects, tmp_path, capsys):
    write_bars(bars, tmp_path / "bars.csv")
    objects["bars.csv"] = (tmp_path / "bars.csv").read_bytes()
    assert main(["data", "check", "s3://b/bars.csv"]) == 0
    assert "s3://b/bars.csv: no problem" in capsys.readouterr().out


def test_shards_are_written_streamed_and_verified_in_a_store(bars, objects, tmp_path):
    there, here = write_shards(bars, "s3://b/all", rows=20), write_shards(bars, tmp_path, rows=20)
    assert objects.puts[-1] == "all/shards.json" and len(objects) == 4
    opened = open_shards("s3://b/all")
    assert list(opened) == list(there) == list(here)
    pieces = list(stream(opened, lambda b: {"close": b.close}))
    for piece, shard in zip(pieces, here, strict=True):
        same(piece.bars, here.read(shard))
    with pytest.raises(StateError, match=r"s3://b/all/shards\.json: is there already"):
        write_shards(bars, "s3://b/all")
    # After it was read once: another version is verified anew.
    content = bytearray(objects["all/000001.parquet"])
    content[len(content) // 2] ^= 1
    objects["all/000001.parquet"] = bytes(content)
    for fails in (lambda: opened.read(opened[1]), opened.verify):
        with pytest.raises(StateError, match=r"s3://b/all/000001\.parquet: not the bytes"):
            fails()
    del objects["all/000001.parquet"]
    with pytest.raises(BarError, match=r"s3://b/all/000001\.parquet: .* can't be read"):
        opened.read(opened[1])

    def fail(what, key):
        raise RuntimeError("connection reset")

    objects.before = fail
    with pytest.raises(StoreError, match="000002"):
        opened.read(opened[2])
    assert dataclasses.asdict(opened[0]) == dataclasses.asdict(here[0])
