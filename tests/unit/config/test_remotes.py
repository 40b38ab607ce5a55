"""Remote stores in the configuration: what is taken, from a flag and from a file, and what is refused in words."""

from pathlib import Path
from urllib.parse import urlencode

import pytest

from kvserver.config.config import Config, load
from kvserver.config.remotes import Remote, parse
from kvserver.errors import ConfigError

FILE = """
[remotes.fleet-7]
url = "valkeys://10.0.0.7,[fe80::1]:6380"
write = "through"
cluster = true
username = "kv server"
password_file = "/etc/kvserver/valkey"
ttl_s = 3601
read_bytes_in_flight = "3MiB"
"""


def test_a_file_and_a_flag_name_the_same_store(tmp_path: Path) -> None:
    file = tmp_path / "kvserver.toml"
    file.write_text(FILE)
    from_file, _ = load(file, {})
    assert from_file.remote_stores[0] == Remote(
        "fleet-7",
        "valkeys://10.0.0.7,[fe80::1]:6380",
        write="through",
        cluster="yes",
        username="kv server",
        password_file="/etc/kvserver/valkey",
        ttl_s=3601,
        read_bytes_in_flight=3 << 20,
    )
    from_flag, _ = load(None, {"remotes": from_file.remotes})
    assert from_flag.remote_stores == from_file.remote_stores


def test_addresses_have_the_usual_port_unless_they_name_one() -> None:
    (remote,) = parse("a=valkeys://10.0.0.7,[fe80::1]:6380,host:7")
    assert remote.addresses == (("10.0.0.7", 6379), ("fe80::1", 6380), ("host", 7))
    assert (remote.uses_tls, remote.directory) == (True, "")


def test_a_directory_has_a_path_and_no_address() -> None:
    (remote,) = parse("shared=file:///mnt/kv%20cache?write=never")
    assert remote.pledged == "wait"
    assert (remote.scheme, remote.addresses, remote.write) == ("file", (), "never")
    assert remote.directory == "/mnt/kv cache"


def test_a_mooncake_store_has_a_master_and_a_transport() -> None:
    usual, own = parse("a=mooncake://[fd00::7]")[0], parse("a=mooncake://m.internal:7?transport=rdma")[0]
    assert (usual.master, usual.transport) == (("fd00::7", 50_051), "tcp")
    assert (own.master, own.transport) == (("m.internal", 7), "rdma")
    assert (own.addresses, own.bucket, parse("a=s3://bucket")[0].master) == ((), "", None)


def test_a_bucket_has_a_prefix_and_no_address() -> None:
    text = (
        "a=s3://kv-cache.7/team_1/a=b/?endpoint=https%3A%2F%2Fs3.internal%3A9000&region=eu-1&username=id&password_env=K"
    )
    (remote,) = parse(text)
    assert (remote.scheme, remote.bucket, remote.bucket_prefix) == ("s3", "kv-cache.7", "team_1/a=b")
    assert (remote.endpoint, remote.region) == ("https://s3.internal:9000", "eu-1")
    assert (remote.addresses, remote.directory) == ((), "")
    assert [parse(f"a={url}")[0].bucket_prefix for url in ("gs://bucket", "az://container/x")] == ["", "x"]


def test_a_plug_in_has_options_of_its_own_beside_ours(tmp_path: Path) -> None:
    text = "a=plugin://some_package.module:Store?root=/x&endpoint=http://y&write=through&password_env=P"
    (remote,) = parse(text)
    assert (remote.scheme, remote.plugin) == ("plugin", "some_package.module:Store")
    assert remote.url == "plugin://some_package.module:Store", "options are not shown"
    assert remote.own == (("root", "/x"), ("endpoint", "http://y"))
    assert (remote.write, remote.password_env, remote.endpoint) == ("through", "P", "")
    file = tmp_path / "kvserver.toml"
    file.write_text('[remotes.a]\nurl = "plugin://m:S?root=/x"\nwrite = "never"\ndepth = 7\n')
    (from_file,) = load(file, {})[0].remote_stores
    assert (from_file.own, from_file.write) == ((("root", "/x"), ("depth", "7")), "never")


def test_a_file_and_a_flag_name_several_stores_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "kvserver.toml"
    file.write_text('[remotes.near]\nurl = "valkey://x?prefix=a"\n[remotes.far]\nurl = "valkey://x"\ncluster = true\n')
    from_file, _ = load(file, {})
    assert [(remote.name, remote.prefix, remote.cluster) for remote in from_file.remote_stores] == [
        ("near", "a", "no"),
        ("far", "", "yes"),
    ]
    from_flag, _ = load(None, {"remotes": from_file.remotes})
    assert from_flag.remote_stores == from_file.remote_stores


def test_one_place_has_several_tenants() -> None:
    names = [remote.name for remote in parse("a=file:///x?tenant=t b=file:///x?tenant=u c=file:///x")]
    assert names == ["a", "b", "c"]


def test_without_stores_there_is_none() -> None:
    assert Config().remote_stores == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a=http://x", "scheme 'http' is unknown"),
        ("a=x:6379", "scheme 'x' is unknown"),
        ("=valkey://x", "expected a name of 1 to 32 characters"),
        ("A=valkey://x", "expected a name of 1 to 32 characters"),
        ("a=valkey://x a=file:///y", "remotes.a: is named twice"),
        ("a=valkey://x b=redis://y,x c=valkey://x:6379", "remotes.c: is the same place as remotes.a"),
        ("a=redis://y,x:7 b=valkey://x:7,y?write=through", "remotes.b: is the same place as remotes.a"),
        ("a=file:///x b=file:///x/?threads=3", "remotes.b: is the same place as remotes.a"),
        ("a=file:////x/y", "expected file:///PATH, an absolute path"),
        ("a=file:///x/y b=file:///x//y", "remotes.b: is the same place as remotes.a"),
        ("a=file:///x/y b=file:///x/./%79", "remotes.b: is the same place as remotes.a"),
        ("a=file:///x/y b=file:///z/../x/y", "remotes.b: is the same place as remotes.a"),
        ("a=s3://bucket/x?region=eu b=s3://bucket/x/", "remotes.b: is the same place as remotes.a"),
        ("a=mooncake://m b=mooncake://m:50051?transport=rdma", "remotes.b: is the same place as remotes.a"),
        (" ".join(f"a{n}=file:///x{n}" for n in range(5)), "a0, a1, a2, a3, a4: 5 stores: expected 4 at most"),
        ("a=valkey://x?write=evict", "is not built: expected reuse, through or never"),
        ("a=valkey://x?write=often", "write='often' must be reuse | through | never"),
        ("a=valkey://x?pledged=often", "pledged='often' must be wait | write"),
        ("a=valkey://x?pledged=write&write=never", "pledged=write and write=never: expected write=reuse or through"),
        ("a=valkey://x?size=3", "unknown key 'size'; keys are url, write, "),
        ("a=valkey://x?ttl_s=7&ttl_s=8", "ttl_s='7' must be a whole number in [60, "),
        ("a=valkey://x?ttl_s=77&ttl_s=88", "names ttl_s twice"),
        ("a=valkey://x?threads=0", "threads='0' must be a whole number in [1, 64]"),
        ("a=valkey://x?write", "is no URL: "),
        ("a=valkey://x/3", "has a path '/3'"),
        ("a=valkey://x:0", "'x:0' is no address"),
        ("a=valkey://x:y", "'x:y' is no address"),
        ("a=valkey://", "'' is no address"),
        ("a=file://host/mnt", "expected file:///PATH"),
        ("a=file:///", "expected file:///PATH"),
        ("a=file:///mnt?cluster=yes", "cluster is for Valkey and Redis"),
        ("a=file:///mnt?ttl_s=77", "ttl_s is for Valkey and Redis"),
        ("a=file:///mnt?endpoint=http://x", "endpoint is for S3, Google, Azure, not for a directory"),
        ("a=valkey://x?region=eu", "region is for S3, not for Valkey and Redis"),
        ("a=s3://bucket?prefix=x", "prefix is for Valkey and Redis, not for S3"),
        ("a=s3://bucket?ttl_s=77", "ttl_s is for Valkey and Redis, not for S3"),
        ("a=gs://bucket?username=x&password_env=X", "username is for Valkey and Redis, S3, Azure, not for Google"),
        ("a=az://box?region=eu", "region is for S3, not for Azure"),
        ("a=s3://bucket?transport=rdma", "transport is for Mooncake, not for S3"),
        ("a=mooncake://h?ttl_s=77", "ttl_s is for Valkey and Redis, not for Mooncake"),
        (
            "a=mooncake://h?password_env=X",
            "password_env is for Valkey and Redis, S3, Azure, a plug-in, not for Mooncake",
        ),
        ("a=mooncake://h?transport=udp", "transport='udp' must be tcp | rdma"),
        ("a=mooncake://h,i", "names 2 nodes: expected 1 master"),
        ("a=mooncake://h:0", "'h:0' is no address"),
        ("a=mooncake://", "'' is no address"),
        ("a=mooncake://h/x", "has a path '/x'"),
        ("a=s3://", "'' is no bucket: expected s3://BUCKET"),
        ("a=s3://Bucket", "'Bucket' is no bucket"),
        ("a=s3://bucket/a/../b", "prefix 'a/../b' must have at most 256 characters"),
        ("a=s3://bucket/a//b", "prefix 'a//b' must have"),
        ("a=s3://bucket/%20", "prefix '%20' must have"),
        ("a=s3://bucket?username=x", "expected username or username_env, and password_file or password_env, or none"),
        ("a=s3://bucket?username_env=X", "expected username or username_env, and password_file or password_env, or"),
        ("a=az://box?password_env=X", "expected username or username_env, and password_file or password_env, or none"),
        ("a=gs://bucket?username_env=X", "username_env is for Valkey and Redis, S3, Azure, not for Google"),
        ("a=valkey://x?username=x&username_env=X", "has username and username_env: expected one of them"),
        ("a=s3://bucket?endpoint=x:9000", "endpoint must be http://HOST:PORT"),
        ("a=s3://bucket?endpoint=http://h:99999", "endpoint must be http://HOST:PORT"),
        ("a=s3://bucket?endpoint=http://h:0", "endpoint must be http://HOST:PORT"),
        ("a=s3://bucket?endpoint=http://h:abc", "endpoint must be http://HOST:PORT"),
        ("a=s3://bucket?endpoint=http://[::1", "endpoint must be http://HOST:PORT"),
        ("a=s3://bucket?endpoint=http://h%20i", "endpoint must be http://HOST:PORT"),
        ("a=s3://bucket?endpoint=http://\u00e4", "endpoint must be http://HOST:PORT"),
        ("a=s3://bucket?endpoint=HTTP://h", "endpoint must be http://HOST:PORT"),
        ("a=s3://bucket?region=a%20b", "region='a b' must have at most 64 characters of a-z"),
        ("a=s3://bucket?region=%C3%A9", "region='\u00e9' must have"),
        ("a=s3://bucket?region=%5B", "region='[' must have"),
        ("a=s3://my..bucket", "'my..bucket' is no bucket"),
        ("a=plugin://", "'' is no plug-in: expected plugin://PACKAGE.MODULE:CLASS"),
        ("a=plugin://package", "'package' is no plug-in"),
        ("a=plugin://package:Class/x", "'package:Class/x' is no plug-in"),
        ("a=plugin://../x:Class", "is no plug-in"),
        ("a=plugin://m:S?Root=x", "option 'Root' of a plug-in: expected a-z"),
        ("a=plugin://m:S?x=1&x=2", "has 2 options of a plug-in: expected 32 different ones at most"),
        ("a=plugin://m:S?write=often", "write='often' must be"),
        ("a=valkey://x?tenant=A", "tenant='A' must have 1 to 64 characters"),
        ("a=valkey://x?tenant=a:b", "tenant='a:b' must have 1 to 64 characters"),
        ("a=valkey://x?password_file=/a&password_env=B", "has password_file and password_env"),
        ("a=valkey://x?password_file=a", "'a' must be an absolute path"),
    ],
)
def test_a_wrong_store_is_refused_in_words(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(remotes=text)
    assert why in refused.value.message


SECRET_KEYS = (
    *("apikey", "api-key", "access-key", "access_key", "account-key", "private-key", "key", "access_key_id"),
    *("sas", "x_sig", "auth", "bearer", "pwd", "pass", "passwd", "passphrase", "Password", "API-KEY"),
    *("connection_string", "connection-string", "aws_secret"),
)


@pytest.mark.parametrize(
    "text",
    [
        "a=plugin://m:S?token=hunter2",
        "a=plugin://m:S?account_key=hunter2",
        "a=plugin://m:S?db-password=hunter2",
        *(f"a=plugin://m:S?{key}=hunter2" for key in SECRET_KEYS),
        "a=plugin://m:S?dsn=postgres://u:hunter2@h/db",
        "a=plugin://m:S?endpoint=https://u:hunter2@h",
        "a=plugin://m:S?endpoint=https://hunter2@h",
        "a=plugin://m:S?x=AccountName%3Da;AccountKey%3Dhunter2",
        "a=s3://id:hunter2@bucket",
        "a=s3://bucket?secret=hunter2",
        "a=valkey://:hunter2@x",
        "a=valkey://me:hunter2@x",
        "a=valkey://x?password=hunter2",
        "a=valkey://x?token=hunter2",
    ],
)
def test_a_literal_password_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(remotes=text)
    assert "password_file or password_env" in refused.value.message
    assert "hunter2" not in str(refused.value)


def test_a_signature_or_a_password_in_an_endpoint_is_not_repeated() -> None:
    for endpoint in ("http://me:hunter2@x", "http://x/?sig=hunter2", "http://me:hunter2\u2100@x", "http://x/#hunter2"):
        with pytest.raises(ConfigError) as refused:
            Config(remotes=f"a=az://box?{urlencode({'endpoint': endpoint})}")
        assert "endpoint must be" in refused.value.message
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("text", ["a=s3://me:hunter2\u2100@h", "a=s3://bucket?sig=a&hunter2", "a=s3://[hunter2"])
def test_what_is_no_url_is_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match=r"remotes\.a: is no URL: expected SCHEME://") as refused:
        Config(remotes=text)
    assert "hunter2" not in str(refused.value)


def test_options_of_a_plug_in_that_could_be_no_secret_are_taken() -> None:
    own = (("passive", "yes"), ("author", "x"), ("dsn", "postgres://h/db"), ("at", "a@b"), ("key_prefix", "p"))
    text = "&".join(f"{key}={value}" for key, value in own)
    assert parse(f"a=plugin://m:S?{text}")[0].own == own


def test_a_table_without_a_url_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kvserver.toml"
    file.write_text('[remotes.a]\nwrite = "never"\n')
    with pytest.raises(ConfigError, match=r"remotes\.a: expected a table with url"):
        load(file, {})


def test_a_store_needs_digests() -> None:
    with pytest.raises(ConfigError, match=r"remotes\.a needs digests=on; it is off"):
        Config(remotes="a=valkey://x", digests="off")
