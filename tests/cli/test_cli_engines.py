"""The commands that take an engine, on a fake model."""

from __future__ import annotations

import hashlib
import json

import pytest

from support.fake_engine import sections, write_engine

# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_a_whole_engine(invoke, engine):
    result = invoke("verify", engine)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{engine}: ok, 9 files, ")


def test_verify_names_every_wrong_file(invoke, engine):
    raw = bytearray((engine / "weights" / "model.safetensors").read_bytes())
    raw[17] ^= 4
    (engine / "weights" / "model.safetensors").write_bytes(raw)
    (engine / "report.json").unlink()
    result = invoke("verify", engine)
    assert result.exit_code == 2
    assert "error: 2 wrong file(s) in the engine:" in result.stderr
    assert "\n  report.json: missing (expected " in result.stderr
    assert "\n  weights/model.safetensors: content changed: sha256 " in result.stderr


def test_verify_json_tells_problems_on_stdout(invoke, engine):
    assert json.loads(invoke("verify", engine, "--json").stdout)["ok"] is True
    (engine / "plan" / "model.onnx").write_bytes(b"")
    result = invoke("verify", engine, "--json")
    assert (result.exit_code, result.stderr) == (2, "")
    told = json.loads(result.stdout)
    assert told["ok"] is False
    assert told["problems"] == [{"path": "plan/model.onnx", "what": "truncated: 0 bytes, expected 35"}]


@pytest.mark.parametrize("command", ["verify", "inspect", "chat", "bench latency", "bench throughput", "run -p x"])
def test_no_engine_there(invoke, tmp_path, command):
    result = invoke(*command.split(), tmp_path / "none")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: no engine at {tmp_path / 'none'}\n  next:  ")


@pytest.mark.parametrize("command", ["inspect", "chat", "bench latency", "run -p x"])
def test_damaged_engine_is_refused(invoke, engine, command):
    (engine / "weights" / "model.safetensors").write_bytes(b"short")
    result = invoke(*command.split(), engine)
    assert result.exit_code == 2
    assert "error: the engine is damaged: weights/model.safetensors: truncated: 5 bytes, expected 5120" in result.stderr


@pytest.mark.parametrize("command", ["chat", "bench latency", "bench throughput", "run -p x"])
@pytest.mark.parametrize("option", ["--device 1", "--kv-memory-fraction 0.5"])
def test_options_of_the_cuda_target_reach_the_executor(invoke, engine, command, option):
    result = invoke(*command.split(), engine, *option.split())
    assert result.exit_code == 2
    name = option.split()[0].removeprefix("--").replace("-", "_")
    assert f"error: the cpu target has no option {name!r}" in result.stderr


@pytest.mark.parametrize("command", ["verify", "inspect", "chat", "bench latency", "run -p x"])
def test_engine_of_a_newer_format_is_refused(invoke, engine, command):
    raw = (engine / "engine.json").read_bytes().replace(b'"format_version": 1', b'"format_version": 2')
    (engine / "engine.json").write_bytes(raw)
    (engine / "engine.json.sha256").write_text(f"{hashlib.sha256(raw).hexdigest()}  engine.json\n")
    result = invoke(*command.split(), engine)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the engine has format version 2; this llmbuild reads version 1" in result.stderr


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_shows_every_section(invoke, engine):
    (engine / "notes.txt").write_text("mine")
    result = invoke("inspect", engine)
    assert result.exit_code == 0, result.stderr
    for text in (
        "tiny (LlamaForCausalLM, from huggingface)",
        "at most 4 sequences in a step",
        "at most 16 in a step",
        "at most 64 tokens (the model: 128)",
        "float32, 128 bytes a token, blocks of 16 tokens",
        "numpy>=1.26",
        "90 graph nodes became 40",
        "2 x a",
        "weights/model.safetensors",
    ):
        assert text in result.stdout
    assert "notes.txt lies in the directory and is not part of the engine" in result.stderr


def test_inspect_json_is_one_object(invoke, engine):
    told = json.loads(invoke("inspect", engine, "--json").stdout)
    assert told["manifest"]["limits"] == {"max_batch_size": 4, "max_num_tokens": 16, "max_seq_len": 64}
    assert told["report"]["graph_nodes"] == {"traced": 90, "optimized": 40}
    assert told["unmet_requirements"] == []


def test_inspect_works_where_the_engine_cannot_run(invoke, tmp_path):
    target = sections()["target"].model_copy(update={"requires": {"numpy": ">=1000"}})
    write_engine(tmp_path / "e", target=target, payload={"report.json": json.dumps(report()).encode()})
    result = invoke("inspect", tmp_path / "e")
    assert result.exit_code == 0
    assert "this machine cannot run it as it is: it needs numpy>=1000 (" in result.stderr


def report() -> dict:
    return {"report_version": 1, "graph_nodes": {"traced": 1, "optimized": 1}, "passes": [], "weight_bytes": {}}


# --- run --------------------------------------------------------------------------------------------------------------


def test_run_streams_what_json_tells_at_once(invoke, engine):
    words = ("run", engine, "-p", "Hello", "--max-tokens", 12, "--temperature", 0)
    streamed, told = invoke(*words), json.loads(invoke(*words, "--json").stdout)
    assert streamed.exit_code == 0, streamed.stderr
    assert streamed.stdout == told["text"] + "\n"
    assert told["prompt_tokens"] == 4  # H e ll o
    assert told["output_tokens"] == len(told["token_ids"]) == 12
    assert told["finish_reason"] == "length"


def test_run_chat_uses_the_template(invoke, engine):
    words = ("run", engine, "-p", "Hi", "--max-tokens", 3, "--temperature", 0, "--json")
    plain, chat = json.loads(invoke(*words).stdout), json.loads(invoke(*words, "--chat").stdout)
    assert plain["prompt_tokens"] == 2
    assert chat["prompt_tokens"] > 15


def test_run_seed_fixes_the_text(invoke, engine):
    words = ("run", engine, "-p", "Hello", "--max-tokens", 12, "--temperature", 1, "--json", "--seed")
    first, again, other = (json.loads(invoke(*words, seed).stdout)["token_ids"] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-p", ""], "the prompt is empty"),
        (["-p", "x" * 64], "the prompt has 64 tokens, but the engine holds"),
        (["-p", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["-p", "x", "--max-tokens", "64"], "but the engine holds"),
        (["-p", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["-p", "x", "--top-p", "0"], "top_p is 0.0"),
    ],
)
def test_run_refuses(invoke, engine, words, message):
    result = invoke("run", engine, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "\n  next:  " in result.stderr
    told = invoke("run", engine, *words, "--json")
    assert (told.exit_code, told.stdout) == (2, "")
    assert message in json.loads(told.stderr)["error"]["what"]


def test_chat_without_a_template_is_refused(invoke, engine, write_fake_engine, tmp_path):
    write_fake_engine(tmp_path / "plain", chat_template=False)
    for result in (
        invoke("run", tmp_path / "plain", "-p", "Hi", "--chat"),
        invoke("chat", tmp_path / "plain", input="Hi\n"),
    ):
        assert (result.exit_code, result.stdout) == (2, "")
        assert "the model has no chat template" in result.stderr


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat_reads_messages_from_a_pipe(invoke, engine):
    words = ("chat", engine, "--temperature", 0, "--max-tokens", 4)
    one = invoke(*words, input="a\n").stdout
    assert one.count("\n") >= 1
    assert invoke(*words, input="a\n/exit\nb\n").stdout == one
    assert invoke(*words, input="\na\n\n").stdout == one
    twice = invoke(*words, input="a\n/reset\na\n").stdout
    assert twice == one + one


def test_chat_remembers(invoke, engine):
    words = ("chat", engine, "--temperature", 0, "--max-tokens", 4)
    one, two = invoke(*words, input="a\n"), invoke(*words, input="a\na\n")
    assert two.stdout.startswith(one.stdout)
    assert two.stdout != one.stdout + one.stdout  # the second answer continues the conversation


def test_chat_that_outgrows_the_engine(invoke, engine):
    words = ("chat", engine, "--temperature", 0, "--max-tokens", 4)
    result = invoke(*words, input="a\n" * 6)
    assert result.exit_code == 2
    assert "but the engine holds" in result.stderr
    assert result.stdout.startswith(invoke(*words, input="a\n").stdout)


# --- bench ------------------------------------------------------------------------------------------------------------


def test_bench_latency_prints_json_first_and_a_table_last(invoke, engine, tmp_path):
    words = ("--input-len", 8, "--output-len", 6, "--batch-size", 2, "--num-iters-warmup", 1, "--num-iters", 3)
    result = invoke("bench", "latency", engine, *words, "--output-json", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.stderr
    first, *rest = result.stdout.splitlines()
    record = json.loads(first)
    assert (record["kind"], record["batch_size"], record["iterations"], record["tag"]) == ("latency", 2, 3, "none")
    assert 0 < record["ttft_ms"]["p50"] < record["latency_ms"]["p99"]
    assert record["ms_per_token"]["mean"] > 0
    assert "ms_per_token" in "\n".join(rest)
    assert json.loads((tmp_path / "out.jsonl").read_text()) == record


def test_bench_throughput(invoke, engine):
    words = ("--num-prompts", 7, "--input-len", 8, "--output-len", 6, "--max-concurrency", 3, "--json")
    result = invoke("bench", "throughput", engine, *words)
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["kind"], record["num_prompts"], record["concurrency"]) == ("throughput", 7, 3)
    assert record["output_tok_s"] > 0
    assert record["total_tok_s"] == pytest.approx(record["output_tok_s"] * 14 / 6, rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["latency", "--batch-size", "5"], "batch size 5 is beyond the engine's 4"),
        (["latency", "--input-len", "32", "--output-len", "33"], "but the engine holds"),
        (["throughput", "--input-len", "64", "--output-len", "1"], "the prompt has 64 tokens"),
    ],
)
def test_bench_refuses(invoke, engine, words, message):
    result = invoke("bench", words[0], engine, *words[1:])
    assert result.exit_code == 2
    assert message in result.stderr
