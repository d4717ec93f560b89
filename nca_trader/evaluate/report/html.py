"""Pieces of an HTML page: everything that is not already `Html` is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence


class Html(str):
    """Text that is markup already."""


def escaped(value: object) -> Html:
    """`value` as markup; a plain string cannot become a tag or leave an attribute."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def join(parts: Iterable[object]) -> Html:
    """The parts one after the other, each escaped."""
    return Html("".join(escaped(part) for part in parts))


def tag(name: str, *content: object, **attributes: str) -> Html:
    """One element. An attribute's trailing underscore is dropped, others become hyphens."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>{join(content)}</{name}>")


def table(
    caption: str,
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    marked: Iterable[int] = (),
) -> Html:
    """A table that scrolls sideways on a narrow screen.

    Args:
      caption: what the table holds; it is also the name of the scrolling region.
      headers: one a column. rows: cells; the first of each is the row's header.
      marked: numbers of the rows to make stand out.
    """
    marked = set(marked)
    head = tag("tr", *(tag("th", text, scope="col") for text in headers))
    body = []
    for number, (first, *cells) in enumerate(rows):
        line = (tag("th", first, scope="row"), *(tag("td", cell) for cell in cells))
        body.append(tag("tr", *line, class_="marked") if number in marked else tag("tr", *line))
    whole = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    return tag("div", whole, class_="scroll", role="region", aria_label=caption, tabindex="0")


def facts(pairs: Mapping[str, object]) -> Html:
    """Names and their values, one a line."""
    return tag(
        "dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs.items())
    )


def items(texts: Iterable[object]) -> Html:
    """A bulleted list."""
    return tag("ul", *(tag("li", text) for text in texts))


def section(heading: str, *content: object) -> Html:
    """A section under its heading."""
    return tag("section", tag("h2", heading), *content)
