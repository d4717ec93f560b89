"""Draws docs/dashboard.png: replays a rule over the sample bars, and photographs its page.

    PYTHONPATH=. .venv-oracles/bin/python tools/dashboard_picture.py

With `--journal FILE --out FILE` it photographs the page of another session. Needs Chromium.
"""

import argparse
import contextlib
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import nca_trader as nca

ROOT = pathlib.Path(__file__).parents[1]
CHROMIUM = "/usr/bin/chromium"


def replayed(folder: pathlib.Path) -> pathlib.Path:
    """Return the journal of a rule that traded two indices for six years, under limits."""
    bars, journal = folder / "bars.csv", folder / "mine.db"
    nca.write_bars(nca.sample_bars("sp500")[-1600:-90], bars)
    costs = nca.Costs(commission=1e-4, half_spread=1e-4)
    limits = {"max_gross": 1.25, "risk": nca.Limits(max_position=0.6, max_drawdown=0.3)}
    rule = nca.rules.sma_cross(20, 100)
    nca.paper_trade(rule, f"replay:{bars}", journal, costs=costs, **limits)
    return journal


@contextlib.contextmanager
def served(journal: pathlib.Path) -> Iterator[str]:
    """Yield the address of a dashboard that shows a journal."""
    command = [sys.executable, "-m", "nca_trader", "dashboard", "--journal", str(journal)]
    with subprocess.Popen([*command, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = re.search(r"http://\S+/", process.stdout.readline())
            assert address is not None
            yield address[0]
        finally:
            process.send_signal(signal.SIGTERM)


def main() -> None:
    """Write the picture."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--journal", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "dashboard.png")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--full", action="store_true", help="the whole page")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        journal = args.journal or replayed(folder)
        address = stack.enter_context(served(journal))
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        page = browser.new_page(
            viewport={"width": args.width, "height": 1080},
            color_scheme="dark" if args.dark else "light",
        )
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.goto(address)
        page.locator("a.card").click()
        page.locator("[data-chart=equity] canvas").wait_for()
        page.locator("[data-table=quality]").get_by_text("holds up to").wait_for()
        page.screenshot(path=args.out, full_page=args.full)
        browser.close()
    if said:
        sys.exit("the page's console is not empty: " + "; ".join(said))


if __name__ == "__main__":
    main()
