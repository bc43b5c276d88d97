"""Renderings kept for other processes: found where nothing that decides them changed, and made anew where it did."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core import refreshing
from dflash_core.target import kept_renderings
from dflash_core.target import rendered as rendered_module
from dflash_core.target.kept_renderings import MOST_KEPT, rendering_key
from dflash_core.target.loading import Target, read_target_folder
from dflash_core.target.prompts import Prompt
from dflash_core.target.rendered import rendered
from dflash_core.target.rendering import Rendering, render_prompts
from tests.support import tiny


def prompt(name: str, text: str, **keys: Any) -> Prompt:
    return Prompt(**({"id": name, "dataset": "d", "group": None, "messages": (("user", text),)} | keys))


PROMPTS = (
    prompt("a", "w20 w21"),
    prompt("b#1", "w30"),
    prompt("b#2", "w31", follows="b#1"),
    prompt("c", "w40", prompt_ids=(10, 40, 11)),
)
SETTINGS: dict[str, Any] = {"thinking": False, "max_new_tokens": 5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write_tiny_target(tmp_path / "target", "llama", seed=3)
    tiny.add_tokenizer(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def kept_in(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / "renderings"


class Processes:
    """Asks for renderings as new processes do, which remember nothing, and counts how often one is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kept_in: Path) -> None:
        self._monkeypatch = monkeypatch
        self.kept_in = kept_in
        self.num_made = 0
        monkeypatch.setattr(rendered_module, "render_prompts", self._make)

    def _make(self, *arguments: Any, **settings: Any) -> Rendering:
        self.num_made += 1
        return render_prompts(*arguments, **settings)

    def forget(self) -> None:
        self._monkeypatch.setattr(rendered_module, "_remembered", OrderedDict())

    def ask(self, folder: Path, prompts: tuple[Prompt, ...] = PROMPTS, **settings: Any) -> Rendering:
        """Return what a new process gets; it must be what rendering gives now."""
        self.forget()
        target = read_target_folder(folder, name="tiny")
        found = rendered(target, prompts, kept_in=self.kept_in, **(SETTINGS | settings))
        assert found == render_prompts(target, prompts, **(SETTINGS | settings))
        return found


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, kept_in: Path) -> Processes:
    return Processes(monkeypatch, kept_in)


def test_another_process_finds_it_and_it_is_the_same(processes: Processes, folder: Path) -> None:
    first = processes.ask(folder)
    assert processes.ask(folder) == first
    assert processes.num_made == 1
    assert [one.id for one in first.later] == ["b#2"]


def edit_json(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a file of the target and give it back its time, as a copy that keeps times has it."""
    path = folder / name
    before = path.stat()
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def swap_two_words(folder: Path) -> None:
    """Another tokenizer in a file of the same size and time."""

    def change(data: dict[str, Any]) -> None:
        words = data["model"]["vocab"]
        words["w20"], words["w21"] = words["w21"], words["w20"]

    edit_json(folder, "tokenizer.json", lambda data: None)
    size = (folder / "tokenizer.json").stat().st_size
    edit_json(folder, "tokenizer.json", change)
    assert (folder / "tokenizer.json").stat().st_size == size


def change_template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    before = path.stat()
    path.write_text(path.read_text().replace("w10", "w12"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_stop_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))


@pytest.mark.parametrize("change", [swap_two_words, change_template, change_stop_tokens])
def test_a_changed_file_of_the_target_renders_anew(
    processes: Processes, folder: Path, change: Callable[[Path], None]
) -> None:
    edit_json(folder, "tokenizer.json", lambda data: None)  # as this file writes it
    before = processes.ask(folder)
    change(folder)
    assert processes.ask(folder) != before
    assert processes.num_made == 2


@pytest.mark.parametrize(
    ("prompts", "settings"),
    [
        (PROMPTS, {"thinking": True}),
        (PROMPTS, {"max_new_tokens": 6}),
        ((prompt("a", "w20 w22"), *PROMPTS[1:]), {}),
        ((prompt("a", "w20 w21", messages=(("system", "w20 w21"),)), *PROMPTS[1:]), {}),
        ((prompt("other", "w20 w21"), *PROMPTS[1:]), {}),
        ((*PROMPTS[:2], prompt("b#2", "w32", follows="b#1"), PROMPTS[3]), {}),
        ((*PROMPTS[:3], prompt("c", "w40", prompt_ids=(10, 41, 11))), {}),
        (PROMPTS[::-1][:1] + PROMPTS[:3], {}),
        (PROMPTS[:3], {}),
    ],
    ids=["thinking", "limit", "text", "role", "id", "later turn", "given ids", "order", "fewer"],
)
def test_other_prompts_or_settings_render_anew(
    processes: Processes, folder: Path, prompts: tuple[Prompt, ...], settings: dict[str, Any]
) -> None:
    processes.ask(folder)
    processes.ask(folder, prompts, **settings)
    assert processes.num_made == 2


@pytest.mark.parametrize("package", ["transformers", "tokenizers", "jinja2"])
def test_another_version_of_what_renders_renders_anew(
    processes: Processes, folder: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    processes.ask(folder)
    true = importlib.metadata.version
    monkeypatch.setattr(kept_renderings, "version", lambda name: "99" if name == package else true(name))
    processes.ask(folder)
    assert processes.num_made == 2


def test_labels_of_prompts_are_not_part_of_it_and_those_asked_for_come_back(processes: Processes, folder: Path) -> None:
    processes.ask(folder)
    relabelled = tuple(dataclasses.replace(one, group="g") for one in PROMPTS)
    assert [one.group for one in processes.ask(folder, relabelled).later] == ["g"]
    assert processes.num_made == 1


def test_a_template_that_asks_for_the_time_is_never_kept(processes: Processes, folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text("{% if strftime_now is defined %}{% endif %}" + path.read_text())
    for number in (1, 2):
        processes.ask(folder)
        assert processes.num_made == number
    assert not processes.kept_in.exists()


def test_a_tokenizer_without_its_own_file_is_never_kept(folder: Path) -> None:
    target = read_target_folder(folder, name="tiny")
    assert rendering_key(target, PROMPTS, **SETTINGS) is not None
    (folder / "tokenizer.json").unlink()
    assert rendering_key(target, PROMPTS, **SETTINGS) is None


def test_beside_a_file_that_cannot_be_read_nothing_is_kept(processes: Processes, folder: Path) -> None:
    (folder / "odd.json").symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match="Input/output error"):
        (folder / "odd.json").read_bytes()
    for number in (1, 2):
        processes.ask(folder)
        assert processes.num_made == number


@pytest.mark.parametrize("damage", ["cut off", "altered", "empty"])
def test_a_damaged_file_is_made_anew(processes: Processes, folder: Path, damage: str) -> None:
    processes.ask(folder)
    (path,) = processes.kept_in.iterdir()
    text = path.read_text()
    altered = {"cut off": text[:-20], "altered": text.replace("20, 21", "20, 22"), "empty": ""}[damage]
    assert altered != text
    path.write_text(altered)
    processes.ask(folder)
    assert processes.num_made == 2
    processes.ask(folder)
    assert processes.num_made == 2, "it was written again"


def test_while_transcripts_are_made_again_so_is_the_rendering(processes: Processes, folder: Path) -> None:
    processes.ask(folder)
    with refreshing.refreshing(["transcripts"]):
        processes.ask(folder)
    assert processes.num_made == 2


def test_what_was_made_before_there_was_a_store_is_kept_once_there_is(processes: Processes, folder: Path) -> None:
    processes.kept_in.parent.rmdir()
    processes.ask(folder)
    assert not processes.kept_in.parent.exists(), "rendering makes no store"
    processes.kept_in.parent.mkdir()
    target = read_target_folder(folder, name="tiny")
    rendered(target, PROMPTS, kept_in=processes.kept_in, **SETTINGS)  # the same process, in a later stage
    processes.ask(folder)
    assert processes.num_made == 1


def test_a_file_that_changes_while_it_is_rendered_is_not_kept_under_the_old_name(
    processes: Processes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*arguments: Any, **settings: Any) -> Rendering:
        change_template(folder)
        return render_prompts(*arguments, **settings)

    monkeypatch.setattr(rendered_module, "render_prompts", make)
    processes.ask(folder)
    assert not processes.kept_in.exists()


def test_a_place_that_cannot_be_written_is_no_error(processes: Processes, folder: Path) -> None:
    processes.kept_in.write_text("a file where the folder would be")
    for number in (1, 2):
        processes.ask(folder)
        assert processes.num_made == number


def test_the_least_recently_used_go(processes: Processes, folder: Path) -> None:
    processes.ask(folder)
    (path,) = processes.kept_in.iterdir()
    for number in range(MOST_KEPT):
        other = processes.kept_in / f"{number}.json"
        other.write_text("{}")
        os.utime(other, (number, number))
    processes.ask(folder)  # it is used, and stays
    processes.ask(folder, thinking=True)
    names = {one.name for one in processes.kept_in.iterdir()}
    assert len(names) == MOST_KEPT
    assert path.name in names
    assert {"0.json", "1.json"} & names == set()


def test_a_target_is_told_from_another_in_the_same_files(folder: Path) -> None:
    """Its vocabulary and context decide which prompts are refused."""
    target: Target = read_target_folder(folder, name="tiny")
    longer = dataclasses.replace(target, config=dataclasses.replace(target.config, max_position_embeddings=7))
    keys = {rendering_key(one, PROMPTS, **SETTINGS) for one in (target, longer)}
    assert len(keys) == 2
