"""A measured number or a picture names its script, its hardware and its date, or links to where."""

import re

import pytest
from documents import ROOT, pages

NOTEBOOKS = sorted(ROOT.glob("notebooks/*.py"))
# Rates, latencies and ratios of rates. What a page orders (`--every 5`) or explains (a half-life of
# 20 bars) is not measured, and neither are lengths of time without a rate.
MEASURED = re.compile(
    r"\d[\d.,]* ?[kMG]? ?(?:steps|bars|decisions|updates|evaluations|bar-evaluations|rows|frames"
    r"|combinations|accounts|bytes|MB|GB|GFLOP|TFLOP)(?:/s\b| per second| a second)"
    r"|\d[\d.,]* (?:ns|us|µs|ms)\b"
    r"|\d[\d.,]* times (?:as fast|faster|the rate|rejax|TorchTrade)"
)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+\.png)\)")
ANY_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
MONTH = "January February March April May June July August September October November December"
FACTS = {
    "date": re.compile(rf"\b20\d\d-\d\d-\d\d\b|\b(?:{MONTH.replace(' ', '|')}) 20\d\d\b"),
    "hardware": re.compile(r"\bcores?\b|\bGPU\b|\bH\d00\b|\bTPU\b|\bv5e|\bv5p"),
    "script": re.compile(r"benchmarks[./]|tools/|tests/|nca-trader [a-z]|\bmake [a-z]"),
}
ELSEWHERE = re.compile(r"lab-notes/|gallery\.md")


def lacking(text, name=""):
    """What a page with measured numbers or pictures does not say."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    if not (MEASURED.search(prose) or PICTURE.search(prose)):
        return []
    missing = [fact for fact, found in FACTS.items() if not found.search(text)]
    # A lab note is what the other pages link to, so it has all three itself.
    return [] if ELSEWHERE.search(prose) and "lab-notes/" not in name else missing


def names(paths):
    return [path.relative_to(ROOT).as_posix() for path in paths]


@pytest.mark.parametrize("name", [n for n in names([*pages(), *NOTEBOOKS]) if n != "CHANGELOG.md"])
def test_a_page_with_measured_numbers_names_script_hardware_and_date(name):
    assert lacking((ROOT / name).read_text(), name) == []


@pytest.mark.parametrize("name", names(NOTEBOOKS))
def test_a_notebook_names_what_made_its_pictures_where_and_when(name):
    first = (ROOT / name).read_text().partition("# %%\n")[0]
    assert all(found.search(first) for found in FACTS.values()), first


def test_a_caption_of_the_gallery_names_script_hardware_and_date():
    text = (ROOT / "docs" / "gallery.md").read_text()
    captions = ANY_PICTURE.split(text)[1:]
    assert len(captions) > 10
    for picture, caption in zip(captions[::2], captions[1::2], strict=True):
        caption = re.search(r"\*(.*?)\*\n", caption, re.S)[1]
        drawing = picture.endswith(".svg")  # it measures nothing
        for fact, found in FACTS.items():
            assert (drawing and fact != "date") or found.search(caption), f"{picture}: no {fact}"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("It runs 3.1 M steps/s.", ["date", "hardware", "script"]),
        ("3.1 M steps/s, 2026-11-21, `make bench`.", ["hardware"]),
        ("40 us on two cores, November 2026, `python -m benchmarks.live`.", []),
        ("8.4 times as fast; see [rates](lab-notes/environments.md).", []),
        ("![A curve](curve.png)", ["date", "hardware", "script"]),
        ("A window of 64 bars, 3 times the costs.\n```sh\necho 5 ms\n```", []),
    ],
)
def test_what_is_missing_is_found_and_nothing_else(text, missing):
    assert lacking(text) == missing
