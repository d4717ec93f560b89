"""Pages in Chromium: nothing overflows, on screens and on paper, and the price chart draws."""

import os

import numpy as np
import pytest

import nca_trader as nca

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = "/usr/bin/chromium"
MOST = 250  # trades in sight that the price chart marks, as in chart.js

pytestmark = pytest.mark.skipif(not os.path.exists(CHROMIUM), reason=f"there is no {CHROMIUM}")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of a result with a sweep and folds; one with more trades than fit in sight."""
    folder = tmp_path_factory.mktemp("pages")
    bars, costs = nca.sample_bars("sp500").select("SP500"), nca.Costs(commission=5e-4)
    grid = {"fast": [5, 10, 20], "slow": [40, 60, 80]}
    table = nca.sweep(bars[-900:], nca.rules.sma_cross, grid, costs, trials=None)
    walk = nca.walk_forward(
        bars[-900:], nca.rules.sma_cross, costs, grid=grid, train=400, test=200, trials=None
    )
    result = nca.backtest(bars, nca.rules.sma_cross(10, 30), costs)
    command = "nca-trader backtest --data 'a folder/it is.csv' " + "--param fast=10 " * 30
    nca.report(
        bars, result, folder / "all.html", sweep=table, folds=walk.folds, command=command.strip()
    )
    daily = np.where(np.arange(len(bars)) % 4 < 2, 1.0, 0.0)
    busy = nca.backtest(bars, daily, costs)
    assert len(busy.trades) > MOST
    busy.report(folder / "busy.html")
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_a_page_fits_its_screen_and_says_nothing_in_the_console(browser, pages, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((pages / "all.html").as_uri())
    page.wait_for_selector("#price-chart canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert said == []
    page.close()


def test_no_table_is_cut_on_paper(browser, pages):
    page = browser.new_page(viewport={"width": 718, "height": 1000})  # A4 at 96 dots per inch
    page.emulate_media(media="print")
    page.goto((pages / "all.html").as_uri())
    page.wait_for_selector("#price-chart canvas")
    widths = page.evaluate(
        "[...document.querySelectorAll('.scroll, pre')].map(x => [x.scrollWidth, x.clientWidth])"
    )
    assert len(widths) > 8
    assert all(needed <= there + 1 for needed, there in widths)
    page.close()


def test_trades_are_marked_once_few_enough_are_in_sight(browser, pages):
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto((pages / "busy.html").as_uri())
    said = page.locator("#price-said")
    sync_api.expect(said).to_contain_text("zoom in")
    sync_api.expect(said).to_contain_text("SP500")
    page.click("[data-zoom='0.1']")
    sync_api.expect(said).not_to_contain_text("zoom in")
    page.close()
