"""Loads what `leakcheck FILE.py:NAME` names from the user's own file, which is run."""

from __future__ import annotations

import importlib.util
import inspect
import os
import pathlib
import sys
import types
from typing import Any

from nca_trader.agents.strategy import Strategy, arguments_needed
from nca_trader.config.ranges import nearest
from nca_trader.data.features import Feature
from nca_trader.errors import ConfigError, user_line


def subject_in(path: str | os.PathLike[str], name: str) -> Any:
    """Return a function of bars, a `Strategy` or a `Feature` from a Python file.

    Args:
      path: the file; it is imported, so its code runs.
      name: of a function of bars, of a Strategy or Feature, or of a function without arguments
        that returns a Strategy or a Feature.

    Raises:
      ConfigError: the file cannot be imported, or has no such subject.
    """
    module = _imported(pathlib.Path(path))
    subjects = [
        key
        for key, value in vars(module).items()
        if isinstance(value, Strategy | Feature)
        or (
            inspect.isfunction(value)
            # Functions that the file imports are not its own.
            and value.__module__ == module.__name__
            and arguments_needed(value) < 2
        )
    ]
    if name not in vars(module):
        what = (
            f"no {name!r} there; {nearest(name, subjects)}" if name else "which of its functions? "
        )
        there = (
            f"There are {', '.join(subjects)}." if subjects else "It defines no function of bars."
        )
        raise ConfigError(f"{path}: {what}{there} Write {path}:NAME.")
    subject, where = getattr(module, name), f"{path}:{name}"
    if isinstance(subject, Strategy | Feature):
        return subject
    # A class can be called too, but returns an object of its own.
    if not callable(subject) or isinstance(subject, type):
        raise ConfigError(
            f"{where}: a {type(subject).__name__} is not a strategy; name a function of bars, a "
            "Strategy or a Feature."
        )
    needed = arguments_needed(subject)
    if needed == 1:
        return subject
    if needed:
        raise ConfigError(
            f"{where}: takes {needed} arguments; a function of bars takes one, so give the others "
            "defaults."
        )
    try:
        built = subject()
    except Exception as error:
        what = f"{type(error).__name__} at {user_line(error)}: {' '.join(str(error).split())}"
        raise ConfigError(f"{where}: it can't be built ({what}); repair that.") from None
    if not isinstance(built, Strategy | Feature):
        raise ConfigError(
            f"{where}: takes no bars and returns a {type(built).__name__}; let it take bars, or "
            "return a Strategy or a Feature."
        )
    return built


def _imported(path: pathlib.Path) -> types.ModuleType:
    """Import the user's file; it finds its neighbours, as `python FILE` would let it."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; check the path.")
    # A name of its own, so that the file cannot take the place of an installed module.
    spec = importlib.util.spec_from_file_location(f"leakcheck_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: is not a Python file; name one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look up their own module there
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        # Nothing of the file ran, so the traceback has no line of it; the error has.
        what = f"{error.msg} (SyntaxError); repair it."
        raise ConfigError(f"{path} line {error.lineno}: {what}") from None
    # A script may end with `sys.exit`.
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__} at {user_line(error)}"
        text = " ".join(str(error).split()) or "no message"
        raise ConfigError(f"{path}: importing it raises {what}: {text}; repair that.") from None
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module
