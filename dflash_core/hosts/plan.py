"""What runs where, in which dtype, with how much memory, and why: made from reports, before anything is loaded.

Two stages, one after the other. `target` writes the transcripts and the hidden states; it runs in a
machine's RAM. `drafter` scores a checkpoint; it runs on a GPU where one is free, else on a CPU. A host
marked read-only, or one that gave no whole answer, is never given work.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

from dflash_core.errors import DoesNotFit
from dflash_core.hosts import memory
from dflash_core.hosts.dtypes import ChosenDtype, choose_cpu_dtype, choose_cuda_dtype
from dflash_core.hosts.job import Job
from dflash_core.hosts.report import GPU, Disk, HostReport, ModelFolder
from dflash_core.hosts.stages import MemoryPart, Plan, Stage, StagePlan
from dflash_core.hosts.wording import gib

_MIB = 2**20
_NO_HOST = "none of the hosts that answered may be given work"


def make_plan(reports: Sequence[HostReport], job: Job, *, only: Collection[str] | None = None) -> Plan:
    """Decide where the stages of a job run.

    Args:
        reports: what the hosts said.
        job: what is to be computed.
        only: names of the hosts that may be given work; None allows all that answered.

    Returns:
        The best place for each stage, also where nothing fits: then the place that lacks least.
    """
    usable = [report for report in reports if report.may_be_given_work and (only is None or report.name in only)]
    return Plan(target=_place_target(usable, job), drafter=_place_drafter(usable, job))


def find_target(reports: Sequence[HostReport], target_path: str) -> ModelFolder | None:
    """Return what a host said of the target, a whole copy before a part of one; None when no host has it."""
    copies = [
        model
        for report in reports
        for model in report.facts.models
        if model.config is not None and _is_named(model, target_path)
    ]
    return max(copies, key=lambda model: (model.is_whole, model.num_shards), default=None)


def check_fits(plan: Plan) -> None:
    """Refuse a plan that cannot work, before anything is loaded.

    Raises:
        DoesNotFit: a stage lacks memory, disk or a host; with the numbers.
    """
    for stage in plan.stages:
        check_stage_fits(stage)


def check_stage_fits(stage: StagePlan) -> None:
    """Refuse one stage of a plan that cannot work.

    Raises:
        DoesNotFit: it lacks memory, disk or a host; with the numbers.
    """
    if stage.host is None:
        raise DoesNotFit(f"no host for the {stage.stage}: {stage.why}; {stage.advice}")
    if not stage.memory_fits:
        raise DoesNotFit(
            f"the {stage.stage} in {stage.dtype} needs {gib(stage.memory_needed_bytes)}, "
            f"{gib(stage.memory_available_bytes)} available on host {stage.host} ({stage.device}); {stage.advice}"
        )
    if not stage.disk_fits:
        raise DoesNotFit(
            f"the hidden states need {gib(stage.disk_needed_bytes)} of disk, {gib(stage.disk_available_bytes)} "
            f"available on host {stage.host} in {stage.disk_path}; "
            "set store to a larger disk or score fewer prompts"
        )


def _place_target(reports: Sequence[HostReport], job: Job) -> StagePlan:
    """Return the best host for the target: one that fits, holds it, and has the most threads."""
    plans = [_target_on(report, job) for report in reports]
    if not plans:
        return _nowhere("target", "cpu", _target_parts(job, "float32"), why=_NO_HOST)
    holders = {report.name for report in reports if _holds_target(report, job)}
    return max(
        plans,
        key=lambda plan: (plan.fits, plan.host in holders, plan.threads or 0, plan.memory_available_bytes or 0),
    )


def _target_on(report: HostReport, job: Job) -> StagePlan:
    dtype = choose_cpu_dtype(report, job.target.dtype, job.compute_dtype)
    disk = _disk_for(report, job)
    holds = "holds the target" if _holds_target(report, job) else "has no copy of the target among its models"
    return StagePlan(
        stage="target",
        host=report.name,
        device="cpu",
        dtype=dtype.name,
        threads=report.facts.threads,
        parts=_target_parts(job, dtype.name),
        memory_available_bytes=report.facts.ram_available_bytes,
        disk_path=disk.path if disk else None,
        disk_needed_bytes=_disk_bytes(job, dtype.name),
        disk_available_bytes=disk.free_bytes if disk else None,
        why=f"{report.name} {holds}; {dtype.why}",
        advice="free memory there, take a host with more, a lower completions.batch_size or a smaller target",
    )


def _target_parts(job: Job, dtype: str) -> tuple[MemoryPart, ...]:
    """Return what the target takes in RAM: all of it while it writes transcripts, else one layer at a time.

    Writing holds the cache of one batch besides. Reading goes layer by layer over all transcripts, whose residual
    stream lies in files: less than writing takes, where both are done here.
    """
    target = job.target
    num_parameters = memory.num_parameters_of(job.target_bytes, target.dtype)
    runtime = MemoryPart(name="runtime", size_bytes=memory.RUNTIME_BYTES)
    if not job.is_target_held:
        reading = memory.extraction_bytes(target, num_parameters, job.longest_tokens, dtype)
        return (MemoryPart(name="reading hidden states", size_bytes=reading), runtime)
    batch_tokens = min(job.batch_size * job.longest_tokens, max(job.num_tokens, job.longest_tokens))
    writing = (
        memory.target_cache_bytes(target, batch_tokens, dtype)
        + memory.activation_bytes(target, batch_tokens, dtype)
        + memory.logits_bytes(job.batch_size, target.vocab_size)
    )
    return (
        MemoryPart(name="target weights", size_bytes=memory.weights_bytes(num_parameters, dtype)),
        MemoryPart(name="writing transcripts", size_bytes=writing),
        runtime,
    )


def _disk_bytes(job: Job, compute_dtype: str) -> int:
    """Return the size of the stored states: the selected layers' and the final norm's."""
    stored = job.store_dtype
    if stored == "auto":
        is_float32 = job.compute_dtype == "float32" or job.target.dtype not in memory.DTYPE_BYTES
        stored = compute_dtype if is_float32 else str(job.target.dtype)
    return memory.hidden_states_bytes(job.num_tokens, job.num_selected_layers + 1, job.target.hidden_size, stored)


def _place_drafter(reports: Sequence[HostReport], job: Job) -> StagePlan:
    """Return the best place for the drafter: the emptiest GPU that fits, else a CPU, with the reason."""
    if not reports:
        return _nowhere("drafter", "cpu", _drafter_parts(job, "float32"), why=_NO_HOST)
    if job.device == "cpu":
        return _drafter_on_cpu(reports, job, "the config says device: cpu")
    plans: list[StagePlan] = []
    reasons: list[str] = []
    for report in reports:
        for gpu in report.facts.gpus:
            reason = _why_not(report, gpu, job)
            if reason is None:
                plans.append(_drafter_on_gpu(report, gpu, job))
            else:
                reasons.append(reason)
    best = max(plans, key=lambda plan: (plan.fits, plan.memory_available_bytes or 0), default=None)
    if best is not None and (best.fits or job.device == "cuda"):
        return best
    reasons += [_lacking(plan) for plan in plans]
    why = f"no GPU can take it ({'; '.join(reasons)})" if reasons else "no host that answered has an NVIDIA GPU"
    if job.device == "cuda":
        return _nowhere("drafter", "cuda", _drafter_parts(job, "float32"), why=why)
    return _drafter_on_cpu(reports, job, why)


def _why_not(report: HostReport, gpu: GPU, job: Job) -> str | None:
    """Return why a GPU is not to be used, or None when it may be."""
    name = f"GPU {gpu.index} of {report.name}"
    if gpu.memory_total_mib is None or gpu.memory_used_mib is None:
        return f"{name} does not say how much of its memory is free"
    if report.is_local and report.facts.torch is not None and report.facts.torch_cuda is None:
        return f"{name} cannot be used by torch {report.facts.torch}, a build without CUDA"
    if job.device != "cuda" and gpu.memory_used_mib * 2 > gpu.memory_total_mib:
        # More than half taken: somebody serves or trains there, and would feel a guest.
        used, total = gib(gpu.memory_used_mib * _MIB), gib(gpu.memory_total_mib * _MIB)
        return f"{name} is busy, {used} of {total} in use"
    return None


def _lacking(plan: StagePlan) -> str:
    needed, free = gib(plan.memory_needed_bytes), gib(plan.memory_available_bytes)
    return f"{plan.device} of {plan.host} has {free} free, {needed} needed"


def _drafter_on_gpu(report: HostReport, gpu: GPU, job: Job) -> StagePlan:
    dtype = choose_cuda_dtype(gpu)
    free = max((gpu.memory_total_mib or 0) - (gpu.memory_used_mib or 0), 0) * _MIB
    return StagePlan(
        stage="drafter",
        host=report.name,
        device=f"cuda:{gpu.index}",
        dtype=dtype.name,
        threads=report.facts.threads,
        parts=_drafter_parts(job, dtype.name),
        memory_available_bytes=free,
        disk_path=None,
        disk_needed_bytes=None,
        disk_available_bytes=None,
        why=f"{gpu.name} of {report.name} has the most free memory of the GPUs that may be used; {dtype.why}",
        advice="free that GPU or set device: auto",
    )


def _drafter_on_cpu(reports: Sequence[HostReport], job: Job, reason: str) -> StagePlan:
    """Return the best CPU for the drafter: one that fits, this machine before others, then most threads."""
    plans: list[tuple[bool, StagePlan]] = []
    for report in reports:
        # As `drafter/device.py` runs it: float32, which is exact and on most CPUs the fastest.
        dtype = ChosenDtype(name="float32", why="float32 because that is what a drafter on a CPU runs in")
        plan = StagePlan(
            stage="drafter",
            host=report.name,
            device="cpu",
            dtype=dtype.name,
            threads=report.facts.threads,
            parts=_drafter_parts(job, dtype.name),
            memory_available_bytes=report.facts.ram_available_bytes,
            disk_path=None,
            disk_needed_bytes=None,
            disk_available_bytes=None,
            why=f"on the CPU because {reason}; {dtype.why}",
            advice="free memory there or take a host with more",
        )
        plans.append((report.is_local, plan))
    return max(plans, key=lambda item: (item[1].fits, item[0], item[1].threads or 0))[1]


def _drafter_parts(job: Job, dtype: str) -> tuple[MemoryPart, ...]:
    """Return what the drafter takes: weights, the target's head, and one batch's context and logits."""
    drafter, target = job.drafter, job.target
    tokens = min(job.batch_size * job.longest_tokens, max(job.num_tokens, job.longest_tokens))
    features = memory.hidden_states_bytes(tokens, job.num_selected_layers, target.hidden_size, dtype)
    keys = memory.key_value_bytes(tokens, drafter.num_layers, drafter.num_key_value_heads, drafter.head_dim, dtype)
    name = "drafter weights (assumed size)" if drafter.is_assumed else "drafter weights"
    logits = memory.logits_bytes(job.num_blocks_at_once * max(job.block_size - 1, 1), target.vocab_size)
    return (
        MemoryPart(name=name, size_bytes=memory.weights_bytes(drafter.num_parameters, dtype)),
        MemoryPart(name="target head", size_bytes=memory.head_bytes(target, dtype)),
        MemoryPart(name="context features", size_bytes=features),
        MemoryPart(name="context keys and values", size_bytes=keys),
        MemoryPart(name="logits", size_bytes=logits),
        MemoryPart(name="runtime", size_bytes=memory.RUNTIME_BYTES),
    )


def _nowhere(stage: Stage, device: str, parts: tuple[MemoryPart, ...], *, why: str) -> StagePlan:
    return StagePlan(
        stage=stage,
        host=None,
        device=device,
        dtype="float32",
        threads=None,
        parts=parts,
        memory_available_bytes=None,
        disk_path=None,
        disk_needed_bytes=None,
        disk_available_bytes=None,
        why=why,
        advice="set device: auto" if device == "cuda" else "see `dflash-eval probe` and the hosts in the config",
    )


def _holds_target(report: HostReport, job: Job) -> bool:
    return job.target_path is not None and any(
        model.is_whole and _is_named(model, job.target_path) for model in report.facts.models
    )


def _is_named(model: ModelFolder, path: str) -> bool:
    """Tell whether two paths end in the same model's name: it lies elsewhere on each machine."""
    return _model_name(model.path) == _model_name(path)


def _model_name(path: str) -> str:
    """Return the last part of a path or hub id; of a snapshot in a hub cache, the model's name."""
    parts = PurePosixPath(path).parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].rpartition("--")[2]
    return parts[-1] if parts else path


def _disk_for(report: HostReport, job: Job) -> Disk | None:
    """Return the disk that the store lies on, else the roomiest that the host was asked about."""
    disks = [disk for disk in report.facts.disks if disk.free_bytes is not None]
    named = [disk for disk in disks if disk.path == job.store_path]
    return max(named or disks, key=lambda disk: disk.free_bytes or 0, default=None)
