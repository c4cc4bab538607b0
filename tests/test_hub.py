"""Drafters from and to the Hub: a local server that speaks its protocol, its cache offline, hostile repositories."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, pipeline

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.model.packing import lay_out
from d3d_hf.testing import tiny_model, tiny_tokenizer
from fake_hub import FakeHub
from lossless import prompt_of


def perturbed(drafter):
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return drafter


def packed_logits(drafter):
    with torch.no_grad():
        return drafter.packed_forward(prompt_of(9), lay_out(6, torch.tensor([[5]]), (3,))).logits


def adapter_drafter(base: Path | str, name: str):
    target = AutoModelForCausalLM.from_pretrained(base)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4, kept_layers=[0, 2])
    wrapped = get_peft_model(
        drafter,
        LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["mask_embedding"]),
    )
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    drafter = wrapped.get_base_model().eval()
    drafter.config.adapter_base = name
    return drafter


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders: target, whole (bf16), sharded (in several files), adapter (on org/target)."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    target = tiny_model("llama", seed=11, num_layers=3)
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    drafter = perturbed(D3DDrafterForCausalLM.from_backbone(target, block_size=4))
    for parameter in drafter.parameters():
        parameter.data = parameter.data.bfloat16().float()
    whole = packed_logits(drafter)
    drafter.to(torch.bfloat16).save_pretrained(folder / "whole")
    drafter.save_pretrained(folder / "sharded", max_shard_size="10KB")
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 3
    adapter = adapter_drafter(folder / "target", "org/target")
    adapter.save_pretrained(folder / "adapter")
    torch.save({"whole": whole, "adapter": packed_logits(adapter)}, folder / "expected.pt")
    return folder


@pytest.fixture(scope="module")
def hub(models):
    with FakeHub() as hub:
        hub.add("org/target", models / "target")
        hub.add("org/whole", models / "whole")
        hub.add("org/sharded", models / "sharded")
        hub.add("org/adapter", models / "adapter")
        hub.add("org/many", models / "target")  # something else on main and beside it
        hub.add("org/many", models / "sharded", branch="v1", prefix="drafters/small/")
        hub.add("org/many", models / "adapter", branch="v1", prefix="drafters/adapter/")
        yield hub


def run_python(code, hub, home, **environment):
    """Runs a script in a process of its own, since the endpoint is read when huggingface_hub is imported."""
    environment = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_of_nobody",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **environment,
    }
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout, result.stderr


LOADS = """
    import torch
    from transformers import AutoModelForCausalLM
    from d3d_hf import D3DDrafterForCausalLM
    from d3d_hf.commands.info import describe
    from d3d_hf.model.packing import lay_out
    from lossless import prompt_of

    expected = torch.load(EXPECTED)

    def check(drafter, name="whole"):
        assert type(drafter) is D3DDrafterForCausalLM
        with torch.no_grad():
            logits = drafter.float().packed_forward(prompt_of(9), lay_out(6, torch.tensor([[5]]), (3,))).logits
        torch.testing.assert_close(logits, expected[name], atol=1e-4, rtol=1e-4)

    for loader in (D3DDrafterForCausalLM, AutoModelForCausalLM):
        for repo in ("org/whole", "org/sharded"):
            loaded = loader.from_pretrained(repo, dtype="auto", device_map="cpu", low_cpu_mem_usage=True)
            assert loaded.dtype == torch.bfloat16, loaded.dtype
            check(loaded)
        check(loader.from_pretrained("org/adapter"), "adapter")
        where = {"revision": "v1", "subfolder": "drafters/small"}
        check(loader.from_pretrained("org/many", **where))
        check(loader.from_pretrained("org/many", **where | {"subfolder": "drafters/adapter"}), "adapter")
    target = AutoModelForCausalLM.from_pretrained("org/target")
    check(D3DDrafterForCausalLM.from_target(target, adapter="org/adapter"), "adapter")
    assert describe("org/whole")["block_size"] == 4
    print("loaded everything")
"""
ERRORS = """
    for repo, kwargs, message in (
        ("org/none", {}, "org/none"),
        ("org/whole", {"revision": "v9"}, "org/whole"),
        ("org/many", {"subfolder": "x"}, "not that of a D3D drafter"),
        ("org/many", {}, "not that of a D3D drafter"),
    ):
        try:
            D3DDrafterForCausalLM.from_pretrained(repo, **kwargs)
        except (OSError, ValueError) as error:
            assert message in str(error), error
        else:
            raise AssertionError(repo)
"""


def test_from_the_hub_and_then_from_its_cache(hub, models, tmp_path):
    code = LOADS.replace("EXPECTED", repr(str(models / "expected.pt")))
    output, _ = run_python(code + ERRORS, hub, tmp_path, HF_HUB_OFFLINE="0")
    assert "loaded everything" in output
    assert any("resolve" in request and "safetensors" in request for request in hub.requests)
    num_requests = len(hub.requests)
    output, _ = run_python(code, hub, tmp_path, HF_HUB_OFFLINE="1")
    assert "loaded everything" in output and len(hub.requests) == num_requests


def lay_cache(cache: Path, repo_id: str, folder: Path):
    """A repository in the Hub's cache, as huggingface_hub lays it: blobs, and links to them by commit and name."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    root = cache / f"models--{repo_id.replace('/', '--')}"
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    for path in filter(Path.is_file, folder.rglob("*")):
        blob = root / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.write_bytes(path.read_bytes())
        link = root / "snapshots" / commit / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))


def test_a_hand_laid_cache_offline(models, tmp_path):
    for name in ("target", "whole", "sharded", "adapter"):
        lay_cache(tmp_path, f"org/{name}", models / name)
    expected = torch.load(models / "expected.pt")
    for name in ("whole", "sharded", "adapter"):
        for loader in (D3DDrafterForCausalLM, AutoModelForCausalLM):
            loaded = loader.from_pretrained(
                f"org/{name}", cache_dir=tmp_path, local_files_only=True, dtype=torch.float32
            )
            torch.testing.assert_close(
                packed_logits(loaded), expected["adapter" if name == "adapter" else "whole"], atol=1e-4, rtol=1e-4
            )


REMOTE = """
    import sys
    sys.modules["d3d_hf"] = None  # as if it were not installed
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained("org/target")
    prompt = torch.randint(2, 67, (1, 9))
    kwargs = dict(max_new_tokens=20, do_sample=False)
    reference = target.generate(prompt, **kwargs)
    try:
        AutoModelForCausalLM.from_pretrained("org/whole", trust_remote_code=False)
    except ValueError as error:
        assert "trust_remote_code" in str(error), error
    else:
        raise AssertionError("code was loaded without trust")
    for repo in ("org/whole", "org/adapter"):
        drafter = AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True)
        assert torch.equal(target.generate(prompt, assistant_model=drafter, **kwargs), reference)
        assert drafter.last_generation_stats.num_drafted > 0
    print("drafted with", type(drafter).__module__)
"""


def test_remote_code_from_the_hub(hub, models, tmp_path):
    output, _ = run_python(REMOTE, hub, tmp_path, HF_HUB_OFFLINE="0")
    assert "drafted with transformers_modules." in output


PUSHES = """
    import json, sys
    from transformers import AutoModelForCausalLM
    from d3d_hf import D3DDrafterForCausalLM
    from d3d_hf.cli import main

    def push(*argv):
        return main(["push", "whole", *argv])

    statuses = [
        push("org/new", "--private", "--dry-run"),
        push("org/new", "--private"),
        push("org/new", "--private"),
        push("org/new", "--revision", "v2", "--message", "second"),
        push("org/new", "--create-pr"),
        push("org/else"),
    ]
    print(json.dumps(statuses))
    D3DDrafterForCausalLM.from_pretrained("whole").push_to_hub("org/from-python")
    target = AutoModelForCausalLM.from_pretrained(MODELS + "/target")
    D3DDrafterForCausalLM.from_target(target, adapter=MODELS + "/adapter").push_to_hub("org/adapter-from-python")
"""


def test_push(models, tmp_path, monkeypatch):
    folder = tmp_path / "whole"
    D3DDrafterForCausalLM.from_pretrained(models / "whole").save_pretrained(folder)
    card = '---\nlicense: apache-2.0\n---\nfrom_pretrained("hub_cards/whole")\n'
    (folder / "README.md").write_text(card)
    (folder / "modeling_d3d.py").write_text("raise SystemExit('not ours')")
    (folder / "optimizer.pt").write_text("x")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "model.safetensors").write_text("x")
    weights = (folder / "model.safetensors").read_bytes()
    with FakeHub() as hub:
        hub.failures = ["/commit/"]  # the weights arrive, the first commit does not
        code = f"import os\nos.chdir({str(tmp_path)!r})\nMODELS = {str(models)!r}\n" + textwrap.dedent(PUSHES)
        output, errors = run_python(code, hub, tmp_path / "home", HF_HUB_OFFLINE="0")
        dry, _, rest = output.partition("would go to org/new\n")
        assert "model.safetensors" in dry and "modeling_d3d.py" in dry and "stays here  optimizer.pt" in dry
        assert "checkpoint-5/model.safetensors" in dry.partition("stays here")[2]
        assert json.loads(rest.splitlines()[-1]) == [0, 2, 0, 0, 0, 0], errors
        assert "d3d-hf: error: the upload to org/new failed" in errors

        main_files = hub.repos["org/new"]["main"]
        assert main_files["model.safetensors"] == weights and b'"org/new"' in main_files["README.md"]
        config = json.loads(main_files["config.json"])
        assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_d3d.D3DDrafterForCausalLM"
        assert b"not ours" not in main_files["modeling_d3d.py"] and "optimizer.pt" not in main_files
        assert not any(name.startswith("checkpoint-5") for name in main_files)
        assert hub.private == {"org/new"} and set(hub.repos["org/new"]) == {"main", "v2"}
        (request,) = hub.pull_requests["org/new"]
        assert "model.safetensors" in request
        assert hub.uploads.count(hashlib.sha256(weights).hexdigest()) == 1, "what has arrived is not sent again"
        assert {"model.safetensors", "modeling_d3d.py", "config.json"} <= hub.repos["org/from-python"]["main"].keys()
        pushed = hub.repos["org/adapter-from-python"]["main"]
        assert {"adapter/adapter_model.safetensors", "modeling_d3d.py", "config.json"} <= pushed.keys()
        assert not any(name.startswith("model") and name.endswith(".safetensors") for name in pushed)


# Damaged and hostile folders


@pytest.fixture
def folder(models, tmp_path):
    """A copy of the whole drafter, to be damaged."""
    D3DDrafterForCausalLM.from_pretrained(models / "whole").save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def refused(folder, error, match, **kwargs):
    for loader in (D3DDrafterForCausalLM, AutoModelForCausalLM):
        with pytest.raises(error, match=match):
            loader.from_pretrained(folder, **kwargs)


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for length in (len(content) - 100, 40, 3, 0):
        path.write_bytes(content[:length])
        refused(folder, OSError, "weights of '.*drafter' are damaged: fetch or save them again")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop("mask_embedding.weight"), "missing mask_embedding.weight, unexpected none"),
        (lambda state: state.update(evil=torch.zeros(3)), "missing none, unexpected evil"),
        (lambda state: state.pop("model.layers.1.mlp.up_proj.weight"), "missing model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_tensors_missing_or_too_many(change, message, folder):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, ValueError, message)
    _, info = D3DDrafterForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"] or info["unexpected_keys"], "whoever asks for the report gets it, and the model"


@pytest.mark.parametrize(
    "part", ["../target/model.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\x", "c:x"]
)
def test_shard_indexes_that_point_elsewhere(part, models, tmp_path):
    folder = tmp_path / "sharded"
    D3DDrafterForCausalLM.from_pretrained(models / "sharded").save_pretrained(folder, max_shard_size="10KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = part
    path.write_text(json.dumps(index))
    refused(folder, ValueError, "not a file beside it: do not trust this checkpoint")
    config_path = folder / "config.json"
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | {"transformers_weights": part}))
    refused(folder, ValueError, "config.json of .* not a file beside it: do not trust this checkpoint")
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | {"transformers_weights": None}))
    path.write_text('{"weight_map": [1]}')
    refused(folder, ValueError, "model.safetensors.index.json' is damaged")


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickle_weights_only_if_asked_for(folder, tmp_path):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    refused(folder, OSError, "has no model.safetensors.*use_safetensors=False alone")
    loaded = D3DDrafterForCausalLM.from_pretrained(folder, use_safetensors=False)
    assert torch.equal(loaded.lm_head.weight, state["lm_head.weight"])
    torch.save(state | {"trap": Trap(tmp_path / "sprung")}, folder / "pytorch_model.bin")
    refused(folder, OSError, "has no model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, "pytorch_model.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, ValueError, "names 'pytorch_model.bin', a pickle file")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "pytorch_model.bin"}))
    refused(folder, ValueError, "config.json of .* names 'pytorch_model.bin', a pickle file")
    assert not (tmp_path / "sprung").exists()


def test_adapters_that_are_damaged_or_pickles(models, tmp_path):
    adapter_drafter(models / "target", str(models / "target")).save_pretrained(tmp_path / "drafter")
    path = tmp_path / "drafter" / "adapter" / "adapter_model.safetensors"
    content, state = path.read_bytes(), load_file(path)
    target = AutoModelForCausalLM.from_pretrained(models / "target")

    def refused(error, match):
        for load in (
            lambda: D3DDrafterForCausalLM.from_pretrained(tmp_path / "drafter"),
            lambda: D3DDrafterForCausalLM.from_target(target, adapter=tmp_path / "drafter"),
        ):
            with pytest.raises(error, match=match):
                load()

    path.write_bytes(content[:-7])
    refused(OSError, "adapter_model.safetensors' are damaged")
    mask = "base_model.model.mask_embedding.weight"
    save_file({name: tensor for name, tensor in state.items() if name != mask}, path)
    refused(ValueError, f"missing {mask}")
    save_file({**state, "base_model.model.more": torch.zeros(1)}, path)
    refused(ValueError, "unexpected base_model.model.more")
    save_file(state, path)
    config_path = path.with_name("adapter_config.json")
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(config | {"megatron_config": {"x": 1}, "megatron_core": "evil"}))
    refused(ValueError, "makes PEFT import modules by name: do not trust this adapter")
    config_path.unlink()
    refused(OSError, "without its adapter_config.json")
    config_path.write_text(json.dumps(config))
    path.unlink()
    torch.save(state | {"trap": Trap(tmp_path / "sprung")}, path.with_name("adapter_model.bin"))
    refused(OSError, "Adapters in pickle files.* are not loaded")
    assert not (tmp_path / "sprung").exists()


def test_no_code_runs_without_trust(folder, tmp_path):
    sprung = tmp_path / "sprung"
    trap = f"open({str(sprung)!r}, 'w')\nclass Evil: ...\n"
    for name in ("modeling_d3d.py", "configuration_d3d.py", "evil.py"):
        (folder / name).write_text(trap)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(trap)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["backbone_config"]["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    path.write_text(json.dumps(fields))
    for loader in (D3DDrafterForCausalLM, AutoModelForCausalLM):
        assert type(loader.from_pretrained(folder)) is D3DDrafterForCausalLM
    assert not sprung.exists()


def test_quantisation_configs_pass_through(folder, models):
    """A quantiser of our own, registered as bitsandbytes and torchao are: it must see the drafter's weights."""
    from transformers.quantizers import register_quantization_config, register_quantizer
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    seen = []
    try:

        @register_quantization_config("seen")
        class SeenConfig(QuantizationConfigMixin):
            def __init__(self, **kwargs):
                self.quant_method = "seen"

        @register_quantizer("seen")
        class SeenQuantizer(HfQuantizer):
            requires_calibration = False

            def _process_model_before_weight_loading(self, model, **kwargs):
                seen.append(type(model))

            def _process_model_after_weight_loading(self, model, **kwargs):
                seen.append(model.lm_head.weight.abs().sum().item())

            def is_serializable(self, *args, **kwargs):
                return True

            @property
            def is_trainable(self):
                return False

        loaded = D3DDrafterForCausalLM.from_pretrained(folder, quantization_config=SeenConfig())
        assert seen == [D3DDrafterForCausalLM, loaded.lm_head.weight.abs().sum().item()] and loaded.is_quantized
        with pytest.raises(ValueError, match="is an adapter, which cannot be merged into a quantised base"):
            D3DDrafterForCausalLM.from_pretrained(models / "adapter", quantization_config=SeenConfig())
    finally:
        AUTO_QUANTIZATION_CONFIG_MAPPING.pop("seen", None)
        AUTO_QUANTIZER_MAPPING.pop("seen", None)


def test_pipelines_take_the_drafter_and_not_its_name(models):
    drafter = D3DDrafterForCausalLM.from_pretrained(models / "whole", dtype=torch.float32)
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    plain = pipeline("text-generation", model=str(models / "target"))("ask me.", **kwargs)
    pipe = pipeline("text-generation", model=str(models / "target"), assistant_model=drafter)
    assert pipe("ask me.", **kwargs) == plain
    assert drafter.last_generation_stats.num_drafted > 0
    with pytest.raises(Exception):  # noqa: B017 - whatever transformers raises: docs/serving.md says that it fails
        pipeline("text-generation", model=str(models / "target"), assistant_model=str(models / "whole"))


def test_an_adapter_is_not_pushed_by_save_pretrained(models):
    drafter = adapter_drafter(models / "target", "org/target")
    with pytest.raises(ValueError, match="call push_to_hub"):
        drafter.save_pretrained("nowhere", push_to_hub=True)
    assert not os.path.exists("nowhere")
