"""`tools/mutations.py` changes what computes, and nothing that is for people."""

import json
import subprocess

import mutations
import pytest

TEXT = '''
"""A module of 3 lines."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os


def rate(paid: int | None = 2, whole: bool = True) -> float:
    """Return 1 + 1."""
    if paid is None or paid < 0 and not whole:
        raise ValueError(f"{paid + 1} is below {0 - 1}")
    print(paid * 7)
    return (paid - 0.5) / len("a" "b")
'''


def test_operators_comparisons_and_numbers_are_changed_and_messages_are_not():
    found = {(one.old, one.new) for one in mutations.mutations("rate.py", TEXT)}
    assert found == {
        ("2", "3"), ("True", "False"), ("is", "is not"), ("or", "and"), ("<", "<="), ("0", "1"),
        ("and", "or"), ("not ", ""), ("-", "+"), ("0.5", "2.0"), ("/", "*"),
    }  # fmt: skip
    for one in mutations.mutations("rate.py", TEXT):
        changed = one.applied(TEXT)
        assert changed != TEXT and len(changed.splitlines()) == len(TEXT.splitlines())
        compile(changed, "rate.py", "exec")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A package of two rooms, and tests that know one of them."""
    for room, text in {"envs": "def two():\n    return 1 + 1\n", "runs": "FLAG = True\n"}.items():
        (tmp_path / "nca_trader" / room).mkdir(parents=True)
        (tmp_path / "nca_trader" / room / "__init__.py").write_text("")
        (tmp_path / "nca_trader" / room / "one.py").write_text(text)
    (tmp_path / "nca_trader/__init__.py").write_text("")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_two.py").write_text(
        "from nca_trader.envs.one import two\n\n\ndef test_two():\n    assert two() == 2\n"
    )
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("build\n.venv\n")
    (tmp_path / ".venv").symlink_to(mutations.ROOT / ".venv")
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "EQUIVALENT", tmp_path / "mutations.toml")
    return tmp_path


@pytest.mark.heavy
def test_what_the_tests_find_is_told_from_what_they_miss(checkout, capsys):
    words = ["--rooms", "envs,runs", "--near-only", "--number", "6"]
    assert mutations.main(words) == 0
    printed = capsys.readouterr().out
    assert "envs: 3 of 3, 0 equivalent" in printed and "runs: 0 of 1, 0 equivalent" in printed
    assert "missed: nca_trader/runs/one.py: FLAG = True: True -> False" in printed
    rows = [json.loads(x) for x in (checkout / "build/mutations.jsonl").read_text().splitlines()]
    assert {row["by"] for row in rows} == {None, "tests/test_two.py::test_two"}
    # The same file is gone on with, and what was judged by hand is left out.
    sentence = "nca_trader/runs/one.py: FLAG = True: True -> False"
    (checkout / "mutations.toml").write_text(f"equivalent = [{sentence!r}]\n")
    assert mutations.main(words) == 0
    again = capsys.readouterr().out
    assert "/4 " not in again and "runs: 0 of 0, 1 equivalent" in again and "missed" not in again


def test_a_seed_draws_the_same(checkout):
    draw = [mutations.drawn(checkout, seed, 6, ("envs", "runs")) for seed in (1, 1, 2)]
    assert draw[0] == draw[1] and sorted(draw[0]) == sorted(draw[2]) and len(draw[0]) == 4
