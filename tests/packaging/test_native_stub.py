"""The typed stub of the native module names what the module has, with the same arguments."""

import ast
from pathlib import Path

import attngrad
from attngrad import _native

STUB = ast.parse((Path(attngrad.__file__).parent / "_native.pyi").read_text())


def arguments(text):
    """The arguments of a signature as nanobind writes it, whose types are no Python: what stands between commas."""
    depth, parts = 0, [""]
    for sign in text[text.index("(") + 1 : text.rindex(") ->")]:
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    found = [part.strip() for part in parts if part.strip()]
    if "/" in found:  # by place only: the name says nothing
        return [("", "= " in part) for part in found[: found.index("/")]]
    return [(part.partition(":")[0], "= " in part) for part in found]


def in_module(value):
    """Functions with their arguments, classes with their methods, the rest by its type."""
    if isinstance(value, type):
        names = [name for name in vars(value) if name == "__init__" or not name.startswith("_")]
        return {name: in_module(getattr(value, name)) for name in names}
    signatures = getattr(value, "__nb_signature__", None)
    if signatures is None:
        return type(value).__name__
    ((text, _, _),) = signatures
    return arguments(text)


def in_stub(node):
    if isinstance(node, ast.ClassDef):
        return {child.name: in_stub(child) for child in node.body if isinstance(child, ast.FunctionDef)}
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation)
    assert isinstance(node, ast.FunctionDef)
    assert node.args.vararg is None
    given = [("", False) for _ in node.args.posonlyargs] + [(a.arg, False) for a in node.args.args]
    first = len(given) - len(node.args.defaults)
    return [(name, n >= first) for n, (name, _) in enumerate(given)]


def test_the_stub_has_the_names_and_arguments_of_the_module():
    module = {name: in_module(value) for name, value in vars(_native).items() if not name.startswith("_")}
    nodes = [node for node in STUB.body if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign)]
    stub = {node.target.id if isinstance(node, ast.AnnAssign) else node.name: in_stub(node) for node in nodes}
    assert stub == module


def test_arguments_are_read_from_what_nanobind_writes():
    text = "def f(self, a: ndarray[shape=(*, *), order='C'] | None, b: int = \\0) -> tuple[int, int]"
    assert arguments(text) == [("self", False), ("a", False), ("b", True)]
    assert arguments("def f(arg: int, /) -> None") == [("", False)]
    assert arguments("def f() -> None") == []


def test_the_package_says_that_it_is_typed():
    assert (Path(attngrad.__file__).parent / "py.typed").is_file()
