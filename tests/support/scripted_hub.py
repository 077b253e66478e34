"""The calls of a model hub that a push makes, in memory: repository, files, commits, tags.

Files come in the commit itself, as a hub asks for small ones, or by the basic transfer of Git LFS,
as it may ask for weights. Xet, which a hub speaks with clients that have `hf_xet`, is not played.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedHub:
    def __init__(self) -> None:
        self.url = ""
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.files: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []
        self.tags: dict[str, str] = {}
        self.by_lfs: set[str] = set()
        """Files that it wants by LFS."""
        self.objects: dict[str, bytes] = {}
        """What came by LFS, by its SHA-256 (hex)."""
        self.verified: list[dict[str, Any]] = []
        self.fails = 0
        """Status of every reply; 0: it works."""
        self.storage_fails = 0
        """Status of each upload by LFS; 0: it works."""

    def answer(self, method: str, path: str, body: bytes) -> Any:
        place = path.partition("?")[0]
        if place == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/o/n", "name": "o/n", "id": "1"}
        if place.endswith("/refs"):
            tags = [
                {"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": at}
                for tag, at in self.tags.items()
            ]
            return {"branches": [], "tags": tags, "converts": []}
        if "/commits/" in place:
            at = self.tags.get(place.rpartition("/")[2], "")
            return [one for one in self.commits if one["id"] == at]
        if "/tree/" in place:
            return [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.files]
        if "/preupload/" in place:
            asked = json.loads(body)["files"]
            return {
                "files": [
                    {
                        "path": one["path"],
                        "uploadMode": "lfs" if one["path"] in self.by_lfs else "regular",
                        "shouldIgnore": False,
                    }
                    for one in asked
                ]
            }
        if place.endswith("/info/lfs/objects/batch"):
            return {"transfer": "basic", "objects": [self._wanted(one) for one in _objects(body)]}
        if place.startswith("/storage/"):
            self.objects[place.rpartition("/")[2]] = body
        if place == "/verify":
            self.verified.append(json.loads(body))
        if "/commit/" in place:
            return self._commit([json.loads(line) for line in body.splitlines()])
        if "/tag/" in place:
            self.tags[json.loads(body)["tag"]] = place.rpartition("/")[2]
        return {}

    def _wanted(self, one: dict[str, Any]) -> dict[str, Any]:
        """How an object is uploaded; it is not asked for twice."""
        oid = one["oid"]
        actions = {
            "upload": {"href": f"{self.url}/storage/{oid}"},
            "verify": {"href": f"{self.url}/verify"},
        }
        return {**one, **({} if oid in self.objects else {"actions": actions})}

    def _commit(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        oid = f"{len(self.commits) + 1:040x}"
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                self.files.pop(value["path"])
            else:
                self.commits.append(
                    {
                        "id": oid,
                        "title": value["summary"],
                        "message": value["description"],
                        "authors": [],
                        "date": "2026-01-01T00:00:00.000Z",
                    }
                )
        return {"commitOid": oid, "commitUrl": f"{self.url}/o/n/commit/{oid}", "hookOutput": ""}


def _objects(body: bytes) -> list[dict[str, Any]]:
    return [{"oid": one["oid"], "size": one["size"]} for one in json.loads(body)["objects"]]


@contextmanager
def scripted_hub() -> Iterator[ScriptedHub]:
    """Serve a hub on loopback."""
    hub = ScriptedHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            body = self._body()
            hub.tokens.add(self.headers.get("authorization", ""))
            fails = hub.storage_fails if self.path.startswith("/storage/") else hub.fails
            reply = json.dumps({} if fails else hub.answer(self.command, self.path, body))
            self.send_response(fails or 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply.encode())

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        do_GET = do_POST = do_PUT = _any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
