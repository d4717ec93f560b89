"""Pages in Chromium: what a reader sees, on screens and on paper, and what the scripts do."""

import csv
import os

import numpy as np
import pytest

import nca_trader as nca

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = "/usr/bin/chromium"
MOST = 250  # trades in sight that the price chart marks, as in chart.js
TRADES = {}  # of each page

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
    length = 100_000
    close = 100 * np.exp(np.cumsum(np.random.default_rng(0).normal(0, 1e-3, (length, 1)), axis=0))
    time = np.datetime64("2015-01-01", "ns") + np.arange(length) * np.timedelta64(30, "m")
    prices = dict.fromkeys(("open", "high", "low", "close"), close)
    lasting = nca.Bars(
        time=time, symbols=("X",), **prices, volume=np.ones_like(close), present=close > 0
    )
    turns = nca.backtest(lasting, np.where(np.arange(length) % 4 < 2, 1.0, 0.0), costs)
    turns.report(folder / "long.html")
    TRADES.update({"all.html": result.trades, "long.html": turns.trades})
    return folder


# Of each text that is shown, its contrast (WCAG 2.1) with the colours behind it.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => top.slice(0, 3).map((x, i) => x * top[3] + under[i] * (1 - top[3]));
  const light = (colour) => colour.map((x) => x / 255)
    .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    if (!element) return [255, 255, 255];
    return over(rgba(getComputedStyle(element).backgroundColor), behind(element.parentElement));
  };
  const found = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || element.closest("script, noscript, style, .chart, button:disabled")) continue;
    if (!element.getClientRects().length) continue;
    const style = getComputedStyle(element), ground = behind(element);
    const ink = over(rgba(element.closest("svg") ? style.fill : style.color), ground);
    const [low, high] = [light(ink), light(ground)].sort((x, y) => x - y);
    found.push([(high + 0.05) / (low + 0.05), text.slice(0, 40)]);
  }
  return found;
}"""


@pytest.fixture
def opened(browser, pages):
    """Opens a page, and fails at the end if its scripts said anything."""
    said, made = [], []

    def opened(name, **options):
        page = browser.new_page(**{"viewport": {"width": 1440, "height": 900}, **options})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((pages / name).as_uri())
        page.wait_for_selector("#trades tbody tr")
        made.append(page)
        return page

    yield opened
    for page in made:
        page.close()
    assert said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_fits_its_screen_and_can_be_read(opened, width, scheme):
    page = opened("all.html", viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.wait_for_selector("#price-chart canvas")
    page.evaluate("document.querySelectorAll('details').forEach((x) => { x.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Each plot shows all of its text.
    cut = page.evaluate(
        """() => [...document.querySelectorAll("svg")].flatMap((svg) => {
          const box = svg.getBoundingClientRect();
          if (!box.width) return [];
          return [...svg.querySelectorAll("text")].filter((text) => {
            const own = text.getBoundingClientRect();
            return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1
              || own.bottom > box.bottom + 1;
          }).map((text) => text.textContent);
        })"""
    )
    assert cut == []
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 400
    assert min(contrasts) >= [4.5]


def test_what_happened_comes_first_on_a_telephone(opened):
    page = opened("all.html", viewport={"width": 390, "height": 844})
    tops = [
        page.locator(x).first.bounding_box()["y"]
        for x in (".headline", "figure.first", ".tiles", ".means", "#price-chart")
    ]
    assert tops == sorted(tops) and tops[1] < 844 / 2
    assert page.locator(".tiles").first.locator(".tile").count() == 4
    assert not page.locator(".means").first.get_by_text("It does not show").is_visible()


def test_trades_are_sorted_paged_shown_on_the_chart_and_downloaded(opened, pages):
    page, trades = opened("all.html"), TRADES["all.html"]
    rows = page.locator("#trades tbody tr")

    def column(number):
        return [row.locator("th, td").nth(number).inner_text() for row in rows.all()]

    assert (
        rows.count() == 15 and f"1 to 15 of {len(trades)}" in page.locator("#trades").inner_text()
    )
    profit = page.get_by_role("button", name="Profit, of the capital")
    for ascending in (True, False):
        profit.click()
        wanted = trades["pnl"].sort_values(ascending=ascending)[:15]
        assert column(4) == [f"{100 * x:.2f}%" for x in wanted]
    # A win and a loss differ by a sign, and not by a colour alone.
    assert all(text.startswith("▲") for text in column(3))
    page.get_by_role("button", name="Next", exact=True).click()
    assert column(4)[0] == f"{100 * trades['pnl'].nlargest(16).iloc[-1]:.2f}%"
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    with open(download.value.path(), newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    ordered = trades.sort_values("pnl", ascending=False, kind="stable")
    assert download.value.suggested_filename == "trades.csv" and len(written) == len(trades)
    for name in ("entry_price", "exit_price", "pnl", "return", "bars"):
        read = [float(row[name]) for row in written]
        np.testing.assert_allclose(read, ordered[name].astype(float), rtol=1e-4)
    assert [row["entry"][:10] for row in written] == [str(x.date()) for x in ordered["entry"]]
    rows.first.click()
    at = str(ordered["entry"].iloc[15].date())
    box = page.locator("#price-chart").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 50)
    sync_api.expect(page.locator("#price-said")).to_contain_text(at[:4])


def test_the_page_of_a_hundred_thousand_bars_is_small_and_opens(opened, pages):
    assert (pages / "long.html").stat().st_size < 2_000_000
    page, trades = opened("long.html"), TRADES["long.html"]
    assert len(trades) > 20_000
    assert f"of {len(trades):,}" in page.locator("#trades").inner_text()


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
