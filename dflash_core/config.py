"""The configuration file: its keys, their defaults, and errors a person can act on.

Every command takes `--config FILE` (YAML). A key that does not exist is refused with the name of
the nearest one that does. Paths may start with `~` and are relative to the working folder.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dflash_core.errors import ConfigError

DEFAULT_CONFIG_NAME = "dflash.yaml"
# A password in a URL, which no message may repeat.
_PASSWORD = re.compile(r"(://[^/@\s:]*):[^/@\s]*@")
# What stands behind the host of a web address: a webhook's is a secret.
_WEB_PATH = re.compile(r"(https?://[^/\s]+)/[^\s\"']+")
_SHOWN_OF_NOTIFY = ("events", "timeout_s")


def _expanded(value: object) -> object:
    if not isinstance(value, str) or not value.startswith("~"):
        return value
    try:
        return str(Path(value).expanduser())
    except RuntimeError as error:
        raise ValueError("there is no such user's home folder") from error


PathText = Annotated[str, BeforeValidator(_expanded)]
"""A path or fsspec URL; a leading `~` is expanded."""


def _server_url(value: object) -> object:
    if not isinstance(value, str):
        return value
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("must be the http:// or https:// address of a server")
    if parts.username is not None or parts.query:
        raise ValueError("must hold no user, password or key; name the key's environment variable in api_key_env")
    return value


ServerUrl = Annotated[str, BeforeValidator(_server_url)]
"""Address of a server; without a secret, for it is shown in messages."""


class _Secret(str):
    """A text that does not show itself where the object that holds it is shown."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def _hook_url(value: str) -> _Secret:
    try:
        parts = urlsplit(value)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        raise ValueError("must be an http:// or https:// address")
    return _Secret(value)


HookUrl = Annotated[str, AfterValidator(_hook_url)]
"""Address that news are posted to; whoever knows it may post there, so it is shown nowhere."""


class _Section(BaseModel):
    # A traceback shows what pydantic says, too, and an input may be a secret.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True)


class HostSettings(_Section):
    """One machine that `probe` asks and that checkpoints may be read from."""

    url: str
    """`ssh://user@host:port/path`; the path may be left out. `local` means this machine."""
    read_only: bool = False
    """True: the host is only ever read over SFTP and never sent a command."""
    max_read_mb_s: float | None = Field(default=None, gt=0)
    """Limit on the read rate in MB/s (10^6 bytes); None reads as fast as the link allows."""
    known_hosts: PathText | None = "~/.ssh/known_hosts"
    """File of known host keys. null turns the check off; say so only for a machine you trust."""
    identity_file: PathText | None = None
    """Private key to log in with; None uses ~/.ssh/config, the agent and the default keys."""
    timeout_s: float = Field(default=20.0, gt=0)
    """How long one answer of this host may take, in seconds."""
    transport: Literal["auto", "openssh", "asyncssh"] = "auto"
    """Who carries the SFTP session: `openssh`, your own `ssh` with all of ~/.ssh/config, or `asyncssh`,
    a client in Python. auto: `ssh` where it is installed, and asyncssh for large reads over a long link."""
    models: list[str] = []
    """Folders of models that `probe` looks into; a leading `~` is the home folder on that host."""
    disks: list[str] = []
    """Folders whose disks `probe` reports; None given means the root."""


class TargetSettings(_Section):
    """The frozen model whose output must be reproduced."""

    model: PathText | None = None
    """A folder, a .gguf file, an fsspec URL or a hub id."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: what the CPU's flags make fast."""
    store_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: the target's own dtype; float32 where compute_dtype is set to float32."""


class CompletionSettings(_Section):
    """Where the target's own continuations come from."""

    source: Literal["local", "server", "file"] = "local"
    """local: the target runs here; server: it is served at base_url; file: the prompts bring their responses."""
    base_url: ServerUrl | None = None
    """Address of an SGLang, vLLM or OpenAI-compatible server; a `/v1` at its end may be left out."""
    api: Literal["auto", "sglang", "vllm", "openai"] = "auto"
    """The protocol to speak; auto asks the server what it is."""
    server_model: str | None = Field(default=None, min_length=1)
    """The server's name of the target; None takes the one it lists under the name of target.model."""
    concurrency: int = Field(default=8, ge=1)
    """Requests under way at once."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long one answer may take, in seconds."""
    api_key_env: str | None = Field(default=None, min_length=1)
    """Name of the environment variable that holds the server's key; the key itself is written nowhere."""
    max_new_tokens: int = Field(default=256, ge=1)
    thinking: bool = False
    batch_size: int = Field(default=24, ge=1)
    """Prompts the local target continues at once."""


class DrafterSettings(_Section):
    """How the drafter is read and run."""

    config: PathText | None = None
    """A draft config (JSON) for checkpoints that carry none."""
    block_size: int | None = Field(default=None, ge=1)
    """Slots of a block, the anchor included; None takes the drafter's own. Shorter is allowed, its own number."""
    anchors: Literal["walk", "all"] = "walk"
    """walk drafts only from the anchors that serving would visit; all drafts from every token."""
    extras: list[Literal["sweep", "recall", "trees", "sampled"]] = []
    """More numbers of each drafter: shorter blocks, recall at k, draft trees, acceptance at temperatures above 0."""
    sweep_block_sizes: list[Annotated[int, Field(ge=2)]] | None = None
    """Block sizes of `sweep`; None takes the powers of two below the drafter's own."""
    tree_budgets: list[Annotated[int, Field(ge=1, le=1024)]] = Field(default=[4, 8, 16, 32, 64], min_length=1)
    """Nodes of the trees of `trees`, the anchor not counted."""
    temperatures: list[Annotated[float, Field(gt=0, le=10)]] = Field(default=[1.0], min_length=1)
    """Temperatures of `sampled`."""


class NotifySettings(_Section):
    """A web address that is told what happens to checkpoints; nothing is sent where none is set."""

    url: HookUrl | None = None
    """Where news are posted to. One with a token in it belongs into url_env."""
    url_env: str | None = Field(default=None, min_length=1)
    """Name of the environment variable that holds the address; it is read where an evaluation or a watch runs."""
    headers_env: dict[str, Annotated[str, Field(min_length=1)]] = {}
    """Header of the request to the environment variable that holds its value, such as Authorization: HOOK_AUTH."""
    events: list[Literal["best", "regressed", "failed"]] = ["best", "regressed", "failed"]
    """The news that are sent; see docs/notifications.md."""
    timeout_s: float = Field(default=10.0, gt=0, le=300)
    """How long one answer may take, in seconds."""


class Config(_Section):
    """The whole configuration; every key has a default."""

    run: str | None = None
    """Name of the training run; None takes the name of the folder that holds the steps."""
    hosts: dict[str, HostSettings] = {}
    target: TargetSettings = TargetSettings()
    completions: CompletionSettings = CompletionSettings()
    prompts: PathText = "prompts.jsonl"
    drafter: DrafterSettings = DrafterSettings()
    device: Literal["auto", "cuda", "cpu"] = "auto"
    store: PathText = "~/.cache/dflash-eval"
    """A local folder, or the ssh://, s3:// or other URL of one that several machines share."""
    store_mirror: PathText = "~/.cache/dflash-eval/mirror"
    """Local folder for copies of what lies in a store that is not local."""
    results: PathText = "results/acceptance.duckdb"
    baseline: str | None = Field(default=None, min_length=1)
    """What each checkpoint is compared with beside the step before it: as `compare --baseline` takes it."""
    notify: NotifySettings = NotifySettings()


def load_config(path: str | Path | None = None) -> Config:
    """Read the configuration file, or return the defaults where there is none.

    Args:
        path: the file; None takes `dflash.yaml` of the working folder if it exists.

    Returns:
        The configuration, checked.

    Raises:
        ConfigError: the file is missing, is not YAML, or a key or value in it is wrong.
    """
    if path is None:
        if not Path(DEFAULT_CONFIG_NAME).exists():
            return Config()
        path = DEFAULT_CONFIG_NAME
    try:
        # A worker's, too: the same `~/dflash.yaml` is each box's own.
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise ConfigError(f"cannot read the config file {str(path)!r}: {error}; check --config") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = _WEB_PATH.sub(r"\1/***", " ".join(str(error).split()))
        raise ConfigError(f"{path} is not valid YAML: {problem}") from None
    return parse_config({} if data is None else data, where=str(path))


def parse_config(data: Any, *, where: str) -> Config:
    """Check a configuration given as plain data.

    Args:
        data: what the YAML file holds.
        where: the name to use for it in error messages.

    Raises:
        ConfigError: a key does not exist or a value is impossible; the message names both.
    """
    if not isinstance(data, dict):
        raise ConfigError(
            f"{where} must hold keys and values, found {type(data).__name__}; see the README's first config"
        )
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item, where) for item in error.errors())) from error


def with_overrides(config: Config, *, block_size: int | None = None, device: str | None = None) -> Config:
    """Return the configuration with what was given on the command line in its place.

    Raises:
        ConfigError: a value is impossible.
    """
    data = config.model_dump()
    if block_size is not None:
        data["drafter"]["block_size"] = block_size
    if device is not None:
        data["device"] = device
    return parse_config(data, where="command line")


def _explain(item: Any, where: str) -> str:
    """Return one line for one of pydantic's findings, naming the nearest key for an unknown one."""
    location = [str(part) for part in item["loc"]]
    dotted = ".".join(location)
    if item["type"] != "extra_forbidden":
        value = _PASSWORD.sub(r"\1:***@", repr(item["input"]))
        if location[:1] == ["notify"] and location[1:2] not in [[key] for key in _SHOWN_OF_NOTIFY]:
            value = "***"
        return f"{where}: {dotted} = {value}: {item['msg'][:1].lower()}{item['msg'][1:]}"
    known = _keys_beside(location)
    nearest = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.0)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{where}: unknown key {dotted!r}; {hint}known here: {', '.join(known)}"


def _keys_beside(location: list[str]) -> list[str]:
    """Return the keys that are allowed where an unknown key was found."""
    section: type[BaseModel] = Config
    for part in location[:-1]:
        field = section.model_fields.get(part)
        if part == "hosts":
            section = HostSettings
        elif field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            section = field.annotation
    return sorted(section.model_fields)
