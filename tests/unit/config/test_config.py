"""Configuration: defaults, then a file, then flags; each impossible value is refused with a message."""

import ast
import dataclasses
import os
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from kvserver.brain.bounds import bounds_from
from kvserver.cli import main
from kvserver.config.config import KEYS, PAGE_BYTES, Config, example, load
from kvserver.config.paths import default_socket
from kvserver.errors import ConfigError
from kvserver.service.holdings.accounts import Quota
from kvserver.service.state.bounds import Bounds
from kvserver.tiers.extents import DEVICE_SPAN, extents_per_segment
from kvserver.units import GIB, KIB, MIB, TIB, parse_bytes, show_bytes

ROOT = Path(__file__).resolve().parents[3]


def refusal(path: Path | None = None, **flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, flags)
    return str(caught.value)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kv.toml"
    path.write_text(text)
    return path


# ---------------------------------------------------------------- sources of values


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = toml(
        tmp_path, '# a comment\n\nlease_ttl_ms = 77\narena_bytes = "3MiB"\n  jobs_max=5\nslab_bytes = 1048576\n'
    )
    config, origins = load(path, {"arena_bytes": "7MiB"})
    assert (config.lease_ttl_ms, config.arena_bytes, config.jobs_max, config.slab_bytes) == (77, 7 * MIB, 5, MIB)
    assert config.leases_max == 4096
    assert origins["lease_ttl_ms"] == f"{path}:3"
    assert origins["jobs_max"] == f"{path}:5"
    assert origins["arena_bytes"] == "--arena-bytes"
    assert origins["leases_max"] == "default"
    assert list(origins) == [key.name for key in KEYS]


def test_what_the_server_chose_is_said() -> None:
    config, origins = load(None, {"arena_bytes": "1001MiB"})
    assert config.slab_bytes == 32 * MIB
    assert config.arena_bytes == 31 * 32 * MIB
    assert origins["slab_bytes"] == "default, chosen by the server"
    assert origins["arena_bytes"] == f"--arena-bytes, rounded down from {1001 * MIB} bytes"


@pytest.mark.parametrize(
    ("slab", "huge", "arena", "slab_bytes", "arena_bytes"),
    [
        (3 * MIB, 0, 10 * MIB, 3 * MIB, 9 * MIB),
        (5000, 0, 5 * MIB + 1, 8192, 5 * MIB),
        (3 * MIB, 2 * MIB, 9 * MIB, 4 * MIB, 8 * MIB),
        (4096, 0, MIB + 4095, 4096, MIB),
        (GIB, GIB, 3 * GIB - 1, GIB, 2 * GIB),
    ],
)
def test_sizes_are_cut_to_whole_pages_and_whole_slabs_and_it_is_said(
    slab: int, huge: int, arena: int, slab_bytes: int, arena_bytes: int
) -> None:
    flags = {"slab_bytes": str(slab), "huge_page_bytes": str(huge), "arena_bytes": str(arena)}
    config, origins = load(None, flags)
    assert (config.slab_bytes, config.arena_bytes) == (slab_bytes, arena_bytes)
    up = f", rounded up from {slab} bytes" if slab_bytes != slab else ""
    assert origins["slab_bytes"] == f"--slab-bytes{up}"
    assert origins["arena_bytes"] == f"--arena-bytes, rounded down from {arena} bytes"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slab_bytes = 1", "slab_bytes=1 must be 0, or 4096 at least"),
        ('slab_bytes = 4095\narena_bytes = "2MiB"', "slab_bytes=4095 must be 0, or 4096 at least"),
        (
            'slab_bytes = 5000\narena_bytes = "9GiB"',
            "arena_bytes=9GiB are 1,179,648 slabs of slab_bytes=8KiB; there may be 1,048,576",
        ),
        ('events_endpoint = "http://x:1"', "events_endpoint='http://x:1' must be tcp://HOST:PORT or ipc:///PATH"),
        ('events_endpoint = "tcp://x:65535"', "events_endpoint='tcp://x:65535' must be tcp://HOST:PORT"),
        ('events_endpoint = "ipc://x"', "events_endpoint='ipc://x' must be tcp://HOST:PORT or ipc:///PATH"),
    ],
)
def test_values_that_no_server_can_use_are_refused_before_it_starts(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "k.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "k.toml", {})
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("arena", "huge", "slab"),
    [
        (4 * GIB, 0, 256 * MIB),
        (100 * GIB, 0, 256 * MIB),
        (5 * MIB, 0, MIB),
        (48 * MIB, 0, 2 * MIB),
        (3 * GIB, GIB, GIB),
        (6 * MIB, 2 * MIB, 2 * MIB),
    ],
)
def test_a_slab_is_chosen_that_fits_arena_and_pages(arena: int, huge: int, slab: int) -> None:
    config = Config(arena_bytes=arena, huge_page_bytes=huge)
    assert config.slab_bytes == slab
    assert config.arena_bytes == arena


def test_a_chosen_configuration_survives_being_passed_to_a_child() -> None:
    config, _ = load(None, {"arena_bytes": "1001MiB", "copy_threads": "3"})
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config
    assert config.copy_threads == 3
    assert 1 <= config.touch_threads <= 4


def test_the_default_socket_is_in_a_directory_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_socket() == "/run/kvserver/kvserver.sock"
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1234")
    assert default_socket() == "/run/user/1234/kvserver/kvserver.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert default_socket() == "/tmp/kvserver-1234/kvserver.sock"


# ---------------------------------------------------------------- refusals


def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    path = toml(tmp_path, "jobs_max = 3\nlease_ttl = 5\n")
    assert refusal(path) == f"config-key: {path}:2: unknown key 'lease_ttl'; did you mean lease_ttl_ms?"
    assert "keys are socket, " in refusal(zzzzzzzzzzzz="1")


def test_a_heading_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = toml(tmp_path, "[server]\njobs_max = 3\n")
    assert (
        refusal(path)
        == f"config-key: {path}:1: [server] is a table; keys stand at the top of the file, under no heading"
    )


def test_a_key_that_was_renamed_is_refused_by_its_new_name(tmp_path: Path) -> None:
    """Its nearest neighbour means something else."""
    told = "'arena_path_gpu' is called 'arena_reach' now, with the same values"
    assert refusal(toml(tmp_path, 'arena_path_gpu = "bounce"\n')).endswith(f":1: {told}")
    run = CliRunner().invoke(main.app, ["config", "--arena-path-gpu", "bounce"])
    assert told in str(run.exception)
    assert "--arena-path-gpu" not in CliRunner().invoke(main.app, ["config", "--help"]).stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("jobs_max = true", "jobs_max=true must be a whole number"),
        ("jobs_max = 1.5", "jobs_max=1.5 must be a whole number"),
        ('jobs_max = "5"', "jobs_max='5' must be a whole number"),
        ('arena_bytes = "16GB"', "arena_bytes='16GB' must be bytes such as 4096 or 16GiB"),
        ('arena_bytes = "1.5GiB"', "arena_bytes='1.5GiB' must be bytes"),
        ("socket = 7", "socket=7 must be text"),
        ('log_level = "loud"', "log_level='loud' must be debug | info | warning | error"),
        ("lease_ttl_ms = 0", "lease_ttl_ms=0 must be in [1, 86400000]"),
        ("namespaces_max = 257", "namespaces_max=257 must be in [1, 256]"),
        ("http_port = 65536", "http_port=65536 must be in [0, 65535]"),
        ("arena_bytes = 4096", "arena_bytes=4KiB must be in [1MiB, 64TiB]"),
        ("numa_node = -2", "numa_node=-2 must be in [-1, 1023]"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_expected_and_where_it_stands(
    tmp_path: Path, text: str, said: str
) -> None:
    path = toml(tmp_path, "\n" + text + "\n")
    message = refusal(path)
    assert said in message
    assert f"from {path}:2)" in message


def test_a_bad_flag_is_named() -> None:
    assert refusal(jobs_max="x") == "config-type: jobs_max='x' must be a whole number (jobs_max from --jobs-max)"
    assert "lease_ttl_ms=-1 must be in" in refusal(lease_ttl_ms="-1")
    assert "jobs_max='١' must be" in refusal(jobs_max="١")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"slab_bytes": "9MiB", "huge_page_bytes": "2MiB", "arena_bytes": "9MiB"}, "must hold a slab of slab_bytes=10"),
        ({"slab_bytes": "64MiB", "arena_bytes": "32MiB"}, "arena_bytes=32MiB must hold a slab of slab_bytes=64MiB"),
        ({"arena_bytes": "512MiB", "huge_page_bytes": "1GiB"}, "must hold a slab of slab_bytes=1GiB"),
        ({"huge_page_bytes": "4MiB"}, "huge_page_bytes=4MiB must be 0, 2MiB or 1GiB"),
        ({"http_host": ""}, "http_port=0 turns HTTP off"),
    ],
)
def test_relations_between_keys_are_checked(flags: dict[str, str], said: str) -> None:
    assert said in refusal(None, **flags)


def test_relations_name_the_place_of_both_values(tmp_path: Path) -> None:
    path = toml(tmp_path, 'slab_bytes = "3MiB"\n')
    assert f"(arena_bytes from --arena-bytes, slab_bytes from {path}:1)" in refusal(path, arena_bytes="2MiB")


@pytest.mark.parametrize("socket", ["relative/kv.sock", "/run/kv/", "/run/\0kv", "@abstract"])
def test_a_socket_is_an_absolute_path_of_a_file(socket: str) -> None:
    assert "must be the absolute path of a file" in refusal(socket=socket)


def test_a_socket_path_must_fit_with_its_suffixes() -> None:
    longest = "/tmp/" + "é" * 48
    assert load(None, {"socket": longest})[0].socket == longest
    assert "has 102 bytes; as a socket's path it may have 101" in refusal(socket=longest + "x")


def test_a_bad_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.toml")
    assert "Is a directory" in refusal(tmp_path)
    assert "not a TOML file" in refusal(toml(tmp_path, "jobs_max = \n"))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    assert "not a TOML file" in refusal(binary)
    assert "larger than 1MiB" in refusal(toml(tmp_path, "#" * (MIB + 1)))


def test_construction_checks_as_well() -> None:
    with pytest.raises(ConfigError, match="jobs_max=true"):
        Config(jobs_max=True)
    with pytest.raises(AttributeError):
        Config().jobs_max = 3  # type: ignore[misc]


# ---------------------------------------------------------------- the list of keys itself


def test_the_example_file_is_the_declared_keys_and_changes_nothing(tmp_path: Path) -> None:
    assert (ROOT / "deploy" / "kvserver.toml").read_text() == example(), (
        "kvserver config --example > deploy/kvserver.toml"
    )
    uncommented = "\n".join(
        line[1:] if line.startswith("#") and not line.startswith("# ") else line for line in example().splitlines()
    )
    from_file, origins = load(toml(tmp_path, uncommented), {})
    assert from_file == Config()
    assert all(origin != "default" for origin in origins.values())


def test_every_key_is_described_and_bounded() -> None:
    for key in KEYS:
        assert key.about.text.endswith("."), key.name
        if key.kind is int:
            assert key.about.least < key.about.most, key.name
        key.check(key.default)


def test_every_key_is_read_by_the_server() -> None:
    """A key that no code reads would be an empty promise."""
    read = {field.name for field in dataclasses.fields(Bounds)}
    rooms = ("supervisor", "brain", "movers", "transfer")
    for path in (path for room in rooms for path in (ROOT / "kvserver" / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {key.name for key in KEYS} - read == set()


def test_every_bound_of_the_service_agrees_with_its_key() -> None:
    """The service's own defaults equal the configuration's, so the simulator tests the shipped ones."""
    defaults = {field.name: field.default for field in dataclasses.fields(Bounds)}
    for key in KEYS:
        if isinstance(defaults.get(key.name), int):
            assert key.default == defaults[key.name], key.name


def test_sizes_are_shown_exactly() -> None:
    for count in (0, 1, 1023, 1024, 3 * MIB, 3 * MIB + 1, 5 * GIB, 64 << 40):
        shown = show_bytes(count)
        assert parse_bytes(shown) == count
    assert show_bytes(1536 * MIB) == "1536MiB"


# ---------------------------------------------------------------- devices of the disk tier


def test_disk_paths_are_a_list_in_a_file_or_have_commas_between_them(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    for written in ('["/a", "file:///b"]', '"/a,/b"', '"/a/, file:///b/"'):
        file.write_text(f"disk_paths = {written}\n")
        directories = load(file, {})[0].disk_directories
        assert tuple(path.rstrip("/") for path in directories) == ("/a", "/b")


@pytest.mark.parametrize("written", ["[5]", '["a"]', '["/a", "/a"]', '[["/a"]]', "7", '["/a,b"]'])
def test_paths_that_are_none_are_refused_with_the_line_on_which_they_stand(tmp_path: Path, written: str) -> None:
    file = tmp_path / "kv.toml"
    file.write_text(f"\ndisk_paths = {written}\n")
    with pytest.raises(ConfigError, match="disk_paths"):
        load(file, {})


def test_devices_have_segments_enough_and_not_too_many() -> None:
    least = Config(disk_paths="/a", disk_bytes=MIB, disk_segment_bytes=64 * KIB)
    assert least.disk_segments == 15
    most = Config(disk_paths="/a", disk_bytes=60 * TIB)
    assert most.disk_segments * most.disk_segment_bytes < DEVICE_SPAN
    with pytest.raises(ConfigError, match=r"disk_bytes=1TiB hold 16,777,215 segments of disk_segment_bytes=64KiB"):
        Config(disk_paths="/a", disk_bytes=TIB, disk_segment_bytes=64 * KIB)
    with pytest.raises(ConfigError, match="config-range"):
        Config(disk_paths="/a", disk_bytes=DEVICE_SPAN)


@pytest.mark.parametrize("given", [{"disk_bytes": "64GiB"}, {"disk_depth": "7"}, {"disk_write_policy": "through"}])
def test_what_is_said_of_disks_without_naming_one_is_refused(tmp_path: Path, given: dict[str, str]) -> None:
    """Also when the value equals the default: it was written for a disk tier that does not exist."""
    ((name, value),) = given.items()
    assert refusal(**given).startswith(f"config-disk: {name}={value} needs disk_paths; ")
    line = f"{name} = {value}\n" if value.isdecimal() else f'{name} = "{value}"\n'
    path = toml(tmp_path, line)
    assert refusal(path).endswith(f"({name} from {path}:1)")
    assert not load(path, {"disk_paths": ""})[0].disk_directories, "no disks, and that was said"
    assert load(path, {"disk_paths": "/a"})[0].disk_directories == ("/a",)


def test_a_directory_has_one_name() -> None:
    assert Config(disk_paths="/a/, file:///b//c/../d").disk_directories == ("/a", "/b/d")


# ---------------------------------------------------------------- quotas


def test_quotas_come_from_a_flag_or_a_table(tmp_path: Path) -> None:
    path = toml(
        tmp_path, 'arena_bytes = "7GiB"\n[tenants]\nagents = "3GiB..5GiB"\n"team b" = "..1GiB"\ndefault = "2MiB.."\n'
    )
    config, origins = load(path, {})
    assert origins["tenants"] == f"{path}:2"
    assert bounds_from(config).tenants == (
        Quota("agents", 3 * GIB, 5 * GIB),
        Quota("team b", 0, GIB),
        Quota("default", 2 * MIB, 0),
    )
    assert load(None, {"tenants": config.tenants, "arena_bytes": "7GiB"})[0] == config
    assert bounds_from(load(None, {})[0]).tenants == ()


def test_quotas_on_disk_stand_beside_those_in_the_arena(tmp_path: Path) -> None:
    text = f'disk_paths = "{tmp_path}"\n[tenants]\nagents = "1GiB.."\n[disk_tenants]\nchat = "3GiB..5GiB"\n'
    config, origins = load(toml(tmp_path, text), {})
    assert origins["disk_tenants"].endswith(":4")
    assert bounds_from(config).tenants == (Quota("agents", GIB, 0), Quota("chat", 0, 0, 3 * GIB, 5 * GIB))


def test_what_is_guaranteed_on_disk_is_held_against_what_records_can_use() -> None:
    sizes = {"disk_paths": "/a,/b", "disk_bytes": GIB + 64 * KIB, "disk_segment_bytes": 16 * MIB}
    room = Config(**sizes).disk_room_bytes
    pages = (16 * MIB) // PAGE_BYTES
    most = max(units * extents_per_segment(16 * MIB, units * PAGE_BYTES) for units in range(1, pages))
    assert room == 2 * 64 * most * PAGE_BYTES, "of records of the size that uses most of a segment"
    Config(**sizes, disk_tenants=f"a={room // 2}.., b={room // 2}..")
    flags = {name: str(value) for name, value in sizes.items()}
    assert "guarantees" in refusal(**flags, disk_tenants=f"a={room // 2}.., b={room // 2 + 4096}..")


def test_quotas_on_disk_need_a_disk_and_count_with_the_others() -> None:
    assert "disk_paths is empty" in refusal(disk_tenants="a=1MiB..")
    many = ",".join(f"t{number}=..1MiB" for number in range(40))
    others = ",".join(f"u{number}=..1MiB" for number in range(25))
    says = refusal(tenants=many, disk_tenants=others, disk_paths="/a")
    assert "tenants and disk_tenants name 65 tenants" in says
    assert "have one tag" in refusal(tenants="plumless=1MiB..", disk_tenants="buckeroo=1MiB..", disk_paths="/a")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("agents", "'agents': expected NAME=GUARANTEED..MAXIMUM"),
        ("agents=3GiB", "expected NAME="),
        ("agents=..", "expected NAME="),
        ("agents=3GB..4GiB", "expected NAME="),
        ("=1MiB..", "a tenant's name is 1 to 128"),
        ("a\nb=1MiB..", "a tenant's name is"),
        ("agents=2MiB..1MiB", "the maximum must not be less"),
        ("agents=..0", "the maximum must not be less"),
        ("agents=1MiB.., agents=..2MiB", "'agents=..2MiB': the tenant has a quota already"),
        ("agents=3GiB.., chat=2GiB..", "guarantees 5GiB, there are 4GiB"),
        (",".join(f"t{number}=1MiB.." for number in range(65)), "tenants name 65 tenants"),
        ("plumless=1MiB.., buckeroo=1MiB..", "'buckeroo' and 'plumless' have one tag"),
    ],
)
def test_a_quota_that_cannot_be_is_refused(text: str, says: str) -> None:
    assert says in refusal(tenants=text)
