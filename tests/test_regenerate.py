"""Regeneration: the target's own words whatever the batch, once each whatever happens, from models and servers."""

import collections
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from d3d_hf import D3DConfig
from d3d_hf.cli import main
from d3d_hf.testing import tiny_config, tiny_model, tiny_tokenizer
from d3d_hf.training import chat_server, check_responses, load_responses
from d3d_hf.training import regenerate as regenerating
from d3d_hf.training.answer_decoding import Decoding, SamplePerRow
from d3d_hf.training.chat_server import ChatServer, ServerError
from d3d_hf.training.chat_template import Template
from d3d_hf.training.prompts import Prompt, load_prompts
from d3d_hf.training.regenerate import regenerate
from d3d_hf.training.responses import ResponseFolder, tokenizer_fingerprint
from d3d_hf.training.server_engine import ServerEngine
from d3d_hf.training.transformers_engine import TransformersEngine


MAX_NEW_TOKENS = 12
LOUD = "{% if loud %}X{% endif %}"


def prompts_of(count=9):
    """Conversations of one to three turns of unequal lengths."""
    letters = "abcdefghij klmnop"
    return [
        Prompt(i, tuple(letters[(i + turn) % 7 : 8 + (5 * i + 3 * turn) % 9] for turn in range(1 + i % 3)))
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def target():
    """Ends its answers with one of two tokens, of which one pads."""
    model = tiny_model("llama", seed=5)
    model.generation_config.eos_token_id = [0, 31]
    return model


@pytest.fixture
def write(target, tmp_path):
    """Runs a regeneration into `tmp_path / name`; gives rows and metadata."""

    def write(name="out", prompts=None, batch_size=4, model=target, settings=None, system=None, shard=(), **decoding):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = LOUD + tokenizer.chat_template
        template = Template(tokenizer, settings, system)
        engine = TransformersEngine(
            model, tokenizer, Decoding(**{"max_new_tokens": MAX_NEW_TOKENS, **decoding}), batch_size
        )
        output = str(tmp_path / name)
        prompts = prompts_of() if prompts is None else prompts
        regenerate(engine, template, prompts, output, "org/target", "prompts.jsonl", *shard)
        return load_responses(output)

    return write


def shard_of(tmp_path, name="out"):
    (shard,) = (tmp_path / name).glob("*.jsonl")
    return shard


def assert_each_once(tmp_path, rows, prompts=None):
    """The rows are all there, and on disk no oftener."""
    expected = [f"{prompt.index}-{turn}" for prompt in prompts or prompts_of() for turn in range(len(prompt.turns))]
    assert [row["id"] for row in rows] == expected
    lines = [line for shard in (tmp_path / "out").glob("*.jsonl") for line in shard.read_text().splitlines()]
    assert sorted(json.loads(line)["id"] for line in lines) == sorted(expected)


# Answers


def test_greedy_answers_are_those_of_plain_generation_turn_by_turn(write, target):
    rows, metadata = write()
    tokenizer, row_of = tiny_tokenizer(), {row["id"]: row for row in rows}
    for prompt in prompts_of():
        messages = []
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            response = target.generate(ids, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=0)
            response = response[0, ids.shape[1] :].tolist()
            row = row_of[f"{prompt.index}-{turn}"]
            assert row["prompt_ids"] == ids[0].tolist() and row["response_ids"] == response
            is_ended = response[-1] in (0, 31)
            assert row["finish"] == ("stop" if is_ended else "length")
            messages.append({"role": "assistant", "content": tokenizer.decode(response, skip_special_tokens=True)})
    assert {row["finish"] for row in rows} == {"stop", "length"}
    assert metadata["target"] == "org/target" and metadata["vocab_size"] == 67
    assert metadata["prompts"]["num_rows"] == len(rows)


@pytest.mark.parametrize("decoding", [{}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9}])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_batches_do_not_change_answers(write, decoding, architecture):
    model = tiny_model(architecture, seed=5)
    one, _ = write("one", batch_size=1, model=model, **decoding)
    assert write("four", batch_size=4, model=model, **decoding)[0] == one
    assert write("all", batch_size=50, model=model, **decoding)[0] == one


def test_draws_depend_on_the_seed_and_the_row(write):
    prompts = [Prompt(i, ("abc",)) for i in range(6)]
    first, _ = write("first", prompts, temperature=1.5, seed=1)
    again, _ = write("again", prompts[2:4], temperature=1.5, seed=1)
    other, _ = write("other", prompts, temperature=1.5, seed=2)
    assert again == first[2:4]
    assert len({str(row["response_ids"]) for row in [*first, *other]}) == 12


def test_rows_are_drawn_from_their_law():
    scores = torch.tensor([[0.0, 1.0, -math.inf, 2.0, 0.5], [3.0, -math.inf, 0.0, -1.0, -math.inf]])
    draw = SamplePerRow([3, 4])
    drawn = torch.stack([draw(None, scores).argmax(dim=-1) for _ in range(3000)])  # (draws, rows)
    for row in (0, 1):
        frequencies = torch.bincount(drawn[:, row], minlength=5) / len(drawn)
        torch.testing.assert_close(frequencies, scores[row].softmax(-1), atol=0.03, rtol=0)
        assert (frequencies[scores[row].isinf()] == 0).all()


def test_system_message_and_template_settings_are_used_and_recorded(write):
    prompts = [Prompt(0, ("a",)), Prompt(1, ("a",), system="own")]
    rows, metadata = write(prompts=prompts, settings={"loud": True}, system="be kind")
    texts = [tiny_tokenizer().decode(row["prompt_ids"]) for row in rows]
    assert texts == ["Xsbe kind.ua.a", "Xsown.ua.a"]
    assert metadata["chat_template"]["settings"] == {"loud": True} and metadata["chat_template"]["system"] == "be kind"


def test_what_does_not_fit_is_skipped_and_not_tried_again(write, tmp_path, caplog):
    model = tiny_model("llama", max_position_embeddings=40)
    prompts = [Prompt(0, ("a" * 45, "b")), Prompt(1, ("a" * 30,)), Prompt(2, ("a", "b"))]
    rows, metadata = write(prompts=prompts, model=model)
    assert "Prompt 0 is left out from turn 0 on: its 48 tokens fill the 40 positions" in caplog.text
    assert [row["id"] for row in rows] == ["1-0", "2-0", "2-1"]
    assert len(rows[0]["response_ids"]) == 40 - 33 and len(rows[1]["response_ids"]) == MAX_NEW_TOKENS
    caplog.clear()
    assert write(prompts=prompts, model=model)[0] == rows
    assert not caplog.text


# Resumption


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_a_torn_shard_is_mended_without_losing_or_repeating_a_row(write, tmp_path, share):
    whole, _ = write()
    shard = shard_of(tmp_path)
    content = shard.read_bytes()
    shard.write_bytes(content[: round(share * len(content))])
    rows, _ = write()
    assert rows == whole
    assert_each_once(tmp_path, rows)


def test_a_process_killed_in_the_middle_of_a_line(write, tmp_path, monkeypatch):
    whole, _ = write("whole")
    pid = os.fork()
    if not pid:
        num_written = 0

        def append(folder, row):
            nonlocal num_written
            line = json.dumps(row).encode() + b"\n"
            num_written += 1
            if num_written == 6:
                folder._file.write(line[: len(line) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            folder._file.write(line)

        try:
            monkeypatch.setattr(ResponseFolder, "append", append)
            write()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert not shard_of(tmp_path).read_bytes().endswith(b"\n")
    assert len(load_responses(str(tmp_path / "out"))[0]) == 5
    rows, _ = write()
    assert rows == whole
    assert_each_once(tmp_path, rows)


def test_a_run_goes_on_with_another_number_of_processes(write, tmp_path, caplog):
    whole, _ = write("whole")
    rows, _ = write(shard=(0, 2))
    assert 0 < len(rows) < len(whole) and f"holds {len(rows)} of {len(whole)} responses" in caplog.text
    assert write()[0] == whole
    assert_each_once(tmp_path, whole)


def test_more_prompts_may_follow(write, tmp_path):
    write(prompts=prompts_of(4))
    rows, metadata = write(prompts=prompts_of(9))
    assert_each_once(tmp_path, rows)
    assert metadata["prompts"]["num_prompts"] == 9
    with pytest.raises(ValueError, match=r"number of prompts \(9 there, 4 here\)"):
        write(prompts=prompts_of(4))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_new_tokens": 13}, r"generation.max_new_tokens \(12 there, 13 here\)"),
        ({"temperature": 1.0, "seed": 4}, r"generation.temperature .*generation.seed \(0 there, 4 here\)"),
        ({"settings": {"loud": True}}, r"chat_template.settings.loud \(None there, True here\)"),
        ({"system": "be kind"}, r"chat_template.system \(None there, 'be kind' here\)"),
        ({"prompts": prompts_of(10)[1:]}, "prompts"),
        (
            {"model": tiny_model("llama", seed=5).to(torch.bfloat16)},
            r"engine.dtype \('float32' there, 'bfloat16'",
        ),
    ],
)
def test_other_settings_are_refused(write, tmp_path, change, message):
    write()
    before = shard_of(tmp_path).read_bytes()
    with pytest.raises(ValueError, match=f"begun with other settings: .*{message}.*another folder"):
        write(**change)
    assert shard_of(tmp_path).read_bytes() == before


def test_two_runs_at_once_into_one_folder_are_refused(write, tmp_path):
    _, metadata = write()
    with open(shard_of(tmp_path), "ab") as file:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="Another process is writing"):
            write()


def test_two_processes_share_the_prompts(write, target, tmp_path):
    prompts = [prompt for prompt in prompts_of() if len(prompt.turns) < 3]
    prompts = [Prompt(i, prompt.turns) for i, prompt in enumerate(prompts)]
    expected, _ = write("expected", prompts)
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"turns": prompt.turns}) + "\n" for prompt in prompts))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--multi_gpu", "--num_processes", "2", "--main_process_port", str(30500 + os.getpid() % 1000)]
    command += ["-m", "d3d_hf.cli", "regenerate", "--target", "target", "--prompts", "prompts.jsonl"]
    command += ["--output", "out", "--max-new-tokens", str(MAX_NEW_TOKENS)]
    source = os.path.dirname(os.path.dirname(__import__("d3d_hf").__file__))
    environment = {**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["ACCELERATE_USE_CPU"] = "true"
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "process 0 of 2" in result.stderr and "process 1 of 2" in result.stderr
    shards = sorted((tmp_path / "out").glob("*.jsonl"))
    assert [shard.name for shard in shards] == [f"responses-0000{i}-of-00002.jsonl" for i in (0, 1)]
    assert all(shard.read_text() for shard in shards)
    assert load_responses(str(tmp_path / "out"))[0] == expected
    assert_each_once(tmp_path, expected, prompts)


# Prompts


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_layouts_of_prompts(tmp_path):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "left out"},
        {"role": "user", "content": "b"},
    ]
    rows = [
        {"turns": ["a", "b"], "question": "not read"},
        {"question": "q", "answer": "x"},
        {"prompt": "p"},
        {"messages": messages},
        {"prompt": messages},
    ]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    expected = [
        Prompt(0, ("a", "b")),
        Prompt(1, ("q",)),
        Prompt(2, ("p",)),
        Prompt(3, ("a", "b"), "s"),
        Prompt(4, ("a", "b"), "s"),
    ]
    assert load_prompts(path) == expected
    assert load_prompts(path, max_samples=2) == expected[:2]
    assert load_prompts(path, column="question", max_samples=1) == [Prompt(0, ("not read",))]
    (tmp_path / "rows.json").write_text(json.dumps(rows[:2]))
    assert load_prompts(str(tmp_path / "rows.json")) == expected[:2]


@pytest.mark.parametrize(
    "rows, column, message",
    [
        ([{"text": "x"}], None, r"row 0 of .*columns \['text'\].*--prompt-column"),
        ([{"question": "x"}], "text", r"no column 'text', but the columns \['question'\]"),
        ([{"turns": []}], None, r"column 'turns' holds \[\]"),
        ([{"question": "x"}, {"question": 3}], None, "row 1 of .*'question' holds 3"),
        ([{"messages": [{"role": "tool", "content": "x"}]}], None, "role 'tool'"),
        ([], None, "holds no prompts"),
    ],
)
def test_unusable_prompts(tmp_path, rows, column, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(write_lines(tmp_path / "rows.jsonl", rows), column)


def test_prompts_from_the_hub(monkeypatch, tmp_path):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return [{"question": "q"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert load_prompts("org/prompts", split="test", subset="main") == [Prompt(0, ("q",))]
    assert asked == [(("org/prompts", "main"), {"split": "test"})]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"'org/prompts' is no file.*pip install d3d_hf\[train\]"):
        load_prompts("org/prompts")
    with pytest.raises(ValueError, match="There is no file './rows'"):
        load_prompts("./rows")
    (tmp_path / "rows.jsonl").write_text('{"question": "x"}\n{"question"\n')
    with pytest.raises(ValueError, match="Line 2 of .* is no JSON"):
        load_prompts(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.5}, "top_p is 0.5.*temperature 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1"),
    ],
)
def test_decoding_is_checked(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Decoding(**kwargs)


def test_templates_are_checked():
    with pytest.raises(ValueError, match="takes no setting 'loudd'"):
        Template(tiny_tokenizer(), {"loudd": True})
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        Template(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '<s>' }}{% endfor %}"
    assert Template(tokenizer).end_of_turn() == 1
    assert Template(tiny_tokenizer()).end_of_turn() is None


# Servers


class FlakyServer(ThreadingHTTPServer):
    """Answers with the last user turn, backwards; `plan` maps the number of a request to what goes wrong instead."""

    daemon_threads = True

    def __init__(self, plan=lambda number, body: None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.plan, self.requests, self.lock = plan, [], threading.Lock()
        self.num_open = self.most_open = 0
        self.gate = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass  # connections are cut on purpose


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = len(server.requests)
            server.requests.append((self.path, dict(self.headers), body))
            server.num_open += 1
            server.most_open = max(server.most_open, server.num_open)
        try:
            if server.gate is not None:
                server.gate.wait(timeout=10)
            self._answer(server.plan(number, body), body)
        finally:
            with server.lock:
                server.num_open -= 1

    def _answer(self, trouble, body):
        if trouble == "cut":
            self.connection.close()
            return
        status, headers, finish = trouble or (200, {}, None)
        answer = body["messages"][-1]["content"][::-1]
        finish = finish or ("length" if len(answer) > body["max_tokens"] else "stop")
        message = {"role": "assistant", "content": answer[: body["max_tokens"]]}
        content = {"choices": [{"message": message, "finish_reason": finish}]} if status == 200 else {"error": "busy"}
        content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def serve(plan=lambda number, body: None):
        server = FlakyServer(plan)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def waits(monkeypatch):
    """Seconds that the client wanted to sleep; it does not."""
    waits = []
    monkeypatch.setattr(chat_server, "time", types.SimpleNamespace(sleep=waits.append, time=time.time))
    return waits


def ask(server, tmp_path, prompts=None, concurrency=4, settings=None, **decoding):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = LOUD + "{% for m in messages %}{{ m['content'] + '<s>' }}{% endfor %}"
    template = Template(tokenizer, settings)
    client = ChatServer(f"{server.url}/v1", "served", api_key="key", max_retries=3)
    engine = ServerEngine(client, template, Decoding(**{"max_new_tokens": 10, **decoding}), concurrency, vocab_size=67)
    regenerate(engine, template, prompts or prompts_of(), str(tmp_path / "out"), "org/target", "prompts.jsonl")
    return load_responses(str(tmp_path / "out"))


def expected_of_server(prompts):
    """The rows of an untroubled server."""
    rows, tokenizer = {}, tiny_tokenizer()
    for prompt in prompts:
        history = ""
        for turn, text in enumerate(prompt.turns):
            answer = text[::-1][:10]
            history += text + "<s>"
            response = tokenizer(answer)["input_ids"] + ([1] if len(text) <= 10 else [])
            finish = "stop" if len(text) <= 10 else "length"
            row_id = f"{prompt.index}-{turn}"
            prompt_ids = tokenizer(history)["input_ids"]
            rows[row_id] = {"id": row_id, "prompt_ids": prompt_ids, "response_ids": response, "finish": finish}
            history += answer + "<s>"
    return rows


def test_a_flaky_server_loses_and_repeats_no_row(serve, waits, tmp_path):
    troubles = {1: (429, {"Retry-After": "7"}, None), 3: (500, {}, None), 4: "cut", 6: (503, {}, None), 9: "cut"}
    server = serve(lambda number, body: troubles.get(number))
    rows, metadata = ask(server, tmp_path)
    assert {row["id"]: row for row in rows} == expected_of_server(prompts_of())
    assert {row["finish"] for row in rows} == {"stop", "length"}
    assert_each_once(tmp_path, rows)
    assert len(server.requests) == len(rows) + len(troubles)
    assert len(waits) == len(troubles) and 7.0 in waits
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer key"
    assert body == {
        "model": "served",
        "messages": body["messages"],
        "max_tokens": 10,
        "temperature": 0.0,
    }
    assert metadata["engine"] == {"name": "openai", "base_url": f"{server.url}/v1", "model": "served"}
    assert "key" not in json.dumps(metadata).replace("keys", "")


def test_requests_under_way_are_bounded(serve, tmp_path):
    server = serve()
    server.gate = threading.Barrier(3)  # passes only if three are there at once
    prompts = [Prompt(i, ("abc",)) for i in range(9)]
    assert len(ask(server, tmp_path, prompts, concurrency=3)[0]) == 9
    assert server.most_open == 3 and not server.gate.broken


def test_seeds_and_template_settings_reach_the_server(serve, tmp_path):
    server = serve()
    ask(server, tmp_path, prompts_of(3), settings={"loud": False}, temperature=0.5, top_p=0.9, top_k=5, seed=3)
    bodies = [body for _, _, body in server.requests]
    assert len({body["seed"] for body in bodies}) == len(bodies)
    assert all(0 <= body["seed"] < 2**31 for body in bodies)
    assert all((body["temperature"], body["top_p"], body["top_k"]) == (0.5, 0.9, 5) for body in bodies)
    assert all(body["chat_template_kwargs"] == {"loud": False} for body in bodies)


def test_a_row_that_fails_for_good_is_named_and_the_others_are_kept(serve, waits, tmp_path):
    is_broken = True

    def plan(number, body):
        bad = is_broken and body["messages"][0]["content"] == prompts_of()[4].turns[0]
        return (500, {}, None) if bad else None

    with pytest.raises(ServerError, match="Row 4-0 failed with status 500: .*busy.*, 4 times") as caught:
        ask(serve(plan), tmp_path)
    assert caught.value.status == 500 and len(waits) == 3
    assert all(low / 2 <= wait <= low for wait, low in zip(waits, (1.0, 2.0, 4.0)))
    kept = {row["id"] for row in load_responses(str(tmp_path / "out"))[0]}
    assert kept == {key for key in expected_of_server(prompts_of()) if not key.startswith("4-")}
    is_broken = False
    rows, _ = ask(serve(plan), tmp_path)  # at another address
    assert {row["id"]: row for row in rows} == expected_of_server(prompts_of())
    assert_each_once(tmp_path, rows)


@pytest.mark.parametrize(
    "trouble, num_requests, message",
    [
        ((401, {}, None), 1, "Row 0-0 failed with status 401"),
        ((400, {}, None), 6, r"failed with status 400.*\(and 5 more rows failed\)"),
        ((200, {}, "content_filter"), 6, "finish_reason 'content_filter'"),
        ("cut", 4, "Row 0-0 failed with no answer: .*, 4 times"),
    ],
)
def test_what_retries_do_not_mend(serve, waits, tmp_path, trouble, num_requests, message):
    server = serve(lambda number, body: trouble)
    with pytest.raises(ServerError, match=message):
        ask(server, tmp_path, [Prompt(i, ("abc",)) for i in range(6)], concurrency=1)
    assert len(server.requests) == num_requests


def test_retry_after_may_be_a_date():
    assert chat_server._retry_after_s("2.5") == 2.5
    assert chat_server._retry_after_s("nan") == 0.0
    assert chat_server._retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert chat_server._retry_after_s("Wed, 21 Oct 2095 07:28:00 GMT") == 600.0
    assert chat_server._retry_after_s("soon") is None and chat_server._retry_after_s(None) is None


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/v1", "http://"])
def test_base_urls_are_checked(url):
    with pytest.raises(ValueError, match="The base URL is"):
        ChatServer(url, "model")


# What was written, read again


def test_files_of_rows_have_no_metadata(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [{"p": [1, 2], "r": [3]}])
    assert load_responses(path) == ([{"p": [1, 2], "r": [3]}], None)
    (tmp_path / "empty").mkdir()
    for bad, message in (("empty", "holds no metadata.json"), ("missing", "There is no")):
        with pytest.raises(ValueError, match=message):
            load_responses(str(tmp_path / bad))


def test_rows_that_are_no_responses_are_refused(write, tmp_path):
    write()
    with open(shard_of(tmp_path), "a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match="Line 19 of .* is no response"):
        load_responses(str(tmp_path / "out"))


def test_responses_are_held_against_the_drafter():
    tokenizer, other = tiny_tokenizer(), tiny_tokenizer()
    other.add_tokens(["one more"])
    metadata = {
        "target": "org/target",
        "vocab_size": 67,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
    }

    def config(target="org/target", recipe=None, vocab_size=67):
        return D3DConfig(
            tiny_config("llama"), vocab_size=vocab_size, target_name_or_path=target, training_recipe=recipe
        )

    check_responses(None, config("anything"))
    check_responses(metadata, config())
    check_responses(metadata, config(None), tokenizer)
    check_responses(metadata, config("org/other"), tokenizer, allow_other_target=True)
    check_responses(metadata, config(recipe={"data": {"tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}}))
    trained_otherwise = config(recipe={"data": {"tokenizer_fingerprint": tokenizer_fingerprint(other)}})
    for arguments, message in (
        ((config("org/other"),), "those of 'org/target' and the drafter drafts for 'org/other'.*--allow-other-target"),
        ((config(vocab_size=60),), "a vocabulary of 67 tokens .*'org/target'.* one of 60"),
        ((config(), other, True), "tokenized by the tokenizer of 'org/target'.*was given here"),
        ((trained_otherwise,), "the one that the drafter was trained with"),
    ):
        with pytest.raises(ValueError, match=message):
            check_responses(metadata, *arguments)


# The command


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, target):
    monkeypatch.chdir(tmp_path)
    target.save_pretrained("target")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = LOUD + tokenizer.chat_template
    tokenizer.save_pretrained("target")
    write_lines(tmp_path / "prompts.jsonl", [{"turns": prompt.turns} for prompt in prompts_of()])

    def run(*argv):
        capsys.readouterr()
        status = main(["regenerate", "--prompts", "prompts.jsonl", "--output", "out", *map(str, argv)])
        return status, capsys.readouterr().err

    return run


def test_the_command_with_a_target(run, write, tmp_path):
    expected, _ = write("expected")
    arguments = ("--target", "target", "--device", "cpu", "--max-new-tokens", MAX_NEW_TOKENS)
    status, err = run(*arguments)
    assert status == 0 and err.startswith(f"[{len(expected)} answers, ") and "tokens/s]" in err
    rows, metadata = load_responses("out")
    assert rows == expected and metadata["target"] == "target"
    status, err = run(*arguments)
    assert status == 0 and f"0 answers, 0 tokens, 0.0 tokens/s; {len(rows)} were there already" in err
    status, err = run(*arguments, "--template-arg", "loud=true")
    assert status == 2 and "chat_template.settings.loud (None there, True here)" in err


def test_the_command_with_a_server(run, serve, monkeypatch):
    server = serve()
    monkeypatch.setenv("SERVER_KEY", "secret")
    arguments = ("--engine", "openai", "--base-url", server.url, "--target", "target", "--api-key-env", "SERVER_KEY")
    status, err = run(*arguments, "--max-samples", 3)
    assert status == 0 and err.startswith("[6 answers")
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body["model"] == "target"
    metadata = load_responses("out")[1]
    assert metadata["vocab_size"] == 67 and "secret" not in json.dumps(metadata)
    server.plan = lambda number, body: (403, {}, None)
    status, err = run(*arguments)
    assert status == 1 and "failed with status 403" in err and "the same command goes on from there" in err


@pytest.mark.parametrize(
    "argv, words",
    [
        (("--base-url", "http://x/v1"), ["--base-url", "http://x/v1", "--engine openai"]),
        (("--engine", "openai", "--target", "x"), ["--base-url"]),
        (("--engine", "openai", "--base-url", "http://x/v1"), ["--target"]),
        (("--engine", "openai", "--base-url", "x", "--target", "target"), ["base URL is 'x'"]),
        (("--engine", "openai", "--base-url", "http://x", "--target", "x", "--batch-size", "3"), ["--batch-size 3"]),
        (("--engine", "openai", "--base-url", "http://x", "--target", "x", "--api-key-env", "NO_KEY"), ["NO_KEY"]),
        (("--template-arg", "loud"), ["'loud'", "KEY=VALUE"]),
        (("--target", "target", "--template-arg", "quiet=1"), ["'quiet'", "chat template"]),
        (("--top-p", "0.5"), ["top_p is 0.5", "temperature"]),
        (("--prompt-column", "text"), ["no column 'text'", "turns"]),
        (("--target", "nowhere/"), ["--target 'nowhere/'"]),
    ],
)
def test_usage_errors_are_one_line(run, argv, words):
    status, err = run(*argv)
    assert status == 2 and err.count("\n") == 1 and err.startswith("d3d-hf: error: ")
    assert all(word in err for word in words), err
    assert not os.path.exists("out")


def test_progress_counts_rows_and_tokens(write, monkeypatch, capsys):
    bars = collections.deque()
    progress = regenerating._progress

    def shown(conversations, total, num_present, is_shown):
        bars.append(progress(conversations, total, num_present, True))
        return bars[-1]

    monkeypatch.setattr(regenerating, "_progress", shown)
    write()
    assert bars[0].n == bars[0].total == 18
    assert "tokens/s" in capsys.readouterr().err
