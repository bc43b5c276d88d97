"""The arrows between the rooms, what an import may do, and what must not occur anywhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dflash_core", "tasks", "flows", "examples")
FORBIDDEN = {
    # A room must not import from these.
    "dflash_core": {"tasks", "flows", "examples", "prefect", "tests"},
    "tasks": {"flows", "examples", "tests"},
    "flows": {"tests"},
    "examples": {"flows", "tasks", "prefect", "tests"},
}
# Tensors and values in, tensors and values out.
PURE = (
    "dflash_core/acceptance/own_walk.py",
    "dflash_core/acceptance/recall.py",
    "dflash_core/acceptance/sampled.py",
    "dflash_core/acceptance/sweep.py",
    "dflash_core/acceptance/trees.py",
    "dflash_core/acceptance/walk.py",
    "dflash_core/acceptance/power.py",
    "dflash_core/acceptance/ranking.py",
    "dflash_core/acceptance/resampling.py",
    "dflash_core/acceptance/statistics.py",
    "dflash_core/drafter/attention.py",
    "dflash_core/drafter/dialects/__init__.py",
    "dflash_core/drafter/extra_metrics.py",
    "dflash_core/drafter/facts.py",
    "dflash_core/drafter/footprint.py",
    "dflash_core/drafter/memory.py",
    "dflash_core/drafter/model.py",
    "dflash_core/drafter/rope.py",
    "dflash_core/drafter/shapes.py",
    "dflash_core/drafter/spec.py",
    "dflash_core/errors.py",
    "dflash_core/hosts/answers.py",
    "dflash_core/hosts/dtypes.py",
    "dflash_core/hosts/memory.py",
    "dflash_core/hosts/plan.py",
    "dflash_core/target/model_config.py",
)
WORLDLY = {"fsspec", "sshfs", "duckdb", "asyncssh", "prefect", "subprocess", "socket", "requests", "huggingface_hub"}
MAX_LINES = 400


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> set[str]:
    """Return every module that a file imports, wherever in the file, by its full name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively; say the whole name"
            assert node.module is not None
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported_modules(path)}


def reachable(path: Path) -> Iterator[Path]:
    """Yield a file and all files of the core that it imports, and they import."""
    waiting, seen = [path], {path}
    while waiting:
        current = waiting.pop()
        yield current
        for name in imported_modules(current):
            for candidate in (ROOT / f"{name.replace('.', '/')}.py", ROOT / name.replace(".", "/") / "__init__.py"):
                if candidate.exists() and candidate not in seen:
                    seen.add(candidate)
                    waiting.append(candidate)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


class TestArrows:
    @pytest.mark.parametrize("path", sources(*FORBIDDEN), ids=name_of)
    def test_no_room_imports_from_one_above_it(self, path: Path) -> None:
        room = path.relative_to(ROOT).parts[0]
        assert tops(path) & FORBIDDEN[room] == set()

    @pytest.mark.parametrize("name", PURE)
    def test_a_pure_module_reaches_nothing_that_touches_the_world(self, name: str) -> None:
        for path in reachable(ROOT / name):
            assert tops(path) & WORLDLY == set(), f"{name} reaches {name_of(path)}"

    @pytest.mark.parametrize("path", sources("dflash_core", "tasks"), ids=name_of)
    def test_a_private_name_stays_in_its_module(self, path: Path) -> None:
        for name in imported_modules(path):
            if name.partition(".")[0] in PACKAGES:
                assert not any(part.startswith("_") for part in name.split(".")), name

    def test_the_walk_notices_an_import_inside_a_function(self, tmp_path: Path) -> None:
        """The tests above can fail."""
        file = tmp_path / "x.py"
        file.write_text("def f():\n    from prefect.flows import flow\n    import tasks.x\n")
        assert {"prefect", "prefect.flows", "tasks.x"} <= imported_modules(file) | tops(file)


_IMPORT_ALL = """
import importlib, logging, os, sys, threading
before = dict(os.environ)
handlers = list(logging.getLogger().handlers)
for name in sys.argv[1:]:
    importlib.import_module(name)
changed = {key for key in set(before) | set(os.environ) if before.get(key) != os.environ.get(key)}
print("environment:", sorted(changed))
print("prefect:", "prefect" in sys.modules)
print("own handlers:", [handler for handler in logging.getLogger().handlers if handler not in handlers])
print("own loggers:", [
    name for name, logger in logging.root.manager.loggerDict.items()
    if name.partition(".")[0] in ("dflash_core", "tasks", "flows") and getattr(logger, "handlers", [])
])
print("threads:", [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()])
"""


class TestImporting:
    def answers(self, modules: list[str]) -> dict[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT_ALL, *modules],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return dict(line.split(": ", 1) for line in done.stdout.splitlines())

    def test_the_core_runs_without_prefect_and_importing_it_does_nothing(self) -> None:
        modules = [module_of(path) for path in sources("dflash_core")]
        assert len(modules) > 50
        answers = self.answers(modules)
        assert answers["prefect"] == "False"
        assert answers["own handlers"] == answers["own loggers"] == answers["threads"] == "[]"
        # torch and transformers may set variables of their own; ours and Prefect's are not among them.
        assert not re.search(r"PREFECT|DFLASH|HF_|TRANSFORMERS|CUDA|OMP|DO_NOT_TRACK", answers["environment"])

    def test_no_module_of_the_core_sets_a_variable(self) -> None:
        for path in sources("dflash_core"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"os\.(environ\[[^\]]+\] *=|environ\.(setdefault|update|pop)|putenv)", text), path


_HELP = """
import sys
from flows.cli import main
try:
    main({arguments})
except SystemExit as ended:
    assert ended.code == 0, ended.code
heavy = {{"torch", "prefect", "transformers", "duckdb", "polars", "asyncssh"}}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
COMMANDS = ("demo", "probe", "inspect", "prepare", "evaluate", "watch", "compare", "show", "sql", "report")


class TestCommandLine:
    @pytest.mark.parametrize("arguments", [["--help"], ["evaluate", "--help"]], ids=" ".join)
    def test_help_needs_no_heavy_library(self, arguments: list[str]) -> None:
        done = run(_HELP.format(arguments=arguments))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("usage: dflash-eval")
        assert done.stderr.strip() == "[]"

    def test_help_lists_every_command(self) -> None:
        done = run(_HELP.format(arguments=["--help"]))
        for command in COMMANDS:
            assert re.search(rf"^\s+{command}\b", done.stdout, re.MULTILINE), command


class TestEverywhere:
    @pytest.mark.parametrize("path", sources(*PACKAGES), ids=name_of)
    def test_no_file_is_too_long(self, path: Path) -> None:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES

    @pytest.mark.parametrize("path", sources(*PACKAGES), ids=name_of)
    def test_no_code_of_a_checkpoint_is_ever_run_and_no_tensor_dropped(self, path: Path) -> None:
        """Neither by a switch, nor by a loader that runs what it loads."""
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            settings = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            where = f"{called} in line {node.lineno}"
            assert "trust_remote_code" not in settings, where
            assert settings.get("weights_only", "True") == "True", where
            assert called not in ("pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load", "yaml.load"), where
            if called == "torch.load":
                assert "weights_only" in settings, where
            if called.endswith("load_state_dict"):
                assert settings.get("strict", "True") == "True", where

    @pytest.mark.parametrize("path", sources(*PACKAGES), ids=name_of)
    def test_the_core_prints_nothing_and_every_module_says_what_it_is(self, path: Path) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.name != "__init__.py":
            assert ast.get_docstring(tree), "a module docstring"
        if path.relative_to(ROOT).parts[0] in ("dflash_core", "tasks"):
            printed = [
                node.lineno
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
            ]
            assert printed == []
