"""A small hub over real HTTP on this machine, with the faults that real ones have."""

import contextlib
import hashlib
import io
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

REPO = "owner/data"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ERROR_PAGE = b"<html>" + b"x" * 622 + b"</html>"  # 635 bytes, as in the public reports


def parquet_bytes(rows: int, seed: int = 0) -> bytes:
    """A parquet file that does not compress to nothing."""
    text = [hashlib.sha256(b"%d %d" % (seed, row)).hexdigest() * 4 for row in range(rows)]
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": text}), sink, compression="zstd")
    return sink.getvalue()


@dataclass
class Behaviour:
    """What the server does; tests change it while it runs.

    ``faults`` maps a file's path to a list of faults, one for each of its next answers:
    "429", "503", "403", "404", "page", "page-chunked", "stall" (no answer for 63 s), "cut", "flip",
    "reset", "whole" (ignores the range), "shifted" (another range), "longer"; "" is none.
    """

    files: dict[str, bytes]
    claimed: dict[str, int] = field(default_factory=dict)  # sizes listed in place of the true ones
    small: set[str] = field(default_factory=set)  # listed as git blobs, not LFS
    faults: dict[str, list[str]] = field(default_factory=dict)
    listing_faults: list[str] = field(default_factory=list)
    redirect_to: str | None = None  # another host:port for the content
    ignore_ranges: bool = False
    bytes_per_second: float | None = None
    retry_after: str = "1"
    page_size: int = 1000


class HubServer:
    """The server and its diary: ``requests`` holds (host, path, headers) in order."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.behaviour = Behaviour(dict(files))
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.times: list[float] = []
        server = self
        self.httpd = _Httpd(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": server}))
        self.port = self.httpd.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.httpd.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.httpd.shutdown()
        self.httpd.server_close()

    def gets(self, name: str) -> list[dict[str, str]]:
        """The headers of each request for the content of a file."""
        return [headers for _, path, headers in self.requests if path.endswith(name)]


class _Httpd(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A client that was killed is no news."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        headers = {name.lower(): value for name, value in self.headers.items()}
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        if path == f"/api/v1/datasets/{REPO}/repo":
            path = f"/datasets/{REPO}/resolve/master/{query['FilePath'][0]}"
        self.hub.requests.append((headers["host"], path, headers))
        self.hub.times.append(time.monotonic())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.answer(path, query, headers)

    def answer(self, path, query, headers):
        behaviour = self.hub.behaviour
        if path.startswith("/api/"):
            if behaviour.listing_faults:
                return self.refuse(behaviour.listing_faults.pop(0))
            if path == f"/api/v1/datasets/{REPO}/repo/tree":
                return self.modelscope_listing(query)
            if "/tree/" in path:
                return self.hugging_face_listing(path.split("/tree/")[1].partition("/")[2], query)
            if path.startswith((f"/api/datasets/{REPO}", f"/api/models/{REPO}")):
                return self.json({"id": REPO, "sha": COMMIT, "siblings": [], "tags": []})
        before, marker, after = path.partition(f"/{REPO}/resolve/")
        if marker and before in ("/datasets", ""):
            name = after.partition("/")[2]
            if behaviour.redirect_to and headers["host"] != behaviour.redirect_to:
                return self.send(
                    302, b"", {"Location": f"http://{behaviour.redirect_to}{self.path}?signature=s"}
                )
            if name in behaviour.files:
                return self.content(name, headers)
        return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def hugging_face_listing(self, folder, query):
        folder = folder.strip("/") + "/" if folder.strip("/") else ""
        below = {
            name: data
            for name, data in sorted(self.hub.behaviour.files.items())
            if name.startswith(folder)
        }
        if not below:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        entries = []
        if query.get("recursive", ["false"])[0].lower() != "true":
            deeper = [name for name in below if "/" in name.removeprefix(folder)]
            folders = {folder + name.removeprefix(folder).split("/")[0] for name in deeper}
            below = {name: data for name, data in below.items() if name not in deeper}
            entries = [{"type": "directory", "path": name, "oid": COMMIT} for name in folders]
        entries += [self.described(name, data) for name, data in below.items()]
        return self.page(entries, query)

    def described(self, name, data):
        behaviour = self.hub.behaviour
        size = behaviour.claimed.get(name, len(data))
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry = {"type": "file", "path": name, "size": size, "oid": blob}
        if name not in behaviour.small:
            sha = hashlib.sha256(data).hexdigest()
            entry |= {"lfs": {"oid": sha, "size": size, "pointerSize": 134}, "xetHash": sha}
        return entry

    def page(self, entries, query):
        behaviour = self.hub.behaviour
        start = int(query.get("cursor", ["0"])[0])
        end = start + behaviour.page_size
        more = {}
        if end < len(entries):
            address = f"{self.hub.url}{urlsplit(self.path).path}?recursive=true&cursor={end}"
            more = {"Link": f'<{address}>; rel="next"'}
        return self.json(entries[start:end], more)

    def modelscope_listing(self, query):
        number, size = int(query["PageNumber"][0]), int(query["PageSize"][0])
        entries = [{"Path": "phase1", "Type": "tree", "Size": 0}]
        for name, data in sorted(self.hub.behaviour.files.items()):
            sha = hashlib.sha256(data).hexdigest()
            entries.append({"Path": name, "Type": "blob", "Size": len(data), "Sha256": sha})
        page = entries[(number - 1) * size : number * size]
        return self.json({"Code": 200, "Success": True, "Data": {"Files": page}})

    def content(self, name, headers):
        behaviour = self.hub.behaviour
        data = behaviour.files[name]
        faults = behaviour.faults.get(name, [])
        fault = faults.pop(0) if faults else ""
        if fault in ("429", "503", "403", "404", "page", "page-chunked", "stall"):
            return self.refuse(fault)
        if fault == "flip":
            data = data[:100] + bytes([data[100] ^ 1]) + data[101:]
        if fault == "longer":
            return self.send(200, data + b"more", {})
        start, end, status, more = 0, len(data), 200, {}
        wanted = headers.get("range")
        if wanted and not behaviour.ignore_ranges and fault != "whole":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, status = int(first) - (10 if fault == "shifted" else 0), 206
            end = min(int(last) + 1, len(data)) if last else len(data)
            more = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        body = data[start:end]
        stop = len(body) // 2 if fault in ("cut", "reset") else len(body)
        return self.send(status, body, more, stop, abrupt=fault == "reset")

    def refuse(self, fault):
        if fault == "stall":
            time.sleep(63)
            self.close_connection = True
            return None
        if fault == "page":
            return self.send(200, ERROR_PAGE, {"Content-Type": "text/html"})
        if fault == "page-chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(ERROR_PAGE), ERROR_PAGE))
            return None
        wait = {"Retry-After": self.hub.behaviour.retry_after} if fault == "429" else {}
        return self.send(int(fault), b"sorry", wait)

    def json(self, value, more=None):
        self.send(
            200, json.dumps(value).encode(), {"Content-Type": "application/json", **(more or {})}
        )

    def send(self, status, body, more, stop=None, abrupt=False):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in more.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.pour(body[:stop])
        if stop is not None and stop < len(body):
            self.close_connection = True
            if abrupt:  # a reset in place of an orderly end
                self.connection.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")
                self.connection.close()

    def pour(self, body):
        speed = self.hub.behaviour.bytes_per_second
        if speed is None:
            self.wfile.write(body)
            return
        step = 4096
        for start in range(0, len(body), step):
            self.wfile.write(body[start : start + step])
            self.wfile.flush()
            time.sleep(step / speed)
