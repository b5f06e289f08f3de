"""Who may know whom in the Python package: imports have no circle, and what a file keeps private stays in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "muster"

# torch and the standard library have no public way to these.
FOREIGN = {
    "_backward_hooks", "_base", "_buffers", "_call_impl", "_cdata", "_dynamo", "_execution_engine", "_exit", "_fields",
    "_foreach_copy_", "_foreach_mul_", "_get_backend", "_get_layout", "_indices", "_join_config",
    "_load_from_state_dict", "_make", "_modules", "_opt_called", "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks", "_parameters", "_post_accumulate_grad_hooks", "_replace", "_save_to_state_dict",
    "_timeout", "_typed_storage", "_untyped_storage", "_values", "_version", "_wrapped_by_lr_sched",
}  # fmt: skip
EXCEPTIONS = {
    # Measurements look at what users do not see.
    "benchmarks/after_backward.py": {"_core"},
    "benchmarks/allreduce.py": {"_comm"},
    "benchmarks/checkpoints.py": {"_saving"},
    # Single snapshots and files, which strategies do not ask for.
    "checkpoint/converting.py": {"_checkpoint"},
    "checkpoint/importing.py": {"_checkpoint"},
    "checkpoint/reading.py": {"_checkpoint"},
    "checkpoint/libtorch.py": {"_C"},  # torch's own, whose reader of archives is nowhere else
    # Collectives among processes of one host, and where those meet, which strategies do not ask for.
    "horovod/runtime.py": {"_comm"},
    "horovod/world.py": {"_cluster_from_environment"},
    "several_hosts.py": {
        "_register_backend",
        "_set_default_backend",
    },  # of torch's groups, which it then does not count
    "saving_policy.py": {"_saving"},  # what a strategy's save() and load() call, and policies besides
}


def files() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def own_names(tree: ast.Module) -> set[str]:
    """The attributes that the classes of a file define."""
    names = set()
    for kind in ast.walk(tree):
        if not isinstance(kind, ast.ClassDef):
            continue
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def reached(text: str) -> Iterator[str]:
    """Private attributes of other objects that a file uses, where no class of that file defines them."""
    tree = ast.parse(text)
    allowed = own_names(tree) | FOREIGN
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or is_own(node) or node.attr in allowed:
            continue
        if node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node.attr


def imported(text: str) -> Iterator[str]:
    """The files of the package that a file imports anywhere, for types alone too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            if package == "muster":
                # The longest beginning that is a file, or has stubs: the rest is a name in it.
                known = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
                paths = [f"{path}{end}" for path in known for end in (".py", ".pyi", "/__init__.py")]
                yield next((path for path in paths if (PACKAGE / path).exists()), "__init__.py")


def circle(imports: dict[str, set[str]]) -> list[str] | None:
    """The first circle of files each of which imports the next."""
    finished: set[str] = set()

    def visit(file: str, above: list[str]) -> list[str] | None:
        if file in above:
            return [*above[above.index(file) :], file]
        if file in finished:
            return None
        for other in sorted(imports.get(file, ())):
            found = visit(other, [*above, file])
            if found is not None:
                return found
        finished.add(file)
        return None

    return next((found for file in sorted(imports) if (found := visit(file, [])) is not None), None)


@pytest.mark.parametrize("file", files())
def test_nothing_reaches_into_another_file(file: str) -> None:
    assert set(reached((PACKAGE / file).read_text())) <= EXCEPTIONS.get(file, set())


def test_imports_have_no_circle() -> None:
    assert circle({file: set(imported((PACKAGE / file).read_text())) for file in files()}) is None


def test_what_is_private_is_noticed() -> None:
    text = (
        "class A:\n    _a = 1\n    def f(self, b):\n        self._c = b._a + b._d + self._e + b._buffers + b.__class__"
    )
    assert list(reached(text)) == ["_d"]


def test_a_circle_is_noticed() -> None:
    assert list(imported("import muster.loader\nfrom muster import batch, Loader\nfrom muster.batch import split")) == [
        "loader.py",
        "batch.py",
        "__init__.py",
        "batch.py",
    ]
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}}) is None
