"""What a `paper` process of the fault tests is given: `--feed papertape:feed`, and a rule.

The folder is that of `PAPER_TAPE`: bars.npz, options.json and the tape's place in it.
"""

import json
import os
import pathlib

import numpy as np
from livedesk import Tape

from nca_trader.paper.feeds.feed import Notice
from nca_trader.types import Bars


def save(bars, folder, **options):
    (pathlib.Path(folder) / "options.json").write_text(json.dumps(options))
    arrays = {name: getattr(bars, name) for name in ("time", *bars.fields)}
    np.savez(pathlib.Path(folder) / "bars.npz", symbols=np.array(bars.symbols), **arrays)


def feed():
    folder = pathlib.Path(os.environ["PAPER_TAPE"])
    arrays = dict(np.load(folder / "bars.npz"))
    bars = Bars(symbols=tuple(arrays.pop("symbols").tolist()), source="a tape", **arrays)
    options = json.loads((folder / "options.json").read_text())
    notices = {int(k): [Notice(*n) for n in v] for k, v in options.pop("notices", {}).items()}
    return Tape(bars, folder / "tape", begin=12, notices=notices, **options)


def steps(bars):
    """Half long above the mean of five closes, else a third short: it trades often."""
    close = bars.close
    mean = np.stack([close[max(i - 4, 0) : i + 1].mean(0) for i in range(len(close))])
    target = np.where(close > mean, 0.45, -0.3)
    target[34:36] = 0.0
    target[36:37] = 1e-11  # too small to be an order
    return target
