"""Asks machines what they have: over SSH, over SFTP alone where a host is read-only, or here.

A machine that does not answer is a report with a status, never an exception: one that is down must
not hide the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import asyncssh

from dflash_core.config import Config, HostSettings
from dflash_core.errors import InputError, one_line
from dflash_core.hosts.answers import read_answer
from dflash_core.hosts.questions import probe_script
from dflash_core.hosts.report import LOCAL_URL, HostFacts, HostReport, Status
from dflash_core.hosts.sftp_facts import read_sftp_facts
from dflash_core.hosts.wording import printable
from dflash_core.ssh import DEFAULT_PORT, SshAddress, connect_options, is_ssh_url, parse_ssh_url
from dflash_core.store_opening import store_of

Value = TypeVar("Value")

_LARGEST_ANSWER_BYTES = 256 * 2**20
_SLOWEST_TOOL_S = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """How asking went; the report without its name and its time."""

    status: Status
    problem: str | None = None
    facts: HostFacts = HostFacts()


def probe_hosts(config: Config) -> list[HostReport]:
    """Ask every configured host, and this machine, all at once.

    Returns:
        One report per configured host in the order of the configuration; where none of them is
        this machine (`url: local`), a report named `local` comes first.
    """
    hosts = dict(config.hosts)
    if not any(settings.url == LOCAL_URL for settings in hosts.values()):
        hosts = {_free_name("local", hosts): HostSettings(url=LOCAL_URL), **hosts}
    hosts = {name: _with_own_folders(settings, config) for name, settings in hosts.items()}
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        return list(pool.map(probe_host, hosts.keys(), hosts.values()))


def probe_host(name: str, settings: HostSettings) -> HostReport:
    """Ask one host and report what it said, or why it said nothing.

    Args:
        name: the host's name in the configuration.
        settings: where it is and how to reach it. With `read_only` it is sent no command.
    """
    started = time.monotonic()
    outcome = _ask_local(settings) if settings.url == LOCAL_URL else _ask_remote(settings)
    return HostReport(
        name=name,
        url=settings.url,
        status=outcome.status,
        problem=outcome.problem,
        seconds=time.monotonic() - started,
        facts=outcome.facts,
    )


def probe_local(settings: HostSettings | None = None) -> HostReport:
    """Ask this machine; its Python and torch are those that run this."""
    return probe_host("local", settings or HostSettings(url=LOCAL_URL))


def _free_name(name: str, hosts: dict[str, HostSettings]) -> str:
    """Return a name that no configured host has."""
    return name if name not in hosts else _free_name(f"this_{name}", hosts)


def _with_own_folders(settings: HostSettings, config: Config) -> HostSettings:
    """Add the configuration's target and store to what this machine is asked about."""
    if settings.url != LOCAL_URL:
        return settings
    models, disks = list(settings.models), list(settings.disks or ["/"])
    model = config.target.model
    # A hub id looks like a relative path; only what exists or cannot be an id is one.
    if model is not None and "://" not in model and (Path(model).exists() or model.startswith(("/", "."))):
        models.append(str(Path(model).absolute()))
    disks.append(str(store_of(config).root))
    return settings.model_copy(update={"models": list(dict.fromkeys(models)), "disks": list(dict.fromkeys(disks))})


def _ask_local(settings: HostSettings) -> _Outcome:
    """Run the questions in a shell of this machine."""
    script = probe_script(
        models=settings.models,
        disks=settings.disks or ["/"],
        python=sys.executable or "python3",
        limit_s=_tool_limit_s(settings),
    )
    try:
        # In a session of its own, so that a tool that hangs can be ended together with the shell.
        process = subprocess.Popen(
            ["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        return _Outcome(status="unreadable", problem=f"no shell `sh` to ask this machine with: {one_line(error)}")
    try:
        answer, _ = process.communicate(os.fsencode(script), timeout=settings.timeout_s)
        return _judge(answer, settings, is_late=False)
    except subprocess.TimeoutExpired as late:
        return _judge(late.output or b"", settings, is_late=True)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a shell that is still at work, with what it started, and let go of its pipes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _ask_remote(settings: HostSettings) -> _Outcome:
    """Connect to a host and ask it, in an event loop of this thread."""
    if not is_ssh_url(settings.url):
        problem = f"url {settings.url!r} is neither 'local' nor ssh://user@host:port/path; correct it in the config"
        return _Outcome(status="misconfigured", problem=problem)
    try:
        address = parse_ssh_url(settings.url)
    except InputError as error:
        return _Outcome(status="misconfigured", problem=one_line(error))
    for path, key in ((settings.known_hosts, "known_hosts"), (settings.identity_file, "identity_file")):
        if path is not None and not os.access(path, os.R_OK):
            status: Status = "unknown-key" if key == "known_hosts" else "misconfigured"
            return _Outcome(status=status, problem=f"the {key} file {path!r} cannot be read; {_ADVICE[key](address)}")
    return asyncio.run(_ask_over_ssh(address, settings))


async def _ask_over_ssh(address: SshAddress, settings: HostSettings) -> _Outcome:
    try:
        async with asyncio.timeout(settings.timeout_s):
            connection = await asyncssh.connect(address.host, **connect_options(address, settings))
    except (OSError, ValueError, asyncssh.Error) as error:
        return _explain(error, address, settings)
    ask = _read_only if settings.read_only else _run_script
    try:
        return await ask(connection, address, settings)
    except (OSError, ValueError, asyncssh.Error) as error:
        return _explain(error, address, settings)
    finally:
        await _hang_up(connection)


async def _read_only(connection: asyncssh.SSHClientConnection, address: SshAddress, settings: HostSettings) -> _Outcome:
    """Learn what reading over SFTP shows; nothing is run on the host."""
    folder = address.path
    disks = list(dict.fromkeys([folder or ".", *settings.disks]))

    async def read() -> HostFacts:
        async with connection.start_sftp_client() as sftp:
            return await read_sftp_facts(sftp, folder=folder, disks=disks, models=settings.models)

    facts = await _in_time(connection, read(), settings)
    is_missing = facts.folder is not None and facts.folder.num_entries is None
    problem = f"the folder {folder!r} cannot be listed; check the path in its url" if is_missing else None
    return _Outcome(status="read-only", problem=problem, facts=facts)


async def _run_script(
    connection: asyncssh.SSHClientConnection, address: SshAddress, settings: HostSettings
) -> _Outcome:
    """Let a shell on the host answer the questions."""
    disks = list(dict.fromkeys([*(settings.disks or ["/"]), *([address.path] if address.path else [])]))
    script = probe_script(models=settings.models, disks=disks, limit_s=_tool_limit_s(settings))
    parts: list[bytes] = []
    try:
        await _in_time(connection, _collect(connection, os.fsencode(script), parts), settings)
    except TimeoutError:
        return _judge(b"".join(parts), settings, is_late=True)
    return _judge(b"".join(parts), settings, is_late=False)


async def _in_time(
    connection: asyncssh.SSHClientConnection, work: Coroutine[Any, Any, Value], settings: HostSettings
) -> Value:
    """Wait for a conversation, or break the connection off when its time is up.

    Cancelling alone would not do: closing a file politely waits for the server, which may never answer.

    Raises:
        TimeoutError: the time was up.
    """
    task = asyncio.create_task(work)
    done, _ = await asyncio.wait({task}, timeout=settings.timeout_s)
    if done:
        return task.result()
    connection.abort()
    task.cancel()
    await asyncio.wait({task}, timeout=1)
    raise TimeoutError


async def _collect(connection: asyncssh.SSHClientConnection, script: bytes, parts: list[bytes]) -> None:
    """Send the script to a shell and append what it writes, so that a part is kept when time runs out."""
    process = await connection.create_process("sh", encoding=None, stderr=asyncssh.DEVNULL)
    # Where something else than a shell runs it may not read; what it wrote is judged all the same.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(script)
        process.stdin.write_eof()
    while part := await process.stdout.read(2**16):
        parts.append(part)
        if sum(map(len, parts)) > _LARGEST_ANSWER_BYTES:
            return


async def _hang_up(connection: asyncssh.SSHClientConnection) -> None:
    """Close a connection without waiting long for a host that hangs."""
    connection.close()
    try:
        async with asyncio.timeout(1):
            await connection.wait_closed()
    except (TimeoutError, OSError, asyncssh.Error):
        connection.abort()


def _tool_limit_s(settings: HostSettings) -> int:
    """Return how long one tool may take so that the answer still arrives when one hangs."""
    return max(1, min(_SLOWEST_TOOL_S, int(settings.timeout_s / 3)))


def _judge(answer: bytes, settings: HostSettings, *, is_late: bool) -> _Outcome:
    """Return what an answer says, whole or cut off."""
    text = answer.decode("utf-8", errors="replace")
    read = read_answer(text)
    if is_late:
        what = "only a part of its answer came" if read.has_begun else "no answer"
        problem = f"{what} within {settings.timeout_s:g} s; raise timeout_s or see what keeps it busy"
        return _Outcome(status="timed-out", problem=problem, facts=read.facts)
    if not read.has_begun:
        begin = f", it begins {printable(text)!r}" if printable(text) else ", it is empty"
        return _Outcome(
            status="unreadable",
            problem=f"unreadable answer{begin}; the login must lead to a POSIX shell, or mark the host read_only",
        )
    if not read.is_complete:
        return _Outcome(status="unreadable", problem="unreadable answer: it stops before its end", facts=read.facts)
    return _Outcome(status="ok", facts=read.facts)


def _explain(error: Exception, address: SshAddress, settings: HostSettings) -> _Outcome:
    """Translate what a connection can fail with."""
    where = address.endpoint
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        problem = f"the host key of {where} is not in {settings.known_hosts}; {_ADVICE['known_hosts'](address)}"
        return _Outcome(status="unknown-key", problem=problem)
    if isinstance(error, asyncssh.PermissionDenied):
        problem = f"{where} refused the login; {_ADVICE['identity_file'](address)}"
        return _Outcome(status="refused", problem=problem)
    if isinstance(error, TimeoutError):
        problem = f"no answer from {where} within {settings.timeout_s:g} s; raise timeout_s or check the network"
        return _Outcome(status="timed-out", problem=problem)
    if isinstance(error, socket.gaierror):
        return _Outcome(status="unreachable", problem=f"the name {address.host!r} is not found; check the url")
    if isinstance(error, OSError):
        reason = error.strerror or one_line(error)
        return _Outcome(status="unreachable", problem=f"cannot reach {where}: {reason}; check host, port and sshd")
    if isinstance(error, ValueError):
        return _Outcome(status="misconfigured", problem=f"the login to {where} cannot be set up: {one_line(error)}")
    return _Outcome(status="unreachable", problem=f"{where} broke the conversation off: {one_line(error)}")


_ADVICE: dict[str, Callable[[SshAddress], str]] = {
    "known_hosts": lambda address: (
        f"check the host's fingerprint, then add the key: ssh-keyscan -p {address.port or DEFAULT_PORT} {address.host}"
    ),
    "identity_file": lambda address: "check the user in its url and identity_file",
}
