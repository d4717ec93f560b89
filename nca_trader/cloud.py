"""Places in an object store, `gs://BUCKET/KEY` and `s3://BUCKET/KEY`, used as paths are.

A store has objects and no folders: a folder is what the keys below it have in common. A put of one
object is whole or not there, so what consists of several is committed by one that is put last.
Both stores are strongly consistent: what was put is there for everyone from then on. An object
can't be appended to.

The store is `obstore` (extra `cloud`), imported when the first URL is used. It repeats a request
that the network or the store failed, `RETRIES` times over about half a minute, at most three.
"""

from __future__ import annotations

import dataclasses
import datetime
import errno
import functools
import hashlib
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from nca_trader.config.ranges import expect
from nca_trader.errors import ConfigError, StoreError

T = TypeVar("T")
R = TypeVar("R")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*)")
SCHEMES = ("gs", "s3")
RETRIES = 8
AT_ONCE = 8  # requests, where several objects are put or read
CREDENTIALS = {
    "gs": "give GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "s3": "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}
# Of what a store says of a key that it does not know, and of asking a machine of the cloud for one.
REFUSED = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "latest/api/token", "token request")


@dataclasses.dataclass(frozen=True)
class Version:
    """Which contents of an object: two of one `tag` are the same bytes. modified: since 1970."""

    tag: str
    size: int
    modified: float


@dataclasses.dataclass(frozen=True)
class CloudPath:
    """An object or a folder in a store: of `pathlib.Path` what this package uses of it.

    Every method that asks the store raises FileNotFoundError for an object that is not there,
    ConfigError for a bucket, credentials or a right that is missing or an extra not installed,
    and StoreError where the store can't be reached.
    """

    scheme: str
    bucket: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> CloudPath:
        return dataclasses.replace(self, key=f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The name's, as of a path."""
        return pathlib.PurePosixPath(self.name).suffix

    @property
    def parent(self) -> CloudPath:
        """The folder it lies in; of a bucket the bucket."""
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    def resolve(self) -> CloudPath:
        """Itself: a URL is absolute and has no links."""
        return self

    def mkdir(self, mode: int = 0, parents: bool = True, exist_ok: bool = True) -> None:
        """Does nothing: a folder is there as soon as something lies below it."""

    def version(self) -> Version:
        """Which contents the object has now."""
        return _version(self._ask(lambda store: store.head(self.key)))

    def is_file(self) -> bool:
        """Whether there is an object of this key."""
        try:
            self.version()
        except FileNotFoundError:
            self.is_dir()  # unlike this answer, a listing's says whether the bucket is missing
            return False
        return True

    def is_dir(self) -> bool:
        """Whether objects lie below it."""
        return self._ask(lambda store: any(map(len, store.list(self.key or None))))

    def exists(self) -> bool:
        """Whether it is an object or a folder."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[CloudPath]:
        """The objects below it, at whatever depth."""
        yield from (self / name for name in self.below())

    def below(self) -> dict[str, Version]:
        """Every object below it, by what its key has beyond this one, in order."""

        def listed(store: Any) -> list[Any]:
            return [meta for chunk in store.list(self.key or None) for meta in chunk]

        start = len(self.key) + 1 if self.key else 0
        found = {meta["path"][start:]: _version(meta) for meta in self._ask(listed)}
        return dict(sorted(found.items()))

    def read(self) -> tuple[bytes, Version]:
        """The object's bytes, and which contents they are."""

        def get(store: Any) -> tuple[bytes, Version]:
            result = store.get(self.key)
            return bytes(result.bytes()), _version(result.meta)

        return self._ask(get)

    def read_bytes(self) -> bytes:
        """The object's bytes."""
        return self.read()[0]

    def read_text(self, encoding: str = "utf-8") -> str:
        """The object's text."""
        return self.read_bytes().decode(encoding)

    def download(self, to: pathlib.Path) -> None:
        """Copies the object into a file, piece by piece; its folder is made."""
        to.parent.mkdir(parents=True, exist_ok=True)

        def get(store: Any) -> None:
            with open(to, "wb") as file:
                for piece in store.get(self.key).stream():
                    file.write(piece)

        self._ask(get)

    def put(self, content: bytes | pathlib.Path) -> None:
        """Writes the object, from bytes or from a file: the whole, or what was there stays."""

        def put(store: Any) -> None:
            try:
                store.put(self.key, content)
            except FileNotFoundError as error:
                # Nothing need be there before: it is the bucket that is missing.
                self._no_bucket(error)

        self._ask(put)

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object; S3 does not say whether there was one."""
        try:
            self._ask(lambda store: store.delete(self.key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def delete(self, names: Iterable[str]) -> None:
        """Deletes the objects of these names below it, as `below` gives them, in any order."""
        keys = [(self / name).key for name in names]
        if keys:
            self._ask(lambda store: store.delete(keys))

    def _ask(self, do: Callable[[Any], R]) -> R:
        try:
            return do(_store(self.scheme, self.bucket))
        except (ConfigError, StoreError):
            raise
        except Exception as error:  # the store has a type for some, and one for all the rest
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        text, kind = str(error), type(error).__name__
        line = text.partition("\n")[0].partition("<?xml")[0].strip(" :.")[:200]
        if "NoSuchBucket" in text:
            self._no_bucket(error)
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from None
        if isinstance(error, OSError):
            raise error
        if "redirect" in text:
            raise ConfigError(
                f"{self}: its bucket is in another region than AWS_REGION says; give that one."
            ) from error
        denied = kind in ("PermissionDeniedError", "UnauthenticatedError")
        if denied or any(word in text for word in REFUSED):
            raise ConfigError(
                f"{self}: no credentials, or no right to do this ({line}); "
                f"{CREDENTIALS[self.scheme]} of an account that may, see docs/guides/cloud.md."
            ) from error
        raise StoreError(
            f"{self}: the store failed or cannot be reached, at the first try and {RETRIES} more "
            f"({line}); check the network and the endpoint, then give the same command again."
        ) from error

    def _no_bucket(self, error: Exception) -> NoReturn:
        raise ConfigError(
            f"{self.scheme}://{self.bucket}: there is no such bucket; check its name, or make it."
        ) from error


Place = pathlib.Path | CloudPath


def place(path: str | os.PathLike[str] | CloudPath, name: str = "path") -> Place:
    """The path, or the place in a store where it is a URL.

    Args:
      name: of the caller's argument, for messages.

    Raises:
      ConfigError: what is no path; a URL of another scheme, or one that names no bucket.
    """
    if isinstance(path, CloudPath):
        return path
    expect(name, path, str | os.PathLike, "a path, or a gs:// or s3:// URL")
    match = URL.fullmatch(os.fspath(path))
    if match is None:
        return pathlib.Path(path)
    scheme, bucket, key = match[1].lower(), match[2], match[3]
    if scheme not in SCHEMES:
        raise ConfigError(
            f"{path}: {scheme}:// is not known here; give gs://BUCKET/NAME, s3://BUCKET/NAME or a "
            "path without a scheme."
        )
    parts = [part for part in key.split("/") if part]
    if not bucket or {".", ".."} & {*parts}:
        raise ConfigError(f"{path}: give {scheme}://BUCKET/NAME, with no . or .. in NAME.")
    return CloudPath(scheme, bucket, "/".join(parts))


def local(path: str | os.PathLike[str], what: str) -> pathlib.Path:
    """The path of something that lies on this machine alone.

    Raises:
      ConfigError: it is a URL. `what` begins the sentence, e.g. "a journal".
    """
    if isinstance(path, CloudPath) or URL.fullmatch(os.fspath(path)):
        raise ConfigError(f"{path}: {what} lies on this machine's disk; give a path, not a URL.")
    return pathlib.Path(path)


def together(do: Callable[[T], R], each: Iterable[T]) -> list[R]:
    """What `do` gives for each, in order; several at once, since a store is far away."""
    with ThreadPoolExecutor(AT_ONCE, "store") as pool:
        return list(pool.map(do, each))


def fetched(path: CloudPath) -> pathlib.Path:
    """A copy of an object, or of all below a folder, in the user's cache folder.

    It is fetched again when the store has other contents; the copy before is then deleted.

    Raises:
      FileNotFoundError: there is neither. ConfigError, StoreError: see `CloudPath`.
    """
    try:
        versions = {"": path.version()}
    except FileNotFoundError:
        versions = path.below()
        if not versions:
            raise
    word = "".join(f"{name}\n{version.tag}\n" for name, version in versions.items())
    folder = cache_folder() / "fetched" / _short(str(path))
    copy = folder / _short(word) / path.name
    if copy.exists():
        return copy
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Made elsewhere and moved: another process may look for the same copy.
    with tempfile.TemporaryDirectory(dir=folder.parent) as part:
        into = pathlib.Path(part) / copy.parent.name
        objects = {path / name if name else path: into / copy.name / name for name in versions}
        together(lambda item: item[0].download(item[1]), objects.items())
        for older in folder.iterdir():
            if older != copy.parent:
                shutil.rmtree(older, ignore_errors=True)
        try:
            into.rename(copy.parent)
        except OSError:
            if not copy.exists():
                raise
    return copy


def cache_folder() -> pathlib.Path:
    """This package's folder in the user's cache folder; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "nca_trader"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version(meta: Any) -> Version:
    modified = meta["last_modified"].timestamp()
    # Every store that we know has tags; where one has none, this is as good as of a file.
    return Version(meta["e_tag"] or f"{meta['size']} {modified}", meta["size"], modified)


@functools.cache
def _store(scheme: str, bucket: str) -> Any:
    """The store of a bucket; keys, region and endpoint are read from the environment."""
    try:
        import obstore.store  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            f"{scheme}://{bucket}: object stores need obstore, which is not installed; "
            "pip install 'nca-trader[cloud]'."
        ) from None
    make = obstore.store.S3Store if scheme == "s3" else obstore.store.GCSStore
    # By itself it waits two seconds in all; so 8 at least, and mostly 20 to 40.
    backoff = {"init_backoff": datetime.timedelta(seconds=1), "base": 3}
    return make(
        bucket,
        client_options={"allow_http": True},  # where the endpoint that the user names is of http
        retry_config={"max_retries": RETRIES, "backoff": backoff},
    )
