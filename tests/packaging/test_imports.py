"""Importing is light: the package loads NumPy and ml_dtypes only, the command's help not even those."""

import subprocess
import sys

import pytest

import attngrad


def loaded(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after ``code``."""
    probe = f"import sys\n{code}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)  # noqa: S603
    return set(result.stdout.split("\n")[-2].split())


def test_importing_attngrad_loads_numpy_and_ml_dtypes_at_most():
    heavy = {"torch", "jax", "transformers", "click", "rich", "safetensors", "array_api_compat"}
    assert not loaded("import attngrad; attngrad.Options") & heavy


def test_a_star_import_and_the_kernels_load_neither_torch_nor_jax():
    code = "from attngrad import *\nimport numpy as np\nattention(*np.zeros((3, 2, 2)))"
    assert not loaded(code) & {"torch", "jax", "transformers"}


def test_importing_the_torch_bridge_loads_no_backend_of_other_devices():
    code = "import sys, attngrad.torch; print(*(name for name in sys.modules if name.startswith('attngrad.backends')))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert "attngrad.backends.blocked" not in result.stdout.split()


@pytest.mark.parametrize(
    ("bridge", "missing"),
    [("torch", "torch"), ("jax", "jax"), ("transformers", "torch"), ("transformers", "transformers")],
)
def test_a_missing_package_gives_the_name_of_the_extra(bridge, missing):
    code = f"import sys\nsys.modules[{missing!r}] = None\nimport attngrad\nattngrad.{bridge}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert result.returncode == 1
    assert f"ImportError: attngrad.{bridge}: " in result.stderr
    assert f"pip install 'attngrad[{bridge}]'" in result.stderr


def test_distributed_without_torch_gives_the_name_of_the_extra():
    code = "import sys\nsys.modules['torch'] = None\nimport attngrad\nattngrad.distributed"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert result.returncode == 1
    assert (
        "ImportError: attngrad.distributed: PyTorch is not installed. Run: pip install 'attngrad[torch]'"
        in result.stderr
    )


def test_the_help_of_the_command_loads_no_numpy():
    code = "import attngrad.cli\ntry:\n    attngrad.cli.main(['--help'])\nexcept SystemExit:\n    pass"
    assert not loaded(code) & {"numpy", "ml_dtypes", "rich", "torch"}


@pytest.mark.parametrize("name", attngrad.__all__)
def test_every_public_name_is_there(name):
    assert getattr(attngrad, name) is not None
    assert name in dir(attngrad)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'attentoin'"):
        attngrad.attentoin  # noqa: B018
