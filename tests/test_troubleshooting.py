"""Each entry of docs/troubleshooting.md: its command prints what it says, its remedy works."""

import re
import shlex
import sqlite3

import pandas as pd
import pytest
from documents import ROOT, blocks

import nca_trader as nca
from nca_trader.cli import main

PAGE = ROOT / "docs" / "troubleshooting.md"
LEAK = """
import pandas as pd


def centred(bars):
    close = pd.DataFrame(bars.close)
    return (close > close.rolling(20, center=True).mean()).astype(float).to_numpy()
"""


def entries():
    """The title and the text of each entry that shows a command."""
    parts = re.split(r"^### (.*)$", PAGE.read_text(), flags=re.M)
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        if blocks(text, "console"):
            yield pytest.param(text, id=title)


@pytest.fixture(scope="module")
def troubles(tmp_path_factory):
    """A folder with a good file, and one for each fault that the page names."""
    folder = tmp_path_factory.mktemp("troubles")
    nca.write_bars(
        nca.sample_bars("sp500").between("2000-01-01", "2003-01-01"), folder / "good.csv"
    )
    good = pd.read_csv(folder / "good.csv")
    broken = {
        "unsorted": good.sample(frac=1, random_state=0),
        "hole": good.assign(close=good["close"].mask(good.index == 5)),
        "novolume": good.drop(columns="volume"),
        "columns": good.rename(columns={"time": "when"}),
    }
    for name, frame in broken.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
    (folder / "leak.py").write_text(LEAK)
    return folder


@pytest.fixture
def here(troubles, tmp_path, monkeypatch):
    """The folder to work in, with the journals that entries start from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("APCA_API_KEY_ID", raising=False)
    for path in troubles.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def journal(name):
    nca.paper_trade(nca.rules.momentum(50), "replay:good.csv", name)


def forge(name):
    with sqlite3.connect(name) as opened:
        opened.execute("update event set body = replace(body, '0', '1') where seq = 40")
    opened.close()


@pytest.mark.drawn(6)
@pytest.mark.parametrize("text", [*entries()])
def test_a_command_prints_what_the_page_says_and_the_remedy_works(text, here, capsys):
    (shown,) = blocks(text, "console")
    command, message, code = shown.splitlines()
    if "momentum.db" in command or "damaged.db" in command:
        name = command.split()[-1]
        journal(name)
        if name == "damaged.db":
            forge(name)
    assert main(shlex.split(command)[2:]) == int(code.removeprefix("exit code "))
    # The last line: before it stands the progress of what takes long.
    said = capsys.readouterr().err.strip().splitlines()[-1]
    parts = [re.escape(part) for part in message.split("...")]
    open_ended = (
        ".*".join(parts) if "..." in message and "=..." not in message else re.escape(message)
    )
    assert re.fullmatch(open_ended, said), said
    for remedy in "".join(blocks(text, "sh")).splitlines():
        assert main(shlex.split(remedy)[1:]) == 0, remedy
