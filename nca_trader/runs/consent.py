"""Decides whether the own code that a run or an exported file names may load.

Such a file may be a stranger's, and all that it says about itself may be forged, its digests too.
So its code loads only where this user signed the file, or the caller allows it. A signature is an
HMAC-SHA256 over the sealed content with a key that never leaves the user's configuration folder. A
run is signed when it is made, and a file from elsewhere when its code is allowed for the first
time. A file that names no code of its own needs neither.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import pathlib
import secrets
import stat
from collections.abc import Collection, Mapping

from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.config.extensions import (
    origin_of,
    refuse_foreign,
    restrict_imports,
    split_frame,
    terms_of,
)
from nca_trader.config.modules import digest_of_files, locate
from nca_trader.errors import ConfigError, RunError, argument, in_a_command, logger, printable
from nca_trader.machine import write_once
from nca_trader.parallel import hosts

SIGNATURE = "signature"  # the file of a run folder
KEY_BYTES = 32
log = logger("nca_trader.runs")
# Signatures of what was allowed in this process, for files that cannot be signed: of a folder that
# is read-only, or of a user without a home.
_allowed: set[str] = set()
_spare = secrets.token_bytes(KEY_BYTES)  # the key of such a user, for this process


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnCode:
    """What a run records of a name of your own code.

    Attributes:
      kind: the group of its entry points, e.g. "features".
      package: that installed it, with its version; "" for your own module or file.
      files: see `digest_of_files`; "" where there is no source, as of a prompt.
    """

    kind: str
    files: str
    package: str = ""


def codes_of(named: Mapping[str, str]) -> dict[str, OwnCode] | None:
    """Return what a run records of the names that are not built in; None where all are.

    Args:
      named: the kind of each name that a config holds.

    Raises:
      ConfigError: a module is missing.
    """
    found = {}
    for text, kind in named.items():
        if (origin := origin_of(kind, text)) is not None:
            (module, _, _), package = origin
            files = "" if module == "__main__" else digest_of_files(module)
            found[text] = OwnCode(kind=kind, package=package, files=files)
    return found or None


def refuse_uninstalled(codes: Mapping[str, OwnCode] | None, where: str) -> None:
    """Refuse a run that names an entry point of a package that is not installed.

    Raises:
      RunError: in one line, which package.
    """
    for text, code in (codes or {}).items():
        if origin_of(code.kind, text) is None:
            raise RunError(
                f"{where}: {text} is of the package {code.package}, which is not installed; "
                "install it."
            )


def refuse_changed(codes: Mapping[str, OwnCode] | None, where: str) -> None:
    """Refuse a run whose own code is missing or is no longer the same.

    Args:
      codes: that it recorded.
      where: the run, for messages.

    Raises:
      RunError: in one line, which module is missing or was changed.
    """
    refuse_uninstalled(codes, where)
    for text, code in (codes or {}).items():
        origin = origin_of(code.kind, text)
        assert origin is not None
        (module, _, _), _ = origin
        if module == "__main__":
            continue  # `load` finds it in the process that defined it, and else refuses it
        try:
            file = locate(module)
            now = digest_of_files(module)
        except ConfigError as error:
            raise RunError(f"{where}: {text}: {error}") from None
        if now != code.files:
            raise RunError(
                f"{where}: {text} was changed in {file} after the run was made, so it is other "
                "code than the agent was trained with; restore it, or train again."
            )


def own_names(env: EnvConfig, agent: AgentConfig) -> dict[str, str]:
    """Return the kind of each name in the configs that is not built in."""
    found = {}
    for config in (env, env.costs, agent.policy, agent.learner):
        for field, kind in config.OWN.items():
            value = getattr(config, field)
            names = [value] if isinstance(value, str) else value or ()
            if kind == "features":  # of another time frame it is the same code
                names = [split_frame(name)[1] for name in names]
            if kind == "strategies":
                names = [rule for name in names for _, rule in terms_of(name)]
            # By its kind: a name of two kinds may be built in as one of them alone.
            found |= {text: kind for text in names if origin_of(kind, text) is not None}
    return found


def key_file() -> pathlib.Path:
    """Return the path of the user's key. It is made when the first run is signed.

    Raises:
      RuntimeError: the user has no home.
    """
    home = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(home):  # a relative one would be of the folder of the command
        home = pathlib.Path.home() / ".config"
    return pathlib.Path(home) / "nca_trader" / "signing.key"


def signature_of(content: bytes, make: bool = False) -> str:
    """Return the signature of a content with the user's key, in hexadecimal.

    Args:
      content: the sealed content.
      make: whether to make the key if there is none. Without one, the signature is valid in this
        process alone.

    Raises:
      ConfigError: others can read or change the key.
    """
    key = _spare
    try:
        file = key_file()
        if make and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_once(file, secrets.token_hex(KEY_BYTES))
        key = _read_key(file)
    except FileNotFoundError:
        pass  # nothing was signed yet
    except (OSError, RuntimeError) as error:
        log.warning("no signing key (%s): a run with own code is not signed", error)
    return hmac.new(key, content, "sha256").hexdigest()


def _read_key(file: pathlib.Path) -> bytes:
    # A link could lead to a file of another user, and a pipe would wait without end.
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        others = stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid()
        text = opened.read(4 * KEY_BYTES) if stat.S_ISREG(status.st_mode) and not others else b""
    with contextlib.suppress(ValueError):
        if len(key := bytes.fromhex(text.decode("ascii", "replace"))) == KEY_BYTES:
            return key
    raise ConfigError(
        f"{file}: is not a key of yours alone (a regular file of mode 0600 with "
        f"{2 * KEY_BYTES} hexadecimal digits); remove it, and a new one is made."
    )


def admit(
    names: Mapping[str, str],
    codes: Mapping[str, OwnCode] | None,
    content: bytes,
    signature: bytes,
    allow: bool | Collection[str] | None,
    where: str,
) -> str:
    """Refuse own code that this user has not consented to; nothing is imported.

    Args:
      names: the kind of each name that is not built in, as the configs hold them.
      codes: what the file records of them.
      content: what is signed, see `signature_of`.
      signature: of the file; empty without one.
      allow: True, or the names that the caller gave itself; False asks for a signature.
      where: the file, for messages.

    Returns:
      The signature to write into the file; "" where nothing is to be written.

    Raises:
      RunError: in one line, the name, its module, and what to do.
    """
    if not names:
        return ""

    def named(text: str) -> str:
        origin = origin_of(names[text], text)
        module = origin[0].module if origin else ""
        with contextlib.suppress(ConfigError):  # there is none
            module = f"{module} ({locate(module)})"
        return printable(f"{names[text]} {text} of {module}")

    try:
        for text, kind in names.items():
            refuse_foreign(text, kind)
    except ConfigError as error:
        raise RunError(f"{where}: {error}") from None
    if unknown := [text for text in names if text not in (codes or {})]:
        raise RunError(
            f"{where}: names own code {printable(unknown[0])} without a record of it; restore it "
            "from a copy, or train again."
        )
    refuse_changed(codes, where)
    made = signature_of(content)
    signed, known = hmac.compare_digest(signature, made.encode()), made in _allowed
    allowed = known or allow is True or (bool(allow) and names.keys() <= {*allow})
    if not signed and not allowed:
        remedy = argument("allow_code") + ("" if in_a_command() else "=True")
        raise RunError(
            f"{where}: names own code that you have not signed: {'; '.join(map(named, names))}; "
            f"read that code, then give {remedy} once."
        )
    if signed:
        restrict_imports({} if allowed else names)
        return ""
    if allow is True and not known:
        log.warning("%s: loads own code: %s", where, "; ".join(map(named, names)))
    made = signature_of(content, make=True)
    _allowed.add(made)
    return made if hosts.first() else ""
