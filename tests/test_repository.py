"""What holds for the repository as a whole: who imports whom, what a wheel holds, where the version is written."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import cocktail

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cocktail"
LINKS = ("cli", "kernels", "offload")
SOURCES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {
    *("accelerate", "bitsandbytes", "numba", "pypdfium2", "ray", "sentence_transformers", "torch", "transformers"),
    "triton",
}
ENVIRONMENT_READERS = {
    "cocktail.settings": "the COCKTAIL_* variables",
    "cocktail.cli.app": "sets libraries up before they load; shell completion",
    "cocktail.cli.output": "NO_COLOR and TERM",
    "cocktail.kernels.aot": "turns the interpreter off for the processes that compile",
    "cocktail.batch_ray": "OMP_NUM_THREADS, for the workers",
    "cocktail.ray_cluster": "RAY_ADDRESS; sets Ray up before it loads",
    "cocktail.ray_worker": "puts OMP_NUM_THREADS back",
    "cocktail.fetch": "hands pip the environment with another temporary folder",
}


def module_name(path: Path) -> str:
    """The dotted name of a source file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that `tree` may import, names taken from a package as modules of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import on line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_level(tree: ast.Module) -> ast.Module:
    """The statements that run on import: no function bodies, and no `if TYPE_CHECKING` blocks."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                return ast.Pass()
            return self.generic_visit(node)

    return Strip().visit(tree)


def under(name: str, *packages: str) -> bool:
    """Whether `name` is one of the packages or lies in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def allowed_import(importer: str, name: str) -> bool:
    """Whether `importer` may import `name`: cli -> cocktail -> {offload, kernels}, and never back."""
    top = name.partition(".")[0]
    if top in LINKS:
        return False
    if under(importer, "cocktail.kernels"):
        libraries = {*sys.stdlib_module_names, "llvmlite", "numba", "numpy", "torch", "triton"}
        return under(name, "cocktail.kernels") if top == "cocktail" else top in libraries
    if top != "cocktail":
        return True
    if under(importer, "cocktail.offload"):
        # What kernels unpack at a time is part of what a budget must hold.
        return under(name, "cocktail.offload", "cocktail.errors", "cocktail.config", "cocktail.kernels.limits")
    return under(importer, "cocktail.cli") or not under(name, "cocktail.cli")


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_import_direction(path: Path) -> None:
    importer = module_name(path)
    wrong = [name for name in imports(ast.parse(path.read_bytes())) if not allowed_import(importer, name)]
    assert wrong == []


@pytest.mark.parametrize(
    ("importer", "name", "allowed"),
    [
        ("cocktail.cli.ask", "cocktail.engine", True),
        ("cocktail.engine", "cocktail.cli.render", False),
        ("cocktail.engine", "cocktail.kernels.mixed_attention", True),
        ("cocktail.kernels.packing", "cocktail.errors", False),
        ("cocktail.kernels.packing", "transformers", False),
        ("cocktail.offload.layer_plan", "cocktail.config.Config", True),
        ("cocktail.offload.budget", "cocktail.kernels.limits.MAX_TILE_TOKENS", True),
        ("cocktail.offload.budget", "cocktail.kernels.mixed_attention", False),
        ("cocktail.offload.layer_plan", "cocktail.kv_cache", False),
        ("cocktail.engine", "kernels", False),
    ],
)
def test_import_rule_is_not_vacuous(importer: str, name: str, allowed: bool) -> None:
    assert allowed_import(importer, name) is allowed


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent == PACKAGE / "cli"], ids=module_name)
def test_command_line_imports_nothing_heavy(path: Path) -> None:
    names = imports(module_level(ast.parse(path.read_bytes())))
    assert [name for name in names if name.partition(".")[0] in HEAVY] == []


def test_help_starts_without_torch() -> None:
    code = f"import sys, cocktail.cli.app\nprint(sorted({HEAVY!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_environment_is_read_in_few_places() -> None:
    readers = {module_name(path) for path in SOURCES if reads_environment(ast.parse(path.read_bytes()))}
    assert readers <= ENVIRONMENT_READERS.keys()


def reads_environment(tree: ast.AST) -> bool:
    """Whether `tree` uses the process's environment."""
    named = any(
        isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv"} for node in ast.walk(tree)
    )
    return named or not {"os.environ", "os.getenv"}.isdisjoint(imports(tree))


def test_imported_libraries_are_declared() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = set(re.findall(r'^    "([a-z0-9-]+)[><=;]', pyproject, re.MULTILINE))
    tops = {name.partition(".")[0] for path in SOURCES for name in imports(ast.parse(path.read_bytes()))}
    renamed = {"bs4": "beautifulsoup4", "pptx": "python-pptx"}
    libraries = {renamed.get(name, name) for name in tops - {*sys.stdlib_module_names, "cocktail", "tomllib"}}
    assert {name.replace("_", "-") for name in libraries} <= declared


@pytest.mark.skipif(sys.platform == "win32", reason="git checks links out as text files on Windows by default")
@pytest.mark.parametrize("name", LINKS)
def test_top_level_links(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("cocktail") / name
    assert ast.get_docstring(ast.parse((link / "__init__.py").read_bytes()))


@pytest.mark.parametrize("name", LINKS)
def test_linked_packages_hold_a_docstring_only(name: str) -> None:
    # Whoever puts the repository root on sys.path can import the link: it must then do nothing.
    body = ast.parse((PACKAGE / name / "__init__.py").read_bytes()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


@pytest.mark.slow
def test_wheel_holds_only_the_package(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "cocktail", ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKS:
        (source / name).symlink_to(Path("cocktail") / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run = subprocess.run([*command, "--wheel-dir", tmp_path, source], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"cocktail_qa-{cocktail.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"cocktail", f"cocktail_qa-{cocktail.__version__}.dist-info"}
    expected = [p for p in PACKAGE.rglob("*") if p.suffix in {".py", ".json", ".toml"} and "__pycache__" not in p.parts]
    assert {p.relative_to(ROOT).as_posix() for p in expected} == {n for n in names if n.startswith("cocktail/")}
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_the_map_of_the_code_names_what_is_there_and_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    named = {path for line in tables for path in re.findall(r"`([\w./-]+(?:/|\.(?:py|json)))`", line)}
    assert len(named) > 40
    assert {path for path in named if not (ROOT / path).exists()} == set()
    packages = {module_name(path) for path in PACKAGE.rglob("__init__.py")}
    assert packages == set(re.findall(r"^\| `[\w/]+/` \| `([\w.]+)` \|", text, re.MULTILINE))
    assert {f"{folder}/" for folder in ("tests", "docs", *LINKS)} <= named


def test_changelog_opens_with_this_version() -> None:
    changelog = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    heading = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert heading is not None
    assert heading[1] == cocktail.__version__


def test_ignored_lint_rules_have_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^ignore = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    assert all(re.fullmatch(r'\s*"[A-Z]+\d+", # .{10,}', line) for line in block[1].splitlines())


def test_sources_stay_short() -> None:
    long = {module_name(path): lines for path in SOURCES if (lines := path.read_bytes().count(b"\n")) > 400}
    assert long == {}


def test_no_test_command_differs_from_the_readme() -> None:
    # .ci/run takes its command from README.md, so there must be exactly one to take.
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python3 -m venv .*make check$", readme, re.MULTILINE)
    assert len(commands) == 1
    assert "-c constraints-cpu.txt" in commands[0]
