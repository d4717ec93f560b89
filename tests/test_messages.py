"""A message names arguments to a caller in Python, and quoted options to a command's user.

What a message or a page says to install is what the project needs, and never a package that a
registry would look up under this project's name: it is published nowhere, so anyone may take it.
"""

import os
import pathlib
import re
import subprocess
import tomllib

import pytest
from sources import literals, parsed

from nca_trader.errors import argument, options_named

OPTION = re.compile(r"(?:^|[\s`(])--[a-z][a-z-]+")
# What these say is typed into a shell, whoever reads it.
OF_A_SHELL = ("cli/", "scale/doctor.py", "scale/words.py", "scale/facts.py", "scale/manifest.py")


@pytest.fixture(scope="module")
def texts(root):
    """Every text in the package's files that is no docstring: its file, its line and itself."""
    package = root / "nca_trader"
    return [
        (path.relative_to(package).as_posix(), line, text)
        for path in sorted(package.rglob("*.py"))
        for line, text in literals(parsed(path))
    ]


def test_no_message_of_the_library_names_an_option_of_a_command(texts):
    found = [
        f"{file}:{line}: {text!r}"
        for file, line, text in texts
        if not file.startswith(OF_A_SHELL) and " " in text and OPTION.search(text)
    ]
    assert found == []


def test_an_argument_is_named_as_its_user_writes_it():
    assert argument("run_dir") == "run_dir"
    assert argument("columns", "dividend=Adj Close/close") == 'columns="dividend=Adj Close/close"'
    assert argument("steps", 0) == "steps=0"
    with options_named():
        assert argument("run_dir") == "--run" and argument("overrides") == "--set"
        said = argument("columns", "dividend=Adj Close/close")
        assert said == "--columns 'dividend=Adj Close/close'"
        assert argument("min_agreement", -1) == "--min-agreement=-1"
    assert argument("steps") == "steps"


# Registries compare names without regard to case, and `-`, `_` and `.` as one.
NAME = r"nca[-_.]+trader"
WORD = rf"{NAME}(?=$|[\s\"'`),\];\\]|\s*[\[=<>!~@])"  # the whole name, and no path or file name
REFUSED = {
    "an extra": rf"{NAME}\[",
    "a version": rf"{NAME}\s*(?:[=~!<>]=|<|>)\s*v?\d|{NAME}[\"']?\s*=\s*[\"'](?:[\^~=<> ]*\d|\*)",
    "an address": rf"{NAME}\s*@\s*(?:git\+|hg\+|https?:)",
    # To the end of the command, and not of those that show or remove what is installed.
    "a command": r"(?<![\w-])(?:pip[\d.]*|pipx|uvx?|poetry|pdm|rye|pixi|conda|mamba)"
    r"(?![\"',\s\\]+(?:uninstall|show|list|check)\b)(?=[\"',\s\\])"
    rf"(?:(?!\s#)[^;&|`\n])*?(?<=[\s\"'=(]){WORD}",
    "a list": r"\b(?:dependencies|(?:install_)?requires|deps|PipInstall|EXTRA_PIP_PACKAGES)\b"
    rf"[\"'\]]*\s*[=:(][^\n]*?(?<=[\s\"'=,]){WORD}",
    # Without a host's name, which has a dot, an image is one of a public registry.
    "an image": r"(?:\bimage[\"']?\s*[=:]|\b(?-i:FROM)\s"
    r"|\bdocker\s+(?:run|pull)\s(?:[^\n;&|]*?\s)?)"
    rf"\s*[\"']?(?:[\w-]+/)*{NAME}(?=$|[\s\"':@])",
}
# A line of these files may be a requirement alone; in a script it stands in quotes in a comment.
REQUIREMENTS = re.compile(
    r"(?i)requirements|constraints|environment|pipfile|pyproject|\.lock$|\.in$"
)
ALONE = rf"[-\"'\s]*{NAME}[\"',\s]*(?:[;#\\].*)?"
COMMENT = rf"#\s*[\"']{NAME}[\"'].*"


def asks_a_registry(text, file=""):
    """The lines of a text that would make an installer look for this project in a registry."""
    joined = text.replace("\\\n", "  ")  # as long as before, so places stay
    found = [
        f"{file}:{text.count(chr(10), 0, match.start()) + 1}: {what}: {match[0][-80:]!r}"
        for what, pattern in REFUSED.items()
        for match in re.finditer(rf"(?im){pattern}", joined)
    ]
    line = ALONE if REQUIREMENTS.search(pathlib.PurePath(file).name) else COMMENT
    alone = re.finditer(rf"(?im)^{line}$", text)
    return found + [f"{file}: alone: {match[0]!r}" for match in alone]


def project_files(root):
    """The files of the project: those that git tracks, or without git all but what tools made."""
    try:
        names = subprocess.run(
            ["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True
        ).stdout.split("\0")[:-1]
    except (OSError, subprocess.CalledProcessError):
        names = []
    made = re.compile(r"__pycache__|build|dist|site|node_modules|\.git|\.venv.*|\..*_cache")
    for folder, folders, files in os.walk(root) if not names else ():
        folders[:] = [name for name in folders if not made.fullmatch(name)]
        names += [os.path.relpath(os.path.join(folder, name), root) for name in files]
    return [root / name for name in names if (root / name).is_file()]


@pytest.mark.heavy
def test_nothing_is_installed_from_a_registry_by_the_name_of_this_project(root, monkeypatch):
    files = project_files(root)
    wanted = {"README.md", "Makefile", "pyproject.toml", "requirements.lock", ".ci/run"}
    wanted |= {"docs/guides/plan.md", "tools/service/Containerfile", "notebooks/sb3_ppo.ipynb"}
    assert wanted <= {str(file.relative_to(root)) for file in files}
    found = []
    for file in files:
        content = file.read_bytes()
        if b"\0" not in content[:8192]:  # text
            name = str(file.relative_to(root))
            found += asks_a_registry(content.decode(errors="replace"), name)
    assert found == []
    monkeypatch.setenv("PATH", "")  # no git: a walk finds the same files, and what is new
    assert {*files} <= {*project_files(root)}


OURS = "nca" + "-trader"  # in two parts, as this file is read as well


@pytest.mark.parametrize(
    ("text", "file"),
    [
        (f"needs {OURS.replace('-', '_')}[arrow]", ""),
        (f"pip install -U NCA_{'Trader'}", ""),
        (f"python3.11 -m venv venv && venv/bin/pip install --no-deps {OURS.replace('-', '.')}", ""),
        (f"python -m pip install \\\n  --upgrade \\\n  {OURS}==0.2.0", ""),
        (f"uvx --from {OURS} run", ""),
        (f"conda install -c forge {OURS}", ""),
        (f'["pip", "install", "{OURS}"]', ""),
        (f'  "!pip install \\"{OURS} [sb3]\\"\\n",', "a.ipynb"),
        (f"{OURS} @ https://example.org/x.whl", ""),
        (f"{OURS}>=0.2", ""),
        (f'{OURS} = "^0.2"', "pixi.toml"),
        (f"numpy\n{OURS}\n", "requirements.txt"),
        (f"  - {OURS}", "environment.yml"),
        (f'dev = [\n    "{OURS}",\n]', "pyproject.toml"),
        (f'dependencies = ["numpy", "{OURS}"]', "own.toml"),
        (f'# /// script\n# dependencies = [\n#   "{OURS}",\n# ]', "own.py"),
        (f'PipInstall(packages=["{OURS}"])', ""),
        (f'image="somebody/{OURS}:0.2.0"', ""),
        (f"FROM {OURS}", "Containerfile"),
        (f"docker run --rm -v a:/var/lib/x somebody/{OURS} paper", ""),
    ],
)
def test_what_would_ask_a_registry_is_refused(text, file):
    assert asks_a_registry(text, file)


@pytest.mark.parametrize(
    ("text", "file"),
    [
        (f"`pip install '.[tpu]'`, then `{OURS} doctor`", ""),
        (f"pip install .     # then {OURS} doctor", ""),
        ("pip install dist/nca_trader-*.whl", ""),
        ("pip install './nca_trader-0.2.0-py3-none-any.whl[tpu]'", ""),
        (f"/opt/{OURS}/bin/pip install --no-cache-dir .", ""),
        (f"pip install /src/{OURS}", ""),
        (f"pip uninstall {OURS}", ""),
        (f"{OURS} [--help] COMMAND", ""),
        (f'name = "{OURS}"\n[project.scripts]\n{OURS} = "nca_trader.cli:main"', "pyproject.toml"),
        (f"image=registry.example.org/{OURS}:0.2.0", ""),
        (f"docker run -v journals:/var/lib/{OURS}/ trading", ""),
        (f"# {OURS}", "notes.md"),
    ],
)  # fmt: skip
def test_what_installs_a_checkout_or_a_wheel_passes(text, file):
    assert asks_a_registry(text, file) == []


def test_what_a_message_says_to_install_is_what_the_project_needs(root, texts):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = [need for each in project["optional-dependencies"].values() for need in each]
    needs = {re.split(r"[\[<>=; ]", need)[0]: need for need in [*extras, *project["dependencies"]]}
    needs |= {"jaxlib": needs["jax"]}  # comes with jax, and stays behind where jax alone is renewed
    needs |= dict.fromkeys(("tensorboard", "xprof"), "")  # for who looks at a profile
    said = [
        word.strip("'.")
        for *_, text in texts
        for words in re.findall(r"pip install ((?:['\w\[\].=<>-]+ ?)+)", text)
        for word in words.split()
        if word != "-U"
    ]
    assert {"starlette", "obstore", "optuna", "libtpu==0.0.51"} <= {*said}
    for word in said:
        name, pinned, _ = re.match(r"([\w-]+)(?:\[\w*\]?)?(==)?(.*)", word).groups()
        assert name in needs, word
        assert "==" not in needs[name] or (pinned and needs[name].startswith(word)), word
