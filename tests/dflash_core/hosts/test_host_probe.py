"""Hosts are asked for real, over loopback; what goes wrong is a row, not a crash."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from dflash_core.config import Config, HostSettings
from dflash_core.hosts.probe import probe_host, probe_hosts, probe_local
from dflash_core.hosts.report import HostReport
from tests.support.sftp_server import RecordingSFTPServer

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 500}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A nested model without its second shard, an empty folder, and a flat one with an awkward name."""
    folder = tmp_path / "models"
    nested = folder / "nested"
    nested.mkdir(parents=True)
    (nested / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3_5ForConditionalGeneration"],
                "text_config": SIZES,
                "vision_config": {"hidden_size": 9},
            }
        )
    )
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = {"weight_map": {f"layers.{number}.weight": name for number, name in enumerate(shards)}}
    (nested / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (nested / shards[0]).write_bytes(b"x" * 1000)
    (nested / shards[2]).write_bytes(b"x" * 234)
    (folder / "empty").mkdir()
    awkward = folder / 'it\'s a  "model" $HOME `id`'
    awkward.mkdir()
    (awkward / "config.json").write_text(json.dumps(SIZES))
    (awkward / "model.safetensors").write_bytes(b"y" * 77)
    return folder


def check_models(report: HostReport, folder: Path) -> None:
    nested, empty, awkward, absent = report.facts.models

    assert nested.config is not None
    assert (nested.config.num_layers, nested.config.sources["num_layers"]) == (3, "text_config.num_hidden_layers")
    assert nested.config.architecture == "Qwen3_5ForConditionalGeneration"
    assert (nested.num_shards, nested.weights_bytes) == (2, 1234)
    assert nested.shards_missing == ("model-00002-of-00003.safetensors",)
    assert nested.problem == "1 of 3 shards missing: model-00002-of-00003.safetensors"
    assert not nested.is_whole

    assert (empty.is_present, empty.num_shards, empty.problem) == (True, 0, "the folder is empty")

    assert awkward.path == str(folder / 'it\'s a  "model" $HOME `id`')
    assert awkward.config is not None
    assert (awkward.config.hidden_size, awkward.weights_bytes, awkward.problem) == (64, 77, None)
    assert awkward.is_whole

    assert (absent.is_present, absent.size_bytes, absent.problem) == (False, None, "no such folder")


def asked(folder: Path) -> list[str]:
    return [str(folder / name) for name in ("nested", "empty", 'it\'s a  "model" $HOME `id`', "nowhere")]


def test_a_host_is_asked_over_ssh(sshd: Any, models: Path) -> None:
    report = probe_host("box", sshd.settings(models=asked(models), disks=["/", str(models)]))

    assert (report.status, report.problem) == ("ok", None)
    facts = report.facts
    assert facts.threads == len(os.sched_getaffinity(0))
    assert facts.ram_total_bytes is not None
    assert facts.ram_available_bytes is not None
    assert 0 < facts.ram_available_bytes <= facts.ram_total_bytes
    assert facts.system is not None
    assert platform.release() in facts.system
    stat = os.statvfs("/")
    assert facts.disks[0].total_bytes == pytest.approx(stat.f_blocks * stat.f_frsize, rel=0.01)
    assert [disk.is_present for disk in facts.disks] == [True, True]
    check_models(report, models)
    assert 0 < report.seconds < 20


def test_a_folder_of_models_is_looked_into(sshd: Any, models: Path) -> None:
    report = probe_host("box", sshd.settings(models=[str(models)]))

    assert sorted(model.path for model in report.facts.models) == sorted(asked(models)[0:3:2])


def test_this_machine_is_asked_with_its_own_python(models: Path) -> None:
    report = probe_local(HostSettings(url="local", models=asked(models)))

    assert (report.status, report.problem) == ("ok", None)
    assert report.facts.python == platform.python_version()
    assert report.facts.torch == version("torch")
    if shutil.which("nvidia-smi") is None:
        assert report.facts.gpus == ()
    check_models(report, models)


def test_a_read_only_host_is_never_sent_a_command(odd_server: Callable[..., Any], models: Path) -> None:
    server, login = odd_server(folder=models.parent)
    settings = login.settings("/models", read_only=True, models=["/models/nested", "/models/empty", "/nowhere"])

    report = probe_host("training", settings)

    assert (report.status, report.problem) == ("read-only", None)
    assert server.commands == []
    assert server.write_opens == []
    facts = report.facts
    assert facts.folder is not None
    assert (facts.folder.path, facts.folder.num_entries) == ("/models", 3)
    stat = os.statvfs(models)
    assert facts.disks[0].path == "/models"
    assert facts.disks[0].total_bytes == stat.f_blocks * stat.f_frsize
    assert facts.disks[0].free_bytes == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.05)
    assert [model.num_shards for model in facts.models] == [2, 0, 0]
    assert facts.models[0].config is not None
    assert facts.models[0].shards_missing == ("model-00002-of-00003.safetensors",)
    assert facts.ram_total_bytes is None, "this server shows its own folder alone, no /proc"
    assert not report.may_be_given_work


def test_everything_a_read_only_host_is_asked_is_a_read(models: Path) -> None:
    with RecordingSFTPServer(models.parent) as server:
        settings = server.host_settings.model_copy(
            update={"url": server.url("/models"), "models": ["/models/nested"], "disks": ["/", "/nowhere"]}
        )
        report = probe_host("training", settings)

        assert (report.status, report.problem) == ("read-only", None)
        assert report.facts.models[0].num_shards == 2
        assert [disk.is_present for disk in report.facts.disks] == [True, True, False]
        assert (server.execs, server.write_attempts, server.num_connections) == ([], [], 1)
        read = {operation.path for operation in server.ops if operation.name == "read"}
        assert read == {"/models/nested/config.json", "/models/nested/model.safetensors.index.json"}, "no weights"


def test_a_read_only_host_that_stops_answering_times_out(models: Path) -> None:
    with RecordingSFTPServer(models.parent) as server:
        server.faults.hang_reads = True
        settings = server.host_settings.model_copy(update={"timeout_s": 1.0, "models": ["/models/nested"]})
        report = probe_host("training", settings)

        assert report.status == "timed-out"
        assert report.seconds < 5


def test_the_counting_server_does_notice_a_command(odd_server: Callable[..., Any]) -> None:
    server, login = odd_server()

    assert probe_host("box", login.settings()).status == "unreadable"
    assert server.commands == ["sh"]


def test_a_read_only_openssh_host_shows_memory_and_cpu_as_files(sshd: Any, models: Path) -> None:
    report = probe_host("training", sshd.settings(str(models), read_only=True, models=asked(models)))

    assert (report.status, report.problem) == ("read-only", None)
    assert report.facts.threads == os.cpu_count()
    assert report.facts.ram_total_bytes is not None
    assert report.facts.load_1min is not None
    assert report.facts.cpu_flags is not None
    assert report.facts.folder is not None
    assert report.facts.folder.num_entries == 3
    check_models(report, models)


def test_a_read_only_folder_that_does_not_exist_is_told(sshd: Any) -> None:
    report = probe_host("training", sshd.settings("/no/such/run", read_only=True))

    assert report.status == "read-only"
    assert report.problem == "the folder '/no/such/run' cannot be listed; check the path in its url"
    assert report.facts.disks[0].is_present is False


def test_a_port_without_a_server_is_unreachable(sshd: Any) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound and not listening: a connection is refused
        url = f"ssh://me@127.0.0.1:{bound.getsockname()[1]}"
        report = probe_host("box", sshd.settings(url=url))

    assert report.status == "unreachable"
    assert report.problem is not None
    assert "cannot reach me@127.0.0.1" in report.problem


def test_a_name_that_does_not_exist_is_unreachable(sshd: Any) -> None:
    report = probe_host("box", sshd.settings(url="ssh://me@no-such-host.invalid"))

    assert report.status == "unreachable"
    assert report.problem == "the name 'no-such-host.invalid' is not found; check the url"


def test_a_key_that_the_host_does_not_know_is_refused(sshd: Any, keys: Any) -> None:
    report = probe_host("box", sshd.settings(identity_file=str(keys.stranger)))

    assert report.status == "refused"
    assert report.problem is not None
    assert f"{sshd.user}@127.0.0.1:{sshd.port} refused the login" in report.problem


@pytest.mark.parametrize("read_only", [False, True])
def test_an_unknown_host_key_is_not_talked_to(odd_server: Callable[..., Any], tmp_path: Path, read_only: bool) -> None:
    server, login = odd_server()
    other = tmp_path / "other_known_hosts"
    other.write_text("")

    report = probe_host("box", login.settings(known_hosts=str(other), read_only=read_only))

    assert report.status == "unknown-key"
    assert report.problem is not None
    assert str(other) in report.problem
    assert f"ssh-keyscan -p {login.port} 127.0.0.1" in report.problem
    assert server.commands == []


def test_a_changed_host_key_is_not_talked_to(odd_server: Callable[..., Any], keys: Any, tmp_path: Path) -> None:
    _, login = odd_server()
    wrong = tmp_path / "wrong_known_hosts"
    wrong.write_text(f"[127.0.0.1]:{login.port} {keys.stranger.with_suffix('.pub').read_text()}")

    assert probe_host("box", login.settings(known_hosts=str(wrong))).status == "unknown-key"


def test_the_host_key_goes_unchecked_only_where_the_config_says_null(odd_server: Callable[..., Any]) -> None:
    server, login = odd_server()

    assert probe_host("box", login.settings(known_hosts=None)).status == "unreadable"
    assert server.commands == ["sh"]


def test_a_missing_known_hosts_file_is_told_before_connecting(odd_server: Callable[..., Any]) -> None:
    _, login = odd_server()
    report = probe_host("box", login.settings(known_hosts="/no/such/known_hosts"))

    assert report.status == "unknown-key"
    assert report.problem is not None
    assert report.problem.startswith("the known_hosts file '/no/such/known_hosts' cannot be read; ")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"identity_file": "/no/such/key"}, "identity_file file '/no/such/key' cannot be read"),
        ({"url": "train-box"}, "'train-box' is neither 'local' nor ssh://"),
        ({"url": "ssh://me@box:many/"}, "port number"),
        ({"url": "ssh://me:secret@box/"}, "log in with a key instead"),
    ],
    ids=["no key file", "no url", "no port number", "password"],
)
def test_settings_that_cannot_work_are_a_row(sshd: Any, change: dict[str, Any], part: str) -> None:
    report = probe_host("box", sshd.settings(**change))

    assert report.status == "misconfigured"
    assert report.problem is not None
    assert part in report.problem
    assert "secret" not in report.problem


def test_a_key_file_that_is_no_key_is_a_row(sshd: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("not a key\n")
    report = probe_host("box", sshd.settings(identity_file=str(tmp_path / "key")))

    assert report.status == "misconfigured"


def test_a_host_that_accepts_and_says_nothing_times_out(sshd: Any) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"ssh://me@127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        report = probe_host("box", sshd.settings(url=url, timeout_s=1.0))

    assert report.status == "timed-out"
    assert 0.9 < time.monotonic() - started < 5


async def _sleep(process: asyncssh.SSHServerProcess[bytes]) -> None:
    await asyncio.sleep(60)


async def _begin_and_sleep(process: asyncssh.SSHServerProcess[bytes]) -> None:
    process.stdout.write(b"@begin\n@threads\n|90\n@memory\n|MemTotal:       1024 kB\n")
    await asyncio.sleep(60)


async def _babble(process: asyncssh.SSHServerProcess[bytes]) -> None:
    process.stdout.write(b"This account is\x1b[31m for backups\xff\nonly.\n")


async def _stop_early(process: asyncssh.SSHServerProcess[bytes]) -> None:
    process.stdout.write(b"@begin\n@threads\n|90\n")


def test_a_slow_host_times_out(odd_server: Callable[..., Any]) -> None:
    _, login = odd_server(_sleep)
    started = time.monotonic()
    report = probe_host("box", login.settings(timeout_s=1.0))

    assert report.status == "timed-out"
    assert report.problem is not None
    assert report.problem.startswith("no answer within 1 s")
    assert 0.9 < time.monotonic() - started < 5


def test_what_a_slow_host_said_in_time_is_kept(odd_server: Callable[..., Any]) -> None:
    _, login = odd_server(_begin_and_sleep)
    report = probe_host("box", login.settings(timeout_s=1.0))

    assert (report.status, report.facts.threads, report.facts.ram_total_bytes) == ("timed-out", 90, 1024 * 1024)
    assert report.problem is not None
    assert report.problem.startswith("only a part of its answer came within 1 s")
    assert not report.may_be_given_work


def test_a_login_without_a_shell_gives_an_unreadable_answer(odd_server: Callable[..., Any]) -> None:
    _, login = odd_server(_babble)
    report = probe_host("box", login.settings())

    assert report.status == "unreadable"
    assert report.problem is not None
    assert report.problem.startswith("unreadable answer, it begins 'This account is [31m for backups")
    assert "\x1b" not in report.problem


def test_an_answer_that_stops_early_is_unreadable_and_its_facts_are_kept(odd_server: Callable[..., Any]) -> None:
    _, login = odd_server(_stop_early)
    report = probe_host("box", login.settings())

    assert (report.status, report.facts.threads) == ("unreadable", 90)


def test_all_hosts_are_asked_at_once_and_this_machine_always(odd_server: Callable[..., Any], sshd: Any) -> None:
    logins = [odd_server(_sleep)[1] for _ in range(3)]
    hosts = {f"slow{number}": login.settings(timeout_s=2.0) for number, login in enumerate(logins)}
    started = time.monotonic()
    reports = probe_hosts(Config(hosts=hosts | {"good": sshd.settings()}))

    assert [report.name for report in reports] == ["local", "slow0", "slow1", "slow2", "good"]
    assert [report.status for report in reports] == ["ok", "timed-out", "timed-out", "timed-out", "ok"]
    assert time.monotonic() - started < 5.5, "three hosts of two seconds each, one after the other, take six"


def test_a_configured_local_host_is_asked_once_about_target_and_store(models: Path, tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "hosts": {"workstation": {"url": "local"}},
            "target": {"model": str(models / "nested")},
            "store": str(tmp_path / "not" / "yet"),
        }
    )
    (report,) = probe_hosts(config)

    assert (report.name, report.status, report.is_local) == ("workstation", "ok", True)
    assert [model.path for model in report.facts.models] == [str(models / "nested")]
    store = report.facts.disks[-1]
    assert (store.path, store.is_present) == (str(tmp_path / "not" / "yet"), False)
    assert store.free_bytes == pytest.approx(os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize, rel=0.05)


def test_probing_works_from_inside_a_running_event_loop() -> None:
    async def inside() -> list[HostReport]:
        return probe_hosts(Config())

    assert [report.status for report in asyncio.run(inside())] == ["ok"]
