"""Plug-ins that do not keep the contract harm nobody but themselves, and their examples keep it."""

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvserver.config.remotes import parse
from kvserver.errors import ConfigError
from kvserver.movers.remote_store import check, open_store
from kvserver.remote.objects import plugin
from kvserver.remote.objects.driver import Named, Start
from kvserver.remote.objects.plugin import PluggedIn
from kvserver.remote.secrets import CurrentSecret, SecretSource
from kvserver.remote.store import Facts, StoreError
from tests.rigs import bad_plugins
from tests.rigs.remote_chunks import head_of, name_of, payloads_of, targets_of

SHORT_S = 0.05
ENDED = memoryview(b"123")
ENDED.release()


def plugged(kind: str, password: CurrentSecret | None = None, **options: str) -> PluggedIn:
    return PluggedIn(f"tests.rigs.bad_plugins:{kind}", options, password)


def secret_of(text: str) -> CurrentSecret:
    return CurrentSecret(SecretSource(variable="P", environment={"P": text}))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    bad_plugins.MEMORY.clear()
    bad_plugins.Hangs.let_go.clear()
    yield
    bad_plugins.Hangs.let_go.set()


# ---------------------------------------------------------------- what is loaded


def test_a_plug_in_gets_its_own_options_and_the_password_and_ours_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLUGIN_PASSWORD", "planted-7")
    url = "plugin://tests.rigs.bad_plugins:InMemory?memory=m&endpoint=http://x&write=never&password_env=PLUGIN_PASSWORD"
    (remote,) = parse(f"a={url}")
    assert (remote.url, remote.write) == ("plugin://tests.rigs.bad_plugins:InMemory", "never")
    store = open_store(remote)
    driver = store._driver._driver  # type: ignore[attr-defined]
    assert driver.options == {"memory": "m", "endpoint": "http://x"}
    assert driver.password() == "planted-7"
    head = head_of(name_of(1))
    assert store.write(name_of(1), head, payloads_of(head))
    other = open_store(remote)
    targets = targets_of(head)
    other.read(name_of(1), head, targets)
    assert targets == payloads_of(head)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_package_x.y:Z", "ModuleNotFoundError: No module named 'no_such_package_x'"),
        ("tests.rigs.bad_plugins:Nothing", "AttributeError: .*has no attribute 'Nothing'"),
        ("tests.rigs.bad_plugins:NeedsMuch", "KeyError: 'planted'"),
        ("tests.rigs.bad_plugins:HangsAtOnce", "opening it has not ended after 0.3 s"),
    ],
)
def test_a_plug_in_that_cannot_be_loaded_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    monkeypatch.setattr(plugin, "OPEN_S", 0.3)
    with pytest.raises(StoreError, match=f"{name}: {why}"):
        PluggedIn(name, {}, None)


def test_a_plug_in_whose_package_is_not_installed_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(ConfigError, match=r"no_such_package_x\.y:Z is not installed"):
        check(parse("a=plugin://no_such_package_x.y:Z")[0])
    with pytest.raises(ConfigError, match="__main__:Z is not installed"):
        check(parse("a=plugin://__main__:Z")[0])
    check(parse("a=plugin://tests.rigs.not_looked_for:Z")[0])


# ---------------------------------------------------------------- raises


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (ZeroDivisionError("planted"), "remote-down"),
        (OSError("planted"), "remote-down"),
        (SystemExit(3), "remote-down"),
        (KeyboardInterrupt(), "remote-down"),
        (TimeoutError("planted"), "remote-slow"),
        (PermissionError("planted"), "remote-denied"),
        (StoreError("remote-full", "no room"), "remote-full"),
        (StoreError("no-such-code", "planted"), "remote-down"),  # type: ignore[arg-type]
    ],
)
def test_whatever_a_plug_in_raises_is_an_error_of_its_store(
    monkeypatch: pytest.MonkeyPatch, problem: BaseException, code: str
) -> None:
    monkeypatch.setattr(bad_plugins.Raises, "problem", problem)
    driver = plugged("Raises")
    lists = driver.listed("kv1/", within_s=5)
    assert next(lists) == []
    for call in (
        lambda: driver.starts(["a"], 9, within_s=5),
        lambda: driver.read("a", [(0, memoryview(bytearray(1)))], within_s=5),
        lambda: next(lists),
        driver.facts,
    ):
        with pytest.raises(StoreError) as raised:
            call()
        assert raised.value.code == code
    assert driver.create("a", [b"1"], within_s=5), "it is asked again"
    driver.close()


class WithoutSuper(StoreError):
    def __init__(self) -> None:
        pass


class WithoutText(Exception):
    def __str__(self) -> str:
        return self.nothing  # type: ignore[attr-defined,no-any-return]


class EndsAsText(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (StoreError("remote-full", OSError("planted")), "planted"),  # type: ignore[arg-type]
        (WithoutSuper(), "WithoutSuper"),
        (WithoutText(), "WithoutText"),
        (EndsAsText(), "an error that cannot be shown"),
    ],
)
@pytest.mark.parametrize("is_answer", [False, True])
def test_an_error_that_is_made_wrong_is_an_error_of_its_store(
    monkeypatch: pytest.MonkeyPatch, problem: BaseException, text: str, *, is_answer: bool
) -> None:
    monkeypatch.setattr(bad_plugins.Raises, "problem", problem)
    monkeypatch.setattr(bad_plugins.Lies, "answers", [None, problem])
    driver = plugged("Lies" if is_answer else "Raises")
    try:
        found = driver.starts(["a", "b"], 9, within_s=5)
    except StoreError as raised:
        found = [None, raised]
    assert found[0] is None
    assert isinstance(found[1], StoreError)
    assert found[1].code == ("remote-full" if "planted" in text else "remote-down")
    if not is_answer or isinstance(problem, StoreError):
        assert text in found[1].message


def test_memory_that_a_plug_in_has_ended_has_its_bytes_all_the_same() -> None:
    driver = plugged("EndsTargets")
    driver.create("a", [b"0123456"], within_s=5)
    target = memoryview(bytearray(7))
    assert driver.read("a", [(0, target)], within_s=5)
    assert target == b"0123456"


def test_a_password_is_in_no_error_of_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_plugins.Raises, "problem", ValueError("login me:planted-7\n failed " + 999 * "x"))
    driver = plugged("Raises", secret_of("planted-7"))
    driver._driver.password()  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match=r"ValueError: login me:\*\*\* failed xxx") as raised:
        driver.facts()
    assert "planted" not in str(raised.value)
    assert len(raised.value.message) < 400


def test_a_password_that_cannot_be_read_is_denied_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = plugged("Raises", secret_of(""))

    def asks(names: object, most_bytes: int, *, within_s: float) -> object:
        return driver._driver.password()  # type: ignore[attr-defined]

    monkeypatch.setattr(driver._driver, "starts", asks)
    with pytest.raises(StoreError, match=r"remote-denied: .*\$P: is empty or not set"):
        driver.starts(["a"], 1, within_s=5)


# ---------------------------------------------------------------- hangs


def test_a_call_that_hangs_ends_for_its_caller_and_what_it_writes_later_reaches_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "GRACE_S", 0.0)
    driver = plugged("Hangs")
    driver.create("a", [b"0123456"], within_s=5)
    arena = memoryview(bytearray(b"\xee" * 7))
    with pytest.raises(StoreError, match=r"remote-slow: .*read has not ended after 0.05 s"):
        driver.read("a", [(0, arena)], within_s=SHORT_S)
    bad_plugins.Hangs.let_go.set()
    until_free(driver)
    assert arena == b"\xee" * 7, "it has written to its own memory"
    assert driver.read("a", [(0, arena)], within_s=5)
    assert arena == b"0123456"


def test_a_plug_in_with_too_many_calls_that_hang_is_not_called_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "GRACE_S", 0.0)
    monkeypatch.setattr(plugin, "HUNG_MAX", 3)
    driver = plugged("Hangs")
    driver.create("a", [b"0123456"], within_s=5)
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(StoreError, match="has not ended"):
            driver.read("a", [(0, memoryview(bytearray(7)))], within_s=SHORT_S)
    for _ in range(20):
        with pytest.raises(StoreError, match="3 calls of the plug-in hang"):
            driver.starts(["a"], 7, within_s=5)
    assert threading.active_count() <= before + 3
    assert plugin.stuck() == ""
    monkeypatch.setattr(plugin, "STUCK_S", 0.0)
    assert plugin.stuck() == driver._name, "only another process can call it"
    bad_plugins.Hangs.let_go.set()
    until_free(driver)
    assert plugin.stuck() == ""
    assert driver.starts(["a"], 7, within_s=5) == [Start(b"0123456", 7)]
    for _ in range(50):
        driver.starts(["a"], 7, within_s=5)
    assert threading.active_count() <= before + 3, "workers are used again"


def until_free(driver: PluggedIn) -> None:
    until_s = time.monotonic() + 30
    while plugin._HUNG[driver._name]:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_plug_in_that_hangs_while_it_is_opened_again_and_again_keeps_few_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "OPEN_S", SHORT_S)
    monkeypatch.setattr(plugin, "HUNG_MAX", 3)
    monkeypatch.setattr(plugin, "STUCK_S", 0.0)
    monkeypatch.setattr(bad_plugins.HangsAtOnce, "closed", 0)
    before = threading.active_count()
    with pytest.raises(StoreError, match="opening it has not ended after"):
        plugged("HangsAtOnce")
    assert plugin.stuck() == ""
    for _ in range(10):
        with pytest.raises(StoreError, match="an earlier try of opening it has not ended"):
            plugged("HangsAtOnce")
    assert threading.active_count() <= before + 1
    assert plugin.stuck() == "tests.rigs.bad_plugins:HangsAtOnce"
    other = plugged("InMemory")
    assert other.facts().kind == "s3", "another one is opened"
    other.close()
    bad_plugins.Hangs.let_go.set()
    until_s = time.monotonic() + 30
    while threading.active_count() > before or not bad_plugins.HangsAtOnce.closed:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert bad_plugins.HangsAtOnce.closed == 1, "who came too late is closed"
    assert plugin.stuck() == ""
    plugged("HangsAtOnce")


def test_a_plug_in_that_fails_while_it_is_opened_again_and_again_keeps_no_thread() -> None:
    before = threading.active_count()
    for _ in range(10):
        with pytest.raises(StoreError, match="planted"):
            plugged("NeedsMuch")
    until_s = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_closed_plug_in_is_not_called_and_keeps_no_thread() -> None:
    before = threading.active_count()
    driver = plugged("InMemory")
    driver.create("a", [b"1"], within_s=5)
    driver.close()
    with pytest.raises(StoreError, match="closed"):
        driver.starts(["a"], 7, within_s=5)
    until_s = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < until_s
        time.sleep(0.01)


# ---------------------------------------------------------------- lies


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "a list of 1 answers; it gave NoneType"),
        ([], "a list of 1 answers; it gave list"),
        ([None, None], "a list of 1 answers; it gave list"),
        ([b"bytes"], "Start, StoreError or None; it gave bytes"),
        ([Start(b"1234", 3)], "the first 5 bytes, or all, of an object; it gave 4 of 3"),
        ([Start(b"1234", 9)], "it gave 4 of 9"),
        ([Start(b"123456", 6)], "it gave 6 of 6"),
        ([Start("12345", 5)], "Start, StoreError or None; it gave Start"),  # type: ignore[arg-type]
        ([Start(b"", -1)], "it gave 0 of -1"),
        ([Start(ENDED, 3)], "ValueError: operation forbidden on released memoryview"),
    ],
)
def test_beginnings_of_another_shape_or_size_are_errors(
    monkeypatch: pytest.MonkeyPatch, answer: object, why: str
) -> None:
    monkeypatch.setattr(bad_plugins.Lies, "answers", answer)
    driver = plugged("Lies")
    try:
        (found,) = driver.starts(["a"], 5, within_s=5)
    except StoreError as raised:
        found = raised
    assert isinstance(found, StoreError)
    assert why in found.message


@pytest.mark.parametrize("answer", [None, 7, "yes"])
def test_other_answers_than_the_contract_has_are_errors(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    monkeypatch.setattr(bad_plugins.Lies, "answers", answer)
    driver = plugged("Lies")
    target = memoryview(bytearray(b"\xee" * 3))
    for call in (
        lambda: driver.read("a", [(0, target)], within_s=5),
        lambda: driver.create("a", [b"1"], within_s=5),
        lambda: list(driver.listed("kv1/", within_s=5)),
        driver.facts,
    ):
        with pytest.raises(StoreError):
            call()
    assert target == b"\xee" * 3


@pytest.mark.parametrize(
    "answer", [[7], [[7]], [[Named("other/1", 1, 0.0)]], [[Named("kv1/1", -1, 0.0)]], [[Named("kv1/1", 1, "now")]]]
)
def test_lists_of_something_else_are_errors(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    monkeypatch.setattr(bad_plugins.Lies, "answers", answer)
    with pytest.raises(StoreError, match="lists of Named that begin with 'kv1/'"):
        list(plugged("Lies").listed("kv1/", within_s=5))


def test_facts_are_shown_as_text_whatever_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_plugins.Lies, "answers", Facts("k", "v", None, (7,)))  # type: ignore[arg-type]
    assert plugged("Lies").facts().warnings == ("7",)


@pytest.mark.parametrize("wrong", [{"evicts": "no"}, {"evicts": 7}, {"warnings": None}, {"warnings": "w"}, {"kind": 7}])
def test_facts_of_other_types_are_errors(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, object]) -> None:
    monkeypatch.setattr(bad_plugins.Lies, "answers", Facts("k", "v", None)._replace(**wrong))
    with pytest.raises(StoreError, match="facts must give Facts"):
        plugged("Lies").facts()


def test_no_answer_of_a_plug_in_shows_its_password_or_is_shown_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = plugged("Lies", secret_of("planted-7"))
    driver._driver.password()  # type: ignore[attr-defined]
    long = "http://me:hunter2@x planted-7 " + 10_000_000 * "x"
    monkeypatch.setattr(bad_plugins.Lies, "answers", Facts(long, long, None, (long,) * 99))
    facts = driver.facts()
    monkeypatch.setattr(bad_plugins.Lies, "answers", long)
    with pytest.raises(StoreError) as raised:
        driver.starts(["a"], 1, within_s=5)
    for text in (facts.kind, facts.version, *facts.warnings, raised.value.message):
        assert "http://***@x *** xxx" in text
        assert len(text) < 400
    assert len(facts.warnings) < 20
