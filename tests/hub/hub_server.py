"""A Hugging Face Hub of one's own on loopback: enough of its interface to push and pull models, and to go wrong."""

import base64
import hashlib
import itertools
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "SecretOfTheTests" * 2


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes], count=itertools.count()) -> str:  # noqa: B008
        sha = hashlib.sha1(f"{next(count)}{sorted(files)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


class FakeHub(ThreadingHTTPServer):
    """
    `repos` is what it holds, `blobs` what was uploaded by LFS, `requests` the (method, path) it was asked. A `fault`
    gets the handler and whether it is about to send the body: "cut" makes it break the connection, a number answer so.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict] = []
        self.fault: Callable[[Handler], str | int | None] = lambda handler: None
        self.lock = threading.RLock()

    def handle_error(self, request, client_address) -> None:
        pass  # a client that goes away


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.dispatch()

    do_HEAD = do_POST = do_PUT = do_GET

    # ---- answers

    def answer(self, status: int, body: bytes | dict | list = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault == "cut":
            self.wfile.write(content[: len(content) // 2])
            self.cut()
        else:
            self.wfile.write(content)

    def error(self, status: int, code: str = "", message: str = "") -> None:
        self.answer(status, {"error": message or code}, **({"X_Error_Code": code} if code else {}))

    def cut(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    # ---- requests

    def dispatch(self) -> None:
        url = urlsplit(self.path)
        self.parts = [unquote(part) for part in url.path.strip("/").split("/")]
        self.query = parse_qs(url.query)
        self.server.requests.append((self.command, url.path))
        self.server.headers.append(dict(self.headers))
        self.authorised = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.fault = self.server.fault(self)
        size = int(self.headers.get("Content-Length", 0))
        if self.fault == "cut" and self.command == "PUT":
            self.rfile.read(size // 2)
            return self.cut()
        self.body = self.rfile.read(size)
        if isinstance(self.fault, int):
            return self.error(self.fault, message="the tests want it so")
        with self.server.lock:
            match self.parts:
                case ["api", "repos", "create"]:
                    self.create()
                case ["api", "validate-yaml"]:
                    self.answer(200, {"errors": [], "warnings": []})
                case ["api", "models", user, name, *rest]:
                    self.api(f"{user}/{name}", rest)
                case [user, name, "info", "lfs", "objects", "batch"]:
                    self.batch(f"{user}/{name}".removesuffix(".git"))
                case ["lfs", oid] if self.command == "PUT":
                    if hashlib.sha256(self.body).hexdigest() != oid:
                        return self.error(400, message="checksum")
                    self.server.blobs[oid] = self.body
                    self.answer(200)
                case [user, name, "resolve", revision, *path]:
                    self.file(f"{user}/{name}", revision, "/".join(path))
                case _:
                    self.answer(200)

    def repo(self, repo_id: str, write: bool = False) -> Repo | None:
        repo = self.server.repos.get(repo_id)
        if repo is None or (repo.private and not self.authorised):
            return self.error(404 if self.authorised else 401, "RepoNotFound")
        if repo.gated and not self.authorised:
            return self.error(403, "GatedRepo")
        if write and not self.authorised:
            return self.error(401, message="Invalid username or password.")
        return repo

    def create(self) -> None:
        if not self.authorised:
            return self.error(401, message="Invalid username or password.")
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if repo_id.startswith("others/"):
            return self.error(403, message="You don't have the rights to create a model under this namespace")
        there = repo_id in self.server.repos
        if not there:
            repo = self.server.repos[repo_id] = Repo(private=asked.get("visibility") == "private")
            repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.answer(409 if there else 200, {"url": f"{self.server.url}/{repo_id}"})

    def api(self, repo_id: str, rest: list[str]) -> None:
        kind = rest[0] if rest else "revision"
        repo = self.repo(repo_id, write=kind in ("preupload", "commit", "branch"))
        if repo is None:
            return
        revision = rest[1] if len(rest) > 1 else "main"
        if kind == "branch":
            there = revision in repo.branches
            repo.branches.setdefault(revision, repo.branches["main"])
            return self.answer(409 if there else 200, {})
        sha = repo.resolve(revision)
        if sha is None:
            return self.error(404, "RevisionNotFound")
        files = repo.commits[sha]
        if kind == "revision":
            siblings = [{"rfilename": name, **self.described(name, content)} for name, content in files.items()]
            gated = "auto" if repo.gated else False
            self.answer(200, {"id": repo_id, "sha": sha, "private": repo.private, "gated": gated, "siblings": siblings})
        elif kind == "tree":
            entries = [{"type": "file", "path": n, **self.described(n, c, "oid")} for n, c in files.items()]
            self.answer(200, entries)
        elif kind == "preupload":
            modes = []
            for file in json.loads(self.body)["files"]:
                mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
                modes.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            self.answer(200, {"files": modes})
        elif kind == "commit":
            self.commit(repo_id, repo, revision, dict(files))

    @staticmethod
    def described(name: str, content: bytes, oid: str = "blobId") -> dict:
        sha1 = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        facts = {oid: sha1, "size": len(content)}
        if name.endswith(".safetensors"):
            sha256 = hashlib.sha256(content).hexdigest()
            key = "oid" if oid == "oid" else "sha256"
            facts["lfs"] = {key: sha256, "size": len(content), "pointerSize": 134}
        return facts

    def commit(self, repo_id: str, repo: Repo, branch: str, files: dict[str, bytes]) -> None:
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        sha = repo.commit(branch, files)
        self.answer(200, {"commitUrl": f"{self.server.url}/{repo_id}/commit/{sha}", "commitOid": sha})

    def batch(self, repo_id: str) -> None:
        if self.repo(repo_id, write=True) is None:
            return
        objects = []
        for item in json.loads(self.body)["objects"]:
            if item["oid"] not in self.server.blobs:
                # As on the Hub, the address itself is what lets one write.
                href = f"{self.server.url}/lfs/{item['oid']}?X-Amz-Signature=f00dcafe"
                item["actions"] = {"upload": {"href": href}}
            objects.append(item)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def file(self, repo_id: str, revision: str, path: str) -> None:
        repo = self.repo(repo_id)
        if repo is None:
            return
        sha = repo.resolve(revision)
        if sha is None:
            return self.error(404, "RevisionNotFound")
        content = repo.commits[sha].get(path)
        if content is None:
            return self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        facts = self.described(path, content)
        etag = facts["lfs"]["sha256"] if "lfs" in facts else facts["blobId"]
        headers = {"X_Repo_Commit": sha, "ETag": f'"{etag}"', "Accept_Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked and self.command == "GET":
            start, _, end = asked.removeprefix("bytes=").partition("-")
            start, end = int(start), int(end or len(content) - 1)
            headers["Content_Range"] = f"bytes {start}-{end}/{len(content)}"
            return self.answer(206, content[start : end + 1], **headers)
        self.answer(200, content, **headers)
