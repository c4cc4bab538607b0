"""A Hub of one process: the routes of the download and upload protocol that huggingface_hub uses, over memory."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class FakeHub:
    """
    Attributes:
        endpoint (`str`): For `HF_ENDPOINT`.
        repos (`dict`): Repository, branch, path: content.
        requests (`list[str]`): Method and path of every request.
        uploads (`list[str]`): Hashes of the large files that were sent, in order.
        failures (`list[str]`): Parts of request lines, each of which fails once with status 500.
    """

    def __init__(self):
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.pull_requests: dict[str, list[dict]] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.uploads: list[str] = []
        self.failures: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info):
        self._server.shutdown()
        self._server.server_close()

    def add(self, repo_id: str, folder: Path, branch: str = "main", prefix: str = ""):
        """Puts a folder's files into a repository."""
        files = self.repos.setdefault(repo_id, {}).setdefault(branch, {})
        for path in folder.rglob("*"):
            if path.is_file():
                files[prefix + path.relative_to(folder).as_posix()] = path.read_bytes()

    def commit_of(self, repo_id: str, branch: str) -> str:
        content = repr(sorted(self.repos[repo_id][branch].items()))
        return hashlib.sha1(f"{repo_id} {branch} {content}".encode()).hexdigest()

    def branch_of(self, repo_id: str, revision: str) -> str | None:
        """The branch that a name or a commit stands for."""
        for branch in self.repos.get(repo_id, {}):
            if revision in (branch, self.commit_of(repo_id, branch)):
                return branch
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._handle(b"")

    do_GET = do_HEAD

    def do_POST(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._handle(body)

    do_PUT = do_POST

    def _handle(self, body: bytes):
        path = unquote(self.path.split("?")[0])
        line = f"{self.command} {path}"
        self.hub.requests.append(line)
        for part in self.hub.failures:
            if part in line:
                self.hub.failures.remove(part)
                return self._answer({"error": "out of order"}, status=500)
        parts = path.strip("/").split("/")
        if self.command in ("GET", "HEAD") and "resolve" in parts:
            return self._resolve(parts)
        if parts[:2] == ["api", "models"]:
            return self._model_api("/".join(parts[2:4]), parts[4:], body)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._lfs_batch(json.loads(body))
        if parts[0] == "blobs" and self.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == parts[1]
            self.hub.blobs[parts[1]] = body
            self.hub.uploads.append(parts[1])
            return self._answer({})
        return self._answer({"error": f"no route for {line}"}, status=404)

    def _answer(self, content, status=200, headers=None):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _missing(self, code: str):
        self._answer({"error": code}, status=404, headers={"X-Error-Code": code, "X-Error-Message": code})

    def _resolve(self, parts):
        at = parts.index("resolve")
        repo_id, revision, name = "/".join(parts[:at]), parts[at + 1], "/".join(parts[at + 2 :])
        if repo_id not in self.hub.repos:
            return self._missing("RepoNotFound")
        branch = self.hub.branch_of(repo_id, revision)
        if branch is None:
            return self._missing("RevisionNotFound")
        content = self.hub.repos[repo_id][branch].get(name)
        commit = self.hub.commit_of(repo_id, branch)
        if content is None:
            return self._answer(
                {"error": "EntryNotFound"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            )
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self._answer(content, headers={"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "none"})

    def _model_api(self, repo_id, rest, body):
        if repo_id not in self.hub.repos:
            return self._missing("RepoNotFound")
        kind, revision = (rest + ["revision", "main"])[:2] if not rest else (rest[0], rest[1])
        if kind == "branch":
            self.hub.repos[repo_id].setdefault(revision, dict(self.hub.repos[repo_id]["main"]))
            return self._answer({})
        branch = self.hub.branch_of(repo_id, revision)
        if branch is None:
            return self._missing("RevisionNotFound")
        files = self.hub.repos[repo_id][branch]
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._answer({"id": repo_id, "sha": self.hub.commit_of(repo_id, branch), "siblings": siblings})
        if kind == "tree":
            under = "/".join(rest[2:])
            found = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
                if name.startswith(under + "/" if under else "")
            ]
            return self._answer(found) if found or not under else self._missing("EntryNotFound")
        if kind == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._answer({"files": modes})
        if kind == "commit":
            return self._commit(repo_id, branch, body)
        return self._answer({"error": f"no route for {kind}"}, status=404)

    def _commit(self, repo_id, branch, body):
        new = {}
        for line in filter(None, body.splitlines()):
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                new[value["path"]] = self.hub.blobs[value["oid"]]
        answer = {"success": True}
        if "create_pr=1" in self.path:
            self.hub.pull_requests.setdefault(repo_id, []).append(new)
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{repo_id}/discussions/1"
        else:
            self.hub.repos[repo_id][branch].update(new)
        commit = self.hub.commit_of(repo_id, branch)
        self._answer({**answer, "commitOid": commit, "commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{commit}"})

    def _create(self, fields):
        repo_id = "/".join(filter(None, [fields.get("organization"), fields["name"]]))
        url = {"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}
        if repo_id in self.hub.repos:
            return self._answer({"error": "exists already", **url}, status=409)
        self.hub.repos[repo_id] = {"main": {}}
        if fields.get("private") or fields.get("visibility") == "private":
            self.hub.private.add(repo_id)
        return self._answer(url)

    def _lfs_batch(self, fields):
        objects = []
        for wanted in fields["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.blobs:
                entry["actions"] = {"upload": {"href": f"{self.hub.endpoint}/blobs/{wanted['oid']}", "header": {}}}
            objects.append(entry)
        self._answer({"transfer": "basic", "objects": objects})
