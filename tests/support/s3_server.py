"""A server on this machine that speaks of S3 what `obstore` asks, and what GCS has alike.

moto is such a server as well, and gave the same answers to the tests that use this one; but it
needs a python-dateutil below 3, and matplotlib one of 4.
"""

import email.utils
import http.server
import re
import threading
import urllib.parse
import xml.etree.ElementTree as ET
from xml.sax.saxutils import escape

from objects import Objects

PAGE = 3  # objects in one answer to a listing


class Server(http.server.ThreadingHTTPServer):
    """Use as a context manager. buckets: of each name its `Objects`.

    `status(method, path)` may give another status to answer with, or "" to hang up; asked: paths.
    by: (access key, method, path) of each request, of those who sign as S3 wants it.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.buckets, self.uploads, self.asked, self.by = {}, {}, [], []
        self.status = lambda method, path: None
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request, client_address):
        pass  # a client that was killed


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": len(body)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status, code):
        self.answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def handle_request(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # cut off: what is not whole is not stored
            return
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        bucket, _, key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        self.server.asked.append(self.path)
        if signed := re.search("Credential=([^/]*)/", self.headers.get("Authorization", "")):
            self.server.by.append((signed[1], self.command, url.path))
        status = self.server.status(self.command, self.path)
        objects = self.server.buckets.get(bucket)
        if status == "":
            self.close_connection = True
        elif status is not None:
            self.answer(status)
        elif objects is None:
            self.fail(404, "NoSuchBucket")
        elif key:
            getattr(self, f"of_object_{self.command}")(objects, key, query, body)
        else:
            getattr(self, f"of_bucket_{self.command}")(objects, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def of_bucket_GET(self, objects, query, body):
        below = sorted(key for key in objects if key.startswith(query.get("prefix", "")))
        first = int(query.get("continuation-token") or query.get("marker") or 0)
        more = len(below) > first + PAGE
        listed = [objects.head(key) for key in below[first : first + PAGE]]
        items = "".join(
            f"<Contents><Key>{escape(meta['path'])}</Key><Size>{meta['size']}</Size>"
            f"<LastModified>{meta['last_modified'].replace(microsecond=0).isoformat()}"
            f'</LastModified><ETag>"{meta["e_tag"]}"</ETag></Contents>'
            for meta in listed
        )
        token = f"<NextContinuationToken>{first + PAGE}</NextContinuationToken>" if more else ""
        text = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}"
        self.answer(200, f"<ListBucketResult>{text}</ListBucketResult>".encode())

    def of_bucket_POST(self, objects, query, body):
        assert "delete" in query
        keys = [item.text for item in ET.fromstring(body).iter() if item.tag.endswith("Key")]
        objects.delete(keys)
        text = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        self.answer(200, f"<DeleteResult>{text}</DeleteResult>".encode())

    def of_object_GET(self, objects, key, query, body):
        try:
            meta = objects.head(key)
        except FileNotFoundError:
            self.fail(404, "NoSuchKey")
            return
        modified = email.utils.format_datetime(meta["last_modified"], usegmt=True)
        self.answer(200, objects[key], ETag=f'"{meta["e_tag"]}"', Last_Modified=modified)

    of_object_HEAD = of_object_GET

    def of_object_PUT(self, objects, key, query, body):
        if "uploadId" in query:
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self.answer(200, ETag=f'"{query["partNumber"]}"')
        else:
            objects.put(key, body)
            self.answer(200, ETag=f'"{objects.head(key)["e_tag"]}"')

    def of_object_POST(self, objects, key, query, body):
        if "uploads" in query:
            name = str(len(self.server.uploads))
            self.server.uploads[name] = {}
            kind = "InitiateMultipartUploadResult"
            text = f"<Bucket>x</Bucket><Key>x</Key><UploadId>{name}</UploadId>"
        else:
            parts = self.server.uploads.pop(query["uploadId"])
            objects.put(key, b"".join(part for _, part in sorted(parts.items())))
            kind, text = "CompleteMultipartUploadResult", '<ETag>"whole"</ETag>'
        self.answer(200, f"<{kind}>{text}</{kind}>".encode())

    def of_object_DELETE(self, objects, key, query, body):
        self.server.uploads.pop(query.get("uploadId"), None)
        if "uploadId" not in query:
            objects.delete(key)
        self.answer(204)


def serving():
    """A server with one empty bucket, `real`."""
    server = Server()
    server.buckets["real"] = Objects()
    return server
