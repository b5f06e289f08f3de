"""Sentences that stand in source text, for help()."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any, TypeVar, cast

__all__ = ["listed", "lists_fields", "sentences_of"]

ClassT = TypeVar("ClassT", bound=type[Any])


def sentences_of(cls: type[Any]) -> dict[str, str]:
    """The string under each annotated field of a class, by name; "" without one. Empty where there is no source."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except OSError:
        return {}
    found: dict[str, str] = {}
    name = ""
    for node in cast(ast.ClassDef, definition).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            found[name] = ""
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[name] = " ".join(str(node.value.value).split())
    return found


def listed(sentences: Mapping[str, str]) -> str:
    """A paragraph for each name, for a docstring."""
    texts = [f"{name}: {sentence}" if sentence else name for name, sentence in sentences.items()]
    return "\n".join(
        textwrap.fill(text, 120, initial_indent="    ", subsequent_indent="        ", break_long_words=False)
        for text in texts
    )


def lists_fields(cls: ClassT) -> ClassT:
    """Decorator: the docstring of a class ends with the sentences of its fields."""
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nFields:\n\n{listed(sentences_of(cls))}"
    return cls
