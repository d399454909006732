"""train.py on several processes trains what it trains on one; what befalls one process, all know.

Most tests call the loop inside a team of gloo processes (tests/processes.py); what only a real job
can show (an error, a killed process, a signal to torchrun) runs under torchrun.

The data are small and awkward. Rows with 0 to 3 negatives, of which 2 are used, so the processes
hold uneven numbers of documents. One image among the 6 rows of a global batch, so that in every
step some process holds nothing but texts. Two held-out rows, fewer than three processes.
"""
import contextlib
import functools
import hashlib
import io
import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from PIL import Image

import checkpoint
import dist
import flags
import step
from tests.processes import run, torchrun
from tests.test_collectives import Collectives

ROWS = 6                                        # a global batch: 6 x 1, 3 x 2 or 2 x 3 processes
WORDS = "sort list key value open file read byte send mail parse date find path copy tree".split()


def words(i, j):
    """3 to 7 words: samples differ in content and in length."""
    return " ".join(WORDS[(5 * i + 3 * j + k * (i + 1)) % 16] for k in range(3 + (i + j) % 5))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with train.jsonl (one global batch), eval.jsonl and an image."""
    folder = tmp_path_factory.mktemp("pairs")
    Image.effect_mandelbrot((96, 64), (-2, -1, 1, 1), 20).save(folder / "page.png")
    rows = [{"query": f"query {i} {words(i, 0)}", "positive": f"answer {i} {words(i, 1)}",
             "negatives": [f"other {i} {words(i, j)}" for j in range(2, 2 + i % 4)]}
            for i in range(ROWS + 2)]
    rows[0]["positive"] = {"image": "page.png", "text": "a page"}
    for name, part in (("train", rows[:ROWS]), ("eval", rows[ROWS:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def arguments(data, out, processes, *more, steps=3):
    """Command line of a run; every process count gets the same global batch."""
    return [*map(str, ("--train-jsonl", data / "train.jsonl", "--eval-jsonl", data / "eval.jsonl",
                       "--batch-size", ROWS // processes, "--num-hard-negatives", 2,
                       "--max-steps", steps, "--warmup-steps", 0, "--lr", 1e-3, "--dtype", "fp32",
                       "--max-length", 64, "--max-num-visual-tokens", 8, "--output-dir", out,
                       *more))]


def loop(argv, **patches):
    """train.py on this process; `patches` replace its functions: name=wrap, called as wrap(real).
    -> exit status, what it printed, the weights after the last step (on process 0), and after each
    step a digest of all weights that this process holds."""
    import train
    printed, digests, last = io.StringIO(), [], {}

    def update(real):
        def wrapped(everything, *rest):
            norm = real(everything, *rest)
            last.update(everything.named_parameters())
            whole = {n: dist.whole(p.detach()) for n, p in last.items()}
            digests.append(hashlib.sha256(b"".join(w.numpy().tobytes() for w in whole.values()))
                           .hexdigest())
            return norm
        return wrapped
    tiny = functools.partial(train.tiny_qwen3_vl, hidden=32, heads=2)
    # One sample per forward of an evaluation: a process with one more would wait for the others.
    encode = functools.partialmethod(train.BiEncoder.encode, batch_size=1)
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(printed):
        for owner, name, value in ((train.BiEncoder, "encode", encode), (train, "tiny_qwen3_vl",
                                   tiny), (train, "verify", lambda *_, **__: 0.0)):
            stack.enter_context(mock.patch.object(owner, name, value))
        for name, wrap in (*patches.items(), ("update", update)):
            module = train if hasattr(train, name) else step
            stack.enter_context(mock.patch.object(module, name, wrap(getattr(module, name))))
        status = train.train(train.parse_args(argv), torch.device("cpu"))
    weights = {n: dist.whole(p.detach()) for n, p in last.items()}
    return SimpleNamespace(status=status, printed=printed.getvalue(), digests=digests,
                           weights=weights if dist.is_main() else None)


def log(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def same_rows(got, expected, rel):
    """Two logs agree in everything but time and memory."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        a, b = ({k: v for k, v in row.items() if k not in ("pairs_per_second", "peak_memory_mb")}
                for row in (a, b))
        assert a == (b if rel == 0 else pytest.approx(b, rel=rel, abs=1e-6))


# --- The same training ---------------------------------------------------------------------------

MODES = {
    "all weights": (),
    "adapters": ("--lora-r", 4, "--lora-vision", "--gradient-checkpointing"),
    "accumulation": ("--grad-accum-steps", 2, "--grad-cache-chunk", 3, "--keep-graphs", 0),
    "query side": ("--mode", "query-side-tune"),
    "query side, adapters": ("--mode", "query-side-tune", "--lora-r", 4),
    "query side, cached": ("--mode", "query-side-tune", "--query-side-backward", "gradcache",
                           "--lora-r", 4),
}
CASES = [(mode, 2, False) for mode in MODES] + [("all weights", 3, False)] + [
    (mode, 2, True) for mode in MODES if mode != "query side"]


@functools.cache
def one_process(data, mode, out):
    return run(1, loop, arguments(data, out, 1, *MODES[mode]))[0], log(out)


@pytest.mark.parametrize("mode, processes, sharded", CASES)
def test_several_processes_train_what_one_trains(data, mode, processes, sharded, tmp_path):
    """Loss, accuracy, gradient norm and temperature of every step, evaluation, final weights."""
    alone, expected = one_process(data, mode, data / mode)
    more = ["--shard"] * sharded
    results = run(processes, loop, arguments(data, tmp_path, processes, *MODES[mode], *more))
    same_rows(log(tmp_path), expected, rel=1e-5)
    assert [r.status for r in results] == [0] * processes
    assert len({tuple(r.digests) for r in results}) == 1        # bitwise equal after every step
    assert len(set(results[0].digests)) == 3                    # and every step moved them
    assert results[0].weights.keys() == alone.weights.keys()
    # AdamW moved each number by up to 3e-3, also one whose gradient is nothing but rounding.
    for name, weight in results[0].weights.items():
        gap = weight - alone.weights[name]
        assert gap.square().mean().sqrt() <= 1e-6 and gap.abs().max() <= 3e-5, name
    saved = checkpoint.load(tmp_path / "checkpoint-3")["weights"]
    assert all(torch.equal(w, results[0].weights[n]) for n, w in saved.items())
    if sharded:
        a, b = run(1, vectors, [data / mode / "final", tmp_path / "final"])[0]
        assert (a - b).abs().max() <= 1e-5
        assert (tmp_path / "final/adapter_config.json").exists() == ("--lora-r" in MODES[mode])


def vectors(folders):
    from model import BiEncoder
    return [BiEncoder.from_pretrained(f).encode(WORDS, progress=False) for f in folders]


def test_a_sharded_run_resumes_bit_for_bit(data, tmp_path):
    more = ("--shard", "--lora-r", 4, "--lora-dropout", 0.3, "--save-steps", 2)
    through = run(2, loop, arguments(data, tmp_path / "a", 2, *more, steps=4))
    resumed = run(2, loop, arguments(data, tmp_path / "b", 2, *more, "--resume",
                                     tmp_path / "a/checkpoint-2", steps=4))
    assert [r.digests for r in resumed] == [r.digests[2:] for r in through]
    same_rows(log(tmp_path / "b"), [row for row in log(tmp_path / "a") if row["step"] > 2], rel=0)
    a, b = run(1, vectors, [tmp_path / "a/final", tmp_path / "b/final"])[0]
    assert torch.equal(a, b)


def test_a_finished_sharded_run_that_is_resumed_writes_its_trained_model_again(data, tmp_path):
    """Nothing is left to train, so the weights it writes can only be those of the checkpoint."""
    run(2, loop, arguments(data, tmp_path, 2, "--shard", steps=1))
    (tmp_path / "final").rename(tmp_path / "first")
    run(2, loop, arguments(data, tmp_path, 2, "--shard", "--resume", "auto", steps=1))
    a, b = run(1, vectors, [tmp_path / "first", tmp_path / "final"])[0]
    assert torch.equal(a, b)


def layers_of_some_models():
    from transformers import (BertConfig, BertModel, ModernBertConfig, ModernBertModel,
                              Qwen3Config, Qwen3Model)
    from model import BiEncoder, tiny_qwen3_vl
    small = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32,
             "num_hidden_layers": 3, "num_attention_heads": 2, "pad_token_id": 0}
    processor = tiny_qwen3_vl(hidden=32, heads=2)[1]
    backbones = [BertModel(BertConfig(**small)), ModernBertModel(ModernBertConfig(**small)),
                 Qwen3Model(Qwen3Config(**small, num_key_value_heads=1, head_dim=8))]
    models = [BiEncoder(b, processor.tokenizer, lora_r=r) for b in backbones for r in (0, 2)]
    models += [BiEncoder(tiny_qwen3_vl(hidden=32, heads=2)[0], processor, lora_r=r, lora_vision=v)
               for r, v in ((0, False), (2, True))]
    return [Counter(type(layer).__name__ for layer in m.language_layers()) for m in models]


def test_the_layers_that_are_sharded_are_the_blocks_of_the_language_model():
    expected = [("BertLayer", 3), ("ModernBertEncoderLayer", 3), ("Qwen3DecoderLayer", 3),
                ("Qwen3VLTextDecoderLayer", 2)]
    assert run(1, layers_of_some_models)[0] == [{name: n} for name, n in expected for _ in (0, 1)]


def test_a_frozen_start_without_adapters_is_refused_when_sharded(capsys):
    with pytest.raises(SystemExit):
        flags.parse_args(["--shard", "--mode", "query-side-tune"])
    assert "--lora-r" in capsys.readouterr().err
    assert flags.parse_args(["--shard", "--mode", "query-side-tune", "--model", "x"]).lora_r == 32


# --- One job, one log ----------------------------------------------------------------------------

def watched_loop(argv):
    """The loop with a clock that ticks once per reading, 100 MB per process, dropout and log
    observed, and weights that differ before the start."""
    masks = []

    def build_model(real):
        def wrapped(*args):
            model = real(*args)
            for p in model.parameters():
                p.data += dist.rank()
            dropout = next(m for n, m in model.named_modules() if "lora_dropout.default" in n)
            dropout.register_forward_hook(
                lambda module, x, y: masks.append((y == 0).flatten()[:64]) if module.training
                else None)
            return model
        return wrapped
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    with mock.patch.object(checkpoint, "open_log", wraps=checkpoint.open_log) as opened:
        result = loop(argv, time=lambda real: clock, build_model=build_model,
                      peak_memory_mb=lambda real: lambda: 100.0 * (dist.rank() + 1))
    return result, masks[0], opened.called


def test_the_log_is_written_once_and_holds_the_numbers_of_the_whole_job(data, tmp_path):
    argv = arguments(data, tmp_path, 2, "--lora-r", 4, "--lora-dropout", 0.5,
                     "--grad-accum-steps", 2)
    (first, mask, logs), (second, other_mask, other_logs) = run(2, watched_loop, argv)
    rows = log(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 3] and logs and not other_logs
    assert {row["pairs_per_second"] for row in rows[1:4]} == {2 * ROWS}     # in a second of its own
    assert {row["peak_memory_mb"] for row in rows[1:4]} == {200}
    assert first.printed.count("eval_loss") == 2 and second.printed == ""
    assert first.digests == second.digests
    assert 0 < mask.sum() < 64 and not torch.equal(mask, other_mask)
    assert max(row["replay_error"] for row in rows[1:4]) == 0


def drifting_loop(argv):
    def sync_gradients(real):
        def wrapped(parameters):
            real(parameters := list(parameters))
            parameters[3].grad += dist.rank()
        return wrapped
    with pytest.raises(RuntimeError) as error:
        loop(argv, sync_gradients=sync_gradients)
    return str(error.value)


def test_processes_that_drift_apart_are_stopped_at_the_next_evaluation(data, tmp_path):
    first, second = run(2, drifting_loop, arguments(data, tmp_path, 2, "--eval-steps", 2))
    assert first == second and "parameters differ between processes, first 'model." in first
    assert [row["step"] for row in log(tmp_path)] == [0, 1, 2]


def count_collectives(argv):
    steps = []

    def gradient_that_fits(real):
        def wrapped(*args):
            steps.append(Collectives())
            with steps[-1]:
                return real(*args)
        return wrapped

    def sync_gradients(real):
        def wrapped(parameters):
            with steps[-1]:
                return real(parameters)
        return wrapped
    loop(argv, gradient_that_fits=gradient_that_fits, sync_gradients=sync_gradients)
    return [calls.names for calls in steps]


def test_the_collectives_of_a_step_depend_neither_on_its_chunks_nor_on_its_modality(data, tmp_path):
    """6 chunks or 2 per process; here texts, there an image. The same calls in the same order."""
    few = run(2, count_collectives, arguments(data, tmp_path / "few", 2, "--grad-cache-chunk", 9))
    many = run(2, count_collectives, arguments(data, tmp_path / "many", 2, "--grad-cache-chunk", 1))
    calls = [names for processes in (few, many) for steps in processes for names in steps]
    assert len(calls) == 12 and calls.count(calls[0]) == 12
    # Sizes, ids, representations: a gather, most with one for the shapes. One reduce-scatter. Sums
    # of gradients: one flat one, one to agree on who has any. Two questions about memory.
    assert len(calls[0]) <= 13 and Counter(calls[0])["reduce_scatter"] == 1, calls[0]




def checking_loop(argv, faulty):
    """--check-grads; process 1's encoder is perhaps one that never gives the same vector twice."""
    def build_model(real):
        def wrapped(*args):
            model, calls = real(*args), itertools.count()
            if faulty and dist.rank() == 1:
                model.register_forward_hook(lambda module, x, y: y + next(calls) * module.training)
            return model
        return wrapped
    result = loop([*argv, "--check-grads"], build_model=build_model)
    return result.status, result.printed


def test_check_grads_compares_the_gradient_of_the_whole_job_and_all_processes_agree(data, tmp_path):
    (status, printed), other = run(2, checking_loop, arguments(data, tmp_path, 2), False)
    assert status == 0 and other == (0, "") and printed.endswith(": equal\n"), printed
    (status, printed), other = run(2, checking_loop, arguments(data, tmp_path, 2), True)
    assert status == 1 and other == (1, "") and printed.endswith(": NOT EQUAL\n"), printed
    assert not list(tmp_path.iterdir())

# --- What befalls one process --------------------------------------------------------------------

def poisoned_loop(argv):
    """Process 1 computes a NaN: in step 2 in a representation, in step 3 in one gradient."""
    steps = itertools.count(1)

    def window_gradient(real):
        def wrapped(window, encoders, *rest):
            step, query = next(steps), encoders[0]
            if step == 2 and dist.rank() == 1:
                encoders = [lambda features: query(features) * math.nan, encoders[1]]
            totals = real(window, encoders, *rest)
            if step == 3 and dist.rank() == 1:
                next(p for p in query.parameters() if p.grad is not None).grad.mul_(math.nan)
            return totals
        return wrapped
    return loop(argv, window_gradient=window_gradient)


@pytest.mark.parametrize("more", [(), ("--shard",)])
def test_a_nan_on_one_process_is_skipped_by_all_and_leaves_no_trace(data, more, tmp_path):
    results = run(2, poisoned_loop, arguments(data, tmp_path, 2, *more, steps=4))
    rows = log(tmp_path)
    assert [row["skipped"] for row in rows[1:5]] == [False, True, True, False]
    assert rows[2]["loss"] is None and math.isfinite(rows[3]["loss"])
    assert results[0].digests == results[1].digests
    one, two, three, four = results[0].digests
    assert one == two == three != four
    assert all(w.isfinite().all() for w in results[0].weights.values())


def loop_out_of_memory(argv, when):
    """Process 1 can encode one sample at a time, and no more; in step 1 or 3 of GradCache."""
    def build_model(real):
        def wrapped(*args):
            model = real(*args)

            def check(module, inputs):
                if (dist.rank() == 1 and module.training and len(inputs[0]) > 1
                        and torch.is_grad_enabled() == (when == "with a graph")):
                    raise torch.OutOfMemoryError("no room")
            model.register_forward_pre_hook(check)
            return model
        return wrapped
    return loop(argv, build_model=build_model)


def test_out_of_memory_on_one_process_halves_the_chunk_of_all(data, tmp_path):
    argv = "--lora-r", 4, "--lora-dropout", 0.3, "--keep-graphs", 0
    small = run(2, loop, arguments(data, tmp_path / "small", 2, *argv, "--grad-cache-chunk", 1))
    for when in ("with a graph", "without"):
        out = tmp_path / when
        results = run(2, loop_out_of_memory,
                      arguments(data, out, 2, *argv, "--grad-cache-chunk", 4), when)
        assert results[0].printed.count("step repeated") == 2           # 4, 2, 1
        assert [r.digests for r in results] == [r.digests for r in small]
        same_rows(log(out), log(tmp_path / "small"), rel=0)


def shard_out_of_memory():
    calls = []

    def window_gradient(*args):
        calls.append(1)
        raise torch.OutOfMemoryError("no room")
    args = flags.parse_args(["--shard"])
    with (mock.patch("step.window_gradient", window_gradient),
          pytest.raises(RuntimeError, match="grad_cache_chunk 2: lower that")):
        step.gradient_that_fits([], [], None, None, None, args, "cpu")
    return len(calls)


def test_a_sharded_step_is_not_repeated_since_the_others_wait_within_a_forward():
    assert run(1, shard_out_of_memory) == [1]


# --- Real jobs -----------------------------------------------------------------------------------

JOB = """
import functools, os, signal, sys, time
import train

train.tiny_qwen3_vl = functools.partial(train.tiny_qwen3_vl, hidden=32, heads=2)
rank, real, steps, stop = int(os.environ["RANK"]), train.update, [], []

def update(*args):
    steps.append(1)
    if len(steps) == 2 and sys.argv[1] == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(steps) == 2 and sys.argv[1] == "terminate" and rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)                       # torchrun, which tells us
        while not stop[0]:
            time.sleep(0.01)
    return real(*args)

def catch_signals(real=train.checkpoint.catch_signals):
    stop.append(real())
    return stop[0]

train.update, train.checkpoint.catch_signals = update, catch_signals
sys.exit(train.main(sys.argv[2:]))
"""


@pytest.fixture
def job(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    return script


def test_torchrun_that_is_terminated_leaves_a_checkpoint_that_continues_bit_for_bit(
        data, job, tmp_path):
    more = "--lora-r", 4, "--lora-dropout", 0.3
    argv = arguments(data, tmp_path / "a", 2, *more, steps=4)
    status, printed, _ = torchrun(2, job, "terminate", *argv, timeout=100)
    assert status != 0 and "stopped by a signal after step 2" in printed, printed
    resumed = run(2, loop, [*argv, "--resume", "auto"])
    through = run(2, loop, arguments(data, tmp_path / "b", 2, *more, steps=4))
    assert [r.digests for r in resumed] == [r.digests[2:] for r in through]
    same_rows(log(tmp_path / "a"), log(tmp_path / "b"), rel=0)


def test_a_killed_process_ends_the_job(data, job, tmp_path):
    status, printed, _ = torchrun(2, job, "kill", *arguments(data, tmp_path / "out", 2),
                                  timeout=100)              # what waits for ever is ended in 1,800
    assert status != 0 and "Signal 9 (SIGKILL)" in printed, printed


def test_a_row_that_fails_on_one_process_ends_the_job_with_its_message(data, job, tmp_path):
    page = (data / "page.png").read_bytes()
    (tmp_path / "page.png").write_bytes(page[:len(page) // 2])          # its header is intact
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text((data / name).read_text())
    status, printed, _ = torchrun(2, job, "", *arguments(tmp_path, tmp_path / "out", 2),
                                  timeout=100)
    assert status != 0 and "row 0 (line 1): cannot read image" in printed, printed
    assert printed.count("ValueError: row 0") == 1
