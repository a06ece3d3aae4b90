"""The table of bad and awkward inputs: what each is, and the right result or the error that must come of it.

A section is a list of rows; the modules say what its rows are given, tests/robustness/test_bad_inputs.py who is called with them.
"""

from bad_inputs import arrays, bridges, commands, files, layer, options, values
from bad_inputs.row import Row

TABLE: dict[str, list[Row]] = {
    "memory": arrays.MEMORY,
    "kinds": arrays.KINDS,
    "lists": arrays.LISTS,
    "conversions": arrays.CONVERSIONS,
    "dtypes": arrays.DTYPES,
    "integers": arrays.INTEGERS,
    "narrow dtypes": arrays.NARROW,
    "options": options.OPTIONS,
    "arrays among the options": options.ARRAYS,
    "shapes": options.SHAPES,
    "cotangents and tangents": options.COTANGENTS,
    "values": values.VALUES,
    "values of scores": values.SCORES,
    "empty axes": values.EMPTY,
    "large axes": values.LARGE,
    "large results": values.LARGE_RESULTS,
    "layer": layer.CONSTRUCTOR,
    "layer in use": layer.STATE,
    "small functions": layer.SMALL,
    "layer files": files.LAYER_FILES,
    "npz files": files.ARCHIVES,
    "command": commands.COMMANDS,
    "torch": bridges.TORCH,
    "jax": bridges.JAX,
}
