"""SSH addresses: read in one way, never with a password, and joined with their host's settings."""

from __future__ import annotations

import asyncssh
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.config import HostSettings
from dflash_core.errors import InputError
from dflash_core.ssh import (
    CIPHERS,
    SshAddress,
    connect_options,
    is_ssh_url,
    parse_ssh_url,
    settings_for,
)

NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("url", "host", "port", "user", "path"),
    [
        ("ssh://me@box:2222/data/runs/a", "box", 2222, "me", "/data/runs/a"),
        ("sftp://box/x", "box", None, None, "/x"),
        ("ssh://box", "box", None, None, ""),
        ("ssh://box/", "box", None, None, "/"),
        ("ssh://me@10.0.0.1/x", "10.0.0.1", None, "me", "/x"),
        ("ssh://me@[::1]:22/x", "::1", 22, "me", "/x"),
        ("ssh://corp%5Cme@box/x", "box", None, "corp\\me", "/x"),
        ("ssh://me@corp@box/x", "box", None, "me@corp", "/x"),
        ("ssh://box/run%20a", "box", None, None, "/run a"),
        ("ssh://box/run #3", "box", None, None, "/run #3"),
        ("ssh://box/what?", "box", None, None, "/what?"),
        ("ssh://box/a@b:c/x", "box", None, None, "/a@b:c/x"),
    ],
)
def test_a_url_is_split(url: str, host: str, port: int | None, user: str | None, path: str) -> None:
    assert parse_ssh_url(url) == SshAddress(host=host, port=port, user=user, path=path)


@given(NAMES, st.none() | st.integers(1, 65535), st.none() | NAMES, st.lists(NAMES, max_size=3))
def test_what_is_put_together_is_taken_apart(host: str, port: int | None, user: str | None, parts: list[str]) -> None:
    path = "".join(f"/{part}" for part in parts)
    url = f"ssh://{f'{user}@' if user else ''}{host}{f':{port}' if port else ''}{path}"
    assert parse_ssh_url(url) == SshAddress(host=host, port=port, user=user, path=path)


@pytest.mark.parametrize(
    "url",
    [
        "ssh:///data",
        "ssh://",
        "ssh://me@/data",
        "ssh://box:port/data",
        "ssh://box:99999/data",
        "ssh://[::1/data",
    ],
)
def test_a_malformed_url_is_one_line_of_what_to_write(url: str) -> None:
    with pytest.raises(InputError, match="write ssh://user@host:port/path") as refused:
        parse_ssh_url(url)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "ssh://me:s3cret@box/x",
        "ssh://me:s3cret@/x",
        "ssh://:s3cret@box/x",
        "ssh://me:s3cret@box:port/x",
        "ssh://me:s3cret@[::1/x",
        "ssh://me:s3cret@corp@box/x",
    ],
)
def test_a_password_is_refused_and_never_repeated(url: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_ssh_url(url)
    assert "password" in str(refused.value)
    assert "s3cret" not in str(refused.value)
    assert refused.value.__cause__ is None or "s3cret" not in str(refused.value.__cause__)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("ssh://box/x", True),
        ("sftp://box/x", True),
        ("s3://bucket", False),
        ("/data/ssh", False),
        ("ssh", False),
        ("ssh:/x", False),
        ("local", False),
    ],
)
def test_only_ssh_urls_are_ssh_urls(text: str, answer: bool) -> None:
    assert is_ssh_url(text) is answer


def test_an_endpoint_is_shown_with_its_port() -> None:
    assert parse_ssh_url("ssh://me@box/x").endpoint == "me@box:22"
    assert parse_ssh_url("ssh://box:23").endpoint == "box:23"


class TestSettings:
    HOSTS = {
        "here": HostSettings(url="local"),
        "training": HostSettings(url="ssh://me@box/data", max_read_mb_s=200),
        "other port": HostSettings(url="ssh://me@box:23", max_read_mb_s=23),
        "other user": HostSettings(url="sftp://you@box:22", max_read_mb_s=7),
    }

    @pytest.mark.parametrize(
        ("url", "name"),
        [
            ("ssh://me@box/elsewhere", "training"),
            ("ssh://me@box:22/data/runs/a", "training"),
            ("sftp://me@box/x", "training"),
            ("ssh://me@BOX/x", "training"),
            ("ssh://me@box:23/x", "other port"),
            ("ssh://you@box/x", "other user"),
        ],
    )
    def test_a_url_takes_the_settings_of_its_user_host_and_port(self, url: str, name: str) -> None:
        assert settings_for(url, self.HOSTS) is self.HOSTS[name]

    @pytest.mark.parametrize(
        "url", ["ssh://box/x", "ssh://me@box2/x", "ssh://me@box:24/x", "ssh://they@box/x", "ssh://local/x"]
    )
    def test_any_other_url_takes_the_defaults(self, url: str) -> None:
        assert settings_for(url, self.HOSTS) == HostSettings(url=url)


class TestConnectOptions:
    def test_host_keys_are_checked_unless_that_is_turned_off(self) -> None:
        address = parse_ssh_url("ssh://box")
        assert connect_options(address, HostSettings(url="ssh://box"))["known_hosts"].endswith("/.ssh/known_hosts")
        assert connect_options(address, HostSettings(url="ssh://box", known_hosts=None))["known_hosts"] is None

    def test_user_port_key_and_time_limit_are_handed_on(self) -> None:
        settings = HostSettings(url="ssh://me@box:23", identity_file="/k", timeout_s=3)
        options = connect_options(parse_ssh_url("ssh://me@box:23/x"), settings)
        assert options["port"] == 23
        assert options["username"] == "me"
        assert options["client_keys"] == ["/k"]
        assert options["connect_timeout"] == options["login_timeout"] == 3

    def test_what_the_url_leaves_out_is_left_to_ssh_config(self) -> None:
        options = connect_options(parse_ssh_url("ssh://box"), HostSettings(url="ssh://box"))
        assert not {"port", "username", "client_keys"} & set(options)

    def test_every_option_and_cipher_is_one_that_asyncssh_knows(self) -> None:
        options = connect_options(
            parse_ssh_url("ssh://me@box:23"), HostSettings(url="ssh://me@box:23", known_hosts=None)
        )
        parsed = asyncssh.SSHClientConnectionOptions(**options)
        assert [cipher.decode() for cipher in parsed.encryption_algs] == list(CIPHERS)
