"""What servers of object stores may answer, and how they are reached: errors, lies, late bodies, TLS, credentials."""

import re
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvserver.remote.objects.clouds import CloudObjects, Place, Scheme
from kvserver.remote.objects.driver import Start
from kvserver.remote.secrets import SecretSource
from kvserver.remote.store import StoreError
from tests.rigs.azure_server import ACCOUNT, CONTAINER, AzureServer
from tests.rigs.azure_server import KEY as AZURE_KEY
from tests.rigs.s3_server import BUCKET, KEY, KEY_ID, S3Server, cloud_objects
from tests.rigs.tls_server import make_certificates

OK = "200 OK"
PLANTED = SecretSource(variable="K", environment={"K": "planted7"})
PARTIAL = "206 Partial Content"
STAMP = 'Last-Modified: Sat, 28 Nov 2026 07:00:00 GMT\r\nETag: "7"\r\n'


def answer(status: str, body: bytes = b"", *, headers: str = "", length: int | None = None) -> bytes:
    told = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {told}\r\nConnection: close\r\n\r\n".encode() + body


def range_of(first: int, last: int, whole: int) -> str:
    return f"{STAMP}Content-Range: bytes {first}-{last}/{whole}\r\n"


@contextmanager
def saying(
    said: bytes, *, then_waits_s: float = 0.0, scheme: Scheme = "s3", heard: list[bytes] | None = None
) -> Iterator[CloudObjects]:
    """Objects at a server that answers every request so. heard: gets the lines of its requests."""

    class Answers(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                if heard is not None:
                    heard.append(line)
            self.wfile.write(said)
            self.wfile.flush()
            is_over.wait(then_waits_s)

    is_over = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        secret = SecretSource(variable="K", environment={"K": "planted7"})
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        objects = CloudObjects(
            Place(scheme, "bucket", endpoint=endpoint, username="id", password=secret, connect_s=10.0)
        )
        yield objects
        is_over.set()
        objects.close()
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        ("500 Internal Server Error", b"<Error><Code>InternalError</Code></Error>", "remote-down"),
        ("503 Service Unavailable", b"<Error><Code>SlowDown</Code></Error>", "remote-slow"),
        ("429 Too Many Requests", b"", "remote-slow"),
        ("507 Insufficient Storage", b"", "remote-full"),
        ("403 Forbidden", b"<Error><Code>QuotaExceeded</Code></Error>", "remote-full"),
        ("403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>", "remote-denied"),
        ("401 Unauthorized", b"", "remote-denied"),
        ("400 Bad Request", b"<Error><Code>InvalidBucketName</Code></Error>", "remote-refused"),
        ("501 Not Implemented", b"<Error><Code>NotImplemented</Code></Error>", "remote-refused"),
        ("404 Not Found", b"<Error><Code>NoSuchBucket</Code></Error>", "remote-refused"),
        ("404 Not Found", b"404 page not found", "remote-down"),
        ("301 Moved Permanently", b"", "remote-refused"),
        ("400 Bad Request", b"<Error><Code>ExpiredToken</Code><Token-0>planted</Token-0></Error>", "remote-denied"),
        ("400 Bad Request", b"<Error><Code>InvalidToken</Code></Error>", "remote-denied"),
        ("400 Bad Request", b"<Error><Code>TokenRefreshRequired</Code></Error>", "remote-denied"),
        ("400 Bad Request", b"<Error><Code>RequestTimeout</Code></Error>", "remote-slow"),
        ("409 Conflict", b"<Error><Code>ConditionalRequestConflict</Code></Error>", "remote-down"),
        ("409 Conflict", b"<Error><Code>OperationAborted</Code></Error>", "remote-down"),
        ("409 Conflict", b"<Error><Code>ContainerBeingDeleted</Code></Error>", "remote-refused"),
    ],
)
def test_what_a_server_answers_has_its_meaning_in_every_call(status: str, body: bytes, code: str) -> None:
    with saying(answer(status, body)) as objects:
        for begins in (objects.starts, objects.first_pieces):
            (start,) = begins(["a"], 7, within_s=10)
            assert isinstance(start, StoreError)
            assert start.code == code
        for call in (
            lambda: objects.read("a", [(0, memoryview(bytearray(7)))], within_s=10),
            lambda: objects.create("a", [b"value"], within_s=10),
            lambda: objects.replace("a", b"value", within_s=10),
            lambda: list(objects.listed("a/", within_s=10)),
        ):
            with pytest.raises(StoreError) as failed:
                call()
            assert failed.value.code == code, failed.value
            assert "planted" not in str(failed.value)


@pytest.mark.parametrize(
    ("status", "code"), [("412 Precondition Failed", "PreconditionFailed"), ("409 Conflict", "BlobAlreadyExists")]
)
def test_an_answer_that_an_object_is_there_already_is_no_error_of_its_creator(status: str, code: str) -> None:
    with saying(answer(status, f"<Error><Code>{code}</Code></Error>".encode())) as objects:
        assert objects.create("a", [b"value"], within_s=10) is False


@pytest.mark.parametrize("code", ["NoSuchKey", "BlobNotFound"])
def test_only_the_store_itself_can_say_that_an_object_is_not_there(code: str) -> None:
    said = answer("404 Not Found", f"<Error><Code>{code}</Code></Error>".encode())
    with saying(said) as objects:
        assert objects.starts(["a"], 7, within_s=10) == [None]
        assert objects.first_pieces(["a"], 7, within_s=10) == [None]
        assert not objects.read("a", [(0, memoryview(bytearray(7)))], within_s=10)
    said = answer("404 Not Found", b"<html>nothing here</html>")
    with saying(said) as objects:
        (start,) = objects.first_pieces(["a"], 7, within_s=10)
        assert isinstance(start, StoreError)
    with saying(said) as objects, pytest.raises(StoreError, match="nothing here"):
        objects.remove(["a"], within_s=10)


def test_an_object_of_many_that_may_not_be_removed_is_denied() -> None:
    said = b"<DeleteResult><Error><Key>a</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>"
    with saying(answer(OK, said)) as objects, pytest.raises(StoreError, match="remote-denied"):
        objects.remove(["a", "b"], within_s=10)


def test_the_same_failure_has_the_same_text_each_time_and_no_token_of_the_answer() -> None:
    texts: set[str] = set()
    for number in range(3):
        told = f"<RequestId>{number}</RequestId><Token-0>planted</Token-0>"
        said = f'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>Broken.</Message>{told}</Error>'
        with saying(answer("500 Internal Server Error", said.encode())) as objects:
            (start,) = objects.starts(["a"], 7, within_s=10)
            assert isinstance(start, StoreError)
            texts.add(re.sub(r":\d+/", ":PORT/", start.message))
    (text,) = texts
    assert text.endswith("500 Internal Server Error: InternalError: Broken.")
    down = CloudObjects(Place("s3", "bucket", endpoint="http://127.0.0.1:1", username="id", password=PLANTED))
    assert len({str(down.starts(["a"], 7, within_s=10)) for _ in range(5)}) == 1


def test_a_list_whose_pages_are_empty_for_ever_ends_with_its_deadline() -> None:
    more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    said = b"<ListBucketResult><Name>b</Name><KeyCount>0</KeyCount>" + more + b"</ListBucketResult>"
    with saying(answer(OK, said)) as objects, pytest.raises(StoreError, match=r"remote-slow: .*a list took longer"):
        list(objects.listed("a/", within_s=0.5))


def test_a_setting_that_the_library_panics_over_is_an_error() -> None:
    place = Place("s3", "b", endpoint="http://h:99999", username="id", password=PLANTED)
    with pytest.raises(StoreError, match="remote-refused"):
        CloudObjects(place).create("a", [b"value"], within_s=5)


@pytest.mark.parametrize(
    ("scheme", "variables"),
    [
        ("s3", {"AWS_SESSION_TOKEN": "foreign", "AWS_ACCESS_KEY_ID": "foreign"}),
        ("s3", {"AWS_SKIP_SIGNATURE": "true"}),
        ("az", {"AZURE_STORAGE_TOKEN": "foreign"}),
        ("az", {"AZURE_STORAGE_SAS_KEY": "sig=foreign"}),
        ("az", {"AZURE_SKIP_SIGNATURE": "true"}),
    ],
)
def test_credentials_that_were_given_are_mixed_with_none_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, scheme: Scheme, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    heard: list[bytes] = []
    with saying(
        answer("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>"), scheme=scheme, heard=heard
    ) as objects:
        objects.starts(["a"], 7, within_s=10)
    sent = b"".join(heard).lower()
    assert b"foreign" not in sent
    assert (b"authorization: aws4-hmac-sha256 credential=id/" if scheme == "s3" else b"sharedkey id:") in sent


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (answer(OK, b"0123456", headers=STAMP), "the whole object instead of a range"),
        (answer(PARTIAL, b"0123456", headers=range_of(3, 9, 20)), "another range than was asked for"),
        (answer(PARTIAL, b"012", headers=range_of(0, 6, 20), length=7), "fewer bytes than it tells"),
        (answer(PARTIAL, b"012", headers=range_of(0, 2, 3)), "an object that is shorter"),
        (b"HTTP/1.1 206 Part", "half a line"),
        (b"\x00\xff" * 99, "no HTTP"),
        (b"", "nothing"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_never_taken_for_the_object(said: bytes, why: str) -> None:
    with saying(said) as objects:
        is_read = False
        with suppress(StoreError):
            is_read = objects.read("a", [(0, memoryview(bytearray(7)))], within_s=10)
        assert not is_read, why


def test_the_right_answer_is_taken() -> None:
    """Or the test before it would show nothing."""
    with saying(answer(PARTIAL, b"0123456", headers=range_of(0, 6, 20))) as objects:
        came = memoryview(bytearray(7))
        assert objects.read("a", [(0, came)], within_s=10)
        assert came == b"0123456"
        assert objects.starts(["a"], 7, within_s=10) == [Start(memoryview(b"0123456"), 20)]


@pytest.mark.parametrize(
    ("told", "is_taken"),
    [("MDEyMzQ1Ng==", True), ("", False), ("!!", False), ("MDEyMzQ1Ng", False)],
    ids=["right", "empty", "no-base64", "cut"],
)
def test_a_first_piece_comes_from_the_metadata_or_else_from_the_object(told: str, is_taken: bool) -> None:
    """The answer's body has other bytes, so it is seen which of them were taken."""
    heard: list[bytes] = []
    metadata = f"{range_of(0, 6, 20)}x-amz-meta-kvfirst: {told}\r\n"
    with saying(answer(PARTIAL, b"abcdefg", headers=metadata), heard=heard) as objects:
        (start,) = objects.first_pieces(["a"], 7, within_s=10)
    assert isinstance(start, Start)
    assert bytes(start.beginning) == (b"0123456" if is_taken else b"abcdefg")
    asked = [line.split()[0] for line in heard if line.endswith(b"HTTP/1.1\r\n")]
    assert asked == ([b"HEAD"] if is_taken else [b"HEAD", b"GET"])


def test_a_body_that_stays_away_ends_with_its_deadline() -> None:
    said = answer(PARTIAL, b"012", headers=range_of(0, 6, 20), length=7)
    with saying(said, then_waits_s=60) as objects:
        began_s = time.monotonic()
        with pytest.raises(StoreError, match="remote-slow"):
            objects.read("a", [(0, memoryview(bytearray(7)))], within_s=0.5)
        (start,) = objects.starts(["a"], 7, within_s=0.5)
        assert isinstance(start, StoreError)
        assert start.code == "remote-slow"
        assert time.monotonic() - began_s < 30, "far from the minute that the server waits"


# ---------------------------------------------------------------- how a store is reached


def round_trip(objects: CloudObjects) -> None:
    assert objects.create("a", [b"value"], within_s=20)
    (start,) = objects.starts(["a"], 9, within_s=20)
    assert start == Start(memoryview(b"value"), 5)
    objects.remove(["a"], within_s=20)
    objects.close()


def test_a_server_with_tls_is_believed_if_its_certificate_comes_from_ours(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    with S3Server(certificates=tmp_path) as server:
        assert server.endpoint.startswith("https://")
        round_trip(cloud_objects(server, "tls", ca_file=str(tmp_path / "ca.crt")))
        for ca_file in ("", str(tmp_path / "other.crt")):
            with pytest.raises(StoreError, match="remote-down"):
                cloud_objects(server, "tls", ca_file=ca_file).create("b", [b"value"], within_s=20)


def test_credentials_of_s3_are_found_in_the_environment(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    round_trip(CloudObjects(Place("s3", BUCKET, tmp_path.name, s3.endpoint)))


def test_credentials_of_azure_are_found_in_the_environment(
    azure: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
    round_trip(CloudObjects(Place("az", CONTAINER, tmp_path.name, azure.endpoint)))


@pytest.mark.parametrize(
    "opens",
    [
        lambda: CloudObjects(Place("s3", "bucket", ca_file="/no/such/file")),
        lambda: CloudObjects(Place("az", "container")),
        lambda: CloudObjects(Place("gs", "bucket", endpoint="no url")),
    ],
    ids=["no certificates", "no account", "no url"],
)
def test_settings_that_cannot_be_right_are_said_when_it_is_opened(opens: Callable[[], CloudObjects]) -> None:
    with pytest.raises(StoreError):
        list(opens().listed("a/", within_s=5))
