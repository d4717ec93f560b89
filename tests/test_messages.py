"""A message names arguments to a caller in Python, and quoted options to a command's user."""

import ast
import re

from sources import parsed

from nca_trader.errors import argument, options_named

OPTION = re.compile(r"(?:^|[\s`(])--[a-z][a-z-]+")
# What these say is typed into a shell, whoever reads it.
OF_A_SHELL = ("cli/", "scale/doctor.py", "scale/words.py", "scale/facts.py", "scale/supervisor.py")


def literals(tree):
    """The string literals of a module that are not docstrings, with their lines."""
    bodies = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, bodies) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in documents:
                yield node.lineno, node.value


def test_no_message_of_the_library_names_an_option_of_a_command(root):
    package = root / "nca_trader"
    found = [
        f"{path.relative_to(root)}:{line}: {text!r}"
        for path in sorted(package.rglob("*.py"))
        if not path.relative_to(package).as_posix().startswith(OF_A_SHELL)
        for line, text in literals(parsed(path))
        if " " in text and OPTION.search(text)
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
