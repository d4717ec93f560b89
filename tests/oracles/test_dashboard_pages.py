"""The dashboard in Chromium, by clicks."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from nca_trader.paper.journal.journal import Journal

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = "/usr/bin/chromium"
DAY = 86_400 * 10**9

pytestmark = pytest.mark.skipif(not os.path.exists(CHROMIUM), reason=f"there is no {CHROMIUM}")


def write_day(journal, day, equity):
    ts = day * DAY
    price = 100.0 + day
    with journal.transaction():
        journal.record("r", "bar", str(day), {"X": [price, price, price, price, 1.0]}, ts)
        logits = [[0.0, 0.0, 1.0 + day]]
        journal.record("r", "decision", str(day), {"target": [0.5], "logits": logits}, ts)
        body = {"equity": equity, "weight": [0.5], "cash": 500.0, "units": [5.0]}
        journal.record("r", "snapshot", str(day), body | {"value": 1000.0 * equity}, ts)


@pytest.fixture
def served(tmp_path):
    """Two sessions, served by another process: its address and their folder."""
    about = {"symbols": ["X"], "actions": "direction", "targets": [-0.5, 0.0, 0.5], "rules": {}}
    for name in ("one", "two"):
        with Journal(tmp_path / f"{name}.sqlite", lambda: 0) as journal:
            journal.record("r", "run_started", "", about, 0)
            for day in range(1, 40):
                write_day(journal, day, 1.0 + 0.001 * day)
    command = [sys.executable, "-m", "nca_trader", "dashboard", "--root", str(tmp_path)]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(process.send_signal, signal.SIGTERM)
        address = re.search(r"http://\S+/", process.stdout.readline())[0]
        yield address, tmp_path


@pytest.fixture
def page(served):
    """A page that fails the test where anything reaches its console."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, said = browser.new_page(), []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        yield page
        browser.close()
    assert said == []


def test_a_person_switches_between_sessions_by_clicks(served, page):
    page.goto(served[0])
    page.get_by_test_id("card-one.sqlite").click()
    sync_api.expect(page.locator("h1")).to_have_text("one.sqlite")
    sync_api.expect(page.get_by_test_id("banner")).to_contain_text("PAPER")
    page.get_by_test_id("nav").get_by_text("two.sqlite").click()
    sync_api.expect(page.locator("h1")).to_have_text("two.sqlite")
    sync_api.expect(page.locator("[data-chart=equity] canvas")).to_be_visible()


def test_the_page_follows_a_session_without_a_reload(served, page):
    address, folder = served
    page.goto(f"{address}s/one.sqlite")
    sync_api.expect(page.get_by_test_id("state")).to_contain_text("Gone")
    with Journal(folder / "one.sqlite", lambda: 50 * DAY) as journal:
        write_day(journal, 50, 0.9)
        sync_api.expect(page.get_by_test_id("state")).to_contain_text("Running")
        sync_api.expect(page.get_by_test_id("tile-return")).to_contain_text("-10.00%")
        sync_api.expect(page.get_by_test_id("why")).to_contain_text("100%")


def test_halt_is_two_clicks_and_shows_the_way_back(served, page):
    address, folder = served
    page.goto(f"{address}s/one.sqlite")
    page.get_by_test_id("halt-open").click()
    page.get_by_test_id("halt-reason").fill("prices look wrong")
    page.get_by_test_id("halt-now").click()
    sync_api.expect(page.get_by_test_id("halted-reason")).to_have_text(
        "prices look wrong (dashboard)"
    )
    sync_api.expect(page.get_by_test_id("state")).to_contain_text("Halt requested")
    sync_api.expect(page.get_by_test_id("resume")).to_contain_text("nca-trader resume --journal")
    sync_api.expect(page.get_by_test_id("halt")).to_be_hidden()
    halt = pathlib.Path(folder / "one.sqlite.halt")
    assert halt.read_text() == "prices look wrong (dashboard)\n"
    assert not (folder / "two.sqlite.halt").exists()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_its_window(served, page, width, scheme):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    for path in ("", "s/one.sqlite"):
        page.goto(served[0] + path)
        page.wait_for_selector("body[data-live]")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
