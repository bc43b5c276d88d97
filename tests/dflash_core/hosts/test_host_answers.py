"""Answers are read as far as they go; no text makes the reader fail."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.hosts.answers import read_answer, read_cpuinfo, read_gpus, read_meminfo
from dflash_core.hosts.model_folders import FolderAnswer, describe_folder

GIB = 2**30
EIGHT_BUSY = "\n".join(
    f"{index}, NVIDIA H100 80GB HBM3, 81559, {used}, 550.54.15, 9.0"
    for index, used in enumerate([78012, 77980, 78012, 78012, 77996, 78012, 78012, 4])
)
CPU_BOX = f"""Welcome to cpu-box
@begin

@system
|Linux 5.15.0-139-generic x86_64

@load
|3.20 2.11 1.90 4/1024 99

@memory
|MemTotal:       307232768 kB
|MemFree:        11000000 kB
|MemAvailable:   293601280 kB
|SwapTotal:       8388604 kB
|SwapFree:        8000000 kB

@cpu
|processor\t: 0
|model name\t: Intel(R) Xeon(R) Gold 5320 CPU @ 2.20GHz
|flags\t\t: fpu avx avx2 avx512f avx512dq avx512_vnni

@threads
|90

@python
|python 3.10.12

@gpus
{chr(10).join("|" + line for line in EIGHT_BUSY.splitlines())}

@disk
|path /
|kind present
|Filesystem     1024-blocks      Used Available Capacity Mounted on
|/dev/mapper/ubuntu--vg-ubuntu--lv 418381824 300000000 97000000 76% /

@end
"""


def test_a_whole_answer_is_read() -> None:
    answer = read_answer(CPU_BOX)
    facts = answer.facts

    assert (answer.has_begun, answer.is_complete) == (True, True)
    assert facts.ram_total_bytes == 293 * GIB
    assert facts.ram_available_bytes == 280 * GIB
    assert (facts.swap_total_bytes, facts.swap_free_bytes) == (8388604 * 1024, 8000000 * 1024)
    assert facts.cpu_model == "Intel(R) Xeon(R) Gold 5320 CPU @ 2.20GHz"
    assert facts.cpu_flags == ("avx2", "avx512f")
    assert (facts.threads, facts.load_1min, facts.python, facts.torch) == (90, 3.2, "3.10.12", None)
    assert (facts.disks[0].total_bytes, facts.disks[0].free_bytes) == (418381824 * 1024, 97000000 * 1024)
    assert [gpu.memory_used_mib for gpu in facts.gpus] == [78012, 77980, 78012, 78012, 77996, 78012, 78012, 4]
    assert {gpu.compute_capability for gpu in facts.gpus} == {"9.0"}


def test_gpu_fields_that_the_driver_does_not_have_are_absent() -> None:
    gpus, notes = read_gpus(
        ["0, NVIDIA GB10, [N/A], [N/A], 580.95.05, 12.1", "1, Tesla K80, 11441, 0, [Unknown Error]"]
    )

    assert (gpus[0].memory_total_mib, gpus[0].memory_used_mib, gpus[0].compute_capability) == (None, None, "12.1")
    assert (gpus[1].memory_total_mib, gpus[1].compute_capability) == (11441, None)
    assert notes == []


@pytest.mark.parametrize(
    "line",
    ["No devices were found", "x, y, z", "-1, NVIDIA, 1, 2, 3, 4", "1, NVIDIA", "0; NVIDIA H100; 81559; 4; 550; 9.0"],
)
def test_what_is_no_gpu_becomes_a_note(line: str) -> None:
    assert read_gpus([line]) == ((), [f"nvidia-smi: {line}"])


def test_a_containers_limit_lowers_what_is_available() -> None:
    cgroup = "|memory.max 4294967296\n|memory.current 3221225472\n|inactive_file 1073741824\n|active_file 1073741824\n"
    facts = read_answer(
        f"@begin\n@memory\n|MemTotal: 16777216 kB\n|MemAvailable: 12000000 kB\n@cgroup\n{cgroup}@end"
    ).facts

    assert (facts.ram_total_bytes, facts.ram_available_bytes) == (4 * GIB, 3 * GIB)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_a_limit_beyond_the_machine_is_none(limit: str) -> None:
    text = f"@begin\n@memory\n|MemTotal: 1048576 kB\n|MemAvailable: 1000 kB\n@cgroup\n|memory.max {limit}\n@end"

    assert read_answer(text).facts.ram_available_bytes == 1000 * 1024


def test_a_whole_cpuinfo_is_counted() -> None:
    cpu = read_cpuinfo(
        ["processor\t: 0", "model name\t: A", "flags\t: avx2 amx_bf16", "", "processor\t: 1", "flags\t: avx2"]
    )

    assert (cpu.model, cpu.threads, cpu.flags) == ("A", 2, ("avx2", "amx_bf16"))


def test_a_cpu_that_lists_no_flags_has_unknown_ones() -> None:
    assert read_cpuinfo(["processor : 0"]).flags is None
    assert read_cpuinfo(["processor : 0", "Features : fp asimd bf16"]).flags == ()


def test_nothing_measured_is_none_and_not_zero() -> None:
    facts = read_answer("@begin\n@memory\n@cpu\n@threads\n@gpus\n@disk\n|path /x\n|kind present\n@end\n").facts

    assert (facts.ram_total_bytes, facts.ram_available_bytes, facts.threads, facts.cpu_flags) == (None,) * 4
    assert (facts.disks[0].total_bytes, facts.disks[0].free_bytes) == (None, None)
    assert read_meminfo(["MemTotal: lots kB"]).ram_total_bytes is None


CONFIG = json.dumps({"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 10})


def shard(number: int, total: int = 3) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"


@pytest.mark.parametrize(
    ("sizes", "index", "num_shards", "missing", "problem"),
    [
        ({shard(1): 5, shard(3): 5}, None, 2, (shard(2),), f"1 of 3 shards missing: {shard(2)}"),
        ({"model.safetensors": 5, "pytorch_model.bin": 5}, None, 1, (), None),
        ({"pytorch_model-00001-of-00001.bin": 5, "training_args.bin": 1}, None, 1, (), None),
        ({"model.safetensors": 0}, None, 0, ("model.safetensors",), "1 of 1 shards missing: model.safetensors"),
        ({"tokenizer.json": 5}, None, 0, (), "no weight files (.safetensors, .bin or .gguf)"),
        (
            {},
            {"weight_map": {"a": shard(1), "b": shard(2)}},
            0,
            (shard(1), shard(2)),
            f"2 of 2 shards missing: {shard(1)}, {shard(2)}",
        ),
        (
            {shard(1, 1): 5},
            {"weight_map": {"a": shard(1, 1)}, "metadata": {"total_size": 9}},
            1,
            (),
            "the shards hold 5 bytes, their index counts 9: one is cut off",
        ),
        ({"a.safetensors": 5, "b.safetensors": 6}, {"weight_map": {"x": "a.safetensors"}}, 1, (), None),
    ],
    ids=["by number", "kinds", "bin", "no byte", "no weights", "index alone", "cut off", "index decides"],
)
def test_shards_are_counted_against_index_and_numbering(
    sizes: dict[str, int], index: object, num_shards: int, missing: tuple[str, ...], problem: str | None
) -> None:
    folder = describe_folder(
        FolderAnswer(
            path="/m",
            sizes={"config.json": 1, **sizes},
            config_text=CONFIG,
            index_text=None if index is None else json.dumps(index),
        )
    )

    assert (folder.num_shards, folder.shards_missing, folder.problem) == (num_shards, missing, problem)
    assert folder.is_whole is (num_shards > 0 and not missing)
    assert folder.size_bytes == 1 + sum(sizes.values())


def test_conflicting_levels_of_a_config_are_told_in_the_row() -> None:
    text = json.dumps({"hidden_size": 9, "text_config": json.loads(CONFIG)})
    folder = describe_folder(
        FolderAnswer(path="/m", sizes={"config.json": 1, "model.safetensors": 1}, config_text=text)
    )

    assert folder.config is not None
    assert folder.config.hidden_size == 8
    assert folder.problem == "hidden_size = 9 contradicts text_config.hidden_size = 8, which holds"


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[]", "null", '{"hidden_size": 1e999}', "\x00", '"a"'])
def test_a_config_that_is_none_is_a_problem(text: str) -> None:
    folder = describe_folder(FolderAnswer(path="/m", sizes={"config.json": 1}, config_text=text))

    assert folder.config is None
    assert folder.problem is not None
    assert "\n" not in folder.problem


LINES = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(
            [
                "@begin",
                "@end",
                "@model",
                "@config",
                "@index",
                "@disk",
                "@gpus",
                "@memory",
                "@cgroup",
                "@cpu",
                "@python",
                "@load",
                "@config_problem",
                "|path /a",
                "|kind folder",
                "|kind file",
                "|file 12 model-00001-of-99999.safetensors",
                "|file 9999999999999999999999 x",
                "|file",
                "|broken",
                "|cut",
                '|{"weight_map": {"a": 1}}',
                "|{}",
                "|[[[",
                "|0, A, 1, 2, 3, 4.5",
                "|,,,,,,",
                "|MemTotal: 99999999999999999999 kB",
                "|memory.max 1",
                "|1 2 3 4% /",
                "|processor:",
                "|flags:",
                "|torch",
                "|note",
                "|٣",
            ]
        ),
        st.text(max_size=15).map("|".__add__),
    )
)


@given(LINES)
def test_no_text_makes_the_reader_fail(lines: list[str]) -> None:
    facts = read_answer("\n".join(lines)).facts

    texts = [*facts.notes, *(model.problem or "" for model in facts.models), facts.cpu_model or "", facts.python or ""]
    assert all(text.isprintable() for text in texts)


@given(st.text())
def test_a_text_that_is_no_answer_is_known_as_such(text: str) -> None:
    answer = read_answer(text)

    assert answer.has_begun is ("@begin" in text.split("\n"))
