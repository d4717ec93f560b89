"""Some file provokes every fault code; the site's reference lists them from the code itself."""

import pathlib

import pytest

from nca_trader.config.reading import REPAIRS
from nca_trader.data.bars import read_bars
from nca_trader.data.reading.faults import Kind
from nca_trader.errors import BarError

NAMES = "time,open,high,low,close,volume"
DAYS = [f"2020-01-{day:02}" for day in range(1, 29)]


def text_of(*rows, names=NAMES):
    return "\n".join([names, *rows]) + "\n"


def days(count=3, **changes):
    """Rows of `count` days; `changes` are the last one's."""
    cells = {"time": DAYS[count - 1], "open": 10, "high": 11, "low": 9, "close": 10, "volume": 5}
    rows = [f"{day},10,11,9,10,5" for day in DAYS[: count - 1]]
    return text_of(*rows, ",".join(str(cell) for cell in (cells | changes).values()))


def with_column(name, *values):
    rows = (f"{d},10,11,9,10,5,{v}" for d, v in zip(DAYS, values, strict=False))
    return text_of(*rows, names=f"{NAMES},{name}")


def closes(*rows):
    return text_of(*(f"{time},10,11,9,10,5" for time in rows))


# A file that has the fault, and the options with which it is read.
FILES = {
    "D001": ("{}", {}),
    "D002": (NAMES + "\n", {}),
    "D003": ("time,last\n2020-01-01,1\n", {}),
    "D004": ("hour,close\n1,1\n", {}),
    "D005": ("time,close\n2020-01-01,1\n", {}),
    "D006": (days(close=""), {}),
    "D007": (days(close="inf"), {}),
    "D008": (days(low=-1), {}),
    "D009": (days(close="halted"), {}),
    "D010": (days(high=9, low=11), {}),
    "D011": (days(close=20), {}),
    "D012": (days(volume=-1), {}),
    "D013": (days(time="soon"), {}),
    "D014": (closes("2020-01-01T10:00Z", "2020-01-01T11:00Z", "2020-01-01T12:00"), {}),
    "D015": (closes("2020-01-01T10:00", "2020-01-01T11:00"), {}),
    "D016": (closes("2020-10-25T02:30", "2020-10-26T02:30"), {"timezone": "Europe/Berlin"}),
    "D017": (closes("01/02/2020", "02/02/2020"), {}),
    "D018": ("time;close\n2020-01-01;1,234\n", {}),
    "D019": (closes("2020-10-01", "2020-11-01", "2020-12-01", "2020-01-13", "2020-01-14"), {}),
    "D020": (closes("2020-01-02", "2020-01-01", "2020-01-03"), {}),
    "D021": (closes("2020-01-02", "2020-01-02"), {}),
    "D022": (text_of("2020-01-01,10,11,9,10,5", "2020-01-02,10,11,9"), {}),
    "D023": ("2020-01-01,10,11,9,10,5\n", {}),
    "D024": (with_column("symbol", "A", "", "A"), {}),
    "D025": (closes(*DAYS, "2020-09-01"), {}),
    "D026": (days(len(DAYS), open=100, high=110, low=90, close=100), {}),
    "D027": (with_column("split_factor", 1, 1, 2), {}),
    "D030": (with_column("factor", 1, 0, 1), {"columns": "split=factor"}),
    "D031": (text_of("2020-01-01,10,11,9,10,5,3,2", names=f"{NAMES},bid,ask"), {}),
    "D032": (
        text_of("2020-01-01,10,11,9,10,5,1,1", names=f"{NAMES},dividends,adjustment"),
        {"columns": "dividend=adjustment"},
    ),
    "D033": (with_column("funding", 0, 2), {}),
    "D034": (days(), {"memory_gb": 1e-6}),
    "D036": (with_column("dividends", 0, 0, 0.1).replace("10,11,9,10", "10,11,9,10.5", 1), {}),
    "D037": (with_column("code", "AB", "AB", "CD", "CD"), {}),
    "D035": (closes("2020-01-01T10:00Z", "2020-01-01T10:30Z"), {"every": "1min"}),
}


@pytest.mark.parametrize("code", [code.name for code in Kind])
def test_a_file_provokes_every_code(code, tmp_path):
    text, options = FILES[code]
    path = tmp_path / "bars.csv"
    path.write_text(text)
    with pytest.raises(BarError, match=rf"{code} "):
        read_bars(path, **options)


def test_codes_count_up_and_their_repairs_exist(root):
    names = [code.name for code in Kind]
    assert names == sorted({*names}) and not {*names} & {"D028", "D029"}  # once, never used again
    assert {name for code in Kind for name in code.repairs} <= REPAIRS.keys()
    for path in pathlib.Path(root / "nca_trader").rglob("*.py"):
        assert '"D0' not in path.read_text(), f"{path}: a code as text; use Kind"
