"""Paths in an object store, `gs://BUCKET/KEY` and `s3://BUCKET/KEY`, with the methods of a path.

A store has objects and no folders: a folder is what the keys below it have in common. Writing one
object is atomic, so several objects are committed by one that is written last. Both stores are
strongly consistent: everyone sees an object from then on. An object cannot be appended to.

The library is obstore (extra `cloud`; MIT, 16 MB), imported with the first URL, in 0.1 s. It
repeats a request that the network or the store failed, `RETRIES` times over about half a minute.
Path types over fsspec (etils.epath with s3fs) were tried in its place. They import in 3 s and add
40 MB, and they lack what a run folder needs: a write that is interrupted stores its first half, a
second listing does not see what another process wrote, and `stat` has no version of an object.
`tests/test_cloud.py` shows it.
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
from typing import Any, NamedTuple, NoReturn, TypeVar

from nca_trader.config.ranges import expect
from nca_trader.errors import ConfigError, StoreError, extra

T = TypeVar("T")
R = TypeVar("R")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*)")
SCHEMES = ("gs", "s3")
RETRIES = 8
AT_ONCE = 8  # requests, where several objects are read or written
CREDENTIALS = {
    "gs": "give GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "s3": "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}
# Types and texts of errors about keys: of a store that refuses one, and of a machine without one.
REFUSED = ("PermissionDeniedError", "UnauthenticatedError")
KEYLESS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "latest/api/token", "token request")


class Version(NamedTuple):
    """The contents of an object: two with one `tag` are equal. modified: seconds since 1970."""

    tag: str
    size: int
    modified: float


@dataclasses.dataclass(frozen=True)
class CloudPath:
    """An object or a folder in a store, with the methods of `pathlib.Path` that are used here.

    Every method that asks the store raises FileNotFoundError if the object does not exist,
    ConfigError if the bucket, credentials, a permission or the extra is missing, and StoreError if
    the store cannot be reached.
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
        return pathlib.PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        """The suffix of the name, as of a path."""
        return pathlib.PurePosixPath(self.key).suffix

    @property
    def parent(self) -> CloudPath:
        """The folder that it is in. The parent of a bucket is the bucket."""
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    def resolve(self) -> CloudPath:
        """Return itself: a URL is absolute and has no links."""
        return self

    def mkdir(self, mode: int = 0, parents: bool = True, exist_ok: bool = True) -> None:
        """Do nothing: a folder exists as soon as an object is below it."""

    def version(self) -> Version:
        """Return the version of the object."""
        return _version(self._ask(lambda store: store.head(self.key)))

    def is_file(self) -> bool:
        """Return whether an object has this key."""
        try:
            self.version()
        except FileNotFoundError:
            self.is_dir()  # unlike this answer, that of a listing says if the bucket is missing
            return False
        return True

    def is_dir(self) -> bool:
        """Return whether objects are below it."""
        return self._ask(lambda store: any(map(len, store.list(self.key or None))))

    def exists(self) -> bool:
        """Return whether it is an object or a folder."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[CloudPath]:
        """Yield the objects below it, at any depth."""
        yield from (self / name for name in self.below())

    def below(self) -> dict[str, Version]:
        """Return the version of every object below it, by the rest of its key, in order."""
        chunks = self._ask(lambda store: list(store.list(self.key or None)))
        start = len(self.key) + 1 if self.key else 0
        found = {meta["path"][start:]: _version(meta) for chunk in chunks for meta in chunk}
        return dict(sorted(found.items()))

    def read(self) -> tuple[bytes, Version]:
        """Return the object's bytes and their version."""

        def get(store: Any) -> tuple[bytes, Version]:
            result = store.get(self.key)
            return bytes(result.bytes()), _version(result.meta)

        return self._ask(get)

    def read_bytes(self) -> bytes:
        """Return the object's bytes."""
        return self.read()[0]

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the object's text."""
        return self.read_bytes().decode(encoding)

    def download(self, to: pathlib.Path) -> None:
        """Copy the object into a file, piece by piece, and make the file's folder."""
        to.parent.mkdir(parents=True, exist_ok=True)

        def get(store: Any) -> None:
            with open(to, "wb") as file:
                # A shard may be larger than the memory that is free.
                for piece in store.get(self.key).stream():
                    file.write(piece)

        self._ask(get)

    def put(self, content: bytes | pathlib.Path) -> None:
        """Write the object, from bytes or from a file: all of it, or the old one stays."""
        try:
            self._ask(lambda store: store.put(self.key, content))
        except FileNotFoundError as error:
            # The object need not exist, so the bucket is missing.
            self._no_bucket(error)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object. S3 does not say whether it existed."""
        try:
            self._ask(lambda store: store.delete(self.key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def delete(self, names: Iterable[str]) -> None:
        """Delete the objects of these names below it, as `below` gives them, in any order."""
        keys = [(self / name).key for name in names]
        if keys:
            self._ask(lambda store: store.delete(keys))

    def _ask(self, do: Callable[[Any], R]) -> R:
        try:
            return do(_store(self.scheme, self.bucket))
        except (ConfigError, StoreError):
            raise
        except Exception as error:  # the store has a type for some, and one for all others
            text, kind = str(error), type(error).__name__
            if "NoSuchBucket" in text:
                self._no_bucket(error)
            if isinstance(error, FileNotFoundError):
                missing = os.strerror(errno.ENOENT)
                raise FileNotFoundError(errno.ENOENT, missing, str(self)) from None
            if isinstance(error, OSError):  # of this machine's disk
                raise
            # The first line, without the store's XML: the rest is for programmers.
            line = text.partition("\n")[0].partition("<?xml")[0].strip(" :.")[:200]
            if "redirect" in text:
                raise ConfigError(
                    f"{self}: its bucket is in another region than AWS_REGION says; give that one."
                ) from error
            if kind in REFUSED or any(word in text for word in KEYLESS):
                raise ConfigError(
                    f"{self}: no credentials, or no right to do this ({line}); "
                    f"{CREDENTIALS[self.scheme]} of an account that may, see docs/guides/cloud.md."
                ) from error
            raise StoreError(
                f"{self}: the store failed or cannot be reached, at the first try and {RETRIES} "
                f"more ({line}); check the network and the endpoint, then give the same command "
                "again."
            ) from error

    def _no_bucket(self, error: Exception) -> NoReturn:
        raise ConfigError(
            f"{self.scheme}://{self.bucket}: there is no such bucket; check its name, or make it."
        ) from error


Place = pathlib.Path | CloudPath


def place(path: str | os.PathLike[str] | CloudPath, name: str = "path") -> Place:
    """Return the path, or the place in a store if it is a URL.

    Args:
      path: a path, or a gs:// or s3:// URL.
      name: of the caller's argument, for messages.

    Raises:
      ConfigError: not a path; a URL with another scheme, or one that names no bucket.

    Example:
      >>> place("s3://mine/runs/a").parent / "b"
      CloudPath(scheme='s3', bucket='mine', key='runs/b')
    """
    if isinstance(path, CloudPath):
        return path
    expect(name, path, str | os.PathLike, "a path, or a gs:// or s3:// URL")
    match = URL.fullmatch(os.fspath(path))
    if match is None:
        return pathlib.Path(path)
    scheme, bucket = match[1].lower(), match[2]
    parts = [part for part in match[3].split("/") if part]
    if scheme not in SCHEMES:
        raise ConfigError(
            f"{path}: {scheme}:// is not known here; give gs://BUCKET/NAME, s3://BUCKET/NAME or a "
            "path without a scheme."
        )
    if not bucket or {".", ".."} & {*parts}:
        raise ConfigError(f"{path}: give {scheme}://BUCKET/NAME, with no . or .. in NAME.")
    return CloudPath(scheme, bucket, "/".join(parts))


def local(path: str | os.PathLike[str] | CloudPath, what: str) -> pathlib.Path:
    """Return the path of something that can only be on this machine.

    Raises:
      ConfigError: it is a URL. `what` begins the sentence, e.g. "a journal".
    """
    if isinstance(path, CloudPath) or URL.fullmatch(os.fspath(path)):
        raise ConfigError(f"{path}: {what} lies on this machine's disk; give a path, not a URL.")
    return pathlib.Path(path)


def together(do: Callable[[T], R], each: Iterable[T]) -> list[R]:
    """Return the results of `do` for each, in order. Several run at once, since a store is far."""
    with ThreadPoolExecutor(AT_ONCE, "store") as pool:
        return list(pool.map(do, each))


def fetched(path: CloudPath) -> pathlib.Path:
    """Return a copy, in the user's cache folder, of an object or of all objects below a folder.

    It is fetched again if the store has other contents. The old copy is then deleted.

    Raises:
      FileNotFoundError: neither exists.
      ConfigError, StoreError: see `CloudPath`.
    """
    try:
        versions = {"": path.version()}
    except FileNotFoundError:
        versions = path.below()
        if not versions:
            raise
    # The name of a copy is a hash of its contents' versions, so a new version is another folder.
    contents = "".join(f"{name}\n{version.tag}\n" for name, version in versions.items())
    words = [hashlib.sha256(word.encode()).hexdigest()[:16] for word in (str(path), contents)]
    folder = cache_folder() / "fetched" / words[0]
    copy = folder / words[1] / path.name
    if copy.exists():
        return copy
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # the bucket may be private
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
        except OSError:  # another process was first; its copy has the same contents
            if not copy.exists():
                raise
    return copy


def cache_folder() -> pathlib.Path:
    """Return this package's folder in the user's cache folder. It need not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "nca_trader"


def _version(meta: Any) -> Version:
    modified = meta["last_modified"].timestamp()
    # All known stores have tags. Without one, this is as good as for a file.
    return Version(meta["e_tag"] or f"{meta['size']} {modified}", meta["size"], modified)


@functools.cache
def _store(scheme: str, bucket: str) -> Any:
    """Return the store of a bucket; keys, region and endpoint are read from the environment."""
    with extra(
        f"{scheme}://{bucket}: object stores need obstore, which is not installed; "
        "pip install obstore."
    ):
        import obstore.store  # pyright: ignore[reportMissingImports]
    make = obstore.store.S3Store if scheme == "s3" else obstore.store.GCSStore
    # By itself it waits two seconds in all; like this 8 at least, and mostly 20 to 40.
    backoff = {"init_backoff": datetime.timedelta(seconds=1), "base": 3}
    return make(
        bucket,
        client_options={"allow_http": True},  # for an endpoint of http that the user names
        retry_config={"max_retries": RETRIES, "backoff": backoff},
    )
