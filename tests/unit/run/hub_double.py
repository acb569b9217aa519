"""A stand-in for the Hugging Face hub's HTTP interface: repositories, branches, tags, large files, commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN, USER = "hf_test", "ann"


class Hub:
    """What the hub holds: files by repository and branch."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, bytes] = {}  # large files by digest
        self.puts = 0
        self.fails_after: int | None = None  # large files that are taken before the connection breaks
        self.url = ""

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        found: dict[str, bytes] = self.repos[name]["branches"][branch]
        return found

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        given = json.loads(body) if body[:1] == b"{" and b"\n{" not in body else {}
        if path == "/api/whoami-v2":
            return 200, {"name": USER, "type": "user", "auth": {}}
        if path == "/api/validate-yaml":
            return 200, {}
        if path == "/api/repos/create":
            return self._create(given)
        if method == "PUT":
            return self._put(path, body)
        if (found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path)) is not None:
            return 200, {"transfer": "basic", "objects": [self._object(one) for one in given["objects"]]}
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/(\w+)/([^/?]+))?", path)
        if found is None or found[1] not in self.repos:
            return 404, {"error": f"no {path}"}
        return self._of_repo(found[1], found[3] or "revision", unquote(found[4] or "main"), given, body)

    def _create(self, given: dict[str, Any]) -> tuple[int, Any]:
        name = f"{given.get('organization') or USER}/{given['name']}"
        is_new = name not in self.repos
        if is_new:
            private = bool(given.get("private")) or given.get("visibility") == "private"
            self.repos[name] = {"private": private, "branches": {"main": {}}, "tags": {}}
        return (200 if is_new else 409), {"url": f"{self.url}/{name}", "name": name}

    def _put(self, path: str, body: bytes) -> tuple[int, Any]:
        if self.fails_after is not None and self.puts >= self.fails_after:
            return 403, {"error": "broken"}
        self.puts += 1
        assert hashlib.sha256(body).hexdigest() == path.rpartition("/")[2]
        self.stored[path.rpartition("/")[2]] = body
        return 200, {}

    def _object(self, one: dict[str, Any]) -> dict[str, Any]:
        known = {} if one["oid"] in self.stored else {"actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}}
        return {"oid": one["oid"], "size": one["size"], **known}

    def _of_repo(self, name: str, verb: str, at: str, given: dict[str, Any], body: bytes) -> tuple[int, Any]:
        repo = self.repos[name]
        branches = repo["branches"]
        if verb == "branch":
            is_new = at not in branches
            branches.setdefault(at, dict(branches["main"]))
            return (200 if is_new else 409), {}
        if verb == "tag":
            repo["tags"][given["tag"]] = dict(branches[at])
            return 200, {}
        if at not in branches:
            return 404, {"error": f"no revision {at}"}
        if verb == "revision":
            siblings = [{"rfilename": file} for file in branches[at]]
            return 200, {"id": name, "private": repo["private"], "sha": "0" * 40, "siblings": siblings}
        if verb == "tree":
            return 200, [{"type": "file", "path": file, "size": 1, "oid": "0"} for file in branches[at]]
        if verb == "preupload":
            modes = {True: "lfs", False: "regular"}
            files = [
                {"path": one["path"], "uploadMode": modes[one["path"].endswith(".safetensors")], "shouldIgnore": False}
                for one in given["files"]
            ]
            return 200, {"files": files}
        assert verb == "commit", verb
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                branches[at][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                branches[at][value["path"]] = self.stored[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40, "success": True}


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urlsplit(self.path).path
            is_known = path.startswith("/lfs/") or self.headers.get("Authorization") == f"Bearer {TOKEN}"
            code, said = hub.answer(self.command, path, body) if is_known else (401, {"error": "Invalid token"})
            content = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub.url
    finally:
        server.shutdown()
        server.server_close()
