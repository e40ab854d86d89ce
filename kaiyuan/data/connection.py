"""One connection to one hub: which hosts may be contacted, who sees the token, how long to wait.

Everything that kaiyuan asks of a hub, by its own requests and by those of huggingface_hub, passes
through the client made here, so the rule about hosts holds in one place. The data of benchmarks
are another matter: lm-eval fetches them in its own way.
"""

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import get_session, set_client_factory
from huggingface_hub.utils import parse_ratelimit_headers

from kaiyuan.errors import UserError

HUGGING_FACE = "https://huggingface.co"
MODELSCOPE = "https://modelscope.cn"

# The data of a hub's large files lies on hosts of its own, to which it redirects. Only these public
# endpoints are known to do so; any other endpoint must serve the data itself.
_DATA_DOMAINS = {
    "huggingface.co": ("huggingface.co", "hf.co"),
    "modelscope.cn": ("modelscope.cn",),
    "www.modelscope.cn": ("modelscope.cn",),
}
_TIMEOUT = httpx2.Timeout(60, connect=15)  # seconds without a byte, not of the whole transfer
_LONGEST_WAIT = 900  # seconds; a server that asks for more is asked again after this long
_TOKENS = "HF_TOKEN or MODELSCOPE_API_TOKEN"  # environment variables
_RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}
_RETRIED_ERRORS = (httpx2.TransportError, ConnectionError, TimeoutError)

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class BadAnswer(Exception):
    """A server answered with something other than what was asked for; asking again may help."""


class Stopped(Exception):
    """Another worker failed, or the user pressed Ctrl-C: this one gives up quietly."""


@dataclass(frozen=True)
class Endpoint:
    """The hub to talk to, and the only hosts that may be contacted on its behalf."""

    url: str
    token: str | None = field(default=None, repr=False)
    more_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.url.rstrip("/"))
        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError:  # its text may have a password in it
            raise UserError(
                "the endpoint must be like https://huggingface.co: its host or port is wrong"
            ) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"the endpoint must be like https://huggingface.co, not {self.url!r}")
        if parts.username or parts.password or parts.query:
            raise UserError(
                "the endpoint must not carry a name, password or query: "
                f"put a token into the environment ({_TOKENS})"
            )

    @property
    def host(self) -> str:
        """The endpoint's own host name."""
        return urlsplit(self.url).hostname or ""

    def permits(self, host: str) -> bool:
        """Whether a request may go to this host."""
        domains = _DATA_DOMAINS.get(self.host, ())
        return (
            host == self.host
            or host in self.more_hosts
            or any(host == domain or host.endswith(f".{domain}") for domain in domains)
        )


class Connection:
    """The shared HTTP client of a process, bound to one endpoint.

    huggingface_hub keeps one client a process; this takes its place, so a process talks with one
    hub at a time.

    Args:
        endpoint: where to go, and with which token.
        pause: seconds before the first retry; doubled for each further one.
    """

    def __init__(self, endpoint: Endpoint, pause: float = 1.0) -> None:
        self.endpoint = endpoint
        self.pause = pause
        self.stop = threading.Event()
        self.hosts: set[str] = set()
        self._not_before = 0.0  # one refusal for haste (429) holds back every worker
        set_client_factory(self._new_client)

    def _new_client(self) -> httpx2.Client:
        return httpx2.Client(event_hooks={"request": [self._guard]}, follow_redirects=True)

    def _guard(self, request: httpx2.Request) -> None:
        """Check every request, each hop of a redirect too, before it is sent."""
        host = request.url.host
        if not self.endpoint.permits(host):
            raise UserError(
                f"{self.endpoint.host} sends us on to {host}, which is not part of the endpoint: "
                f"use another endpoint (or, if it is wanted, kaiyuan download --allow-host {host})"
            )
        self.hosts.add(host)
        own = httpx2.URL(self.endpoint.url)
        if (request.url.scheme, host, request.url.port) != (own.scheme, own.host, own.port):
            request.headers.pop("Authorization", None)
            request.headers.pop("Cookie", None)
        # huggingface_hub lists without any timeout; a server that falls silent would hang us.
        request.extensions["timeout"] = _TIMEOUT.as_dict()
        self.sleep(self._not_before - time.monotonic())

    def client(self) -> httpx2.Client:
        """Return the client; each of its requests waits until the server wants to be asked."""
        return get_session()

    def patiently(self, action: Callable[[], Result], attempts: int = 8) -> Result:
        """Call ``action`` until it succeeds, as long as trying again makes sense."""
        patience = Patience(self, attempts)
        while True:
            try:
                return action()
            except Exception as error:
                patience.wait(error)

    def hold_back(self, seconds: float) -> None:
        """Let no worker send a request for some seconds."""
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    def sleep(self, seconds: float) -> None:
        """Wait, unless the work is stopped meanwhile."""
        if self.stop.wait(max(seconds, 0)):
            raise Stopped


class Patience:
    """How many failures in a row are borne, and how long to wait after each."""

    def __init__(self, connection: Connection, attempts: int = 8) -> None:
        self.connection = connection
        self.attempts = attempts
        self.failures = 0

    def wait(self, error: Exception) -> None:
        """Sleep before the next attempt.

        Raises:
            UserError: trying again is of no use, or was done often enough.
        """
        if isinstance(error, UserError | Stopped):
            raise error
        answer = _answer_in(error)
        asked = None if answer is None else asked_to_wait(answer)
        if answer is None:
            again = isinstance(error, (BadAnswer, *_RETRIED_ERRORS))
        else:
            status, host = answer.status_code, answer.request.url.host
            # A data host's 403 is a signed address that expired: the next redirect has a new one.
            expired = status == 403 and host != self.connection.endpoint.host
            again = status in _RETRIED_STATUS or expired or asked is not None
        if not again:
            raise UserError(_explanation(error, answer, self.connection.endpoint)) from error
        self.failures += 1
        reason = _explanation(error, answer, self.connection.endpoint)
        if self.failures >= self.attempts:
            raise UserError(f"{reason} (tried {self.failures} times; run again later)") from error
        _log.warning("%s; trying again (%d of %d)", reason, self.failures + 1, self.attempts)
        if asked is not None:
            self.connection.hold_back(min(asked, _LONGEST_WAIT))
        # The random part keeps several workers from coming back at the same instant.
        pause = self.connection.pause * 2 ** (self.failures - 1)
        self.connection.sleep(min(pause, 60) * random.uniform(0.5, 1))


def asked_to_wait(answer: httpx2.Response) -> float | None:
    """Return the seconds that a server asks to wait: Retry-After, or the hub's ratelimit header."""
    value = answer.headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    if value:
        try:
            then = parsedate_to_datetime(value)
        except ValueError:
            return None
        then = then if then.tzinfo else then.replace(tzinfo=UTC)
        return max((then - datetime.now(UTC)).total_seconds(), 0.0)
    limit = parse_ratelimit_headers(answer.headers) if answer.status_code == 429 else None
    return float(limit.reset_in_seconds) if limit else None


def _answer_in(error: BaseException) -> httpx2.Response | None:
    """Find the server's answer in an error, or in those that it wraps."""
    seen: BaseException | None = error
    while seen is not None:
        answer = getattr(seen, "response", None)
        if isinstance(answer, httpx2.Response):
            return answer
        seen = seen.__cause__ or seen.__context__
    return None


def _explanation(error: Exception, answer: httpx2.Response | None, endpoint: Endpoint) -> str:
    # No URL is shown: those of data hosts carry a signature that is as good as a token.
    if answer is None:
        return f"{endpoint.host}: {error or type(error).__name__}"
    status, host = answer.status_code, answer.request.url.host
    told = " ".join(answer.headers.get("X-Error-Message", "").split())[:200]
    if not told:
        # Hugging Face answers 401 for a repository that does not exist, too.
        told = {
            401: f"no such repository, or it asks for another token ({_TOKENS})",
            403: f"the token has no right to it, or there is none ({_TOKENS})",
            404: "no such repository, revision or file",
        }.get(status, "")
    return f"{host} answers {status}{f': {told}' if told else ''}"


def hugging_face() -> Connection:
    """Return a connection to Hugging Face, or to the mirror that HF_ENDPOINT names."""
    url = os.environ.get("HF_ENDPOINT") or HUGGING_FACE
    return Connection(Endpoint(url, token_from_environment("hf")))


def token_from_environment(source: str) -> str | None:
    """Return the token of a hub; files that other tools leave in the home folder are not read."""
    names = ("HF_TOKEN",) if source == "hf" else ("MODELSCOPE_API_TOKEN",)
    return next((os.environ[name].strip() for name in names if os.environ.get(name)), None)
