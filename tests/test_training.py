"""Training: the packed loss, whatever the batching; resumption; evaluation; what goes in and what is refused."""

import copy
import inspect
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from peft import LoraConfig

from d3d_hf import D3DDrafterForCausalLM, D3DTrainer, D3DTrainingArguments
from d3d_hf.model.packing import lay_out
from d3d_hf.testing import tiny_model, tiny_tokenizer
from d3d_hf.training.acceptance import draft_outcomes, play_through
from d3d_hf.training.examples import DraftingCollator, DraftingDataset, draw_blocks, to_example
from d3d_hf.training.losses import token_loss


BLOCK_SIZE = 4


def rows_of(count, seed=0, longest=30):
    """Texts of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)

    def pick(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    lengths = [(pick(2, 8), pick(6, longest)) for _ in range(count)]
    return [
        {"input_ids": torch.randint(2, 67, (p + r,), generator=generator).tolist(), "prompt_length": p, "extra": "x"}
        for p, r in lengths
    ]


def drafter_of(seed=3, architecture="llama", **kwargs):
    return D3DDrafterForCausalLM.from_backbone(tiny_model(architecture, seed=seed), block_size=BLOCK_SIZE, **kwargs)


def arguments(folder, **kwargs):
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "blocks_per_sequence": 5,
        "dataloader_drop_last": False,
    }
    return D3DTrainingArguments(**{**defaults, **kwargs})


def trained(folder, rows, drafter=None, resume=None, **kwargs):
    drafter = drafter_of() if drafter is None else drafter
    trainer = D3DTrainer(drafter, arguments(folder, **kwargs), train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {name: p.detach().clone() for name, p in drafter.named_parameters()}, losses


def assert_same_weights(left, right, tolerance=1e-6):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=tolerance, rtol=0, msg=name)


# The loss


def naive_loss(drafter, example, args):
    """One forward per anchor and one for the text; every supervised row by hand. Sums and weights of both parts."""
    ids, prompt_length = torch.tensor([example["input_ids"]]), example["prompt_length"]
    logits = drafter(input_ids=ids).logits[0, max(prompt_length, 1) - 1 : -1]
    labels = ids[0, max(prompt_length, 1) :]
    ar = torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), float(len(labels))
    total, weight = torch.tensor(0.0), 0.0
    for anchor, shown in zip(example["anchors"].tolist(), example["num_visible"].tolist(), strict=True):
        if anchor < 0:
            continue
        layout = lay_out(anchor + 1, torch.tensor([[anchor]]), (BLOCK_SIZE,), num_visible=torch.tensor([[shown]]))
        slots = torch.zeros(1, BLOCK_SIZE, dtype=torch.long)
        slots[0, :shown] = ids[0, anchor + 1 : anchor + 1 + shown]
        logits = drafter.packed_forward(torch.cat([ids[:, : anchor + 1], slots], dim=1), layout).logits[
            0, anchor + 1 :
        ]
        for slot in range(shown, BLOCK_SIZE):
            place = anchor + 2 + slot
            if place < ids.shape[1]:
                slot_weight = args.block_loss_decay ** (slot - shown)
                loss = torch.nn.functional.cross_entropy(logits[slot : slot + 1], ids[0, place : place + 1])
                total, weight = total + slot_weight * loss, weight + slot_weight
    return ar, (total, weight)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gemma3"])
@pytest.mark.parametrize("denoising_mask_ratio", [1.0, 0.4])
def test_the_packed_loss_is_the_naive_one(architecture, denoising_mask_ratio, tmp_path):
    drafter = drafter_of(architecture=architecture).train()
    args = arguments(tmp_path, denoising_mask_ratio=denoising_mask_ratio, block_loss_decay=0.7, ar_loss_weight=0.3)
    trainer = D3DTrainer(drafter, args, train_dataset=rows_of(4))
    examples = [trainer.train_dataset[i] for i in range(4)]
    loss = trainer.compute_loss(drafter, trainer.data_collator(examples))
    parts = [naive_loss(drafter, example, args) for example in examples]
    ar = sum(part[0][0] for part in parts) / sum(part[0][1] for part in parts)
    blocks = sum(part[1][0] for part in parts) / sum(part[1][1] for part in parts)
    torch.testing.assert_close(loss, blocks + 0.3 * ar, atol=1e-5, rtol=1e-5)


def test_batch_shape_does_not_change_a_step(tmp_path):
    """Batches of 8 x 1, 2 x 4 and 1 x 8 of unequal lengths, and the tail of two rows that the epoch ends with."""
    rows = rows_of(10)
    results = [
        trained(
            tmp_path,
            rows,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            learning_rate=2e-3,  # from one step to the next rounding grows with it
        )
        for size in (8, 2, 1)
    ]
    for weights, losses in results[1:]:
        assert_same_weights(results[0][0], weights)
        assert losses == pytest.approx(results[0][1], abs=1e-5)
    assert len(results[0][1]) == 2


def test_left_and_right_padding_give_the_same_loss(tmp_path):
    trainer = D3DTrainer(drafter_of(), arguments(tmp_path), train_dataset=rows_of(4))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    left = copy.deepcopy(batch)
    width = batch["context_mask"].shape[1]
    for i, length in enumerate(batch["context_mask"].sum(dim=1).tolist()):
        for name in ("input_ids", "labels", "loss_weights", "context_mask"):
            left[name][i, :width] = batch[name][i, :width].roll(width - length)
    assert (left["context_mask"] != batch["context_mask"]).any()
    losses = [trainer.compute_loss(trainer.model, inputs) for inputs in (batch, left)]
    torch.testing.assert_close(*losses, atol=1e-6, rtol=1e-6)


def test_blocks_see_nothing_after_their_anchor():
    """Changing the token at p moves no output of a block that hangs before p, though other blocks overlap it."""
    drafter, ids = drafter_of(), torch.randint(2, 67, (1, 20))
    anchors = torch.tensor([[4, 5, 9, 9, 15]])
    layout = lay_out(20, anchors, (BLOCK_SIZE,) * 5, num_visible=torch.tensor([[0, 1, 0, 1, 2]]))
    slots = torch.randint(2, 67, (1, 20))
    with torch.no_grad():
        before = drafter.packed_forward(torch.cat([ids, slots], 1), layout).logits
        changed = ids.clone()
        changed[0, 9] = (ids[0, 9] + 1) % 60 + 2
        after = drafter.packed_forward(torch.cat([changed, slots], 1), layout).logits
    moved = (before != after).any(-1)[0]
    assert not moved[:9].any() and moved[9]
    by_block = moved[20:].view(5, BLOCK_SIZE).any(dim=1).tolist()
    assert by_block == [False, False, True, True, True]


def test_a_trained_drafter_drafts_what_it_was_trained_on(tmp_path):
    """One text of 32 tokens, overfitted, then generated with a target that writes it: whole blocks are accepted."""
    target = tiny_model("llama", seed=11)
    prompt = torch.randint(2, 67, (1, 8))
    text = target.generate(prompt, max_new_tokens=24, do_sample=False)
    drafter = drafter_of()
    trained(
        tmp_path,
        [{"input_ids": text[0].tolist(), "prompt_length": 8}],
        drafter,
        max_steps=150,
        optim="adamw_torch",
        learning_rate=3e-3,
        blocks_per_sequence=16,
        logging_steps=150,
    )
    output = target.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter.eval())
    assert torch.equal(output, text)
    assert drafter.last_generation_stats.tokens_per_round >= BLOCK_SIZE


def test_distillation_pulls_towards_the_teacher():
    logits, labels = torch.randn(6, 9, requires_grad=True), torch.randint(9, (6,))
    teacher = torch.randn(6, 9)
    plain = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(token_loss(logits, labels, teacher, 0.0), plain)
    pure = token_loss(logits, labels, teacher, 1.0, temperature=2.0)
    expected = 4 * torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=teacher / 2), torch.distributions.Categorical(logits=logits / 2)
    )
    torch.testing.assert_close(pure, expected)
    torch.testing.assert_close(token_loss(teacher, labels, teacher, 1.0), torch.zeros(6), atol=1e-6, rtol=0)


def test_the_teachers_law_stands_at_the_token_that_a_row_predicts(tmp_path):
    """With the drafter itself as the teacher, the context's rows diverge by nothing."""
    drafter = drafter_of()
    args = arguments(tmp_path, distillation_weight=1.0)
    trainer = D3DTrainer(drafter, args, train_dataset=rows_of(3), teacher_model=copy.deepcopy(drafter))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    batch["loss_weights"][:, batch["context_mask"].shape[1] :] = 0
    assert float(trainer.compute_loss(drafter, batch).detach()) == pytest.approx(0, abs=1e-4)
    targets = batch["labels"][batch["labels"] != -100]
    logits = trainer._teacher_logits(batch, batch["labels"] != -100)
    assert logits.shape == (len(targets), 67)


# Examples


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [5, 6, 7, 8, 9], "prompt_length": 2, "topic": "x"},
        {"prompt_ids": [5, 6], "response_ids": [7, 8, 9]},
        {"p": [5, 6], "r": [7, 8, 9]},
        {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, 9]},
    ],
)
def test_layouts(row):
    assert to_example(row) == ([5, 6, 7, 8, 9], 2)


def test_conversations_need_no_generation_tags():
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    ids, prompt_length = to_example({"messages": messages}, tokenizer)
    assert tokenizer.decode(ids[:prompt_length]) == "uhi.a" and tokenizer.decode(ids[prompt_length:]) == "yes."


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": "x"}, r"columns \['text'\].*prompt_length"),
        ({"input_ids": [1, 2], "prompt_length": 3}, "prompt_length is 3 in a text of 2"),
        ({"input_ids": [1, 70], "prompt_length": 1}, "token id 70.*67 tokens.*own target"),
        ({"messages": [{"role": "user", "content": "x"}]}, "pass processing_class="),
    ],
)
def test_unusable_rows_are_refused_before_training(row, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        D3DTrainer(drafter_of(), arguments(tmp_path), train_dataset=[row])


def test_texts_without_a_response_are_refused(tmp_path):
    rows = [{"input_ids": [3, 4, 5, 6], "prompt_length": 4}] * 3
    with pytest.raises(ValueError, match="None of the first 3 rows.*prompt_length"):
        D3DTrainer(drafter_of(), arguments(tmp_path), train_dataset=rows)


def test_short_rows_give_a_finite_loss_and_a_warning(tmp_path, caplog):
    rows = [*rows_of(2), {"input_ids": [3, 4], "prompt_length": 1}, {"input_ids": [3, 4, 5], "prompt_length": 3}]
    weights, losses = trained(tmp_path, rows)
    assert "2 of the first 4 rows" in caplog.text
    assert all(np.isfinite(losses)) and all(torch.isfinite(tensor).all() for tensor in weights.values())
    alone, losses = trained(tmp_path, [rows[0], rows[2]], per_device_train_batch_size=1, max_steps=2)
    assert all(np.isfinite(losses)) and all(torch.isfinite(tensor).all() for tensor in alone.values())


def test_padding_is_never_a_target_and_eos_is_learned_though_both_are_one_token():
    eos = 0  # also what the collator pads with
    rows = [
        {"input_ids": [5, 6, 7, 8, eos], "prompt_length": 2},
        {"input_ids": list(range(5, 17)), "prompt_length": 2},
    ]
    draw = lambda length, prompt_length, rng: draw_blocks(length, prompt_length, 4, 3, 0.5, 1.0, rng)  # noqa: E731
    dataset = DraftingDataset(rows, draw, seed=0)
    batch = DraftingCollator(4, 0.8)([dataset[0], dataset[1]])
    context_labels = batch["labels"][0, :12].tolist()
    assert context_labels == [-100, 7, 8, eos, *[-100] * 8]
    assert (batch["anchors"][0] <= 2).all()
    assert eos in batch["labels"][0, 12:].tolist()
    assert not ((batch["labels"] == -100) & (batch["loss_weights"] > 0)).any()


def test_blocks_depend_on_seed_epoch_and_row_alone():
    rows = rows_of(6, longest=40)
    draw = lambda length, prompt_length, rng: draw_blocks(length, prompt_length, 4, 5, 0.5, 0.5, rng)  # noqa: E731

    def anchors(seed, epoch, index):
        dataset = DraftingDataset(rows, draw, seed)
        dataset.set_epoch(epoch)
        row = dataset[index]
        return row["anchors"].tolist() + row["num_visible"].tolist()

    assert anchors(0, 0, 3) == anchors(0, 0, 3)
    assert len({str(anchors(*case)) for case in ((0, 0, 3), (1, 0, 3), (0, 1, 3))}) == 3
    for index in range(6):
        drawn = DraftingDataset(rows, draw, 0)[index]
        used = drawn["anchors"][drawn["anchors"] >= 0]
        assert len(set(used.tolist())) == len(used)
        assert (used >= rows[index]["prompt_length"] - 1).all() and (used <= len(rows[index]["input_ids"]) - 3).all()


# Runs


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(tmp_path):
    rows = rows_of(12)
    kwargs = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 8, "lr_scheduler_type": "linear"}
    whole, _ = trained(tmp_path / "whole", rows, **kwargs)
    saving = {**kwargs, "save_strategy": "steps", "save_steps": 5}
    trained(tmp_path / "cut", rows, **{**saving, "max_steps": 8})
    resumed_drafter = drafter_of()
    resumed, _ = trained(
        tmp_path / "cut", rows, resumed_drafter, resume=str(tmp_path / "cut" / "checkpoint-5"), **saving
    )
    assert_same_weights(whole, resumed, tolerance=1e-7)


def test_two_processes_equal_one_with_twice_the_batch(tmp_path):
    rows = rows_of(8)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    drafter_of().save_pretrained(tmp_path / "drafter")
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, os, sys, torch
            from d3d_hf import D3DDrafterForCausalLM, D3DTrainer, D3DTrainingArguments
            torch.set_num_threads(1)
            folder, size, out = sys.argv[1:]
            drafter = D3DDrafterForCausalLM.from_pretrained(f"{folder}/drafter")
            args = D3DTrainingArguments(
                output_dir=f"{folder}/out", per_device_train_batch_size=int(size), max_steps=2, learning_rate=2e-3,
                lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, save_strategy="no", report_to=[],
                logging_steps=1, use_cpu=True, disable_tqdm=True, blocks_per_sequence=5,
                ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
            )
            trainer = D3DTrainer(drafter, args, train_dataset=json.load(open(f"{folder}/rows.json")))
            trainer.train()
            if trainer.is_world_process_zero():
                losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
                torch.save({"weights": dict(drafter.named_parameters()), "losses": losses}, f"{folder}/{out}")
            trainer.accelerator.wait_for_everyone()
            os._exit(0)  # gloo's threads may abort an ordinary exit
            """
        )
    )
    launch = ["-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no"]
    source = os.path.dirname(os.path.dirname(__import__("d3d_hf").__file__))
    environment = {**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["ACCELERATE_USE_CPU"] = "true"
    port = str(29500 + os.getpid() % 1000)
    two = ["--multi_gpu", "--num_processes", "2", "--main_process_port", port]  # what starts several, on CPUs too
    for launcher, size, out in (([*launch, *two], 2, "two.pt"), ([], 4, "one.pt")):
        command = [sys.executable, *launcher, str(script), str(tmp_path), str(size), out]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[-3000:]
    one, two = torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt")
    assert_same_weights(one["weights"], two["weights"])
    assert one["losses"] == pytest.approx(two["losses"], abs=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_load_and_keep_embeddings_tied(tmp_path, tied):
    model = tiny_model("qwen3", seed=3, tie_word_embeddings=tied)
    drafter = D3DDrafterForCausalLM.from_backbone(model, block_size=BLOCK_SIZE)
    weights, _ = trained(tmp_path, rows_of(8), drafter, save_strategy="steps", save_steps=2)
    loaded = D3DDrafterForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert_same_weights(weights, dict(loaded.named_parameters()), tolerance=0)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_lora_trains_the_adapter_and_the_mask_embedding_alone(tmp_path):
    drafter = drafter_of()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = D3DTrainer(
        drafter, arguments(tmp_path), train_dataset=rows_of(8), eval_dataset=rows_of(3), peft_config=lora
    )
    trainer.train()
    assert trainer.evaluate()["eval_acceptance_length"] >= 0
    changed = set()
    for name, parameter in drafter.named_parameters():
        plain = name.replace("base_layer.", "").replace("original_module.", "")
        if plain in before and "modules_to_save" not in name and not torch.equal(before[plain], parameter):
            changed.add(name)
    assert not changed, "the base is frozen"
    trainable = {name for name, p in drafter.named_parameters() if p.requires_grad}
    assert all("lora" in name or "mask_embedding" in name for name in trainable)
    mask = next(p for name, p in drafter.named_parameters() if "mask_embedding.modules_to_save" in name)
    assert not torch.equal(mask, before["mask_embedding.weight"])


def test_gradient_checkpointing_with_a_frozen_embedding_gives_the_same_gradients(tmp_path):
    gradients = []
    has_new_name = "activation_checkpointing" in inspect.signature(D3DTrainingArguments).parameters
    name = "activation" if has_new_name else "gradient"
    for checkpointing in (False, True):
        drafter = drafter_of()
        drafter.get_input_embeddings().requires_grad_(False)
        trained(
            tmp_path,
            rows_of(4),
            drafter,
            max_steps=1,
            **{f"{name}_checkpointing": checkpointing, f"{name}_checkpointing_kwargs": {"use_reentrant": False}},
        )
        gradients.append({name: p.detach().clone() for name, p in drafter.named_parameters()})
    assert_same_weights(*gradients)


def test_bf16_and_grouping_by_length(tmp_path):
    weights, losses = trained(tmp_path, rows_of(12), bf16=True, train_sampling_strategy="group_by_length", max_steps=3)
    assert all(np.isfinite(losses)) and all(torch.isfinite(tensor).all() for tensor in weights.values())


# Evaluation


def test_the_best_model_is_chosen_by_acceptance_length(tmp_path):
    trainer = D3DTrainer(
        drafter_of(),
        arguments(
            tmp_path,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="acceptance_length",
        ),
        train_dataset=rows_of(8),
        eval_dataset=rows_of(3),
        compute_metrics=lambda prediction: {"most": int(prediction.predictions.max())},
    )
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_acceptance_length" in entry]
    assert trainer.state.best_metric == max(entry["eval_acceptance_length"] for entry in evaluations)
    expected = {"acceptance_length", "tokens_per_round", "ar_accuracy", "bonus_hit_rate", "most"}
    assert {f"eval_{name}" for name in expected} <= set(evaluations[0])
    assert all(f"eval_acceptance_length_guess_{k}" in evaluations[0] for k in (1, 2, 3))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("mask_token_id", [None, 5])
def test_rounds_played_through_are_those_of_generate(architecture, mask_token_id):
    """Teacher-forced drafts after every position of the target's own text give the very rounds of a generation."""
    target = tiny_model(architecture, seed=11)
    drafter = D3DDrafterForCausalLM.from_backbone(
        tiny_model(architecture, seed=11), block_size=BLOCK_SIZE, mask_token_id=mask_token_id
    )
    with torch.no_grad():  # disturbed, so that drafts fail here and there
        drafter.lm_head.weight.add_(0.15 * torch.randn_like(drafter.lm_head.weight))
    prompt = torch.randint(6, 67, (1, 7))
    text = target.generate(prompt, max_new_tokens=30, do_sample=False)
    anchors = torch.arange(6, 36)[None]
    outcomes = draft_outcomes(drafter, drafter.config, text, torch.ones_like(text), anchors)
    rounds = play_through(outcomes, 0, prompt_length=7, length=37)
    target.generate(prompt, max_new_tokens=30, do_sample=False, assistant_model=drafter)
    stats = drafter.last_generation_stats
    assert sum(rounds) == 30 == stats.num_tokens
    histogram = {length - 1: rounds.count(length) for length in set(rounds)}
    assert histogram == stats.num_accepted
    packed = play_through(outcomes, 0, prompt_length=7, length=37, num_guesses=3)
    assert sum(packed) == 30 and packed[0] == 1


def test_a_right_guess_is_as_good_as_a_synchronous_draft():
    drafter, text = drafter_of(), torch.randint(2, 67, (2, 20))
    anchors = torch.arange(5, 18).expand(2, -1)
    outcomes = draft_outcomes(drafter, drafter.config, text, torch.ones_like(text), anchors)
    assert (outcomes.guessed[:, :-1] == outcomes.synchronous[:, 1:]).all()


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"blocks_per_sequence": 0}, "blocks_per_sequence is 0"),
        ({"visible_token_share": 1.5}, "visible_token_share is 1.5"),
        ({"block_loss_decay": 0.0}, "block_loss_decay is 0.0"),
        ({"denoising_mask_ratio": 1.2}, "denoising_mask_ratio is 1.2"),
        ({"ar_loss_weight": -1.0}, "ar_loss_weight is -1.0"),
        ({"distillation_temperature": 0.0}, "distillation_temperature is 0.0"),
    ],
)
def test_arguments_are_checked(kwargs, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **kwargs)


def test_models_and_teachers_are_checked(tmp_path):
    with pytest.raises(ValueError, match="LlamaForCausalLM.*from_backbone"):
        D3DTrainer(tiny_model("llama"), arguments(tmp_path), train_dataset=rows_of(2))
    with pytest.raises(ValueError, match="distillation_weight is 0.5.*teacher_model="):
        D3DTrainer(drafter_of(), arguments(tmp_path, distillation_weight=0.5), train_dataset=rows_of(2))
    with pytest.raises(ValueError, match="hold no rows"):
        D3DTrainer(drafter_of(), arguments(tmp_path), train_dataset=[])
