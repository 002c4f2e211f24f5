"""The documents: links lead somewhere, folder READMEs stay short, the examples name what exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
MAX_README_LINES = 40
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _documents() -> list[Path]:
    """Every document of the project; what tools and environments put beside it is not ours."""
    folders = [path for path in REPO.iterdir() if path.is_dir() and not path.name.startswith(".") and path.name != "build"]
    return sorted([*REPO.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))])


DOCUMENTS = _documents()
PYTHON_EXAMPLES = [
    (document, code)
    for document in DOCUMENTS
    for language, code in _FENCE.findall(document.read_text(encoding="utf-8"))
    if language == "python"
]


def _anchors(document: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_document_relative_links_exist(document: Path) -> None:
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{link} does not exist"
        assert target == REPO or REPO in target.parents, f"{link} leads out of the repository"
        assert not anchor or anchor in _anchors(target), f"{link}: no heading makes that anchor"


def test_folder_readmes_are_there_and_short() -> None:
    for folder in ("cluster", "router", "replicas", "kvcache", "tests"):
        readme = REPO / folder / "README.md"
        assert readme.exists(), f"{folder} has no README.md"
        num_lines = len(readme.read_text(encoding="utf-8").splitlines())
        assert num_lines <= MAX_README_LINES, f"{folder}/README.md has {num_lines} lines, {MAX_README_LINES} allowed"


@pytest.mark.parametrize(("document", "code"), PYTHON_EXAMPLES, ids=lambda value: value.parent.name if isinstance(value, Path) else "")
def test_document_python_examples_import_what_exists(document: Path, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                assert _defines(node.module, alias.name), f"{node.module} has no {alias.name}"


def _defines(module: str, name: str) -> bool:
    """Whether a module has a class or function of that name at its top. Read off the source, because importing the engine's half
    would load torch; a package's exports may be lazy, so that one is imported."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    if spec.submodule_search_locations is not None:
        return hasattr(importlib.import_module(module), name)
    assert spec.origin is not None, f"{module} has no source"
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return any(isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name for node in tree.body)


def test_documents_name_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for document in DOCUMENTS:
        named = re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(named) <= targets, f"{document.name} names {set(named) - targets}"


def test_every_metric_is_in_the_table() -> None:
    """The table leaves out a beginning that the name before has."""
    modules = [path for package in ("cluster", "router", "replicas", "kvcache") for path in (REPO / package).rglob("*.py")]
    names = {name for module in modules for name in re.findall(r'"(manta_[a-z_]+)"', module.read_text(encoding="utf-8"))} - {
        "manta_paged"
    }  # of an attention backend
    shown = set(re.findall(r"`(\w+)`", (REPO / "README.md").read_text(encoding="utf-8").partition("## Metrics")[2]))
    missing = [name for name in names if name not in shown and not any(each.startswith("_") and name.endswith(each) for each in shown)]
    assert len(names) > 50
    assert missing == []


def test_every_term_of_a_cost_is_explained() -> None:
    from router.policies.replica_costs import _TERMS_IN_TIME

    source = (REPO / "router/policies/plan_costs.py").read_text(encoding="utf-8")
    terms = {*_TERMS_IN_TIME, *re.findall(r'terms\["(\w+)"\]', source), *re.findall(r'"(\w+)": \w+_s\b', source)}
    assert {"crowding", "misplaced", "pending"} <= terms
    rows = [line.split("|")[1] for line in (REPO / "router/README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert terms - set(re.findall(r"`(\w+)`", "".join(rows))) == set()


@pytest.mark.parametrize("document", [REPO / "README.md", REPO / "docs/operations.md"], ids=lambda path: path.name)
def test_yaml_examples_are_valid_args(document: Path) -> None:
    import yaml

    from cluster.settings.config import read_config

    for language, code in _FENCE.findall(document.read_text(encoding="utf-8")):
        if language == "yaml":
            read_config({"models": [{"name": "a"}], **yaml.safe_load(code)})


def test_make_simulate_makes_the_trace_that_it_replays() -> None:
    """A fresh clone has none."""
    shown = subprocess.run(["make", "-n", "simulate", "PY=python"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    made, replayed = re.findall(r"--output (\S+)", shown), re.findall(r"--trace (\S+)", shown)
    assert made == replayed == ["build/synthetic.jsonl"]


def test_operations_names_the_files_that_the_launcher_writes() -> None:
    sources = [(REPO / "cluster/local" / name).read_text(encoding="utf-8") for name in ("launcher.py", "ray_head.py")]
    written = {name for source in sources for name in re.findall(r'"([a-z-]+\.log)"', source)}
    assert len(written) == 2
    operations = (REPO / "docs/operations.md").read_text(encoding="utf-8")
    assert [name for name in written if f"`{name}`" not in operations and f"/{name}`" not in operations] == []
