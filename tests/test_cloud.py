"""Places in an object store: as paths, with errors of one line, and copies on this machine."""

import pathlib
import sys
import threading

import pytest

from nca_trader import cloud
from nca_trader.cloud import CloudPath, fetched, local, place
from nca_trader.errors import ConfigError, NcaTraderError, StoreError
from nca_trader.machine import write_atomically

STORE = cloud._store


def test_a_url_is_a_place_in_a_store_and_all_else_is_a_path():
    assert place("s3://b/runs//a/") == CloudPath("s3", "b", "runs/a") == place("S3://b/runs/a")
    assert str(place("gs://b/runs/a")) == "gs://b/runs/a" == str(place(place("gs://b/runs/a")))
    assert str(place("gs://b")) == str(place("gs://b/")) == "gs://b"
    for text in ("runs/a", "/tmp/s3", "a:b", "s3:/b/c", "C:\\bars.csv"):
        assert place(text) == pathlib.Path(text)
    assert place(pathlib.Path("runs")) == pathlib.Path("runs")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://host/a.csv", "ftp:// is not known here; give gs://BUCKET/NAME"),
        ("file:///tmp/a", "file:// is not known here"),
        ("s3:///a", "give s3://BUCKET/NAME"),
        ("gs://b/runs/../../a", "no . or .. in NAME"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(url, says):
    with pytest.raises(ConfigError) as error:
        place(url)
    assert says in str(error.value) and str(error.value).startswith(url)


def test_a_place_has_the_parts_of_a_path():
    path = place("s3://b/runs/a/agent.toml")
    same = pathlib.PurePosixPath("runs/a/agent.toml")
    assert (path.name, path.suffix, path.parent.name) == (same.name, same.suffix, same.parent.name)
    assert path.parent / "x" / "y.z" == place("s3://b/runs/a/x/y.z")
    assert str(path.resolve().parent.parent.parent) == "s3://b" and not place("s3://b").name


def test_objects_are_written_whole_read_listed_and_deleted(objects):
    run = place("gs://b/runs/a")
    assert not run.exists() and not run.is_dir() and not list(run.iterdir())
    write_atomically(run / "run.json", "{}\n")
    write_atomically(run / "deep/er", b"\x00\xff")
    write_atomically(place("gs://b/runs/ab/run.json"), "other")
    assert objects["runs/a/run.json"] == b"{}\n" == (run / "run.json").read_bytes()
    assert (run / "run.json").read_text() == "{}\n"
    assert (run / "run.json").is_file() and not (run / "run.json").is_dir()
    assert run.is_dir() and not run.is_file() and run.exists()
    # Not what only begins alike.
    assert list(run.below()) == ["deep/er", "run.json"]
    assert list(place("gs://b").below()) == [
        "runs/a/deep/er",
        "runs/a/run.json",
        "runs/ab/run.json",
    ]
    assert (run / "deep/er").read() == (b"\x00\xff", (run / "deep/er").version())
    (run / "deep/er").unlink()
    assert list(run.iterdir()) == [run / "run.json"]
    with pytest.raises(FileNotFoundError) as error:
        (run / "deep/er").read_bytes()
    assert error.value.filename == "gs://b/runs/a/deep/er"


def test_a_bucket_that_is_not_there_is_named(objects):
    run = place("s3://typo/runs/a")
    for ask in (run.read_bytes, run.exists, run.below, lambda: write_atomically(run, "x")):
        with pytest.raises(
            ConfigError, match=r"^s3://typo: there is no such bucket; check its name"
        ):
            ask()


def of_type(name, text):
    return type(name, (Exception,), {})(text)


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (
            of_type("PermissionDeniedError", "refused: 403 Forbidden: <?xml version='1.0'?>\n<E/>"),
            ConfigError,
            "no credentials, or no right to do this (refused: 403 Forbidden); give AWS_ACCESS_KEY",
        ),
        (
            of_type("GenericError", "Error performing PUT http://169.254.169.254/latest/api/token"),
            ConfigError,
            "no credentials",
        ),
        (
            of_type("GenericError", "Received redirect without LOCATION\n\nDebug source: ..."),
            ConfigError,
            "another region than AWS_REGION",
        ),
        (
            of_type("GenericError", "Generic S3 error: error sending request\n\nDebug source: ..."),
            StoreError,
            "at the first try and 8 more (Generic S3 error: error sending request); check the net",
        ),
    ],
)
def test_what_a_store_refuses_is_one_line(objects, raised, kind, says):
    def refuse(what, key):
        raise raised

    objects.before = refuse
    with pytest.raises(NcaTraderError) as error:
        place("s3://b/x").read_bytes()
    assert type(error.value) is kind and says in str(error.value)
    assert str(error.value).startswith("s3://b/x: ") and "\n" not in str(error.value)


def test_a_full_disk_here_is_not_the_stores_fault(objects):
    def full(what, key):
        raise OSError(28, "No space left on device")

    objects["x"] = b""
    objects.before = full
    with pytest.raises(OSError, match="No space left"):
        place("s3://b/x").read_bytes()


def test_without_the_extra_a_url_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    STORE.cache_clear()
    with pytest.raises(ConfigError, match=r"not installed; pip install obstore"):
        place("gs://b/runs/a").exists()


def test_what_lies_here_alone_is_no_url():
    assert local("journal.db", "a journal") == pathlib.Path("journal.db")
    for path in ("s3://b/journal.db", place("s3://b/journal.db"), "ftp://x/y"):
        with pytest.raises(ConfigError, match="a journal lies on this machine's disk; give a path"):
            local(path, "a journal")


def test_a_copy_is_fetched_once_and_again_when_the_object_changes(objects, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    objects["in/bars.csv"] = b"first"
    path = place("s3://b/in/bars.csv")
    copy = fetched(path)
    assert (copy.name, copy.read_bytes()) == ("bars.csv", b"first")
    assert fetched(path) == copy and objects.gets == ["in/bars.csv"]
    objects["in/bars.csv"] = b"other"  # of the same length
    again = fetched(path)
    assert again.read_bytes() == b"other" and not copy.exists()
    # An object of the same name and contents elsewhere has its own.
    objects["bars.csv"] = b"other"
    assert fetched(place("s3://b/bars.csv")) != again and again.exists()
    assert not [p for p in (tmp_path / "nca_trader/fetched").iterdir() if p.name.startswith("tmp")]


def test_a_fetch_that_is_cut_off_leaves_no_copy(objects, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    objects["bars.csv"] = b"0123456789"

    def cut(self):
        yield b"0123"
        raise of_type("GenericError", "connection reset")

    monkeypatch.setattr("objects.Got.stream", cut)
    with pytest.raises(StoreError, match="connection reset"):
        fetched(place("s3://b/bars.csv"))
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_folder_is_fetched_whole(objects, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    objects |= {"x.parquet/year=1/a": b"1", "x.parquet/year=2/a": b"2", "x.parquets": b"no"}
    copy = fetched(place("gs://b/x.parquet"))
    found = {p.relative_to(copy).as_posix(): p.read_bytes() for p in copy.rglob("a")}
    assert found == {"year=1/a": b"1", "year=2/a": b"2"} and copy.name == "x.parquet"
    with pytest.raises(FileNotFoundError):
        fetched(place("gs://b/y.parquet"))


def test_several_requests_are_under_way_at_once():
    all_here = threading.Barrier(cloud.AT_ONCE, timeout=500)  # each waits for all others

    def square(n):
        all_here.wait()
        return n * n

    assert cloud.together(square, range(cloud.AT_ONCE)) == [n * n for n in range(cloud.AT_ONCE)]
