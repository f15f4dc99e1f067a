"""Every module says what it exports, and exports what it says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import bapipe

MODULES = sorted(module.name for module in pkgutil.walk_packages(bapipe.__path__, "bapipe."))
ROOT = Path(bapipe.__file__).parent


def source_of(name: str) -> ast.Module:
    path = ROOT.joinpath(*name.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def definitions(tree: ast.Module) -> set[str]:
    """Public classes and functions that the module itself defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def declared(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = getattr(node, "value", None)
            assert value is not None
            return [str(name) for name in ast.literal_eval(value)]
    return None


@pytest.mark.parametrize("name", MODULES)
def test_all_is_complete_and_true(name: str) -> None:
    tree = source_of(name)
    exported = declared(tree)
    if exported is None:
        assert not definitions(tree), f"{name} needs an __all__"
        return
    assert len(exported) == len(set(exported))
    missing = definitions(tree) - set(exported)
    assert not missing, f"public in {name} but not in its __all__: {sorted(missing)}"
    if name.startswith("bapipe.torch") and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    module = importlib.import_module(name)
    for export in exported:
        assert hasattr(module, export), f"{name}.{export}"


def test_the_public_api() -> None:
    """Small on purpose; a change here is a change for every user."""
    assert bapipe.__all__ == [
        "Action",
        "BaPipeError",
        "Cluster",
        "Comparison",
        "Costs",
        "Kind",
        "Model",
        "Network",
        "Plan",
        "Profile",
        "RunRecord",
        "Schedule",
        "Summary",
        "Timeline",
        "__version__",
        "check",
        "compare",
        "detect_cluster",
        "make_schedule",
        "plan",
        "profile",
        "read_cluster",
        "read_plan",
        "read_profile",
        "read_run",
        "read_schedule",
        "require_valid",
        "simulate",
        "summarise",
        "write_plan",
        "write_profile",
        "write_report",
        "write_schedule",
    ]
    for name in bapipe.__all__:
        assert getattr(bapipe, name) is not None
    assert set(bapipe.__all__) <= set(dir(bapipe))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'bapipe' has no attribute 'simulat'"):
        _ = bapipe.simulat  # type: ignore[attr-defined]


def test_names_hide_no_module() -> None:
    """`from bapipe import x` must mean one thing, whatever was imported before."""
    assert not {f"bapipe.{name}" for name in bapipe.__all__} & set(MODULES)


def test_importing_bapipe_loads_nothing_else() -> None:
    program = "import sys, bapipe; print([n for n in sys.modules if n.startswith(('bapipe.', 'numpy', 'torch'))])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert result.stdout == "[]\n"


def test_the_package_is_typed() -> None:
    assert (ROOT / "py.typed").exists()
