"""`d3d-hf doctor`: what is installed, whether drafting works here, and what to do where it does not."""

import argparse
import platform
from dataclasses import dataclass, field

from .arguments import one_line


_NUM_TOKENS = 32
_BLOCK_SIZE = 5
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "huggingface-hub", "safetensors")
_REPORT = "report it with this output"


def add_command(commands):
    parser = commands.add_parser(
        "doctor",
        help="check this installation with a tiny generation in each drafting mode",
        description="Prints versions, hooks, device and threads, generates with tiny random models on the CPU in "
        "every drafting mode and through every door, and holds the ids against plain generation's. Exit status 0, or "
        "1 with a list of what is wrong and what to do. Needs no network.",
        allow_abbrev=False,
    )
    # `run` imports the package by itself, since that may be what fails.
    parser.set_defaults(run=run, needs_package=False)


@dataclass
class _Findings:
    """What was looked at, printed at once, and what is wrong: pairs of a complaint and its mend."""

    problems: list[tuple[str, str]] = field(default_factory=list)

    def tell(self, subject: str, text: str):
        print(f"{subject:<16}{text}", flush=True)

    def blame(self, subject: str, complaint: str, mend: str):
        self.tell(subject, f"WRONG: {complaint}")
        self.problems.append((f"{subject}: {complaint}", mend))


def run(args: argparse.Namespace) -> int:
    findings = _Findings()
    _look_at_versions(findings)
    if _can_import(findings):
        _look_at_machine(findings)
        _look_at_hooks(findings)
        _generate(findings)
    if not findings.problems:
        print("\nNothing is wrong.")
        return 0
    print("\nWhat is wrong, and what to do:")
    for number, (complaint, mend) in enumerate(findings.problems, 1):
        print(f"{number}. {complaint}.\n   {mend}.")
    return 1


def _look_at_versions(findings: _Findings):
    from importlib import metadata

    from packaging.requirements import Requirement

    from .. import __version__

    try:
        requirements = [Requirement(text) for text in metadata.requires("d3d_hf") or ()]
    except metadata.PackageNotFoundError:
        findings.tell("package", "not installed but run from its sources, so that nothing says what it needs")
        requirements = [Requirement(name) for name in _PACKAGES]
    findings.tell("python", platform.python_version())
    findings.tell("d3d_hf", __version__)
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            findings.blame(requirement.name, "not installed", f"Install it: pip install '{requirement}'")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            findings.tell(requirement.name, version)
        else:
            complaint = f"{version} is installed, and d3d_hf needs {requirement.specifier}"
            findings.blame(requirement.name, complaint, f"Install it: pip install '{requirement}'")


def _can_import(findings: _Findings) -> bool:
    try:
        from ..decoding import seam  # noqa: F401
    except Exception as error:
        findings.blame(
            "import d3d_hf",
            f"{type(error).__name__}: {one_line(error)}",
            f"Install releases of torch and transformers that d3d_hf's metadata names; if these are such, {_REPORT}",
        )
        return False
    return True


def _look_at_machine(findings: _Findings):
    import torch

    from ..training.provenance import machine

    facts = machine()
    accelerators = ", ".join(facts["accelerators"]) or "none"
    findings.tell("machine", f"{facts['system']}, {facts['processor']}, {facts['num_cores']} cores")
    findings.tell("threads", f"{facts['num_threads']} of torch, {torch.get_num_interop_threads()} between operations")
    findings.tell("accelerator", accelerators)


def _look_at_hooks(findings: _Findings):
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..model.configuration_d3d import D3DConfig
    from ..model.generation_hook import is_generation_hook_installed
    from ..model.modeling_d3d import D3DDrafterForCausalLM

    if is_generation_hook_installed():
        findings.tell("hook", "in place: generate(assistant_model=drafter) drafts in blocks")
    else:
        findings.blame(
            "hook",
            f"not in place, so that generate of transformers {transformers.__version__} does not know a drafter",
            "Call d3d_hf.install_generation_hook() if something has taken it away (uninstall_generation_hook, another "
            "package that patches generate); if a warning says that this release has no such method, install "
            "one that d3d_hf's metadata names",
        )
    try:
        is_registered = type(AutoConfig.for_model(D3DConfig.model_type)) is D3DConfig
        is_registered = is_registered and AutoModelForCausalLM._model_mapping[D3DConfig] is D3DDrafterForCausalLM
    except (KeyError, ValueError):
        is_registered = False
    if is_registered:
        findings.tell("registers", "AutoConfig and AutoModelForCausalLM know drafters")
    else:
        findings.blame(
            "registers",
            f"AutoConfig or AutoModelForCausalLM of transformers {transformers.__version__} do not know drafters",
            f"Load drafters with d3d_hf.D3DDrafterForCausalLM.from_pretrained, and {_REPORT}",
        )


def _generate(findings: _Findings):
    """A tiny generation in each mode through the first door that takes it, and one through the second door."""
    import torch

    from ..decoding import LoopDoor
    from ..model.drafting_options import DRAFTING_MODES
    from ..model.generation_hook import Door, open_door
    from ..testing import tiny_model

    target = tiny_model("llama", seed=11)
    prompt = torch.arange(2, 10)[None]
    reference = target.generate(prompt, **_arguments(prompt))
    for mode in DRAFTING_MODES:
        _try_mode(findings, mode, target, prompt, reference, mode, LoopDoor.name)

    class Closed(Door):
        name = LoopDoor.name

        def reason_against(self, call):
            return "the doctor has closed it"

    open_door(Closed(), first=True)
    try:
        _try_mode(findings, "second door", target, prompt, reference, "sync", "candidate generator")
    finally:
        open_door(LoopDoor(), first=True)


def _arguments(prompt) -> dict:
    ones = prompt.new_ones(prompt.shape)
    return {"attention_mask": ones, "max_new_tokens": _NUM_TOKENS, "min_new_tokens": _NUM_TOKENS, "do_sample": False}


def _try_mode(findings: _Findings, subject: str, target, prompt, reference, mode: str, wanted_door: str):
    """Holds one drafted generation against the plain one. The drafter proposes the target's own text."""
    import torch
    import transformers

    from ..testing import ForwardCounter, oracle_drafter

    release = transformers.__version__
    mend = f"Install another release of transformers than {release} that d3d_hf's metadata names, and {_REPORT}"
    drafter = oracle_drafter(reference, block_size=_BLOCK_SIZE)
    drafter.generation_config.drafting_mode = mode
    try:
        with ForwardCounter(target) as forwards:
            output = target.generate(prompt, assistant_model=drafter, **_arguments(prompt))
    except Exception as error:
        findings.blame(subject, f"generate raised {type(error).__name__}: {one_line(error)}", mend)
        return
    if not torch.equal(output, reference):
        findings.blame(subject, "the text is not that of plain generation", f"Do not use this mode, and {_REPORT}")
        return
    stats = drafter.last_generation_stats
    door = getattr(stats, "door", None)
    if door is not None and door != wanted_door:
        reason = getattr(stats, "door_reason", None)
        findings.blame(subject, f"ran {_through(door)} instead of {_through(wanted_door)}: {reason}", mend)
        return
    num_tokens = output.shape[1] - prompt.shape[1]
    # In "auto" measured times may choose not to draft, which tiny models give reason to.
    if mode != "auto" and forwards.count > num_tokens // 2:
        complaint = f"{forwards.count} target forwards for {num_tokens} tokens: right, but hardly anything was drafted"
        findings.blame(subject, complaint, mend)
        return
    way = "" if door is None else f" {_through(door)}"
    findings.tell(
        subject, f"{num_tokens} tokens in {forwards.count} target forwards{way}, the ids of plain generation"
    )


def _through(door: str) -> str:
    return "without drafts" if door == "plain" else f"through the {door}"


__all__ = ["add_command", "run"]
