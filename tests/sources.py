"""The package's own sources as syntax trees, for tests that read code instead of running it."""

import ast
import contextlib
import gc


@contextlib.contextmanager
def no_collection():
    """Holds the garbage collector back.

    CPython 3.11 raises SystemError where a collection inside `ast.parse` parses again, which
    formatting a traceback does; asyncio formats one for a failed task that is collected.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def parsed(path):
    """The syntax tree of a file."""
    return tree_of(path.read_text())


def tree_of(source):
    """The syntax tree of a source text."""
    with no_collection():
        return ast.parse(source)
