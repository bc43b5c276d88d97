"""The plan a person would make, with numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.errors import DoesNotFit
from dflash_core.hosts import memory
from dflash_core.hosts.dtypes import choose_cpu_dtype, choose_cuda_dtype
from dflash_core.hosts.job import DrafterSize, Job, typical_drafter
from dflash_core.hosts.plan import check_fits, find_target, make_plan
from dflash_core.hosts.present import model_rows, plan_json, plan_rows, report_from_json, report_json, report_rows, turn
from dflash_core.hosts.report import GPU, Disk, HostFacts, HostReport, Listing, ModelFolder, Status
from dflash_core.target.model_config import read_model_config

GIB = 2**30
TARGET = read_model_config(
    {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "intermediate_size": 17408,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 248320,
            "dtype": "bfloat16",
        },
    }
)
TARGET_BYTES = 52 * 10**9
JOB = Job(
    target=TARGET,
    target_bytes=TARGET_BYTES,
    target_path="/models/Qwen3.6-27B",
    drafter=DrafterSize(
        num_parameters=1_730_150_400, num_layers=5, num_key_value_heads=8, head_dim=128, dtype="bfloat16"
    ),
    block_size=16,
    num_tokens=100_000,
    longest_tokens=1024,
    num_selected_layers=5,
    store_path="/home/me/.cache/dflash-eval",
)


def make_gpu(
    index: int, total_gib: float, used_gib: float, capability: str | None = "8.6", name: str = "NVIDIA RTX A4000"
) -> GPU:
    return GPU(
        index=index,
        name=name,
        memory_total_mib=int(total_gib * 1024),
        memory_used_mib=int(used_gib * 1024),
        driver="570.86.10",
        compute_capability=capability,
    )


def make_report(name: str, *, status: Status = "ok", url: str | None = None, **facts: Any) -> HostReport:
    return HostReport(
        name=name, url=url or f"ssh://me@{name}", status=status, problem=None, seconds=0.5, facts=HostFacts(**facts)
    )


MODEL = ModelFolder(
    path="/data/models/Qwen3.6-27B",
    is_present=True,
    size_bytes=TARGET_BYTES + 10**7,
    weights_bytes=TARGET_BYTES,
    num_shards=15,
    shards_missing=(),
    config=TARGET,
    problem=None,
)
TRAINING = make_report(
    "training",
    status="read-only",
    ram_total_bytes=2000 * GIB,
    ram_available_bytes=1900 * GIB,
    threads=256,
    cpu_flags=("avx2", "avx512f", "avx512_bf16", "amx_bf16"),
    models=(MODEL,),
    folder=Listing(path="/data/runs/a", num_entries=12),
)
CPU_BOX = make_report(
    "cpu_box",
    gpus=(make_gpu(0, 80, 75, "9.0", "NVIDIA H100"), make_gpu(1, 80, 60, "9.0", "NVIDIA H100")),
    ram_total_bytes=293 * GIB,
    ram_available_bytes=280 * GIB,
    disks=(Disk(path="/", is_present=True, total_bytes=399 * GIB, free_bytes=90 * GIB),),
    cpu_model="Intel(R) Xeon(R) Gold 5320 CPU @ 2.20GHz",
    threads=90,
    cpu_flags=("avx2", "avx512f"),
    python="3.10.12",
    models=(MODEL,),
)
WORKSTATION = make_report(
    "workstation",
    url="local",
    gpus=(make_gpu(0, 16, 1.5),),
    ram_total_bytes=754 * GIB,
    ram_available_bytes=700 * GIB,
    disks=(Disk(path="/", is_present=True, total_bytes=1000 * GIB, free_bytes=60 * GIB),),
    threads=64,
    cpu_flags=("avx2", "avx512f"),
    python="3.11.7",
    torch="2.13.0+cu128",
    torch_cuda="12.8",
)
THREE = [TRAINING, CPU_BOX, WORKSTATION]


def test_the_three_machines_are_used_as_a_person_would() -> None:
    plan = make_plan(THREE, JOB)

    target, drafter = plan.stages
    assert (target.host, target.device, target.dtype, target.threads) == ("cpu_box", "cpu", "float32", 90)
    assert target.parts[0].size_bytes == 104 * 10**9, "26 B numbers of 4 bytes"
    assert target.memory_available_bytes == 280 * GIB
    assert target.fits
    assert target.why == (
        "cpu_box holds the target; float32 because its CPU has no bf16 instructions (avx512_bf16, amx_bf16)"
    )
    assert (drafter.host, drafter.device, drafter.dtype) == ("workstation", "cuda:0", "bfloat16")
    assert drafter.memory_available_bytes == int(14.5 * GIB)
    assert drafter.fits
    check_fits(plan)


def test_the_targets_memory_is_what_a_hand_works_out() -> None:
    target = make_plan(THREE, JOB).target

    cache = 2 * 24 * 1024 * 64 * 4 * 256 * 4  # keys and values, tokens, layers, heads, head size, bytes
    activations = 24 * 1024 * (4 * 5120 + 3 * 17408) * 4
    logits = 24 * 248320 * 4
    assert [part.size_bytes for part in target.parts] == [104 * 10**9, cache + activations + logits, GIB // 2]
    assert [part.name for part in target.parts] == ["target weights", "writing transcripts", "runtime"]
    assert target.disk_needed_bytes == 100_000 * 6 * 5120 * 2, "five selected layers and the final norm, in bf16"
    assert target.disk_available_bytes == 90 * GIB


def test_the_drafters_memory_is_what_a_hand_works_out() -> None:
    sizes = {part.name: part.size_bytes for part in make_plan(THREE, JOB).drafter.parts}

    assert sizes == {
        "drafter weights": 1_730_150_400 * 2,
        "target head": 248320 * 5120 * 2,
        "context features": 24 * 1024 * 5 * 5120 * 2,
        "context keys and values": 2 * 24 * 1024 * 5 * 8 * 128 * 2,
        "logits": 64 * 15 * 248320 * 4,
        "runtime": GIB // 2,
    }


def test_a_target_that_only_reads_takes_one_layer_however_many_tokens_there_are() -> None:
    parts = make_plan(THREE, replace(JOB, is_target_held=False)).target.parts

    assert [part.name for part in parts] == ["reading hidden states", "runtime"]
    layer = (26 * 10**9 - 2 * 248320 * 5120) // 64 * 4
    work = 1024 * (4 * 5120 + 3 * 17408) * 4
    assert parts[0].size_bytes == int((layer + work + layer // 8) * 1.2)
    assert make_plan(THREE, replace(JOB, is_target_held=False, num_tokens=10**7)).target.parts == parts
    small = make_report("local", url="local", ram_available_bytes=16 * GIB, threads=8, cpu_flags=("avx2",))
    assert make_plan([small], replace(JOB, is_target_held=False)).target.memory_fits, "104 GB of weights, 16 of RAM"


def test_a_typical_drafter_is_as_large_as_the_published_one() -> None:
    drafter = typical_drafter(TARGET)

    assert drafter.num_parameters == 1_730_150_400
    assert make_plan(THREE, replace(JOB, drafter=drafter)).drafter.parts[0].name == "drafter weights (assumed size)"


@pytest.mark.parametrize("status", ["read-only", "unreachable", "timed-out", "unreadable"])
def test_only_a_host_that_answered_and_may_be_written_to_is_given_work(status: Status) -> None:
    plan = make_plan([replace(CPU_BOX, status=status)], JOB)

    assert [stage.host for stage in plan.stages] == [None, None]
    assert not plan.target.fits
    with pytest.raises(DoesNotFit, match="no host for the target: none of the hosts"):
        check_fits(plan)


def test_only_the_hosts_named_are_given_work() -> None:
    plan = make_plan(THREE, JOB, only=["workstation"])

    assert [stage.host for stage in plan.stages] == ["workstation", "workstation"]
    assert plan.target.why.startswith("workstation has no copy of the target")


def test_a_target_that_fits_nowhere_says_so_with_the_numbers() -> None:
    small = make_report("local", url="local", ram_available_bytes=16 * GIB, threads=8, cpu_flags=("avx2",))
    plan = make_plan([small], JOB)

    assert not plan.target.fits
    with pytest.raises(DoesNotFit) as caught:
        check_fits(plan)
    # 104e9 + 20,055,834,624 of one batch + 0.5 GiB, in GiB of 2^30: 116.0
    assert str(caught.value).startswith(
        "the target in float32 needs 116.0 GiB, 16.0 GiB available on host local (cpu); free memory there"
    )
    assert caught.value.exit_status == 2


def test_hidden_states_that_fit_on_no_disk_say_so() -> None:
    disk = Disk(path=JOB.store_path or "", is_present=False, total_bytes=10 * GIB, free_bytes=GIB)
    roomy = Disk(path="/", is_present=True, total_bytes=900 * GIB, free_bytes=800 * GIB)
    report = replace(CPU_BOX, facts=replace(CPU_BOX.facts, disks=(roomy, disk)))

    with pytest.raises(DoesNotFit, match=r"need 5\.7 GiB of disk, 1\.0 GiB available on host cpu_box in /home/me"):
        check_fits(make_plan([report], JOB))


def test_memory_that_is_not_known_is_not_held_against_a_host() -> None:
    plan = make_plan([make_report("mac", url="local")], JOB)

    assert plan.target.memory_available_bytes is None
    check_fits(plan)


def test_a_gpu_that_is_too_small_leaves_the_drafter_to_the_cpu_and_says_why() -> None:
    tight = replace(WORKSTATION, facts=replace(WORKSTATION.facts, gpus=(make_gpu(0, 8, 1.5),)))
    drafter = make_plan([CPU_BOX, tight], JOB).drafter

    assert (drafter.host, drafter.device, drafter.dtype, drafter.fits) == ("workstation", "cpu", "float32", True)
    assert "GPU 0 of cpu_box is busy, 75.0 GiB of 80.0 GiB in use" in drafter.why
    assert "cuda:0 of workstation has 6.5 GiB free, 8.6 GiB needed" in drafter.why
    assert "float32 because that is what a drafter on a CPU runs in" in drafter.why


def test_without_any_gpu_the_drafter_runs_on_the_cpu_of_this_machine() -> None:
    here = replace(WORKSTATION, facts=replace(WORKSTATION.facts, gpus=()))
    drafter = make_plan([replace(CPU_BOX, facts=replace(CPU_BOX.facts, gpus=())), here], JOB).drafter

    assert (drafter.host, drafter.device) == ("workstation", "cpu")
    assert drafter.why.startswith("on the CPU because no host that answered has an NVIDIA GPU; ")


def test_a_torch_without_cuda_cannot_use_this_machines_gpu() -> None:
    here = replace(WORKSTATION, facts=replace(WORKSTATION.facts, torch="2.13.0+cpu", torch_cuda=None))
    drafter = make_plan([here], JOB).drafter

    assert drafter.device == "cpu"
    assert "GPU 0 of workstation cannot be used by torch 2.13.0+cpu, a build without CUDA" in drafter.why


def test_a_gpu_that_does_not_say_how_full_it_is_is_not_used() -> None:
    gpu = replace(make_gpu(0, 16, 1), memory_used_mib=None)
    drafter = make_plan([replace(WORKSTATION, facts=replace(WORKSTATION.facts, gpus=(gpu,)))], JOB).drafter

    assert drafter.device == "cpu"
    assert "does not say how much of its memory is free" in drafter.why


def test_the_config_can_ask_for_the_cpu() -> None:
    drafter = make_plan(THREE, replace(JOB, device="cpu")).drafter

    assert (drafter.host, drafter.device) == ("workstation", "cpu")
    assert "the config says device: cpu" in drafter.why


def test_the_config_can_insist_on_a_busy_gpu_and_is_refused_where_it_is_too_full() -> None:
    plan = make_plan([CPU_BOX], replace(JOB, device="cuda"))

    assert (plan.drafter.device, plan.drafter.fits) == ("cuda:1", True)
    full = replace(CPU_BOX, facts=replace(CPU_BOX.facts, gpus=(make_gpu(0, 80, 78, "9.0"),)))
    with pytest.raises(
        DoesNotFit, match=r"the drafter in bfloat16 needs 8\.6 GiB, 2\.0 GiB available on host cpu_box \(cuda:0\)"
    ):
        check_fits(make_plan([full], replace(JOB, device="cuda")))


def test_the_config_can_insist_on_a_gpu_where_there_is_none() -> None:
    here = make_report("local", url="local", ram_available_bytes=400 * GIB)

    with pytest.raises(
        DoesNotFit, match="no host for the drafter: no host that answered has an NVIDIA GPU; set device: auto"
    ):
        check_fits(make_plan([here], replace(JOB, device="cuda")))


@pytest.mark.parametrize(
    ("flags", "stored", "configured", "expected"),
    [
        (("avx2", "avx512f"), "bfloat16", "auto", "float32"),
        (("avx2", "avx512f", "avx512_bf16"), "bfloat16", "auto", "bfloat16"),
        (("amx_bf16",), "bfloat16", "auto", "bfloat16"),
        (("amx_bf16",), "float32", "auto", "float32"),
        (("amx_bf16",), None, "auto", "float32"),
        (None, "bfloat16", "auto", "float32"),
        (("avx2",), "bfloat16", "bfloat16", "bfloat16"),
        (("amx_bf16",), "bfloat16", "float32", "float32"),
    ],
)
def test_a_cpu_computes_bf16_only_with_the_instructions_for_it(
    flags: tuple[str, ...] | None, stored: str | None, configured: str, expected: str
) -> None:
    chosen = choose_cpu_dtype(make_report("box", cpu_flags=flags), stored, configured)

    assert chosen.name == expected
    assert chosen.why.startswith(f"{expected} because ")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ("7.5", "float32"),
        ("8.0", "bfloat16"),
        ("8.9", "bfloat16"),
        ("10.0", "bfloat16"),
        ("12.1", "bfloat16"),
        (None, "float32"),
    ],
)
def test_a_gpu_computes_bf16_from_capability_8(capability: str | None, expected: str) -> None:
    assert choose_cuda_dtype(make_gpu(0, 16, 1, capability)).name == expected


def test_a_bf16_target_stays_bf16_on_a_cpu_that_computes_it() -> None:
    fast = replace(CPU_BOX, facts=replace(CPU_BOX.facts, cpu_flags=("avx512f", "avx512_bf16", "amx_bf16")))
    target = make_plan([fast], JOB).target

    assert (target.dtype, target.parts[0].size_bytes) == ("bfloat16", TARGET_BYTES)


@pytest.mark.parametrize(
    ("compute", "store", "bytes_each"),
    [("auto", "auto", 2), ("float32", "auto", 4), ("auto", "float32", 4), ("float32", "bfloat16", 2)],
)
def test_hidden_states_take_the_stored_dtypes_bytes(compute: str, store: str, bytes_each: int) -> None:
    plan = make_plan(THREE, replace(JOB, compute_dtype=compute, store_dtype=store))

    assert plan.target.disk_needed_bytes == 100_000 * 6 * 5120 * bytes_each


def test_a_target_is_found_on_the_host_that_holds_it_whole() -> None:
    part = replace(MODEL, path="/old/Qwen3.6-27B", num_shards=14, shards_missing=("x",))
    broken = replace(WORKSTATION, facts=replace(WORKSTATION.facts, models=(part,)))

    assert find_target([broken, CPU_BOX], "/models/Qwen3.6-27B") == MODEL
    assert find_target([broken], "Qwen3.6-27B") == part
    assert find_target([broken], "Qwen3.6") is None
    cached = replace(MODEL, path="/home/me/.cache/huggingface/hub/models--Qwen--Qwen3.6-27B/snapshots/0123abc")
    assert find_target([replace(WORKSTATION, facts=HostFacts(models=(cached,)))], "Qwen/Qwen3.6-27B") == cached
    assert make_plan([broken, CPU_BOX], JOB).target.host == "cpu_box"


def test_the_memory_functions_by_hand() -> None:
    assert memory.num_parameters_of(1000, "float32") == 250
    assert memory.num_parameters_of(1000, None) == 500
    assert memory.weights_bytes(10, "bfloat16") == 20
    assert memory.key_value_bytes(7, 3, 2, 5, "float32") == 2 * 7 * 3 * 2 * 5 * 4
    assert memory.hidden_states_bytes(7, 3, 5, "bfloat16") == 210
    assert memory.logits_bytes(2, 11) == 88
    bare = read_model_config({"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 10})
    assert memory.head_bytes(bare, "float32") == 320
    assert memory.activation_bytes(bare, 3, "float32") == 3 * (4 * 8 + 3 * 32) * 4
    assert memory.target_cache_bytes(bare, 3, "float32") == 2 * 3 * 2 * 8 * 4, "a width no config narrows"


@given(st.integers(0, 10**12), st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 200))
def test_a_stage_fits_exactly_when_it_needs_no_more_than_there_is(
    available: int, tokens: int, longest: int, batch: int
) -> None:
    report = make_report("local", url="local", ram_available_bytes=available)
    stage = make_plan([report], replace(JOB, num_tokens=tokens, longest_tokens=longest, batch_size=batch)).target

    assert stage.fits is (stage.memory_needed_bytes <= available)
    assert stage.memory_needed_bytes > 104 * 10**9


def test_rows_show_sizes_and_say_what_is_read_only() -> None:
    rows = {row["host"]: row for row in report_rows(THREE)}

    assert rows["training"]["status"] == "read-only: SFTP facts only"
    assert rows["training"]["folder"] == "/data/runs/a: 12 entries"
    assert rows["training"]["gpus"] == "-"
    assert rows["cpu_box"]["ram"] == "280.0 of 293.0 GiB available"
    assert rows["cpu_box"]["disks"] == "/: 90.0 of 399.0 GiB free"
    assert rows["cpu_box"]["torch"] == "-"
    assert rows["workstation"]["gpus"] == "0: NVIDIA RTX A4000 (1.5 of 16.0 GiB used, capability 8.6)"
    assert rows["workstation"]["torch"] == "2.13.0+cu128 (CUDA 12.8)"
    assert len({tuple(row) for row in rows.values()}) == 1, "every row has the same columns"


def test_a_table_can_be_turned_on_its_side() -> None:
    rows = turn(report_rows([CPU_BOX, WORKSTATION]), by="host")

    assert {tuple(row) for row in rows} == {("", "cpu_box", "workstation")}
    by_fact = {row[""]: row for row in rows}
    assert (by_fact["threads"]["cpu_box"], by_fact["threads"]["workstation"]) == ("90", "64")
    assert "folder" not in by_fact, "neither of the two is read-only"
    assert turn([], by="host") == []


def test_a_models_row_says_which_keys_its_sizes_were_found_under() -> None:
    row = model_rows([CPU_BOX])[0]

    assert row["keys"] == "text_config.num_hidden_layers, text_config.hidden_size, text_config.vocab_size"
    assert (row["shards"], row["depth"], row["hidden"], row["vocabulary"]) == ("15 of 15", "64", "5120", "248320")
    assert (row["size"], row["dtype"], row["present"]) == ("48.4 GiB", "bfloat16", "yes")


def test_a_host_that_said_nothing_is_a_row_too() -> None:
    down = HostReport(
        name="x", url="ssh://x", status="unreachable", problem="cannot\x1b[31m\nreach x", seconds=1.0, facts=HostFacts()
    )
    (row,) = report_rows([down])

    assert (row["status"], row["problem"], row["ram"], row["threads"]) == (
        "unreachable",
        "cannot [31m reach x",
        "-",
        "-",
    )


def test_a_plan_has_a_row_and_an_object_per_stage() -> None:
    plan = make_plan(THREE, JOB)
    target, drafter = plan_rows(plan)

    assert (target["stage"], target["memory"], target["disk"], target["fits"]) == (
        "target",
        "116.0 GiB of 280.0 GiB",
        "5.7 GiB of 90.0 GiB",
        "yes",
    )
    assert (drafter["device"], drafter["memory"], drafter["disk"]) == ("cuda:0", "8.6 GiB of 14.5 GiB", "-")
    data = json.loads(json.dumps(plan_json(plan)))
    assert [stage["host"] for stage in data] == ["cpu_box", "workstation"]
    assert data[0]["memory_needed_bytes"] == sum(part["size_bytes"] for part in data[0]["parts"])


@pytest.mark.parametrize("report", [*THREE, make_report("bare")], ids=lambda report: report.name)
def test_a_report_survives_json(report: HostReport) -> None:
    data = json.loads(json.dumps(report_json(report), allow_nan=False))

    assert data["name"] == report.name
    assert "gpus" in data
    assert report_from_json(data) == report
