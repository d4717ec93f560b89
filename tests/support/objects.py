"""An object store in memory, with the methods of `obstore` that the package calls."""

import datetime
import hashlib
import pathlib

from nca_trader import cloud


class Objects(dict):
    """Keys to bytes. `puts` and `deletes` are the keys in order; `before` may raise at either."""

    def __init__(self):
        super().__init__()
        self.puts, self.deletes, self.gets = [], [], []
        self.before = lambda what, key: None
        self._times = {}

    def put(self, key, content):
        self.before("put", key)
        self.puts.append(key)
        self[key] = content.read_bytes() if isinstance(content, pathlib.Path) else bytes(content)
        self._times[key] = datetime.datetime.now(datetime.UTC)

    def head(self, key):
        self.before("head", key)
        if key not in self:
            raise FileNotFoundError(f"Object at location {key} not found")
        tag = hashlib.md5(self[key]).hexdigest()
        # A test may set an item itself.
        modified = self._times.setdefault(key, datetime.datetime.now(datetime.UTC))
        return {"path": key, "e_tag": tag, "size": len(self[key]), "last_modified": modified}

    def get(self, key):
        self.before("get", key)
        self.gets.append(key)
        return Got(self.head(key), self[key])

    def list(self, prefix):
        self.before("list", prefix)
        below = f"{prefix}/" if prefix else ""
        found = [self.head(key) for key in list(self) if key.startswith(below)]
        yield from (found[at : at + 2] for at in range(0, len(found), 2))  # as pages come

    def delete(self, keys):
        for key in [keys] if isinstance(keys, str) else keys:
            self.before("delete", key)
            self.deletes.append(key)
            self.pop(key, None)

    def below(self, prefix):
        return sorted(key[len(prefix) + 1 :] for key in self if key.startswith(f"{prefix}/"))


class Got:
    def __init__(self, meta, content):
        self.meta, self._content = meta, content

    def bytes(self):
        return self._content

    def stream(self):
        return (self._content[at : at + 7] for at in range(0, len(self._content), 7))


def stored(monkeypatch):
    """The bucket `b` of either scheme, in the place of a real one; there are no others."""
    objects = Objects()

    def store(scheme, bucket):
        assert scheme in cloud.SCHEMES
        return objects if bucket == "b" else Missing()

    monkeypatch.setattr(cloud, "_store", store)
    return objects


class Missing:
    """A bucket that is not there, as obstore tells of it."""

    def head(self, key):  # an answer without a body
        raise FileNotFoundError(f"Object at location {key} not found: 404 Not Found: ")

    def _named(self, *args):
        raise FileNotFoundError("Object not found: 404: <Error><Code>NoSuchBucket</Code>")

    def _listed(self, prefix):
        raise RuntimeError("Generic S3 error: 404: <Error><Code>NoSuchBucket</Code>")

    get = put = delete = _named
    list = _listed
