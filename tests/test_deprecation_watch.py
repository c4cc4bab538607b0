"""The fixture in conftest.py that fails a test where d3d_hf calls transformers in a deprecated way."""

import os

import pytest
from transformers.utils.deprecation import deprecate_kwarg

import d3d_hf
from d3d_hf.testing import tiny_config


PACKAGE = os.path.dirname(d3d_hf.__file__)
OURS, HOOK = os.path.join(PACKAGE, "model", "modeling_d3d.py"), os.path.join(PACKAGE, "model", "generation_hook.py")


@deprecate_kwarg("old", version="99.0.0", new_name="new")
def deprecating(new=None):
    return new


@pytest.mark.parametrize("path, is_ours", [(OURS, True), (HOOK, False), (__file__, False)])
@pytest.mark.parametrize(
    "expression, message",
    [("config.torch_dtype", "`torch_dtype` is deprecated"), ("deprecating(old=1)", "`old` is deprecated")],
)
@pytest.mark.parametrize("_", ["first", "second"])  # what is reported once per process counts in each test
@pytest.mark.filterwarnings("default:.*old.*:FutureWarning")
def test_only_our_own_calls_count(deprecated_calls, expression, message, path, is_ours, _):
    names = {"config": tiny_config("llama"), "deprecating": deprecating}
    eval(compile(expression, path, "eval"), names)  # as if the expression stood in the file at that path
    seen, deprecated_calls[:] = list(deprecated_calls), []
    assert len(seen) == is_ours
    assert all(call.startswith(f"{OURS}:1: ") and message in call for call in seen)


def test_a_warning_about_our_own_line_is_an_error():
    with pytest.raises(FutureWarning, match="`old` is deprecated"):
        eval(
            compile("deprecating(old=1)", OURS, "eval"),
            {"deprecating": deprecating, "__name__": "d3d_hf.model.modeling_d3d"},
        )
