"""Reads the docstrings of the package as the Python API of the site shows them."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Makes the section "Example" of a docstring code; the parser knows "Examples" alone."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.M
            )
