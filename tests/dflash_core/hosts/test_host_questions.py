"""The script runs in plain shells, on machines that lack almost everything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from dflash_core.hosts.answers import Answer, read_answer
from dflash_core.hosts.questions import probe_script

SHELLS = [["dash"], ["bash", "--posix"], ["busybox", "sh"], ["sh"]]


@pytest.fixture(params=SHELLS, ids=lambda shell: shell[0])
def shell(request: pytest.FixtureRequest) -> list[str]:
    command: list[str] = request.param
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} on this machine")
    return command


def ask(script: str, *, shell: list[str] | None = None, tools: Path | None = None, home: str = "/root") -> Answer:
    path = os.environ["PATH"] if tools is None else f"{tools}:{os.environ['PATH']}"
    run = subprocess.run(
        shell or ["sh"], input=script.encode(), capture_output=True, timeout=60, env={"PATH": path, "HOME": home}
    )
    assert run.returncode == 0
    return read_answer(run.stdout.decode())


def make_tool(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    return folder


def test_every_plain_shell_gives_the_same_facts(shell: list[str], tmp_path: Path) -> None:
    model = tmp_path / "a 'b' \"c\" $d; touch bad"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"hidden_size": 8, "n_layer": 2, "vocab_size": 10}))
    (model / "model.safetensors").write_bytes(b"12345")
    (model / "two words.txt").write_bytes(b"123")
    (model / ".hidden").write_bytes(b"1")
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nothing")
    answer = ask(probe_script(models=[str(model)], disks=[str(tmp_path)]), shell=shell)

    assert answer.is_complete
    (found,) = answer.facts.models
    config_bytes = (model / "config.json").stat().st_size
    assert (found.path, found.weights_bytes, found.size_bytes) == (str(model), 5, config_bytes + 9)
    assert found.config is not None
    assert found.config.num_layers == 2
    stat = os.statvfs(tmp_path)
    assert answer.facts.disks[0].total_bytes == pytest.approx(stat.f_blocks * stat.f_frsize, rel=0.01)
    assert answer.facts.threads == len(os.sched_getaffinity(0))
    assert not Path("bad").exists()


def test_a_host_without_python_gpu_or_torch_says_nothing_of_them() -> None:
    answer = ask(probe_script(python="no-such-python"))

    assert answer.is_complete
    assert (answer.facts.python, answer.facts.torch, answer.facts.torch_cuda) == (None, None, None)
    if shutil.which("nvidia-smi") is None:
        assert (answer.facts.gpus, answer.facts.notes) == ((), ())


def test_torchs_cuda_build_is_read_without_importing_torch(tmp_path: Path) -> None:
    torch = tmp_path / "site" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (torch / "version.py").write_text(
        "__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    tools = make_tool(tmp_path / "bin", "snake", f'PYTHONPATH={tmp_path}/site exec python3 "$@"')
    answer = ask(probe_script(python="snake"), tools=tools)

    assert (answer.facts.torch, answer.facts.torch_cuda) == ("2.13.0+cu128", "12.8")


def test_gpus_are_listed_with_their_compute_capability(tmp_path: Path) -> None:
    tools = make_tool(
        tmp_path / "bin", "nvidia-smi", "echo '0, NVIDIA RTX A4000, 16376, 1529, 570.86.10, 8.6'; echo \"$*\" >&2"
    )
    (gpu,) = ask(probe_script(), tools=tools).facts.gpus

    assert (gpu.index, gpu.name, gpu.memory_total_mib, gpu.memory_used_mib) == (0, "NVIDIA RTX A4000", 16376, 1529)
    assert (gpu.driver, gpu.compute_capability) == ("570.86.10", "8.6")


def test_a_driver_too_old_for_compute_capability_is_asked_without(tmp_path: Path) -> None:
    body = (
        'case "$*" in *compute_cap*) echo \'Field "compute_cap" is not a valid field to query.\'; exit 2;; esac\n'
        "echo '0, Tesla V100-SXM2-32GB, 32510, 4, 450.80.02'"
    )
    facts = ask(probe_script(), tools=make_tool(tmp_path / "bin", "nvidia-smi", body)).facts

    assert [(gpu.name, gpu.compute_capability) for gpu in facts.gpus] == [("Tesla V100-SXM2-32GB", None)]
    assert facts.notes == ()


def test_a_driver_that_fails_is_a_note(tmp_path: Path) -> None:
    body = "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9"
    answer = ask(probe_script(), tools=make_tool(tmp_path / "bin", "nvidia-smi", body))

    assert answer.is_complete
    assert answer.facts.gpus == ()
    assert answer.facts.notes == (
        "nvidia-smi: NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.",
    )


@pytest.mark.skipif(shutil.which("timeout") is None, reason="no timeout command on this machine")
def test_a_driver_that_hangs_does_not_keep_the_rest_from_being_told(tmp_path: Path) -> None:
    tools = make_tool(tmp_path / "bin", "nvidia-smi", "exec sleep 30")
    started = time.monotonic()
    answer = ask(probe_script(limit_s=1), tools=tools)

    assert time.monotonic() - started < 10
    assert answer.is_complete
    assert answer.facts.notes == ("nvidia-smi: no answer within 1 s",)
    assert len(answer.facts.disks) == 1


def test_a_leading_tilde_is_the_home_folder_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    answer = ask(probe_script(models=["~/models"], disks=["~"]), home=str(tmp_path))

    assert [model.path for model in answer.facts.models] == [f"{tmp_path}/models"]
    assert answer.facts.disks[0].is_present


def test_models_are_found_in_a_hub_cache_and_by_owner(tmp_path: Path) -> None:
    for place in ("models--me--a/snapshots/abc", "owner/b", "c"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text("{}")
    answer = ask(probe_script(models=[str(tmp_path)]))

    found = [model.path.removeprefix(f"{tmp_path}/") for model in answer.facts.models]
    assert sorted(found) == ["c", "models--me--a/snapshots/abc", "owner/b"]


def test_a_link_to_nowhere_is_a_missing_shard(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "n_layer": 2, "vocab_size": 10}))
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "abc")
    (model,) = ask(probe_script(models=[str(tmp_path)])).facts.models

    assert (model.num_shards, model.shards_missing) == (0, ("model.safetensors",))


def test_a_single_file_is_told_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF1234")
    (model,) = ask(probe_script(models=[str(tmp_path / "model.gguf")])).facts.models

    assert (model.is_present, model.size_bytes, model.num_shards) == (True, 8, 1)
    assert model.problem == "one file: its sizes are not read by probe"


def test_a_text_that_looks_like_an_answer_stays_a_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1,\n@threads\n|9999\n@end\n"b": 2}')
    answer = ask(probe_script(models=[str(tmp_path)]))

    assert answer.facts.threads == len(os.sched_getaffinity(0))
    assert answer.facts.models[0].problem is not None
    assert answer.facts.models[0].problem.startswith("config.json is not valid JSON")


def test_nothing_runs_when_only_a_part_of_the_script_arrives(tmp_path: Path) -> None:
    script = probe_script(models=[str(tmp_path)])
    cut = script[: script.rindex("ask </dev/null")]
    run = subprocess.run(["sh"], input=cut.encode(), capture_output=True, timeout=10)

    assert run.stdout == b""
