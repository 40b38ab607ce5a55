"""S3 and what speaks it, Google and Azure, by the library obstore (`pip install kvserver[object-stores]`).

The library tries no call again: its retries know no deadline of ours. It takes one only for a whole client, so there
is a client for each. Without a name and a password it looks for credentials itself, in the environment, in files, and
at the machine's own service. It loads no module of boto3, and so no profiles.
"""

import asyncio
import binascii
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from kvserver.errors import ConfigError
from kvserver.remote.objects.driver import DigestSum, Named, Start
from kvserver.remote.secrets import CurrentSecret, Secret, SecretSource, safe_text
from kvserver.remote.store import Facts, Problem, StoreError
from kvserver.transfer.native import add_digest_sums, digest_copy

STARTS_AT_A_TIME = 32
"""Requests for beginnings that are under way at a time: there is none that asks for several objects."""
GAP_BYTES_MAX = 1 << 20
"""Bytes between two wanted pieces that are read too, instead of a second request."""
STREAM_BYTES = 1 << 20
FIRST = "kvfirst"
"""Metadata of an object: its first piece in base64. One name for all clouds: Azure takes letters and digits only."""
FIRST_BYTES_MAX = 1400
"""In base64 they fit in the 2 KB of metadata that S3 takes for an object."""
LISTED_AT_A_TIME = 1000
CLIENTS_MAX = 8
"""Clients with different deadlines. There are three or four."""
IDLE = "10s"
"""A connection that was idle for so long is not used again: the other side may have closed it."""
ERRORS = (BaseError, FileNotFoundError, ValueError, OSError)
"""Errors that the library raises."""
PANIC = "PanicException"
"""Name of the class that the library raises where it meets a bug of its own. It is no Exception."""
DOCUMENT = re.compile(r"<(?:\?xml|Error)\b.*", re.DOTALL)
SAID = re.compile(r"<(Code|Message)>([^<\n]*)")
"""The parts of a document that are shown. The rest may be a token, or an id that is another one in each answer."""
TOOK = re.compile(r"\s*\bin \d[\d.]*\s?(ns|µs|us|ms|s)\b")
"""Times in texts of the library. A text that does not change is logged once."""
Scheme = Literal["s3", "gs", "az"]
CONFLICT = "409 Conflict"
"""Words in an answer that other writes are under way; the library takes each of them for one that has won."""
IS_THERE = "BlobAlreadyExists"
NOT_THERE = (
    "NoSuchKey",
    "BlobNotFound",
    "specified blob does not exist",  # in the answer to a removal of many
    "No such object",
    "No data in memory found",
    "No such file",
)
"""Words in an answer that an object is not there. Any other 404 may come from whatever stands before the store."""
NO_PLACE = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist", "ContainerBeingDeleted")
"""Words in an answer that nothing is there, because the bucket itself is not."""
OUTSIDE = ("416 Range Not Satisfiable", "StartTooLarge")
"""Words in an answer that an object ends before the bytes that are wanted."""
MEANINGS: dict[str, Problem] = {
    "//169.254.": "remote-denied",  # no credentials were found, and the machine's own service gives none
    "kind: Timeout": "remote-slow",
    "TimedOut": "remote-slow",
    "RequestTimeout": "remote-slow",
    "ExpiredToken": "remote-denied",
    "InvalidToken": "remote-denied",
    "TokenRefresh": "remote-denied",
    "AccessDenied": "remote-denied",  # also of one object of many
    "SlowDown": "remote-slow",
    "ServerBusy": "remote-slow",
    "OperationTimedOut": "remote-slow",
    "429 Too Many": "remote-slow",
    "503 Service": "remote-slow",
    "507 Insufficient": "remote-full",
    "QuotaExceeded": "remote-full",
    "XMinioStorageFull": "remote-full",
    "401 Unauthorized": "remote-denied",
    "403 Forbidden": "remote-denied",
    "MissingCredentials": "remote-denied",
    "501 Not Implemented": "remote-refused",
    "400 Bad Request": "remote-refused",
    "301 Moved": "remote-refused",  # another region
    "redirect without LOCATION": "remote-refused",
}
"""Words in an error of the library, and what they mean; the first counts. What has none of them is "remote-down"."""


class Outside(NamedTuple):
    """An object is there, and ends before the bytes that are wanted."""


class Place(NamedTuple):
    """A place of objects, and who asks for them."""

    scheme: Scheme
    bucket: str
    prefix: str = ""
    """The beginning of all names, without "/" at either end."""
    endpoint: str = ""
    """URL of a service that is not the cloud's own."""
    region: str = ""
    username: str = ""
    """S3: id of an access key. Azure: name of the account."""
    password: SecretSource | None = None
    """S3: the secret access key. Azure: the account's key."""
    ca_file: str = ""
    """Certificates that count besides the machine's own."""
    connect_s: float = 1.0


class CloudObjects:
    """A Driver of objects in a bucket or container (kvserver/remote/objects/driver.py)."""

    def __init__(self, place: Place, *, stand_in: Any = None) -> None:
        """stand_in: one of the library's own stores, such as one in memory. Raises StoreError for wrong settings."""
        self._place = place
        self._password = CurrentSecret(place.password) if place.password is not None else None
        self._stand_in = stand_in
        self._takes_metadata = not isinstance(stand_in, LocalStore)
        self._secret: Secret | None = None
        self._clients: dict[float, Any] = {}
        self._is_closed = False
        self._opening = threading.Lock()
        self._crew = ThreadPoolExecutor(STARTS_AT_A_TIME, thread_name_prefix="starts")
        self._client(place.connect_s)

    def facts(self) -> Facts:
        place = self._place
        where = place.endpoint or {"s3": "Amazon", "gs": "Google", "az": "Azure"}[place.scheme]
        warning = "it makes no room by itself unless its bucket has a rule that removes old objects of kv1/"
        return Facts(place.scheme, f"at {where}", evicts=None, warnings=(warning,))

    def starts(self, names: Sequence[str], most_bytes: int, *, within_s: float) -> list[Start | StoreError | None]:
        return self._each(self._start, names, most_bytes, within_s)

    def _each(
        self, call: Callable[..., Start | StoreError | None], names: Sequence[str], most_bytes: int, within_s: float
    ) -> list[Start | StoreError | None]:
        ask = partial(call, most_bytes=most_bytes, within_s=within_s, due_s=time.monotonic() + within_s)
        try:
            return [ask(names[0])] if len(names) == 1 else list(self._crew.map(ask, names))
        except (RuntimeError, CancelledError):  # the crew was sent away meanwhile
            raise StoreError("remote-down", "closed", node=self._node) from None

    def _start(self, name: str, *, most_bytes: int, within_s: float, due_s: float) -> Start | StoreError | None:
        if time.monotonic() > due_s:
            return StoreError("remote-slow", f"the beginnings took longer than {within_s} s", node=self._node)
        try:
            with self._as_store_errors():
                found = self._get(name, (0, most_bytes), within_s)
                if isinstance(found, Outside):
                    return Start(b"", 0)
                return found and Start(memoryview(found.buffer()), found.meta["size"])
        except StoreError as problem:
            return problem.with_traceback(None)

    def first_pieces(
        self, names: Sequence[str], most_bytes: int, *, within_s: float
    ) -> list[Start | StoreError | None]:
        return self._each(self._first_piece, names, most_bytes, within_s)

    def _first_piece(self, name: str, *, most_bytes: int, within_s: float, due_s: float) -> Start | StoreError | None:
        """The first piece from the metadata: a server may read far more than is asked for, but not for metadata.

        An answer without a body does not say why, so all but slowness is asked again for bytes."""
        try:
            if time.monotonic() <= due_s:
                found = self._told(name, within_s)
                if first := binascii.a2b_base64(found.attributes.get(FIRST, ""), strict_mode=True):
                    return Start(first[:most_bytes], found.meta["size"])
        except binascii.Error:
            pass  # somebody else's
        except StoreError as problem:
            if problem.code == "remote-slow":
                return problem.with_traceback(None)
        return self._start(name, most_bytes=most_bytes, within_s=within_s, due_s=due_s)

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        return self.read_summed(name, pieces, within_s=within_s) is not None

    def read_summed(
        self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float
    ) -> list[DigestSum] | None:
        due_s = time.monotonic() + within_s
        tag: str | None = None
        sums: list[DigestSum] = []
        with self._as_store_errors():
            for number, run in enumerate(_runs(pieces)):
                if time.monotonic() > due_s:
                    raise StoreError("remote-slow", f"a read took longer than {within_s} s", node=self._node)
                if number and tag is None:
                    raise StoreError(
                        "remote-refused", "it tells no ETag, so two requests may see two writes", node=self._node
                    )
                end = run[-1][0] + len(run[-1][1])
                found = self._get(name, (run[0][0], end), within_s, tag)
                if found is None or isinstance(found, Outside) or found.range != (run[0][0], end):
                    return None
                told = found.meta["e_tag"]
                if number and told != tag:
                    return None  # it has not looked at If-Match
                tag = told
                some = _filled(run, found.stream(min_chunk_size=STREAM_BYTES))
                if some is None:
                    return None
                sums += some
        return sums

    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        first = pieces[0] if len(pieces) > 1 and self._takes_metadata else b""
        has_place = 0 < len(first) <= FIRST_BYTES_MAX
        told: Any = {FIRST: binascii.b2a_base64(first, newline=False).decode()} if has_place else None
        with self._as_store_errors():
            try:
                client = self._client(within_s)
                obstore.put(client, name, list(pieces), attributes=told, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError) as problem:
                if CONFLICT in str(problem) and IS_THERE not in str(problem):
                    raise  # that write may fail yet
                return False
        return True

    def replace(self, name: str, value: bytes, *, within_s: float) -> None:
        with self._as_store_errors():
            obstore.put(self._client(within_s), name, value, use_multipart=False)

    def touch(self, name: str, *, within_s: float) -> None:
        """These stores drop by age alone."""

    def remove(self, names: Sequence[str], *, within_s: float) -> None:
        with self._as_store_errors():
            try:
                obstore.delete(self._client(within_s), list(names))
            except FileNotFoundError as missing:
                if not _is_not_there(missing):
                    raise
                if len(names) > 1:  # which of them is not said, and the rest may be left
                    for name in names:
                        self.remove([name], within_s=within_s)

    def listed(self, beginning: str, *, within_s: float) -> Iterator[list[Named]]:
        with self._as_store_errors():
            pages = obstore.list(self._client(within_s), beginning.rstrip("/"), chunk_size=LISTED_AT_A_TIME)
            while (page := self._page(pages, within_s)) is not None:
                yield [Named(one["path"], one["size"], one["last_modified"].timestamp()) for one in page]

    def _page(self, pages: AsyncIterator[Any], within_s: float) -> Any:
        """The next page of a list; None: it has ended. An answer may be empty and not the last, for ever."""

        async def asked() -> Any:
            return await asyncio.wait_for(anext(pages, None), within_s)

        try:
            return asyncio.run(asked())
        except TimeoutError:
            raise StoreError("remote-slow", f"a list took longer than {within_s} s", node=self._node) from None

    def close(self) -> None:
        self._is_closed = True
        self._crew.shutdown(wait=False, cancel_futures=True)

    # ---------------------------------------------------------------- calls

    @property
    def _node(self) -> str:
        return f"{self._place.scheme}://{self._place.bucket}"

    def _told(self, name: str, within_s: float) -> Any:
        """Asks a store about an object without its bytes. Raises StoreError, also if it is not there."""
        with self._as_store_errors():
            return obstore.get(self._client(within_s), name, options={"head": True})

    def _get(self, name: str, span: tuple[int, int], within_s: float, tag: str | None = None) -> Any:
        """An object's bytes, as they come; None if it is not there, or another one than the tag says.

        Outside: it is there, and has no byte of the span."""
        options: dict[str, Any] = {"range": span}
        if tag is not None:
            options["if_match"] = tag
        try:
            return obstore.get(self._client(within_s), name, options=options)  # type: ignore[arg-type]
        except FileNotFoundError as missing:
            if not _is_not_there(missing):
                raise
            return None
        except PreconditionError:
            return None
        except BaseError as problem:
            if any(words in str(problem) for words in OUTSIDE):
                return Outside()
            raise

    def _client(self, within_s: float) -> Any:
        """A client whose calls end in that time, with the password as it is now."""
        if self._is_closed:
            raise StoreError("remote-down", "closed", node=self._node)
        if self._stand_in is not None:
            return self._stand_in
        with self._opening:
            try:
                secret = self._password.current() if self._password is not None else None
            except ConfigError as problem:
                raise StoreError("remote-denied", problem.message, node=self._node) from problem
            if secret != self._secret or len(self._clients) > CLIENTS_MAX:
                self._secret = secret
                self._clients.clear()
            if within_s not in self._clients:
                with self._as_store_errors(otherwise="remote-refused"):
                    self._clients[within_s] = _opened(self._place, secret, within_s)
            return self._clients[within_s]

    @contextmanager
    def _as_store_errors(self, *, otherwise: Problem = "remote-down") -> Iterator[None]:
        """Errors of the library leave as StoreError, without secrets in them."""
        try:
            yield
        except BaseException as problem:  # a panic of the library is no Exception
            is_panic = type(problem).__name__ == PANIC
            if not is_panic and not isinstance(problem, ERRORS):
                raise
            text = str(problem)
            code = next((code for word, code in MEANINGS.items() if word in text), otherwise)
            if is_panic or _has_no_place(problem):
                code = "remote-refused"
            # Not `from problem`: the library's text may quote what it sent.
            raise StoreError(code, self._readable(text), node=self._node) from None

    def _readable(self, text: str) -> str:
        """The part of an error that a person needs: without the library's own view of it, and without secrets."""
        words = text.partition("Debug source:")[0]
        words = DOCUMENT.sub(lambda found: ": ".join(said for _, said in SAID.findall(found[0])), words)
        return safe_text(TOOK.sub("", words), self._secret)


def _opened(place: Place, secret: Secret | None, within_s: float) -> Any:
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=within_s),
        "connect_timeout": timedelta(seconds=min(place.connect_s, within_s)),
        "pool_idle_timeout": IDLE,
        "allow_http": place.endpoint.startswith("http://"),
    }
    if place.ca_file:
        client["root_certificate"] = Path(place.ca_file).read_bytes()
    common: dict[str, Any] = {
        "prefix": place.prefix or None,
        "client_options": client,
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=within_s)},
    }
    given: dict[str, Any] = {}
    # A provider alone decides: beside a key, the library would use a token that it finds in the environment.
    match place.scheme:
        case "s3":
            given = {key: value for key, value in (("endpoint", place.endpoint), ("region", place.region)) if value}
            if secret is not None:
                keys = {"access_key_id": place.username, "secret_access_key": secret.reveal(), "expires_at": None}
                given |= {"credential_provider": lambda: keys, "skip_signature": False}
            # TLS protects what is sent; without it the payload is signed, which costs three times the processor.
            given["unsigned_payload"] = not client["allow_http"]
            return S3Store(place.bucket, **common, **given)
        case "gs":
            if place.endpoint:
                given["base_url"] = place.endpoint
            return GCSStore(place.bucket, **common, **given)
        case "az":
            named = {"endpoint": place.endpoint, "account_name": place.username}
            given = {key: value for key, value in named.items() if value}
            if secret is not None:
                key = {"access_key": secret.reveal(), "expires_at": None}
                given |= {"credential_provider": lambda: key, "skip_signature": False}
            return AzureStore(place.bucket, **common, **given)


def _is_not_there(problem: FileNotFoundError) -> bool:
    return any(words in str(problem) for words in NOT_THERE) and not _has_no_place(problem)


def _has_no_place(problem: BaseException) -> bool:
    text = str(problem)
    return any(word in text for word in NO_PLACE)


def _runs(pieces: Sequence[tuple[int, memoryview]]) -> list[list[tuple[int, memoryview]]]:
    """Pieces in groups that one request reads: little lies between them."""
    runs: list[list[tuple[int, memoryview]]] = []
    end = 0
    for offset, target in pieces:
        if runs and offset - end <= GAP_BYTES_MAX:
            runs[-1].append((offset, target))
        else:
            runs.append([(offset, target)])
        end = offset + len(target)
    return runs


def _filled(run: Sequence[tuple[int, memoryview]], stream: Iterator[Any]) -> list[DigestSum] | None:
    """Distributes the bytes of one request over its pieces. Returns each piece's sum; None: the bytes end too early.

    They are summed as they are copied, while they are in the cache, and without the GIL."""
    at = run[0][0]
    sums: list[DigestSum] = []
    left = list(run)
    total: DigestSum = 0, 0
    for came in stream:
        some = memoryview(came)
        while some and left:
            offset, target = left[0]
            skipped = min(max(0, offset - at), len(some))
            at, some = at + skipped, some[skipped:]
            if not some:
                break  # the piece begins later
            count = min(len(some), offset + len(target) - at)
            begin = at - offset
            total = add_digest_sums(total, digest_copy(some[:count], target[begin : begin + count], begin))
            at, some = at + count, some[count:]
            if at == offset + len(target):
                left.pop(0)
                sums.append(total)
                total = 0, 0
    return None if left else sums
