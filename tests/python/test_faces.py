"""What help(), completion and type checkers show of the public API."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import muster
import muster.horovod
import muster.huggingface
import muster.lightning
from muster import options

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES: dict[type, Any] = {
    muster.MirroredStrategy: options.Options,
    muster.MultiWorkerMirroredStrategy: options.Options,
    muster.ParameterServerStrategy: options.CommonOptions,
}
# A module's methods take what the module's own take.
FORWARDED = ("Replicated.", "PerReplica.")
# Whose keywords are names that the caller chooses.
NAMING = {"Strategy.save", "Strategy.load", "ObjectState", "TorchState"} | {
    f"Checkpoints{method}" for method in ("", ".after_step", ".save", ".best")
}


def callables() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Every public function, constructor and method that is written in Python: name, itself, its text."""
    for module in (muster, muster.optim, muster.horovod, muster.horovod.elastic, muster.huggingface, muster.lightning):
        for exported in module.__all__:
            value = getattr(module, exported)
            name = f"lightning.{exported}" if module is muster.lightning else exported
            if isinstance(value, type) and value.__module__.startswith("muster") and "_C" not in value.__module__:
                if not is_lightnings(value.__init__):
                    yield name, value, f"{value.__doc__} {value.__init__.__doc__}"
                for attribute, member in vars(value).items():
                    if (
                        attribute[0] != "_"
                        and callable(getattr(value, attribute))
                        and not any(is_lightnings(getattr(base, attribute, None)) for base in value.__mro__[1:])
                    ):
                        yield f"{name}.{attribute}", getattr(value, attribute), str(inspect.getdoc(member))
            elif inspect.isfunction(value):
                yield name, value, str(value.__doc__)


def is_lightnings(function: Any) -> bool:
    """Whether Lightning says what a function, or what overrides it, takes."""
    return str(getattr(function, "__module__", "")).startswith("lightning.")


def has_signature(function: Callable[..., Any]) -> bool:
    try:
        return inspect.signature(function) is not None
    except ValueError:  # compiled, or an exception's
        return False


CALLABLES = {name: (function, text) for name, function, text in callables() if has_signature(function)}


def parameters_of(name: str) -> list[inspect.Parameter]:
    found = list(inspect.signature(CALLABLES[name][0]).parameters.values())
    return found[1:] if "." in name and found and found[0].name == "self" else found


def is_torchs(function: Any) -> bool:
    """Whether it takes what a class of torch's does, which says what that is."""
    return isinstance(function, type) and issubclass(function, (torch.optim.Optimizer, torch.nn.SyncBatchNorm))


def sentences_of_header(path: str, struct: str) -> dict[str, str]:
    """The comments of a struct's fields: what stands above a field, behind it, or above the enum that is its type."""
    header = (ROOT / path).read_text()
    of_enums = {name: comment for comment, name in re.findall(r"^/// (.*)\nenum class (\w+) ", header, re.MULTILINE)}
    body = re.search(rf"struct {struct} {{(.*?)\n}};", header, re.DOTALL)
    assert body is not None
    sentences: dict[str, str] = {}
    above: list[str] = []
    for line in body[1].splitlines():
        field = re.match(r"\s*([\w:<>]+) (\w+) = [^;]+;(?:\s*///< (.*))?$", line)
        if comment := re.match(r"\s*/// (.*)", line):
            above.append(comment[1])
        elif field:
            sentences[field[2]] = field[3] or " ".join(above) or of_enums[field[1]]
            above = []
        else:
            above = []
    return sentences


def sentences_in_source(path: str, name: str) -> dict[str, str]:
    tree = ast.parse((ROOT / path).read_text())
    (definition,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    sentences: dict[str, str] = {}
    for node, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            sentences[node.target.id] = " ".join(after.value.value.split()) if has_text else ""  # type: ignore[union-attr]
    return sentences


def in_words_of_both(sentence: str) -> str:
    """Without what the languages write differently."""
    for cpp, python in (("::", "."), ("empty:", "none:"), ("exact:", "none:"), ('float("inf")', "infinity")):
        sentence = sentence.replace(cpp, python).replace(cpp.capitalize(), python.capitalize())
    return re.sub(r'[`"]', "", sentence).strip(" .").casefold()


@pytest.mark.parametrize("name", CALLABLES)
def test_every_parameter_is_named_in_its_text(name: str) -> None:
    function, text = CALLABLES[name]
    if is_torchs(function) or name.startswith(FORWARDED):
        return
    missing = [p.name for p in parameters_of(name) if not re.search(rf"\b{p.name}\b", text)]
    assert missing == [], f"{name} does not say what these are"


@pytest.mark.parametrize("name", CALLABLES)
def test_no_callable_takes_just_anything(name: str) -> None:
    if not name.startswith(FORWARDED) and name not in NAMING:
        assert not [p.name for p in parameters_of(name) if p.kind is p.VAR_KEYWORD]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["__init__", "from_env"])
def test_a_strategy_shows_every_option_with_its_sentence(strategy: type, name: str) -> None:
    if not hasattr(strategy, name):
        return
    function = getattr(strategy, name)
    parameters = inspect.signature(function).parameters
    text = " ".join(function.__doc__.split())
    sentences = sentences_in_source("python/muster/options.py", "StrategyOptions")
    for field in fields(muster.StrategyOptions):
        if field.name in STRATEGIES[strategy].__annotations__:
            assert parameters[field.name].default == field.default
            assert f"{field.name}: {sentences[field.name]}" in text
        else:
            assert field.name not in parameters


def test_typed_options_are_those_of_the_dataclass() -> None:
    expected = typing.get_type_hints(muster.StrategyOptions)
    assert typing.get_type_hints(options.Options) == expected


@pytest.mark.parametrize(
    ("header", "struct", "source"),
    [
        ("csrc/include/muster/options.h", "StrategyOptions", "python/muster/options.py"),
        ("csrc/include/muster/precision.h", "LossScale", "python/muster/precision.py"),
    ],
)
def test_both_languages_have_the_same_sentences(header: str, struct: str, source: str) -> None:
    # Python may say more, where C++ says it beside the values of an enum.
    in_cpp = sentences_of_header(header, struct)
    in_python = sentences_in_source(source, struct)
    assert in_cpp.keys() == in_python.keys()
    for name, sentence in in_python.items():
        common, whole = in_words_of_both(in_cpp[name]), in_words_of_both(sentence)
        assert whole.startswith(common) if name in ("precision", "wire") else whole == common, name
