"""What a hub lists and where each file is had: Hugging Face, its mirrors, and ModelScope."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol
from urllib.parse import quote

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoFile

from kaiyuan.data.connection import BadAnswer, Connection, Result
from kaiyuan.errors import UserError


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub describes it.

    Attributes:
        path: its name in the repository, as the hub gives it: not to be trusted.
        size: bytes.
        algorithm: "sha256" of the content, or "git-sha1", git's own hash of a blob, which is all
            that Hugging Face tells of small files that are not in LFS.
        digest: hexadecimal.
    """

    path: str
    size: int
    algorithm: str
    digest: str


class Hub(Protocol):
    """The two questions that a download has for a hub."""

    def resolve(self, revision: str | None) -> str:
        """Return the revision to use, as exact as the hub can tell it."""

    def list_files(self, revision: str) -> list[RemoteFile]:
        """Return all files of the dataset at a revision."""

    def request(self, path: str, revision: str) -> tuple[str, dict[str, str]]:
        """Return the address of a file's content and the headers to ask for it with."""


class HuggingFaceHub:
    """Hugging Face, or a mirror that speaks its language.

    Args:
        connection: to the endpoint.
        repo: owner/name.
        kind: of the repository.
    """

    def __init__(
        self, connection: Connection, repo: str, kind: Literal["dataset", "model"] = "dataset"
    ) -> None:
        self.connection = connection
        self.repo = repo
        self.kind = kind
        endpoint = connection.endpoint
        # token=False: without it huggingface_hub would look for a token in the home folder.
        self.api = HfApi(endpoint=endpoint.url, token=endpoint.token or False)

    def resolve(self, revision: str | None) -> str:
        """Return the commit that a branch or tag stands for now."""

        def asked() -> str | None:
            return self.api.repo_info(self.repo, repo_type=self.kind, revision=revision).sha

        sha = self._ask(asked, attempts=4)
        if not sha:
            raise UserError(
                f"{self.connection.endpoint.host} does not tell the commit of {self.repo}"
            )
        return str(sha)

    def list_files(self, revision: str) -> list[RemoteFile]:
        """Return all files of the repository at a commit."""

        def listing() -> list[RemoteFile]:
            tree = self.api.list_repo_tree(
                self.repo, repo_type=self.kind, revision=revision, recursive=True
            )
            return [_described(entry) for entry in tree if isinstance(entry, RepoFile)]

        # huggingface_hub makes six attempts of its own within each of these.
        return self._ask(listing, attempts=2)

    def _ask(self, question: Callable[[], Result], attempts: int) -> Result:
        def asked() -> Result:
            try:
                return question()
            except HFValidationError as error:
                raise UserError(
                    f"a repository is called like owner/name, not {self.repo!r}"
                ) from error
            except (ValueError, KeyError, TypeError) as error:
                raise BadAnswer("its answer is not a listing of files") from error

        return self.connection.patiently(asked, attempts)

    def request(self, path: str, revision: str) -> tuple[str, dict[str, str]]:
        """Return the address of a file and the headers to ask for it with."""
        # Plain HTTP, never Xet: its transfers go to hosts that an endpoint cannot choose.
        url = hf_hub_url(
            self.repo,
            path,
            repo_type=self.kind,
            revision=revision,
            endpoint=self.connection.endpoint.url,
        )
        return url, _bearer(self.connection.endpoint.token)


def _described(entry: RepoFile) -> RemoteFile:
    if entry.lfs is not None:
        return RemoteFile(entry.path, int(entry.lfs.size), "sha256", entry.lfs.sha256)
    return RemoteFile(entry.path, int(entry.size), "git-sha1", entry.blob_id)


class ModelScopeHub:
    """ModelScope, by its public HTTP interface.

    Its own client asks storage regions beside the endpoint and follows any redirect; the two
    requests that are needed are made here, under the same rule about hosts as all others.
    """

    PAGE = 200  # entries a page, as its own client asks for

    def __init__(self, connection: Connection, repo: str) -> None:
        self.connection = connection
        self.base = f"{connection.endpoint.url}/api/v1/datasets/{quote(repo)}/repo"

    def resolve(self, revision: str | None) -> str:
        """Return the revision as given: ModelScope's listing pins the content by its hashes."""
        return revision or "master"

    def list_files(self, revision: str) -> list[RemoteFile]:
        """Return all files of the dataset."""
        return [
            RemoteFile(entry["Path"], int(entry["Size"]), "sha256", _sha256_in(entry))
            for entry in self._entries(revision)
            if entry.get("Type") != "tree"
        ]

    def _entries(self, revision: str) -> Iterator[dict[str, Any]]:
        number = 0
        while True:
            number += 1
            page = self.connection.patiently(partial(self._page, revision, number))
            yield from page
            if len(page) < self.PAGE:
                return

    def _page(self, revision: str, number: int) -> list[dict[str, Any]]:
        answer = self.connection.client().get(
            f"{self.base}/tree",
            params={
                "Revision": revision,
                "Recursive": "True",
                "PageNumber": number,
                "PageSize": self.PAGE,
            },
            headers=_bearer(self.connection.endpoint.token),
        )
        answer.raise_for_status()
        try:
            body = answer.json()
            files = body["Data"]["Files"] or []
            return [{**entry, "Path": str(entry["Path"])} for entry in files]
        except (ValueError, KeyError, TypeError) as error:
            # ModelScope also refuses with status 200 and the reason inside.
            raise BadAnswer("its answer is not a listing of files") from error

    def request(self, path: str, revision: str) -> tuple[str, dict[str, str]]:
        """Return the address of a file and the headers to ask for it with."""
        url = f"{self.base}?Revision={quote(revision, safe='')}&FilePath={quote(path, safe='')}"
        return url, _bearer(self.connection.endpoint.token)


def _sha256_in(entry: dict[str, Any]) -> str:
    digest = entry.get("Sha256")
    if not digest:
        raise UserError(
            f"the hub lists {entry['Path']} without a checksum, so it cannot be trusted"
        )
    return str(digest)


def _bearer(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}
