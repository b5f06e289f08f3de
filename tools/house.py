"""Counts what keeps this tree readable and fails where a bound of docs/architecture.md is passed.

Usage: house.py [--table]

`--table` prints the counts of every room and the classes that come nearest to a bound.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import tree_sitter_cpp
from tree_sitter import Language, Node, Parser

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
PYTHON = ROOT / "python" / "muster"
TAKERS = ("tests", "examples", "benchmarks", "docs", "tools")
"""Folders whose Python takes names from the package."""
REFERENCE = ROOT / "docs" / "reference" / "python.md"
"""Names the modules that users take names from."""

MAX_LINES = 450
"""Of a file of the product."""
MAX_LINES_OF = {"csrc/window/window.h": 110, "csrc/comm/communicator.h": 120, "python/muster/strategy.py": 400}
MAX_MEDIAN = {"window": 200, "strategy": 200}
"""By room, of its files."""
MAX_VIRTUALS = 9
MAX_PUBLIC_FUNCTIONS = 25
MAX_MEMBERS = 20
TESTED_ONE_BY_ONE = ("window", "data")
"""Rooms each of whose sources has a test of its own name."""
COMPILED_APART = "isa_"
"""Sources that are never compiled as one with others begin so."""
PUBLIC_FACE = {"Strategy"}
"""Classes that have as many public functions as users need."""

PARSER = Parser(Language(tree_sitter_cpp.language()))


@dataclass
class ClassCount:
    """One class: its functions and members, without those of nested classes."""

    name: str
    path: str
    public_functions: list[str] = field(default_factory=list)
    virtuals: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    is_abstract: bool = False


def text_of(node: Node | None) -> str:
    return "" if node is None or node.text is None else node.text.decode()


def product_files() -> list[Path]:
    sources = [p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]
    return sorted([*sources, *PYTHON.rglob("*.py"), *PYTHON.rglob("*.pyi")])


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def declarators(node: Node) -> Iterator[list[Node]]:
    """From each declarator of a declaration inwards, to the name that it declares."""
    for outermost in node.children_by_field_name("declarator"):
        inwards = [outermost]
        while not inwards[-1].type.endswith(("identifier", "name")):
            inner = inwards[-1].child_by_field_name("declarator") or next(
                (c for c in inwards[-1].named_children if c.type.endswith(("declarator", "identifier", "name"))), None
            )
            if inner is None:
                break
            inwards.append(inner)
        yield inwards


def declared_names(node: Node) -> Iterator[tuple[str, bool]]:
    """The names that a field declaration declares, and whether each is a function."""
    for inwards in declarators(node):
        is_function = False
        for outer, inner in pairwise(inwards):
            # A pointer to a function is a member: its parentheses enclose the name.
            if outer.type == "function_declarator":
                is_function = text_of(inner)[:2] != "(*"
        yield text_of(inwards[-1]), is_function


def count_class(node: Node, path: str) -> ClassCount:
    name = text_of(node.child_by_field_name("name"))
    count = ClassCount(name, path)
    access = "public" if node.type == "struct_specifier" else "private"
    body = node.child_by_field_name("body")
    assert body is not None
    for child in body.named_children:
        if child.type == "access_specifier":
            access = text_of(child)
            continue
        if child.type == "template_declaration":
            child = next((c for c in child.named_children if c.type.endswith(("definition", "declaration"))), child)
        if child.type not in {"field_declaration", "function_definition", "declaration"}:
            continue
        words = text_of(child).split("(")[0].split()
        if words[:1] in (["using"], ["friend"], ["typedef"]):
            continue
        is_virtual = "virtual" in words
        is_pure = is_virtual and text_of(child).rstrip("; \n").endswith("= 0")
        count.is_abstract |= is_pure
        for declared, is_function in declared_names(child):
            if is_function or child.type == "function_definition":
                is_special = declared.lstrip("~") == name or declared.startswith("operator")
                if is_virtual and not declared.startswith("~"):
                    count.virtuals.append(declared)
                if access == "public" and not is_special:
                    count.public_functions.append(declared)
            elif "static" not in words and "constexpr" not in words:
                count.members.append(declared)
    return count


def classes_in(source: bytes, path: str) -> Iterator[ClassCount]:
    pending = [PARSER.parse(source).root_node]
    while pending:
        node = pending.pop()
        pending.extend(reversed(node.named_children))
        if node.type in {"class_specifier", "struct_specifier"} and node.child_by_field_name("body") is not None:
            yield count_class(node, path)


def all_classes() -> list[ClassCount]:
    sources = [path for path in product_files() if path.suffix in {".h", ".cpp"}]
    return [count for path in sources for count in classes_in(path.read_bytes(), str(path.relative_to(ROOT)))]


def hidden_names(source: bytes) -> Iterator[tuple[str, str]]:
    """What anonymous namespaces define: the namespace around, and the name, of a function with its parameters' types.
    No aliases, which may stand there twice."""
    pending = [(PARSER.parse(source).root_node, "", False)]
    while pending:
        node, around, is_hidden = pending.pop()
        if node.type == "namespace_definition":
            name = text_of(node.child_by_field_name("name"))
            around, is_hidden = (f"{around}::{name}", is_hidden) if name else (around, True)
        elif (
            is_hidden and node.type not in {"declaration_list", "linkage_specification"} and "preproc" not in node.type
        ):
            yield from ((around, name) for name in defined_names(node))
            continue
        pending.extend((child, around, is_hidden) for child in reversed(node.named_children))


def defined_names(node: Node) -> Iterator[str]:
    """The names that one declaration of a namespace defines there."""
    if node.type == "template_declaration":
        node = node.named_children[-1]
    if node.type in {"class_specifier", "struct_specifier", "enum_specifier"}:
        if node.child_by_field_name("body") is not None:
            yield text_of(node.child_by_field_name("name"))
        return
    if node.type not in {"function_definition", "declaration"}:
        return
    for *outer, name in declarators(node):
        if name.type != "identifier":  # a member's definition has a qualified one
            continue
        functions = [each for each in outer if each.type == "function_declarator"]
        yield text_of(name) + "".join(types_of(each.child_by_field_name("parameters")) for each in functions)


def types_of(parameters: Node | None) -> str:
    """Of a parameter list, without names, defaults and const: functions that differ in nothing else clash."""
    types = []
    for parameter in [] if parameters is None else parameters.named_children:
        declarator = text_of(parameter.child_by_field_name("declarator"))
        types.append(text_of(parameter.child_by_field_name("type")) + "".join(c for c in declarator if c in "&*"))
    return f"({', '.join(types)})"


def check_hidden_names(sources: dict[str, bytes]) -> Iterator[str]:
    """Compiled as one, two files must not define the same in anonymous namespaces of one namespace."""
    first: dict[tuple[str, str], str] = {}
    for path, source in sources.items():
        for key in set(hidden_names(source)):
            if key in first:
                around, name = key
                yield f"{first[key]} and {path} both hide {name} in {around[2:]}; compiled as one they clash: rename it"
            first.setdefault(key, path)


def room_of(path: Path) -> str:
    return path.relative_to(CSRC).parts[0] if path.is_relative_to(CSRC) else "python"


def check_files(files: list[Path]) -> Iterator[str]:
    for path in files:
        relative = str(path.relative_to(ROOT))
        lines, most = lines_of(path), MAX_LINES_OF.get(relative, MAX_LINES)
        if lines > most:
            yield f"{relative} has {lines} lines, of at most {most}: it holds more than one idea; split it"
    for room, most in MAX_MEDIAN.items():
        found = median(lines_of(path) for path in files if room_of(path) == room)
        if found >= most:
            yield f"csrc/{room}: the median file has {found:.0f} lines; it must be below {most}"


def check_classes(classes: list[ClassCount]) -> Iterator[str]:
    for count in classes:
        where = f"{count.path}: class {count.name}"
        if count.is_abstract and len(count.virtuals) > MAX_VIRTUALS:
            yield f"{where} has {len(count.virtuals)} virtual functions, of at most {MAX_VIRTUALS}"
        if len(count.public_functions) > MAX_PUBLIC_FUNCTIONS and count.name not in PUBLIC_FACE:
            yield f"{where} has {len(count.public_functions)} public functions, of at most {MAX_PUBLIC_FUNCTIONS}"
        if len(count.members) > MAX_MEMBERS:
            yield f"{where} has {len(count.members)} data members, of at most {MAX_MEMBERS}"


def check_tests(files: list[Path]) -> Iterator[str]:
    for path in files:
        room = room_of(path)
        if room in TESTED_ONE_BY_ONE and path.suffix == ".cpp":
            names = {test.name for test in (ROOT / "tests" / "cpp").rglob("*_test.cpp")}
            if f"{path.stem}_test.cpp" not in names:
                yield f"{path.relative_to(ROOT)} has no test of its own: tests/cpp/{room}/{path.stem}_test.cpp"


def modules_in(folder: Path) -> dict[str, ast.Module]:
    """The Python modules of a package, by name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        *parts, last = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts if last == "__init__" else [*parts, last])] = ast.parse(path.read_text())
    return found


def exports_of(module: ast.Module) -> set[str] | None:
    """What its `__all__` lists; None where it has none."""
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return None


def imports_of(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that it imports from modules: the module and the name."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)


def attributes_of(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that it takes from modules that it has imported whole: the module and the name."""
    names = {name.rpartition(".")[2]: name for name in map(".".join, imports_of(module))}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names.update({alias.asname: alias.name for alias in node.names if alias.asname is not None})
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and (of := ast.unparse(node.value)).replace(".", "").isidentifier():
            yield names.get(of, of), node.attr


def check_exports(
    product: Mapping[str, ast.Module], takers: Iterable[ast.Module], faces: Container[str]
) -> Iterator[str]:
    """`__all__` lists what modules of the product take from one another, and nothing that nobody takes. That of `faces`
    is for users."""
    listed = {
        name: exports
        for name, module in product.items()
        if name not in faces and (exports := exports_of(module)) is not None
    }
    everywhere: set[tuple[str, str]] = set()
    for taker, module in product.items():
        taken = {*imports_of(module), *attributes_of(module)}
        everywhere |= taken
        for name, each in taken:
            is_module = f"{name}.{each}" in product
            if name in listed and not is_module and not each.startswith("_") and each not in listed[name]:
                yield f"{taker} takes {each} from {name}, whose __all__ lacks it: list it there"
    for module in takers:
        everywhere |= {*imports_of(module), *attributes_of(module)}
    for name, exports in listed.items():
        for each in exports:
            if (name, each) not in everywhere:
                yield f"{name} lists {each} in __all__, and nobody takes it: leave it out"


def check_python() -> Iterator[str]:
    """The rules of modules of Python."""
    product = modules_in(PYTHON)
    paths = (path for folder in TAKERS for path in (ROOT / folder).rglob("*.py"))
    packages = {name for name in product if any(other.startswith(f"{name}.") for other in product)}
    named = set(re.findall(r"\bmuster(?:\.[a-z_]+)+", REFERENCE.read_text()))
    yield from sorted(check_exports(product, (ast.parse(path.read_text()) for path in paths), packages | named))


def print_table(files: list[Path], classes: list[ClassCount]) -> None:
    print(f"{'room':<12}{'files':>6}{'lines':>8}{'median':>8}{'longest':>9}")
    for room in sorted({room_of(path) for path in files}):
        lines = [lines_of(path) for path in files if room_of(path) == room]
        print(f"{room:<12}{len(lines):>6}{sum(lines):>8}{median(lines):>8.0f}{max(lines):>9}")
    print(f"\n{'class':<28}{'public':>7}{'members':>8}{'virtual':>8}  file")
    for count in sorted(classes, key=lambda c: -max(len(c.public_functions) / 25, len(c.members) / 20))[:20]:
        numbers = (len(count.public_functions), len(count.members), len(count.virtuals))
        print(f"{count.name:<28}{numbers[0]:>7}{numbers[1]:>8}{numbers[2]:>8}  {count.path}")


def main() -> int:
    files, classes = product_files(), all_classes()
    if "--table" in sys.argv[1:]:
        print_table(files, classes)
    sources = {
        str(path.relative_to(ROOT)): path.read_bytes()
        for path in files
        if path.suffix == ".cpp" and not path.name.startswith(COMPILED_APART)
    }
    broken = [
        *check_files(files),
        *check_classes(classes),
        *check_hidden_names(sources),
        *check_tests(files),
        *check_python(),
    ]
    for message in broken:
        print(message, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
