"""Formulas as MathML, made when the site is built: browsers draw it without a script.

A label, written ``$$ ... $$ (R4)``, is printed beside its formula.
"""

import re
from html import escape
from typing import Any

from docutils import nodes
from latex2mathml import converter
from sphinx.application import Sphinx


def convert(text: str, display: str = "inline") -> str:
    """LaTeX to MathML. A dot above is an accent, close to its letter: latex2mathml does not say so."""
    found = converter.convert(text, display=display)
    return re.sub(
        r"<mover>(<mrow><mi>[^<]*</mi></mrow>|<mi>[^<]*</mi>)(?=<mo>&#x002D9;)", r'<mover accent="true">\1', found
    )


def inline(writer: Any, node: nodes.math) -> None:
    """$...$ in a line."""
    writer.body.append(f'<span class="math">{convert(node.astext())}</span>')
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> None:
    """$$...$$ on lines of its own, with its label."""
    ids = "".join(f' id="{escape(name)}"' for name in node["ids"][:1])
    label = f'<span class="eqno">({escape(node["label"])})</span>' if node.get("label") else ""
    writer.body.append(f'<div class="math"{ids}>{convert(node.astext(), display="block")}{label}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer; conf.py chooses it."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
