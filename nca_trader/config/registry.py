"""Built-in names of one kind, and names of your own code next to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from nca_trader.config.extensions import FORGET, installed_points, load, origin_of
from nca_trader.config.ranges import nearest
from nca_trader.errors import ConfigError

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """What names of one kind stand for: built in, of an installed package, or your own code.

    It lists the built-in and the installed names, and finds every name of your own code.
    """

    def __init__(
        self,
        kind: str,
        builtin: Mapping[str, T],
        made: Callable[[Any, str], T],
        spelled: Callable[[str], T | None] = lambda name: None,
    ):
        """Set what is built in.

        Args:
          kind: of the entry points, "features" for the group "nca_trader.features".
          builtin: by name.
          made: `(object, name) ->` what the registry holds; raises ConfigError for another object.
          spelled: what a name stands for that says it itself, e.g. "column:vix"; else None.
        """
        self.kind, self.builtin, self._made = kind, dict(builtin), made
        self._spelled = spelled
        self._own: dict[str, T] = {}
        FORGET.append(self._own.clear)

    def __getitem__(self, name: str) -> T:
        """Return what `name` stands for; the same object at each call.

        Raises:
          ConfigError: there is no such name, or its code does not give what is needed.
        """
        if name in self.builtin:
            return self.builtin[name]
        if name not in self._own and (found := self._spelled(name)) is not None:
            self._own[name] = found
        if name not in self._own:
            if origin_of(self.kind, name) is None:
                what = self.kind.removesuffix("s").replace("policie", "policy")
                raise ConfigError(
                    f"unknown {what} {name!r}; {nearest(name, self)}Give a known name, or "
                    "module:name of your own."
                )
            self._own[name] = self._made(load(self.kind, name), name)
        return self._own[name]

    def __contains__(self, name: object) -> bool:
        """Whether it is a name; nothing is imported."""
        if not isinstance(name, str) or name in self.builtin:
            return isinstance(name, str)
        return self._spelled(name) is not None or origin_of(self.kind, name) is not None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the built-in names, then those of installed packages."""
        yield from self.builtin
        yield from (name for name in installed_points(self.kind) if name not in self.builtin)

    def __len__(self) -> int:
        return sum(1 for _ in self)
