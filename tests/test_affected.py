"""`make check` runs the tests that depend on a change, the nearest first."""

import subprocess

import affected
import pytest

FILES = {
    "nca_trader/__init__.py": "if TYPE_CHECKING:\n    from nca_trader.low import Thing\n",
    "nca_trader/low.py": "class Thing: ...\n",
    "nca_trader/high.py": "def f():\n    from nca_trader.low import Thing\n",
    "nca_trader/cli/__init__.py": "import_module(f'nca_trader.cli.{name}')\n",
    "nca_trader/cli/train.py": "from ..high import f\n",
    "nca_trader/alone.py": "'''Not about nca_trader.low, of which a docstring speaks.'''\n",
    "benchmarks/speed.py": "import nca_trader.low\n",
    "tests/shared.py": "from benchmarks import speed\n",
    "tests/cli/conftest.py": "from nca_trader.cli import main\n",
    "tests/cli/test_command.py": "def test(command): ...\n",
    "tests/test_public.py": "import nca_trader as nca\nnca.Thing\n",
    "tests/test_high.py": "from nca_trader import high\n",
    "tests/test_text.py": "PROGRAM = 'import sys; from nca_trader.high import f'\n",
    "tests/test_shared.py": "import shared\n",
    "tests/test_other.py": "import nca_trader\nPAGE = 'page.md'\n",
}


@pytest.fixture
def repository(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def chosen(repository, *changes):
    texts = {name: text for name, text in FILES.items() if "/test_" in name}
    return affected.affected(affected.graph(repository), set(changes), texts)


@pytest.mark.parametrize(
    ("changes", "tests"),
    [
        (["nca_trader/low.py"], ["public", "high", "shared", "text", "cli/command"]),
        (["nca_trader/high.py"], ["high", "text", "cli/command"]),
        (["nca_trader/cli/train.py"], ["cli/command"]),
        (["tests/cli/conftest.py"], ["cli/command"]),
        (["tests/test_other.py"], ["other"]),
        (["docs/page.md"], ["other"]),
        (["nca_trader/alone.py", "README.md"], []),
        ([], []),
    ],
)
def test_the_tests_that_depend_on_a_change_come_nearest_first(repository, changes, tests):
    found = [
        test.removeprefix("tests/").removesuffix(".py").replace("test_", "")
        for test in chosen(repository, *changes)
    ]
    assert sorted(found) == sorted(tests)
    assert found[:1] == tests[:1] and found[-1:] == tests[-1:]


def test_of_tests_as_near_those_of_the_files_own_room_and_name_come_first():
    texts = dict.fromkeys(
        ("tests/agents/test_a.py", "tests/envs/test_a.py", "tests/envs/test_gym.py"), ""
    )
    for file, order in (("envs/gym/vector.py", (2, 1, 0)), ("agents/nca.py", (0, 1, 2))):
        edges = {test: {f"nca_trader/{file}"} for test in texts}
        found = affected.affected(edges, {f"nca_trader/{file}"}, texts)
        assert found == [[*texts][place] for place in order]


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


def test_a_change_is_what_differs_from_where_main_was_left(tmp_path):
    git(tmp_path, "init", "-b", "main")
    for name in ("kept.py", "edited.py", "deleted.py"):
        (tmp_path / name).write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "checkout", "-b", "mine")
    (tmp_path / "edited.py").write_text("x = 1")
    git(tmp_path, "commit", "-a", "-m", "mine")
    git(tmp_path, "checkout", "main")
    (tmp_path / "kept.py").write_text("another's")
    git(tmp_path, "commit", "-a", "-m", "another's")
    git(tmp_path, "checkout", "mine")
    (tmp_path / "deleted.py").unlink()
    (tmp_path / "new.py").write_text("")
    assert affected.changed(tmp_path, "main") == {"edited.py", "deleted.py", "new.py"}


def test_the_seconds_bound_what_is_chosen(repository, monkeypatch, capsys):
    monkeypatch.setattr(affected, "ROOT", repository)
    monkeypatch.setattr(affected, "changed", lambda *_: {"nca_trader/low.py"})
    record = repository / affected.DURATIONS
    record.parent.mkdir(parents=True)
    record.write_text('{"tests/test_public.py": 10.0, "tests/test_high.py": 1000.0}')
    assert affected.main(["--seconds", "9"]) == 0
    said = capsys.readouterr()
    assert said.out.split() == [
        "tests/test_public.py",
        "tests/test_text.py",
        "tests/test_shared.py",
    ]
    assert "3 test files, about 9 s; `make test` runs the other 2" in said.err
