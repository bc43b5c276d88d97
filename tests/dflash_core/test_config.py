"""The configuration file: every key, every default, and a helpful line for every slip."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from dflash_core.config import (
    CompletionSettings,
    Config,
    DrafterSettings,
    HostSettings,
    NotifySettings,
    TargetSettings,
    load_config,
    parse_config,
    with_overrides,
)
from dflash_core.errors import ConfigError

ROOT = Path(__file__).parents[2]
# The file that the manual shows: three machines, every other key at its default.
DOCUMENTED = """
run: null                     # name of the training run
hosts:
  training: {url: "ssh://me@train-box:22/data/runs/a", read_only: true, max_read_mb_s: 200,
             known_hosts: ~/.ssh/known_hosts}
  cpu_box:  {url: "ssh://me@cpu-box", models: [/data/models]}
target:
  model: /models/Qwen3.6-27B
  compute_dtype: auto
  store_dtype: auto
completions:
  source: local
  base_url: null
  max_new_tokens: 256
  thinking: false
prompts: prompts.jsonl
drafter:
  config: null
  block_size: null
device: auto
store: ~/.cache/dflash-eval
store_mirror: ~/.cache/dflash-eval/mirror
results: results/acceptance.duckdb
"""

# Every key with a value that is not its default.
CHANGED: dict[str, Any] = {
    "run": "a",
    "hosts": {
        "x": {
            "url": "ssh://h/p",
            "read_only": True,
            "max_read_mb_s": 1.5,
            "known_hosts": None,
            "identity_file": "/k",
            "transport": "openssh",
            "timeout_s": 3.0,
            "models": ["~/m"],
            "disks": ["/d"],
        }
    },
    "target": {"model": "/m", "compute_dtype": "bfloat16", "store_dtype": "float32"},
    "completions": {
        "source": "server",
        "base_url": "http://h",
        "api": "vllm",
        "server_model": "m",
        "concurrency": 2,
        "timeout_s": 4.5,
        "api_key_env": "KEY",
        "max_new_tokens": 9,
        "thinking": True,
        "batch_size": 3,
    },
    "prompts": "p.jsonl",
    "drafter": {
        "config": "/c.json",
        "block_size": 4,
        "anchors": "all",
        "extras": ["trees"],
        "sweep_block_sizes": [2],
        "tree_budgets": [3],
        "temperatures": [0.5],
    },
    "device": "cpu",
    "store": "/s",
    "store_mirror": "/m",
    "results": "/r.duckdb",
    "baseline": "a:1",
    "notify": {
        "url": "https://h/x",
        "url_env": "HOOK",
        "headers_env": {"Authorization": "AUTH"},
        "events": ["failed"],
        "timeout_s": 2.5,
    },
}
SECTIONS: dict[str, type[BaseModel]] = {
    "": Config,
    "target": TargetSettings,
    "completions": CompletionSettings,
    "drafter": DrafterSettings,
    "notify": NotifySettings,
    "hosts.x": HostSettings,
}


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """Return data with a value at a dotted key, in hosts beside the url that they need."""
    for key in reversed(dotted.split(".")):
        value = {key: value}
    if dotted.startswith("hosts.x"):
        value["hosts"]["x"] = {"url": "local"} | value["hosts"]["x"]
    return value


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


class TestKeys:
    def test_the_documented_file_is_the_defaults_and_three_hosts(self, home: Path) -> None:
        config = parse_config(yaml.safe_load(DOCUMENTED), where="dflash.yaml")
        assert config.model_copy(update={"hosts": {}, "target": TargetSettings()}) == Config()
        assert config.target.model == "/models/Qwen3.6-27B"
        assert config.hosts["training"].read_only
        assert config.hosts["training"].max_read_mb_s == 200
        assert config.hosts["training"].known_hosts == f"{home}/.ssh/known_hosts"
        assert config.hosts["cpu_box"] == HostSettings(url="ssh://me@cpu-box", models=["/data/models"])

    def test_the_readmes_first_config_names_every_key_and_is_the_defaults(self) -> None:
        (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        data = yaml.safe_load(text)
        config = parse_config(data, where="README.md")
        assert config.model_copy(update={"hosts": {}, "target": TargetSettings()}) == Config()
        named = {"": set(data), "hosts.x": {key for host in data["hosts"].values() for key in host}}
        named |= {section: set(data[section]) for section in ("target", "completions", "drafter", "notify")}
        assert named == {section: set(kind.model_fields) for section, kind in SECTIONS.items()}

    def test_every_key_can_be_set(self) -> None:
        config = parse_config(CHANGED, where="x")
        assert config.model_dump() == CHANGED
        default = Config(hosts={"x": HostSettings(url="local")}).model_dump()
        same = [key for key in CHANGED if CHANGED[key] == default[key]]
        same += [f"{part}.{key}" for part in ("target", "completions", "drafter", "notify") for key in CHANGED[part]
                 if CHANGED[part][key] == default[part][key]]  # fmt: skip
        assert same == [], "every value of this test differs from the default"

    @pytest.mark.parametrize("section", SECTIONS, ids=lambda name: name or "top")
    def test_the_test_above_knows_every_key(self, section: str) -> None:
        data = CHANGED
        for part in filter(None, section.split(".")):
            data = data[part]
        assert set(data) == set(SECTIONS[section].model_fields)

    def test_a_host_must_have_a_url(self) -> None:
        with pytest.raises(ConfigError, match=r"hosts\.x\.url.*field required"):
            parse_config({"hosts": {"x": {}}}, where="f")

    def test_the_home_folder_is_expanded_wherever_a_local_path_stands(self, home: Path) -> None:
        config = parse_config(
            {
                "store": "~/s",
                "results": "~/r",
                "prompts": "~/p",
                "target": {"model": "~/m"},
                "drafter": {"config": "~/c"},
                "hosts": {"x": {"url": "local", "identity_file": "~/k", "models": ["~/m"]}},
            },
            where="f",
        )
        host = config.hosts["x"]
        local = [config.store, config.results, config.prompts, config.target.model, config.drafter.config]
        assert local == [f"{home}/{name}" for name in "srpmc"]
        assert (host.identity_file, host.known_hosts) == (f"{home}/k", f"{home}/.ssh/known_hosts")
        assert host.models == ["~/m"], "that is a home folder on the host"
        assert Config().store == f"{home}/.cache/dflash-eval"

    def test_a_home_folder_that_does_not_exist_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"store = '~nobody-of-that-name/s'.*home folder"):
            parse_config({"store": "~nobody-of-that-name/s"}, where="f")

    def test_a_url_keeps_its_slashes(self) -> None:
        assert parse_config({"target": {"model": "s3://bucket/m"}}, where="f").target.model == "s3://bucket/m"

    def test_a_configuration_cannot_be_changed_by_accident(self) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            Config().device = "cpu"


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("key", "nearest"),
        [
            ("devcie", "device"),
            ("Store", "store"),
            ("target.modle", "model"),
            ("completions.max_tokens", "max_new_tokens"),
            ("drafter.blocksize", "block_size"),
            ("hosts.x.known_host", "known_hosts"),
            ("hosts.x.readonly", "read_only"),
        ],
    )
    def test_the_nearest_key_of_that_level_is_named(self, key: str, nearest: str) -> None:
        with pytest.raises(ConfigError) as refused:
            parse_config(nested(key, 1), where="my.yaml")
        message = str(refused.value)
        assert message.startswith(f"my.yaml: unknown key {key!r}; did you mean {nearest!r}?")
        assert "\n" not in message
        section = SECTIONS[key.rpartition(".")[0]]
        assert message.endswith(f"known here: {', '.join(sorted(section.model_fields))}")

    def test_all_slips_are_told_at_once(self) -> None:
        with pytest.raises(ConfigError) as refused:
            parse_config({"devcie": "cpu", "completions": {"max_new_tokens": 0}}, where="f")
        assert "'devcie'" in str(refused.value)
        assert "completions.max_new_tokens = 0" in str(refused.value)


class TestValues:
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("device", "gpu"),
            ("run", 5),
            ("target", "/models/x"),
            ("target.compute_dtype", "fp32"),
            ("target.store_dtype", "float16"),
            ("completions.source", "remote"),
            ("completions.max_new_tokens", 0),
            ("completions.max_new_tokens", 1.5),
            ("completions.thinking", "perhaps"),
            ("completions.batch_size", 0),
            ("drafter.block_size", 0),
            ("drafter.block_size", -4),
            ("drafter.anchors", "some"),
            ("hosts", []),
            ("hosts.x.max_read_mb_s", 0),
            ("hosts.x.timeout_s", -1),
            ("hosts.x.models", "/m"),
            ("store", None),
            ("prompts", ["a"]),
        ],
        ids=lambda value: str(value),
    )
    def test_an_impossible_value_is_named_with_its_key_in_one_line(self, key: str, value: Any) -> None:
        with pytest.raises(ConfigError) as refused:
            parse_config(nested(key, value), where="my.yaml")
        message = str(refused.value)
        assert message.startswith(f"my.yaml: {key} = {value!r}: ")
        assert "\n" not in message

    def test_a_password_is_not_repeated_in_a_message(self) -> None:
        with pytest.raises(ConfigError) as refused:
            parse_config({"hosts": {"x": "ssh://me:secret@box/p"}}, where="f")
        assert "secret" not in str(refused.value)
        assert "ssh://me:***@box/p" in str(refused.value)

    @pytest.mark.parametrize("key", [1, None, True], ids=repr)
    def test_a_key_that_is_no_text_is_refused(self, key: Any) -> None:
        with pytest.raises(ConfigError, match="my.yaml"):
            parse_config({key: 1}, where="my.yaml")


class TestFile:
    def test_a_file_is_read(self, workspace: Path) -> None:
        (workspace / "c.yaml").write_text("device: cpu\n")
        assert load_config("c.yaml").device == "cpu"
        assert load_config(workspace / "c.yaml").device == "cpu"

    def test_without_a_name_the_default_file_is_taken_if_it_exists(self, workspace: Path) -> None:
        assert load_config() == Config()
        (workspace / "dflash.yaml").write_text("device: cpu\n")
        assert load_config().device == "cpu"

    @pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n", "null\n"], ids=repr)
    def test_an_empty_file_means_the_defaults(self, workspace: Path, text: str) -> None:
        (workspace / "c.yaml").write_text(text)
        assert load_config("c.yaml") == Config()

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (None, "cannot read the config file 'c.yaml'"),
            (b"\xff\xfe\x00device", "cannot read the config file 'c.yaml'"),
            (b"device: [cpu", "c.yaml is not valid YAML"),
            (b"a: b: c", "c.yaml is not valid YAML"),
            (b"a: !!python/object/apply:os.system ['true']", "c.yaml is not valid YAML"),
            (b"- device: cpu\n", "c.yaml must hold keys and values, found list"),
            (b"device", "c.yaml must hold keys and values, found str"),
        ],
        ids=["missing", "not text", "bracket open", "two colons", "python object", "list", "one word"],
    )
    def test_a_file_that_is_no_configuration_is_one_line(
        self, workspace: Path, content: bytes | None, expected: str
    ) -> None:
        if content is not None:
            (workspace / "c.yaml").write_bytes(content)
        with pytest.raises(ConfigError) as refused:
            load_config("c.yaml")
        assert str(refused.value).startswith(expected)
        assert "\n" not in str(refused.value)

    def test_a_folder_is_no_file(self, workspace: Path) -> None:
        with pytest.raises(ConfigError, match="cannot read"):
            load_config(workspace)


class TestCommandLine:
    def test_what_was_typed_replaces_the_files_value_and_nothing_else(self) -> None:
        config = parse_config(CHANGED, where="f")
        changed = with_overrides(config, block_size=2, device="cuda")
        assert (changed.drafter.block_size, changed.device) == (2, "cuda")
        restored = with_overrides(changed, block_size=config.drafter.block_size, device=config.device)
        assert restored == config

    def test_what_was_not_typed_stays(self) -> None:
        config = parse_config(CHANGED, where="f")
        assert with_overrides(config) == config

    def test_an_impossible_value_names_the_command_line(self) -> None:
        with pytest.raises(ConfigError, match=r"command line: drafter\.block_size = 0"):
            with_overrides(Config(), block_size=0)


class TestWebhookAddress:
    @pytest.mark.parametrize(
        "notify",
        [
            "https://h/S3CRET",
            ["https://h/S3CRET"],
            {"url": "h/S3CRET"},
            {"url": "ftp://h/S3CRET"},
            {"url": "https://h:0/S3CRET"},
            {"url": ["https://h/S3CRET"]},
            {"url_env": ["https://h/S3CRET"]},
            {"headers_env": "S3CRET"},
            {"headers_env": {"Authorization": ["S3CRET"]}},
            {"url": "https://h/S3CRET", "timeout_s": 0},
            {"url": "https://h/S3CRET", "urll": 1},
        ],
        ids=repr,
    )
    def test_a_mistake_beside_it_does_not_show_it(self, notify: object) -> None:
        with pytest.raises(ConfigError, match=r"f: (unknown key '|)notify") as caught:
            parse_config({"notify": notify}, where="f")
        assert "S3CRET" not in "".join(traceback.format_exception(caught.value))

    def test_broken_yaml_does_not_show_it(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text('notify:\n  url: "https://h/S3CRET\n')
        with pytest.raises(ConfigError, match="not valid YAML") as caught:
            load_config(path)
        assert "S3CRET" not in "".join(traceback.format_exception(caught.value))

    def test_the_configuration_does_not_show_it(self) -> None:
        config = parse_config({"notify": {"url": "https://h/S3CRET"}}, where="f")
        assert config.notify.url == "https://h/S3CRET"
        assert "S3CRET" not in f"{config!r} {config}"
