"""The command line: documented defaults, refused values, and the learning rate's table."""
import math
import re

import pytest
import torch

import flags
import train
from flags import describe_run, lr_factor, parse_args

DOCUMENTED = """
    --batch-size 4  --grad-cache-chunk 2  --warmup-steps 50  --max-steps 500  --temperature 0.07
    --num-hard-negatives 0  --lora-alpha 32  --max-num-visual-tokens 256  --max-grad-norm 1.0
    --train-jsonl None  --resume None  --mode standard  --query-side-backward direct  --model None
    --eval-jsonl None  --chunk-tokens None  --keep-graphs 1  --loss info_nce  --grad-accum-steps 1
    --lr-schedule cosine  --gradient-checkpointing False  --check-grads False  --output-dir output
    --lora-dropout 0.0  --offline-data stdlib  --documents text  --mask-names False  --shard False
    --no-duplicates False  --skip-bad-rows False  --allow-any-path False  --trust-remote-code False
    --allow-changed-flags False  --seed 0  --memory-limit-gb None  --vision-cache-gb 1.0
    --attention auto  --compile False  --merge-lora False  --document-cache None
    --report-to None"""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name, value", re.findall(r"--([a-z-]+) (\S+)", DOCUMENTED))
def test_a_flag_has_its_documented_default(name, value):
    assert str(getattr(parse_args([]), name.replace("-", "_"))) == value


def test_a_default_that_suits_pretrained_weights_is_replaced_for_the_tiny_model():
    tiny, pretrained = parse_args([]), parse_args(["--model", "some/model"])
    assert (tiny.lr, tiny.lora_r, tiny.max_length) == (1e-3, 0, 96)
    assert (pretrained.lr, pretrained.lora_r, pretrained.max_length) == (2e-5, 32, None)
    own = parse_args(["--model", "some/model", "--lr", "0.5", "--lora-r", "0"])
    assert (own.lr, own.lora_r) == (0.5, 0)
    assert parse_args(["--documents", "image"]).max_length == 96 + 256      # a page must fit


@pytest.mark.parametrize("gpu, dtype, workers", [(False, "fp32", 0), (True, "bf16", 4)])
def test_a_gpu_decides_what_auto_means(gpu, dtype, workers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert (parse_args([]).dtype, parse_args([]).num_workers) == (dtype, workers)
    own = parse_args(["--dtype", "fp32", "--num-workers", "1"])
    assert (own.dtype, own.num_workers) == ("fp32", 1)


def test_help_documents_every_flag_and_both_defaults(capsys):
    with pytest.raises(SystemExit) as done:
        train.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert done.value.code == 0
    for name in vars(parse_args([])):
        assert re.search(rf" --{name.replace('_', '-')} (?!-)[^-\s]", text), name    # then words
    assert "2e-5; tiny model 1e-3" in text and "32; tiny model 0" in text


@pytest.mark.parametrize("wrong", [
    "--batch-size 0", "--batch-size two", "--batch-size 2.5", "--grad-cache-chunk -1",
    "--chunk-tokens 0", "--keep-graphs -1", "--grad-accum-steps 0", "--max-steps 0", "--epochs 0",
    "--epochs -1", "--lr -1", "--lr nan", "--max-grad-norm 0", "--lora-dropout 1",
    "--lora-r -1", "--temperature 20", "--temperature 0", "--num-hard-negatives -1",
    "--warmup-steps -1", "--min-lr-ratio 1.5", "--weight-decay -0.1", "--max-length 0",
    "--max-num-visual-tokens 0", "--keep-checkpoints 0", "--save-steps -1", "--eval-steps -1",
    "--num-workers -1", "--lr-schedule linear", "--mode query", "--dtype fp8", "--eval-jsonl x",
    "--chunk-tokens 9 --grad-cache-chunk 0", "--no-such-flag 1", "--keep-graphs many",
    "--keep-graphs auto", "--memory-limit-gb 2", "--vision-cache-gb -1", "--columns query",
    "--columns =a", "--document-cache x.db", "--report-to mail"])
def test_a_wrong_value_ends_the_program_at_once_and_names_the_flag(wrong, capsys):
    with pytest.raises(SystemExit) as done:
        train.main(wrong.split())
    message = capsys.readouterr().err.splitlines()[-1]
    assert done.value.code == 2 and wrong.split()[0] in message, message


def test_values_at_the_edge_are_accepted():
    args = parse_args("--max-grad-norm inf --lr 0 --warmup-steps 0 --temperature 1 "
                      "--min-lr-ratio 1 --chunk-tokens 1".split())
    assert args.max_grad_norm == math.inf and args.warmup_steps == 0 and args.chunk_tokens == 1


def test_columns_are_pairs_of_our_name_and_theirs():
    args = parse_args(["--columns", "query=the question", "positive=a=b"])
    assert args.columns == {"query": "the question", "positive": "a=b"}
    assert parse_args([]).columns == {}


def test_only_a_gpu_that_is_not_shared_by_parts_of_a_model_counts_its_graphs(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = parse_args("--keep-graphs auto --memory-limit-gb 0.5".split())
    assert (args.keep_graphs, args.memory_limit_gb) == ("auto", 0.5)
    for wrong in ("--keep-graphs auto --shard", "--dtype fp16 --shard", "--compile --shard",
                  "--mode query-side-tune --document-cache x --lora-r 4 --shard"):
        with pytest.raises(SystemExit):
            parse_args(wrong.split())
        assert "--shard" in capsys.readouterr().err.splitlines()[-1]


def test_flags_that_change_the_result_are_a_subset_of_the_flags_and_no_memory_flag_is_among_them():
    known = set(vars(parse_args([]))) | {"data", "processes"}        # these two train.py adds
    assert set(flags.MATHEMATICS) <= known
    free = known - set(flags.MATHEMATICS)
    assert free == {"grad_cache_chunk", "chunk_tokens", "keep_graphs", "gradient_checkpointing",
                    "shard", "num_workers", "trust_remote_code", "eval_jsonl", "skip_bad_rows",
                    "allow_any_path", "query_side_backward", "output_dir", "eval_steps",
                    "save_steps", "keep_checkpoints", "resume", "allow_changed_flags",
                    "check_grads", "loss_tile", "memory_limit_gb", "vision_cache_gb", "attention",
                    "compile", "merge_lora", "columns", "document_cache", "report_to"}


def test_the_start_up_lines_do_the_arithmetic():
    args = parse_args("--batch-size 8 --grad-cache-chunk 3 --num-hard-negatives 2 "
                      "--grad-accum-steps 5".split())
    args.processes = 2
    text = describe_run(args)
    assert "2 process(es) x 8 queries = 16, each against 48 documents: 1 positive, 47" in text
    assert "32 samples per process, 11 chunks of 3" in text          # ceil(8 / 3) + ceil(24 / 3)
    assert "500 steps x 5 batch(es), peak lr 0.001, cosine after 50" in text
    args.grad_cache_chunk = 0
    assert "32 samples per process, all at once" in describe_run(args)
    args.chunk_tokens = 4096
    assert "chunks of 4096 tokens" in describe_run(args)


# --- The learning rate ---------------------------------------------------------------------------

# Peak 1, warm-up 10, 100 steps in all: 90 after the warm-up. Written down by hand.
HALF = math.sqrt(0.5)
TABLE = [
    ("cosine", {0: 0, 1: 0.1, 5: 0.5, 10: 1, 25: (1 + math.cos(math.pi / 6)) / 2, 40: 0.75, 55: 0.5,
                70: 0.25, 100: 0, 110: 0}),
    ("constant", {0: 0, 5: 0.5, 10: 1, 55: 1, 100: 1, 110: 1}),
    # The last fifth of 90 steps begins at 82: q = 0, then 1/3 at 88, 2/3 at 94.
    ("wsd", {0: 0, 5: 0.5, 10: 1, 55: 1, 82: 1, 88: 4 / 9, 91: 1 / 4, 94: 1 / 9, 100: 0, 110: 0}),
]


@pytest.mark.parametrize("schedule, expected", TABLE)
def test_the_schedules_follow_their_tables(schedule, expected):
    found = {step: lr_factor(step, schedule, 10, 100) for step in expected}
    assert found == pytest.approx(expected, abs=1e-12)


def test_warm_restarts_come_after_cycles_of_double_length():
    """70 steps after a warm-up of 10: cycles of 10, 20 and 40, the rate 1 at the start of each."""
    expected = {9: 0.9, 10: 1, 15: 0.5, 20: 1, 25: (1 + HALF) / 2, 30: 0.5, 35: (1 - HALF) / 2,
                40: 1, 50: (1 + HALF) / 2, 60: 0.5, 70: (1 - HALF) / 2, 80: 0, 90: 0}
    found = {step: lr_factor(step, "sgdr", 10, 80) for step in expected}
    assert found == pytest.approx(expected, abs=1e-12)
    rates = [lr_factor(step, "sgdr", 0, 7000) for step in range(7001)]
    assert [s for s in range(1, 7001) if rates[s] > rates[s - 1]] == [1000, 3000]


@pytest.mark.parametrize("schedule", ["cosine", "sgdr", "wsd", "constant"])
def test_every_schedule_warms_up_linearly_stays_in_range_and_keeps_its_floor(schedule):
    for warmup, total, floor in ((0, 70, 0.0), (10, 100, 0.0), (10, 100, 0.25), (50, 20, 0.1)):
        rates = [lr_factor(step, schedule, warmup, total, floor) for step in range(total + 30)]
        assert rates[:warmup] == [step / warmup for step in range(warmup)][:total + 30]
        assert all(floor - 1e-12 <= rate <= 1 for rate in rates[warmup:])
        if warmup < total:
            assert rates[warmup] == 1                                    # the peak is reached
            end = 1 if schedule == "constant" else floor
            assert rates[total:] == pytest.approx([end] * 30, abs=1e-12)


def test_a_floor_compresses_the_decay_instead_of_cutting_it():
    assert lr_factor(55, "cosine", 10, 100, 0.2) == pytest.approx(0.2 + 0.8 * 0.5)
