"""What SECURITY.md promises, of the sources and of every page that is written."""

import ast
import html
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import attngrad
from attngrad.auditor.report import AuditReport, Explained, Finding, Heat, Stage

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
)
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
EVALUATES = {"eval", "exec", "compile", "__import__", "execfile"}
READS_CODE = {"ast", "code", "codeop", "importlib", "numexpr", "runpy", "sympy"}
COLLECTIVES = r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?"
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&</style></title></pre><!--"


def dotted(node):
    """``a.b.c`` of an expression of names, else an empty text."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(code):
    """What a source does that it must not: unpickles, or runs text as code."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.split(".")[0] in PICKLES)
        if not isinstance(node, ast.Call):
            continue
        name, given = dotted(node.func), {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        if name in EVALUATES or name in ("torch.load", "os.system", "os.popen") or given.get("shell"):
            yield name
        if re.fullmatch(r"(np|numpy)\.load", name) and given.get("allow_pickle") is not False:
            yield name
        if re.search(rf"\.{COLLECTIVES}$", name) or given.get("allow_pickle"):
            yield name


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import a, joblib.memory",
        "eval(x)",
        "exec(x)",
        "__import__(x)",
        "torch.load(x)",
        "np.load(x)",
        "numpy.load(x, allow_pickle=True)",
        "np.save(x, y, allow_pickle=True)",
        "dist.all_gather_object(a, b)",
        "torch.distributed.broadcast_object_list(a)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_a_danger_is_seen(code):
    assert list(dangers(code))


def test_nothing_is_unpickled_and_no_text_is_run_as_code():
    found = {(path.name, name) for path in SOURCES for name in dangers(path.read_text())}
    assert len(SOURCES) > 100
    assert found == {("example.py", "exec")}  # the errata's own transcripts of published code, constants of that file


def test_the_code_that_the_errata_runs_is_written_in_it(monkeypatch):
    from attngrad import errata
    from attngrad.errata._back_pass import example

    printed, ran = example._printed, []
    monkeypatch.setattr(example, "_printed", lambda code, **names: (ran.append(code), printed(code, **names))[1])
    errata.run("back-pass")
    source = (ROOT / "src/attngrad/errata/_back_pass/example.py").read_text()
    assert ran
    for code in ran:
        for line in filter(None, map(str.strip, code.splitlines())):
            assert line in source


def test_formulas_are_read_by_our_own_parser_alone():
    imported = set()
    for path in (ROOT / "src/attngrad/formulas").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert not {name.split(".")[0] for name in names} & READS_CODE, (path.name, names)
                imported.update(names)
    assert "numpy" in imported  # the modules were there, and were read


@pytest.mark.parametrize(
    "text",
    [
        "dS = __import__('os').system('touch hurt')",
        "dS = open('hurt', 'w')",
        "dS = (lambda: A)()",
        "dS = A.__class__",
        "dS = A if A else A",
        "dS = [A for A in A]",
        r"dS = \input{/etc/passwd}",
        r"dS = \write18{touch hurt}",
    ],
)
def test_a_formula_is_never_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="audit_formula: "):
        attngrad.audit_formula(text)
    assert list(tmp_path.iterdir()) == []


# --- pages -----------------------------------------------------------------------------------------------------------


class Seen(HTMLParser):
    """The tags of a page in order, their attributes, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text += data


def trace():
    x = np.random.default_rng(0).standard_normal((3, 2))
    return attngrad.trace(x, x, x, x, tokens=[EVIL, "b", "c"])


def report():
    explained = Explained(*(EVIL for _ in Explained.__dataclass_fields__))
    heat = Heat(*({"errors": ((0.5,),), "allowed": 1e-9, "head": (0,)}.get(n, EVIL) for n in Heat.__dataclass_fields__))
    stage = Stage("dq", "shape", 1.0, 1e-9, 1, 1, EVIL, detail=EVIL, pattern=EVIL)
    return AuditReport(
        EVIL,
        "wrong",
        mistakes=(EVIL,),
        findings=(Finding("crash", EVIL),),
        stages=(stage,),
        explanations=((explained,),),
        smallest=EVIL,
        traceback=EVIL,
        heat=heat,
        settings={"options": EVIL, "level": EVIL, "cases": 1},
    )


WRITERS = {
    "page": lambda: trace().to_html(title=EVIL),
    "notebook": lambda: trace()._repr_html_(),
    "audit": lambda: report().to_html(),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_users_name_never_becomes_markup(writer):
    seen = Seen(WRITERS[writer]())
    assert "img" not in seen.tags
    assert seen.tags.count("script") == (2 if writer == "page" else 0)  # the data and the program
    assert not [a for a in seen.attributes if a[1].startswith("on") or a[1] in ("src", "href", "action")]
    assert "alert(1)" in seen.text


@pytest.mark.parametrize("writer", ["page", "audit"])
def test_a_page_has_a_strict_policy_before_anything_that_it_governs(writer):
    seen = Seen(WRITERS[writer]())
    at = next(n for n, (_, _, value) in enumerate(seen.attributes) if value == "Content-Security-Policy")
    policy = html.unescape(seen.attributes[at + 1][2])
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    assert rules
    for name, allowed in rules.items():
        assert name in ("script-src", "style-src")
        assert re.fullmatch(r"'sha256-[\w+/]{43}='", allowed), allowed
    first = min(seen.tags.index(tag) for tag in ("style", "script", "title") if tag in seen.tags)
    assert seen.tags.index("meta") < first
    assert [tag for tag in seen.tags[:first] if tag not in ("html", "head", "meta")] == []
