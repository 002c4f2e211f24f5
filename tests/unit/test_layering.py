"""Imports follow the request: cluster -> router -> replicas -> kvcache. Ray, torch and FastAPI stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("cluster", "router", "replicas", "kvcache")

# In these, torch may be imported at module level; everything else must run with torch blocked.
TORCH_MODULES = frozenset(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for folder in ("replicas", "kvcache")
    for path in (ROOT / folder).rglob("*.py")
    if any(line.startswith(("import torch", "from torch")) for line in path.read_text().splitlines())
)
TORCH_FREE_PREFIXES = ("cluster", "router", "replicas.grammar", "replicas.text")
TORCH_FREE_MODULES = (
    "kvcache.block_pool",
    "kvcache.events",
    "kvcache.handoff",
    "kvcache.hashing",
    "kvcache.ownership",
    "kvcache.prefix_cache",
    "kvcache.transfer_gate",
    "replicas.engine.async_engine",
    "replicas.process.cores",
    "replicas.model.default_model",
    "replicas.engine_config",
    "replicas.engine.metrics",
    "replicas.grammar_spec",
    "replicas.process.logs",
    "replicas.model_description",
    "replicas.handoff.paired_progress",
    "replicas.engine.reporter",
    "replicas.request",
    "replicas.scheduling.request_state",
    "replicas.sampling_params",
    "replicas.scheduling.scheduler",
    "replicas.stats",
    "replicas.scheduling.step_plan",
    "replicas.engine.step_statistics",
)
RAY_MODULES = ("cluster", "router.deployment", "replicas.deployment", "replicas.serve")


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the four packages."""
    found = {}
    for layer in LAYERS:
        for path in (ROOT / layer).rglob("*.py"):
            name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            found[name.removesuffix(".__init__")] = path
    return found


def imports_of(path: Path) -> set[str]:
    """Every module that the file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module)
    return names


def is_under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_imports_only_itself_and_the_layers_below(layer: str) -> None:
    above = LAYERS[: LAYERS.index(layer)]
    wrong = {
        name: back
        for name, path in modules().items()
        if is_under(name, (layer,)) and (back := [i for i in imports_of(path) if is_under(i, above)])
    }
    assert wrong == {}


def test_ray_is_imported_only_by_cluster_and_deployment_shells() -> None:
    wrong = [
        name for name, path in modules().items() if any(is_under(i, ("ray",)) for i in imports_of(path)) and not is_under(name, RAY_MODULES)
    ]
    assert wrong == []


def test_web_frameworks_are_imported_only_by_cluster() -> None:
    frameworks = ("fastapi", "starlette", "uvicorn")
    wrong = [
        name
        for name, path in modules().items()
        if any(is_under(i, frameworks) for i in imports_of(path)) and not is_under(name, ("cluster",))
    ]
    assert wrong == []


def test_torch_is_never_imported_by_gateway_router_and_text() -> None:
    wrong = [
        name
        for name, path in modules().items()
        if is_under(name, TORCH_FREE_PREFIXES) and any(is_under(i, ("torch",)) for i in imports_of(path))
    ]
    assert wrong == []


def test_formats_of_http_are_imported_only_by_the_protocols() -> None:
    dialects = tuple(f"cluster.protocols.{path.name}" for path in (ROOT / "cluster" / "protocols").iterdir() if path.is_dir())
    assert "cluster.protocols.openai" in dialects
    wrong = [
        name
        for name, path in modules().items()
        if not is_under(name, ("cluster.protocols",)) and any(is_under(i, dialects) for i in imports_of(path))
    ]
    assert wrong == []


ROOMS = {
    "cluster": (
        "app", "gateway", "local", "serve", "web", "protocols", "telemetry", "generation", "models", "grammar", "principal", "settings",
    ),
    "router": ("deployment", "simulator", "live", "router", "model_router", "waiting", "policies", "fleet"),
    "replicas": (
        "deployment", "llm", "serve", "engine", "speculation", "ranks", "handoff", "model", "sharding", "linear", "attention", "scheduling",
        "sampling", "grammar", "native", "text", "process",
    ),
}  # fmt: skip
"""Folders of each package, and the modules that stand above some of them, in the order in which a request walks. An import goes
from left to right. Modules that are not named are contracts: they import no folder."""

MAX_MODULES_PER_FOLDER = 14
MAX_LINES_PER_MODULE = 400


@pytest.mark.parametrize("package", ROOMS)
def test_import_between_the_rooms_of_a_package_never_runs_back(package: str) -> None:
    order = ROOMS[package]
    folders = {path.name for path in (ROOT / package).iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= set(order), f"{package} has rooms that ROOMS does not place: {folders - set(order)}"

    def floor(name: str) -> int:
        """Place of a module's room; contracts are below all rooms."""
        room = name.split(".")[1]
        return order.index(room) if room in order else len(order)

    wrong = [
        f"{name} -> {imported}"
        for name, path in modules().items()
        if name.startswith(f"{package}.")
        for imported in imports_of(path)
        if imported.startswith(f"{package}.") and floor(imported) < floor(name)
    ]
    assert wrong == []


def test_folder_of_the_packages_holds_few_modules_and_modules_few_lines() -> None:
    paths = [path for path in modules().values() if path.name != "__init__.py"]
    crowded = {folder: num for folder, num in Counter(path.parent for path in paths).items() if num > MAX_MODULES_PER_FOLDER}
    long = {path: num for path in paths if (num := len(path.read_text().splitlines())) > MAX_LINES_PER_MODULE}
    assert (crowded, long) == ({}, {})


def import_all(names: list[str], blocked: str) -> subprocess.CompletedProcess[str]:
    """Imports `names` in a fresh process in which importing `blocked` fails."""
    program = (
        "import importlib, sys\n"
        f"sys.modules[{blocked!r}] = None\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "leaked = sorted(m for m in sys.modules if (m == sys.argv[1] or m.startswith(sys.argv[1] + '.')) and sys.modules[m] is not None)\n"
        "assert leaked == [], leaked\n"
    )
    return subprocess.run([sys.executable, "-c", program, blocked], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_torch_free_modules_import_with_torch_blocked() -> None:
    names = [*TORCH_FREE_MODULES, *(name for name in modules() if is_under(name, TORCH_FREE_PREFIXES) and not name.endswith("__main__"))]
    result = import_all(sorted(names), "torch")
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.slow
def test_engine_and_bookkeeping_import_with_ray_blocked() -> None:
    names = [name for name in modules() if not is_under(name, RAY_MODULES) and not name.endswith("__main__")]
    result = import_all(sorted(names), "ray")
    assert result.returncode == 0, result.stderr[-2000:]


def test_torch_stays_out_of_what_the_gateway_shares_with_the_engine() -> None:
    assert TORCH_MODULES & set(TORCH_FREE_MODULES) == set()


def test_http_application_imports_with_ray_blocked() -> None:
    result = import_all(["cluster.web.http_app"], "ray")
    assert result.returncode == 0, result.stderr[-2000:]
