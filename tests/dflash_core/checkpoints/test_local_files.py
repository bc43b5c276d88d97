from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from dflash_core.checkpoints import open_source
from dflash_core.errors import CheckpointError, CheckpointNotFound, InputError


def test_a_file_url_names_a_path_of_this_machine_and_no_host() -> None:
    with open_source("file:///a", {}) as source:
        assert source.path_of("file:///a/b%20c%23.pt") == "/a/b c#.pt"
        assert source.path_of("file://localhost/a/b") == "/a/b"
        assert source.path_of("file:///a/b#1?x") == "/a/b#1?x"
        with pytest.raises(InputError, match=r"names a host, 'data'; write file:///"):
            source.path_of("file://data/run")
        with pytest.raises(InputError) as caught:
            source.path_of("file://me:hush@data/run")
        assert "hush" not in str(caught.value)


def test_a_name_that_is_no_text_is_found_again(tmp_path: Path) -> None:
    name = os.fsdecode(b"step_\xff.pt")
    (tmp_path / name).write_bytes(b"x")
    with open_source(str(tmp_path), {}) as source:
        (entry,) = source.list_dir(str(tmp_path))
        assert entry.name == name
        assert source.path_of((tmp_path / name).as_uri()) == entry.path
        assert source.read_at(entry.path, 0, 1) == b"x"


def test_what_is_no_file_is_not_opened_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "checkpoint.pt")
    ended = threading.Event()

    def attempt() -> None:
        with open_source(str(tmp_path), {}) as source, pytest.raises(CheckpointNotFound, match="is no file"):
            source.open(str(tmp_path / "checkpoint.pt"))
        ended.set()

    threading.Thread(target=attempt, daemon=True).start()
    assert ended.wait(5)
    with open_source("/dev/zero", {}) as source, pytest.raises(CheckpointNotFound, match="is no file"):
        source.open("/dev/zero")


def test_impossible_paths_are_told(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    with open_source(str(tmp_path), {}) as source:
        for path in ("a\0b", "x" * 5000, str(tmp_path / "loop")):
            with pytest.raises(CheckpointError):
                source.stat(path)
            with pytest.raises(CheckpointError):
                source.open(path)
        entries = {entry.name: entry for entry in source.list_dir(str(tmp_path))}
        assert entries["gone"].stat is None
        assert entries["loop"].stat is None


def test_a_link_leads_to_one_real_path(tmp_path: Path) -> None:
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_latest").symlink_to("step_3")
    with open_source(str(tmp_path), {}) as source:
        assert source.realpath(str(tmp_path / "step_latest")) == source.realpath(str(tmp_path / "step_3"))
        links = {entry.name for entry in source.list_dir(str(tmp_path)) if entry.is_link}
        assert links == {"step_latest"}
