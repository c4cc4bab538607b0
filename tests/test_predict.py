"""The cost model: acceptance, schedules, what files say, the command."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_hf.cli import main
from d3d_hf.commands import predict_options
from d3d_hf.cost_model import (
    HARDWARE,
    AcceptanceProfile,
    MeasuredForward,
    Plan,
    RooflineForward,
    Schedule,
    best_choice,
    constant_profile,
    needed_tokens_per_round,
    predict,
    predict_lookup,
    simulate,
    with_layers_between,
)
from d3d_hf.cost_model.acceptance import first_slots, tokens_per_round, verdict_law, with_tokens_per_round
from d3d_hf.cost_model.forward_times import Demand
from d3d_hf.cost_model.inputs import conditional, read_acceptance, read_retention, read_times
from d3d_hf.cost_model.schedules import overlapped_ms
from d3d_hf.cost_model.shapes import SHAPE_NAMES, random_model, shape_config
from d3d_hf.testing import tiny_model


_CHANCES = st.lists(st.floats(0, 1), min_size=1, max_size=10)


def forward(name="qwen3-8b", hardware="h200", **kwargs):
    return RooflineForward(shape_config(name), HARDWARE[hardware], **kwargs)


class TestAcceptance:
    @given(_CHANCES)
    def test_tokens_per_round_is_the_mean_of_the_verdict_law(self, slots):
        law = verdict_law(slots)
        assert math.isclose(sum(law), 1)
        assert min(law) >= -1e-12
        assert math.isclose(tokens_per_round(slots), sum(p * (a + 1) for a, p in enumerate(law)))

    def test_known_values(self):
        assert tokens_per_round([0.5, 0.5]) == 1.75
        assert verdict_law([0.5, 0.5]) == [0.5, 0.25, 0.25]
        assert tokens_per_round([]) == 1

    @given(st.lists(st.floats(0.05, 1), min_size=1, max_size=10), st.floats(0, 1))
    def test_scaling_reaches_what_was_asked_for(self, slots, share):
        wanted = 1 + share * len(slots)
        scaled = with_tokens_per_round(slots, wanted)
        assert tokens_per_round(scaled) == pytest.approx(wanted, abs=1e-6)
        assert all(0 <= p <= 1 for p in scaled)

    def test_slots_beyond_the_profile_take_its_last_value(self):
        assert first_slots((0.9, 0.5), 4) == (0.9, 0.5, 0.5, 0.5)
        assert first_slots((0.9, 0.5), 1) == (0.9,)

    def test_retaining_scales_the_acceptance_length(self):
        profile = AcceptanceProfile((0.9, 0.8, 0.7))
        kept = profile.retaining(0.9)
        for before, after in ((profile.slots, kept.slots), (profile.masked_slots, kept.masked_slots)):
            assert tokens_per_round(after) - 1 == pytest.approx(0.9 * (tokens_per_round(before) - 1))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (((),), "slots"),
            (((1.2,),), "1.2"),
            (((0.5,), (-0.1,)), "masked_slots"),
            (((0.5,), None, (0.9, 0.8)), "rising"),
        ],
    )
    def test_no_probabilities_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            AcceptanceProfile(*arguments)

    def test_more_tokens_than_a_draft_has_are_refused(self):
        with pytest.raises(ValueError, match="give 1 to 9"):
            constant_profile(9.5, 8)


class TestForwardTimes:
    @pytest.mark.parametrize("name", SHAPE_NAMES)
    def test_weights_are_those_of_the_model(self, name):
        config = shape_config(name, tiny=True)
        model = random_model(config)
        layers = sum(p.numel() for key, p in model.named_parameters() if ".layers." in key and p.dim() == 2)
        roofline = RooflineForward(config, HARDWARE["h200"])
        assert config.num_hidden_layers * roofline.layer_weights == layers
        assert roofline.head_weights == model.get_output_embeddings().weight.numel()

    def test_few_tokens_wait_for_memory_and_many_for_arithmetic(self):
        few, many = forward().demand(1, 1), forward().demand(2048, 2048)
        latency = 36 * HARDWARE["h200"].layer_latency_ms
        assert few.alone_ms == pytest.approx(few.memory_ms + latency)
        assert many.alone_ms == pytest.approx(many.compute_ms + latency)

    def test_reads_of_qwen3_8b(self):
        # 36 layers of 192,937,984 weights and a head of 151,936 rows, in 16 bits, without a cache.
        assert forward(context=0).num_bytes(1) == 2 * (36 * 192_937_984 + 151_936 * 4096)
        assert forward(context=0).num_bytes(0) == 2 * 36 * 192_937_984

    def test_batches_and_context_cost_cache_reads(self):
        small, large = forward(context=100), forward(context=100, batch_size=4)
        per_sequence = 2 * 36 * 100 * 2 * 8 * 128
        assert large.num_bytes(1) - small.num_bytes(1) == 3 * per_sequence
        assert large.num_flops(5, 5) == 4 * small.num_flops(5, 5)

    def test_experts_and_wrong_numbers_are_refused(self):
        with pytest.raises(ValueError, match="mixture of experts"):
            RooflineForward(tiny_model("qwen3_moe").config, HARDWARE["h200"])
        with pytest.raises(ValueError, match="batch_size is 0"):
            forward(batch_size=0)

    def test_measured_times_are_lines(self):
        measured = MeasuredForward({"9": 30.0, "1": 22.0, "17": 46.0})
        assert [measured.alone_ms(n) for n in (1, 5, 9, 13, 17, 25)] == [22, 26, 30, 38, 46, 62]
        with pytest.raises(ValueError, match="at least two"):
            MeasuredForward({1: 20.0})

    def test_depths_between_measured_ones(self):
        measured = {10: MeasuredForward({1: 10.0, 9: 12.0}), 30: MeasuredForward({1: 30.0, 9: 36.0})}
        assert with_layers_between(measured, 20).forward_ms == {1: 20.0, 9: 24.0}
        assert with_layers_between(measured, 30) is measured[30]
        with pytest.raises(ValueError, match="measure two depths"):
            with_layers_between({30: measured[30]}, 20)


_DEMANDS = st.tuples(st.floats(0.1, 50), st.floats(0, 1), st.floats(0, 1)).map(
    lambda x: Demand(x[0], x[0] * x[1], x[0] * x[2])
)


class TestSchedules:
    @given(_DEMANDS, st.lists(_DEMANDS, max_size=2))
    def test_one_device_is_never_faster_than_its_resources(self, verification, passes):
        together = overlapped_ms(verification, passes)
        every = [verification, *passes]
        bounds = (
            verification.alone_ms,
            sum(p.alone_ms for p in passes),
            sum(p.memory_ms for p in every),
            sum(p.compute_ms for p in every),
        )
        assert together >= max(bounds) * (1 - 1e-9)

    def test_two_passes_bound_by_memory_take_the_sum(self):
        assert overlapped_ms(Demand(3.5, 3.5, 0.1), [Demand(3.2, 3.2, 0.3)]) == pytest.approx(6.7)

    def test_idle_arithmetic_hides_a_draft(self):
        assert overlapped_ms(Demand(10, 10, 1), [Demand(5, 0, 4)]) == pytest.approx(10)

    def test_serial_round(self):
        target, drafter = MeasuredForward({1: 25.0, 9: 33.0}), MeasuredForward({8: 30.0, 16: 38.0})
        profile = AcceptanceProfile((0.5,))
        prediction = predict(target, drafter, profile, Plan("serial", 8, 1, overhead_ms=2.0))
        assert prediction.tokens_per_round == 1.5
        assert prediction.round_ms == pytest.approx(26 + 30.5 + 2)  # half of the drafts take in one token more
        assert prediction.speedup == pytest.approx(1.5 * 25 / 58.5)

    def test_two_devices_wait_for_the_longer(self):
        target, drafter = forward("qwen3-32b"), forward("qwen3-1.7b")
        plan = Plan(Schedule.TWO_DEVICES, 8)
        prediction = predict(target, drafter, AcceptanceProfile((0.8,)), plan)
        assert prediction.round_ms == prediction.verify_ms > prediction.draft_ms

    def test_rounds_by_whether_the_bonus_was_guessed(self):
        flat = MeasuredForward({1: 10.0, 2: 10.0})
        profile = AcceptanceProfile((1.0,), (0.5,), (0.75,))
        expected = {
            (0, True): 1.5,
            (1, True): 0.75 * 2 + 0.25 * 1.5,
            (1, False): 0.75 * 2 + 0.25 * 1,
        }
        for (num_guesses, masked), tokens in expected.items():
            plan = Plan("two-devices", 1, num_guesses=num_guesses, has_masked_branches=masked)
            assert predict(flat, flat, profile, plan).tokens_per_round == pytest.approx(tokens)

    def test_needed_tokens_are_the_inverse_of_the_speedup(self):
        prediction = predict(forward(), forward("qwen3-1.7b"), AcceptanceProfile((0.8,)), Plan("one-device", 8))
        needed = needed_tokens_per_round(prediction.speedup, prediction.round_ms, prediction.plain_ms)
        assert needed == pytest.approx(prediction.tokens_per_round)

    def test_lookup_costs_its_verification(self):
        prediction = predict_lookup(MeasuredForward({1: 20.0, 11: 25.0}), 1.75)
        assert prediction.speedup == pytest.approx(1.75 * 20 / 25)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"block_size": 0}, "block_size is 0"),
            ({"draft_length": 9}, "draft_length is 9"),
            ({"num_guesses": -1}, "num_guesses is -1"),
            ({"has_masked_branches": False}, "neither guesses nor masked"),
            ({"overhead_ms": -1.0}, "overhead_ms"),
            ({"schedule": "parallel"}, "parallel"),
        ],
    )
    def test_unusable_plans_are_refused(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            Plan(**{"schedule": "one-device", "block_size": 8, **kwargs})


class TestSimulation:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        slots=st.lists(st.floats(0.2, 0.98), min_size=1, max_size=8),
        schedule=st.sampled_from(Schedule),
        target=st.sampled_from(("qwen3-32b", "qwen3-8b")),
        drafter=st.sampled_from(("qwen3-8b", "qwen3-1.7b")),
        hardware=st.sampled_from(("h200", "rtx4090", "cpu-2-cores")),
        batch_size=st.sampled_from((1, 8, 64)),
        context=st.sampled_from((16, 1024, 16384)),
        block_size=st.integers(2, 12),
        num_guesses=st.integers(0, 2),
        has_masked_branches=st.booleans(),
        overhead_share=st.floats(0, 0.3),
    )
    def test_closed_form_and_simulation_agree(
        self,
        slots,
        schedule,
        target,
        drafter,
        hardware,
        batch_size,
        context,
        block_size,
        num_guesses,
        has_masked_branches,
        overhead_share,
    ):
        sizes = {"hardware": hardware, "batch_size": batch_size, "context": context}
        target, drafter = forward(target, **sizes), forward(drafter, **sizes)
        plan = Plan(
            schedule,
            block_size,
            max(1, block_size - 1),
            num_guesses,
            has_masked_branches=has_masked_branches or num_guesses == 0,
            overhead_ms=overhead_share * target.demand(1, 1).alone_ms,
        )
        profile = AcceptanceProfile(slots)
        prediction = predict(target, drafter, profile, plan)
        simulated = simulate(target, drafter, profile, plan, num_rounds=20_000)
        assert simulated.tokens_per_round == pytest.approx(prediction.tokens_per_round, rel=0.02)
        assert simulated.round_ms == pytest.approx(prediction.round_ms, rel=0.02)
        assert simulated.ms_per_token == pytest.approx(prediction.ms_per_token, rel=0.02)

    def test_certain_rounds_are_exact(self):
        target, drafter = MeasuredForward({1: 10.0, 9: 10.0}), MeasuredForward({1: 4.0, 200: 4.0})
        profile = AcceptanceProfile((1.0,), (1.0,))
        times = {"serial": 14.0, "two-devices": 10.0}
        for schedule, round_ms in times.items():
            simulated = simulate(target, drafter, profile, Plan(schedule, 4), num_rounds=101)
            assert simulated.round_ms == pytest.approx(round_ms)
            # The first asynchronous round has no draft.
            first = 1 if schedule == "two-devices" else 5
            assert simulated.tokens_per_round == pytest.approx((first + 100 * 5) / 101)

    def test_the_same_seed_gives_the_same_rounds(self):
        arguments = forward(), forward("qwen3-1.7b"), AcceptanceProfile((0.8, 0.6)), Plan("serial", 4)
        first, same, other = (simulate(*arguments, num_rounds=200, seed=seed) for seed in (0, 0, 1))
        assert first == same != other


class TestSearch:
    def test_nothing_that_was_tried_is_better(self):
        target, profile = forward("qwen3-32b"), AcceptanceProfile((0.9, 0.85, 0.8))
        profiles = {28: profile, 20: profile.retaining(0.97)}

        def drafter(layers):
            return forward("qwen3-1.7b", num_layers=layers)

        best = best_choice(target, drafter, profiles, Schedule.ONE_DEVICE, range(1, 7), guess_counts=(0, 2))
        tried = {
            (layers, size, length, guesses): predict(
                target, drafter(layers), profiles[layers], Plan("one-device", size, length, guesses)
            ).speedup
            for layers in profiles
            for size in range(1, 7)
            for length in range(1, size + 1)
            for guesses in (0, 2)
        }
        assert best.prediction.speedup == max(tried.values())
        plan = best.plan
        assert tried[best.num_layers, plan.block_size, plan.draft_length, plan.num_guesses] == max(tried.values())

    def test_a_slow_drafter_drafts_less(self):
        target = MeasuredForward({1: 30.0, 17: 34.0})
        profiles = {1: AcceptanceProfile((0.8,))}

        def best_size(ms_per_slot):
            drafter = MeasuredForward({1: 5.0 + ms_per_slot, 17: 5.0 + 17 * ms_per_slot})
            return best_choice(target, lambda _: drafter, profiles, Schedule.SERIAL, range(1, 17)).plan.block_size

        assert best_size(3.0) < best_size(0.1)

    def test_nothing_to_try_is_refused(self):
        with pytest.raises(ValueError, match="No plan"):
            best_choice(forward(), lambda _: forward(), {36: AcceptanceProfile((0.5,))}, Schedule.SERIAL, [4], [8])


def written(tmp_path, content) -> str:
    path = tmp_path / "input.json"
    path.write_text(json.dumps(content))
    return str(path)


class TestInputs:
    def test_rows_of_a_benchmark(self, tmp_path):
        rows = [
            {"dataset": "gsm8k", "method": "plain", "tokens_per_second": 20.0, "slot_acceptance": []},
            {"dataset": "gsm8k", "method": "prompt-lookup", "slot_acceptance": [0.3, 0.9]},
            {"dataset": "gsm8k", "method": "d3d-async", "slot_acceptance": [0.7, 0.6]},
            {"dataset": "gsm8k", "method": "d3d-sync", "slot_acceptance": [0.9, 0.8]},
            {"dataset": "mt-bench", "method": "d3d-sync", "slot_acceptance": [0.6, 0.5]},
        ]
        path = written(tmp_path, {"results": rows})
        assert read_acceptance(path).slots == (0.9, 0.8)
        assert read_acceptance(path, dataset="mt-bench").slots == (0.6, 0.5)
        assert read_acceptance(path, method="prompt-lookup").slots == (0.3, 0.9)
        with pytest.raises(ValueError, match="humaneval.*gsm8k/d3d-sync"):
            read_acceptance(path, dataset="humaneval")

    def test_an_evaluation(self, tmp_path):
        def drafts(*chances):
            return {"acceptance_by_slot": [{"mean": chance} for chance in chances]}

        hits = {"1": {"mean": 0.7}, "2": {"mean": 0.9}}
        results = {"drafts": {"synchronous": drafts(0.8, 0.4), "masked": drafts(0.5, 0.1)}, "bonus_hit_rate": hits}
        given = read_acceptance(written(tmp_path, {"results": results}))
        assert given.slots == pytest.approx((0.8, 0.5))
        assert given.masked_slots == pytest.approx((0.5, 0.2))
        assert given.bonus_hit_rates == (0.7, 0.9)

    @given(_CHANCES)
    def test_conditional_is_the_inverse_of_the_product(self, slots):
        accepted, product = [], 1.0
        for chance in slots:
            product *= chance
            accepted.append(product)
        assert tokens_per_round(conditional(accepted)) == pytest.approx(1 + sum(accepted))

    def test_retention_of_a_pruning_report(self, tmp_path):
        report = {
            "full": {"kept_layers": [0, 1, 2]},
            "steps": [{"kept_layers": [0, 2], "retention": 0.98}, {"kept_layers": [0], "retention": 0.8}],
        }
        assert read_retention(written(tmp_path, report)) == {3: 1.0, 2: 0.98, 1: 0.8}
        assert read_retention(written(tmp_path, {"30": 1, "24": 0.97})) == {30: 1.0, 24: 0.97}

    @pytest.mark.parametrize(
        ("read", "content", "message"),
        [
            (read_acceptance, {}, "neither slot_acceptance nor results"),
            (read_acceptance, {"slot_acceptance": [2.0]}, "from 0 to 1"),
            (read_acceptance, [], "holds a list"),
            (read_retention, {"thirty": 1}, "no pruning report"),
            (read_retention, {"30": 0}, "above 0"),
            (read_times, {"target": {}}, "lacks forward times"),
            (read_times, {"target": {"forward_ms": {"1": 2, "9": 3}}, "drafters": []}, "no drafters"),
        ],
    )
    def test_unusable_files_are_refused(self, tmp_path, read, content, message):
        with pytest.raises(ValueError, match=message):
            read(written(tmp_path, content))


_SHAPES = ["predict", "--target", "qwen3-32b", "--drafter", "qwen3-1.7b", "--hardware", "h200"]


class TestCommand:
    def test_the_rows_are_what_the_functions_give(self, tmp_path, capsys):
        output = tmp_path / "predicted.json"
        arguments = ["--acceptance", "0.9,0.8,0.7,0.6", "--output", str(output), "--simulate", "50"]
        assert main([*_SHAPES, *arguments]) == 0
        printed, rows = capsys.readouterr().out, json.loads(output.read_text())["predicted"]
        assert len(rows) == 6
        profile = AcceptanceProfile((0.9, 0.8, 0.7, 0.6))
        for row in rows:
            plan = Plan(row["schedule"], row["block_size"], row["draft_length"], row["num_guesses"])
            prediction = predict(forward("qwen3-32b"), forward("qwen3-1.7b"), profile, plan)
            assert row["speedup"] == pytest.approx(prediction.speedup)
            assert row["simulated_speedup"] > 0
            assert f"{prediction.speedup:.2f}" in printed
        for given_row, best_row in zip(rows[::2], rows[1::2]):
            assert best_row["speedup"] >= given_row["speedup"]

    def test_depth_is_searched_where_its_acceptance_is_known(self, tmp_path, capsys):
        output, retention = tmp_path / "predicted.json", written(tmp_path, {"28": 1.0, "20": 0.995, "4": 0.1})
        arguments = ["--acceptance", "0.9,0.8,0.7,0.6", "--output", str(output), "--retention", retention]
        assert main([*_SHAPES, *arguments, "--schedule", "serial"]) == 0
        given_row, best_row = json.loads(output.read_text())["predicted"]
        assert (given_row["num_layers"], best_row["num_layers"]) == (28, 20)

    def test_tokens_per_round_are_what_was_asked_for(self, tmp_path, capsys):
        output = tmp_path / "predicted.json"
        arguments = [
            "--tokens-per-round",
            "4.01",
            "--block-size",
            "8",
            "--schedule",
            "serial",
            "--output",
            str(output),
        ]
        assert main([*_SHAPES, *arguments]) == 0
        assert json.loads(output.read_text())["predicted"][0]["tokens_per_round"] == pytest.approx(4.01)

    def test_every_device_can_be_named(self):
        assert predict_options.DEVICES == tuple(HARDWARE)
        assert predict_options.SCHEDULES == tuple(schedule.value for schedule in Schedule)

    def test_times_of_a_file(self, tmp_path, capsys):
        times = {
            "target": {"forward_ms": {"1": 25, "9": 33}},
            "drafters": [{"num_layers": 30, "forward_ms": {"8": 36, "16": 36}}],
            "round_overhead_ms": 1.5,
        }
        output = tmp_path / "predicted.json"
        arguments = ["--times", written(tmp_path, times), "--acceptance", "0.5", "--block-size", "8"]
        assert main(["predict", *arguments, "--draft-length", "8", "--output", str(output)]) == 0
        row = json.loads(output.read_text())["predicted"][0]
        assert row["round_ms"] == pytest.approx(33 + 36 + 1.5)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["predict", "--acceptance", "0.9"], "no times are given"),
            (["predict", "--acceptance", "0.9", "--hardware", "h200"], "--target and --drafter are missing"),
            ([*_SHAPES], "give either --acceptance"),
            ([*_SHAPES, "--tokens-per-round", "4"], "needs --block-size"),
            ([*_SHAPES, "--tokens-per-round", "9.5", "--block-size", "8"], "give 1 to 9"),
            ([*_SHAPES, "--acceptance", "0.9,x"], "no list of numbers"),
            ([*_SHAPES, "--acceptance", "1.9"], "each from 0 to 1"),
            ([*_SHAPES, "--acceptance", "0.9,0.8", "--draft-length", "3"], "draft_length is 3"),
            ([*_SHAPES, "--acceptance", "0.9", "--num-layers", "40"], "asks for 40 layers"),
            ([*_SHAPES, "--acceptance", "nothing.json"], "cannot be read"),
            ([*_SHAPES, "--acceptance", "0.9", "--times-output", "x.json"], "needs --measure"),
            (["predict", "--times", "a.json", "--measure"], "not allowed with"),
        ],
    )
    def test_errors_are_one_line(self, arguments, message, capsys):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
