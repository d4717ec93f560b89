"""A replay's file is read with the options that `data check` takes."""

import numpy as np
import pytest

from nca_trader.cli import main
from nca_trader.cli.options import READING
from nca_trader.errors import BarError
from nca_trader.paper.feed import parse_feed

TEXT = """time,open,high,low,close,volume
2021-03-01 09:32,10,11,9,10.5,5
2021-03-01 09:31,10,11,9,10.25,5
"""


def test_a_replay_takes_the_reading_options(tmp_path):
    path = tmp_path / "bars.csv"
    path.write_text(TEXT)
    with pytest.raises(BarError, match="D015"):
        parse_feed(f"replay:{path}")
    feed = parse_feed(
        f"replay:{path}", None, {"timezone": "America/New_York", "repair": "sort", "symbol": "X"}
    )
    assert feed.symbols == ("X",)
    bars = list(feed)
    np.testing.assert_array_equal([bar.close[0] for bar in bars], [10.25, 10.5])
    assert bars[0].time[0] == 1614609060  # 14:31 UTC


def test_the_command_names_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as end:
        main(["paper", "--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and all(f"--{name}" in said for name in READING)


def test_the_command_hands_them_on(tiny, tmp_path, capsys):
    path = tmp_path / "naive.csv"
    text = tiny.data.read_text().replace("+00:00", "")
    text = "\n".join(
        line.replace(",", " 00:30:00,", 1) if i else line
        for i, line in enumerate(text.splitlines())
    )
    path.write_text(text.replace(" 00:00:00 00:30:00", " 00:30:00"))
    command = ["paper", f"--run={tiny.path}", f"--feed=replay:{path}"]
    assert main([*command, f"--journal={tmp_path / 'a.db'}"]) == 2
    assert "D015" in capsys.readouterr().err
    assert main([*command, f"--journal={tmp_path / 'b.db'}", "--timezone=UTC"]) == 0
