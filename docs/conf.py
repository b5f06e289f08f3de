"""The site that `make docs` builds: the README, the pages of this folder, and the reference of both languages."""

from __future__ import annotations

import os
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.util import logging

import muster
import muster.huggingface
import muster.lightning

DOXYGEN_XML = Path(os.environ["MUSTER_DOXYGEN"]) / "xml"
REFERENCE = Path(__file__).parent / "reference"
CONTENTS = """
```{toctree}
:hidden:
:caption: Guides
:glob:

docs/concepts
docs/cpp
docs/launching
docs/several_hosts
docs/parameter_servers
docs/scaling_servers
docs/resuming
docs/checkpoints
docs/*
CONTRIBUTING
CHANGELOG
```
```{toctree}
:hidden:
:caption: Coming from
:glob:

docs/migration/*
```
```{toctree}
:hidden:
:caption: Reference

docs/reference/python
docs/reference/cpp
```
"""

project = "Muster"
release = muster.__version__
extensions = ["breathe", "myst_parser", "sphinx.ext.autodoc"]
# Links between pages are those of the repository, so its root is that of the site.
root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "build*", "dist", "csrc", "tests"]
myst_heading_anchors = 4

default_role = "py:obj"
autoclass_content = "both"
autodoc_inherit_docstrings = False
autodoc_member_order = "groupwise"
maximum_signature_line_length = 100

breathe_projects = {"muster": str(DOXYGEN_XML)}
breathe_default_project = "muster"

html_theme = "alabaster"
html_theme_options = {
    "body_max_width": "none",
    "description": "Distribution strategies for PyTorch and LibTorch",
    "page_width": "76rem",
}


def check_that_all_is_there(app: Sphinx) -> None:
    """Every public name of both languages is in the reference."""
    python = (REFERENCE / "python.md").read_text().replace("()", "").split()
    cpp = (REFERENCE / "cpp.md").read_text().split()
    public = ET.parse(DOXYGEN_XML / "namespacemuster.xml").getroot()[0]
    names = [inner.text for inner in public.iter("innerclass") if inner.get("prot") == "public"]
    names += [f"muster::{member.findtext('name')}" for member in public.iter("memberdef")]
    public_names = [name for name in muster.__all__ if name != "__version__"]
    absent = [name for name in public_names if name not in python and f"muster.{name}" not in python]
    absent += [
        f"{module.__name__}.{name}"
        for module in (muster.huggingface, muster.lightning)
        for name in module.__all__
        if f"{module.__name__}.{name}" not in python
    ]
    absent += [name for name in names if name and name.count("::") == 1 and name not in cpp]
    if absent:
        logger = logging.getLogger(__name__)
        logger.warning("docs/reference says nothing of %s: name each in python.md or cpp.md", ", ".join(absent))


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """The README is the first page; GitHub would show a table of contents in it as text."""
    if name == root_doc:
        source[0] += CONTENTS


def begin_with_readme(app: Sphinx, error: Exception | None) -> None:
    """A visitor of the folder gets the first page."""
    if error is None and app.builder.format == "html":
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def write_as_rst(app: Sphinx, what: str, name: str, documented: object, options: object, lines: list[str]) -> None:
    """Docstrings have Markdown's backticks, and lists of options and fields, a name and a sentence each."""
    text = re.sub(
        r"\n(?:Fields|Options):\n\n(.*)", lambda found: f"\n{as_fields(found[1])}", "\n".join(lines), flags=re.DOTALL
    )
    lines[:] = re.sub(r"(?<![`:])`([^`]+)`(?!`)(\w?)", as_name, text).splitlines()


def without_addresses(
    app: Sphinx, what: str, name: str, documented: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """A default that has no name reads as "...": what Python prints of it says nothing."""
    return signature and re.sub(r"=\s*<[^<>]*>", "=...", signature), returns


def as_fields(listed: str) -> str:
    return re.sub(r"^ {4}(\w+): ", r":param \1: ", listed, flags=re.MULTILINE)


def as_name(found: re.Match[str]) -> str:
    text, letter = found.groups()
    name = f"`{text}`" if re.fullmatch(r"[a-zA-Z_][\w.]*", text) else f"``{text}``"
    return f"{name}\\ {letter}" if letter else name


def setup(app: Sphinx) -> None:
    app.add_lexer("mermaid", TextLexer)
    app.connect("autodoc-process-docstring", write_as_rst)
    app.connect("autodoc-process-signature", without_addresses)
    app.connect("builder-inited", check_that_all_is_there)
    app.connect("source-read", add_contents)
    app.connect("build-finished", begin_with_readme)
