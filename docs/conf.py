"""The documentation site: ``make docs`` builds it into build/docs, with warnings as errors."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

import attngrad  # noqa: E402

project = "attngrad"
author = "The attngrad authors"
copyright = "The attngrad authors, MIT licence"  # noqa: A001
release = version = attngrad.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design", "mathml", "generated"]
myst_enable_extensions = ["amsmath", "dollarmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the outputs are in the notebooks; the tests run them
exclude_patterns = ["_ext", "_static", "figures", "studies"]

html_math_renderer = "mathml"  # no script and nothing from another host: the pages work offline
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!attngrad\.[a-z]).*")]  # names of other packages and of type variables

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # np.float64, not <class 'numpy.float64'>
autodoc_typehints = "none"  # the signatures carry options; the shapes are in the text
napoleon_google_docstring = True
napoleon_use_param = False  # arguments that go together are described together

html_theme = "furo"
html_title = "attngrad"
html_static_path = ["_static"]
html_css_files = ["attngrad.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#0072B2"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}
highlight_language = "none"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
