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
