import contextlib
import logging
import os
import re
import sys
import warnings

import peft
import pytest
import torch
import transformers
from transformers.utils import logging as transformers_logging

import d3d_hf
from d3d_hf import embedded
from d3d_hf.model.drafting_options import DraftingOptions


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    """Tests run side by side in processes of one thread each, from a known seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _synchronous_by_default(monkeypatch):
    """Tests count rounds; in the automatic mode times would decide them. Its own tests ask for it."""
    monkeypatch.setattr(DraftingOptions, "drafting_mode", "sync")
    monkeypatch.setattr(DraftingOptions, "draft_tree_size", 0)


@pytest.fixture(scope="session")
def embedded_target():
    """(model, tokenizer) of SmolLM2-135M-Instruct in bfloat16. Shared: whoever changes the model changes a copy."""
    try:
        return embedded.load_target()
    except ImportError as error:
        pytest.skip(str(error))


def _folder_of(module) -> str:
    return os.path.dirname(module.__file__) + os.sep


_OURS, _TRANSFORMERS = _folder_of(d3d_hf), _folder_of(transformers)
_REPORTING = (__file__, warnings.__file__, _folder_of(logging), transformers_logging.__file__)
# What may stand between a call of ours and the function that it calls: decorators, module calls, auto classes, PEFT,
# which asks a model for what it needs, and the hook's wrappers, which hand on what the user gave.
_PASSED_THROUGH = (
    contextlib.__file__,
    _folder_of(torch),
    _folder_of(peft),
    os.path.join(_TRANSFORMERS, "utils", ""),
    os.path.join(_TRANSFORMERS, "models", "auto", ""),
    os.path.join(_TRANSFORMERS, "integrations", "heterogeneity", ""),  # a config's attribute look-up
    os.path.join(_OURS, "model", "generation_hook.py"),
)


def _next_outside(paths: tuple[str, ...], frame):
    while frame is not None and frame.f_code.co_filename.startswith(paths):
        frame = frame.f_back
    return frame


def _deprecated_call_of_ours(message: str) -> str | None:
    """
    The line of d3d_hf that the deprecation which transformers is reporting just now is about, if it is about one.

    A function that is called in a deprecated way reports that itself, or its decorator does. So it was a call of ours
    if the nearest caller of whoever reports is a line of d3d_hf, where decorators and the reporter's own module are
    passed over. If transformers reports what it does itself, that caller is another module of transformers.
    """
    reporter = _next_outside(_REPORTING, sys._getframe(1))
    if reporter is None or not reporter.f_code.co_filename.startswith(_TRANSFORMERS):
        return None
    caller = _next_outside((*_PASSED_THROUGH, reporter.f_code.co_filename), reporter)
    if caller is None or not caller.f_code.co_filename.startswith(_OURS):
        return None
    return f"{caller.f_code.co_filename}:{caller.f_lineno}: {message}"


@pytest.fixture(autouse=True)
def deprecated_calls():
    """Fails the test where d3d_hf calls transformers in a deprecated way: transformers logs some, warns of others."""
    calls = []

    def watch(message: str):
        call = _deprecated_call_of_ours(message)
        if call is not None:
            calls.append(call)

    class Handler(logging.Handler):
        def emit(self, record):
            if re.search("deprecat|will be removed", record.getMessage(), re.IGNORECASE):
                watch(record.getMessage())

    def showwarning(message, category, *args, **kwargs):
        if issubclass(category, (FutureWarning, DeprecationWarning)):
            watch(str(message))
        return show(message, category, *args, **kwargs)

    logger, handler, show = logging.getLogger("transformers"), Handler(), warnings.showwarning
    level = logger.level
    transformers_logging.warning_once.cache_clear()  # else only the first test to meet one would fail
    logger.addHandler(handler)
    logger.setLevel(min(level or logging.WARNING, logging.WARNING))
    warnings.showwarning = showwarning
    yield calls
    warnings.showwarning = show
    logger.removeHandler(handler)
    logger.setLevel(level)
    assert not calls, "d3d_hf calls transformers in a deprecated way:\n" + "\n".join(calls)
