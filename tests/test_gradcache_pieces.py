"""The pieces of gradcache.py by themselves: errors, RandContext, plan_chunks, the file alone."""
import ast
import itertools
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gradcache
from gradcache import RandContext, grad_cache_step, graphs_that_fit, plan_chunks
from tests.test_gradcache import Tower, contrastive, two_towers

SCALE = torch.tensor(2.0, dtype=torch.float64)


def step(encoders=None, batches=None, loss_fn=None, chunk_size=2, **options):
    tower, _, usual, _ = two_towers(n=6)
    encoders = [tower, tower] if encoders is None else encoders
    batches = usual if batches is None else batches
    return grad_cache_step(encoders, batches, loss_fn or contrastive(SCALE), chunk_size, **options)


def refuses(*words, error=ValueError, **arguments):
    """The error must carry each of the words: the value, the index, the name, the remedy."""
    with pytest.raises(error) as caught:
        step(**arguments)
    for word in words:
        assert re.search(word, str(caught.value)), (word, str(caught.value))


# --- Errors ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("chunk_size", [0, -1, 2.5, "2", True, None])
def test_a_chunk_size_that_is_no_whole_number_is_refused_by_its_value(chunk_size):
    refuses("chunk_size", re.escape(repr(chunk_size)), chunk_size=chunk_size)
    with pytest.raises(ValueError, match=re.escape(repr(chunk_size))):
        plan_chunks([1, 2, 3], chunk_size)


@pytest.mark.parametrize("keep", [-1, 1.5, None, "1"])
def test_a_keep_that_is_no_number_of_chunks_is_refused_by_its_value(keep):
    refuses("keep", re.escape(repr(keep)), keep=keep)


ALL = [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("plan, words", [
    ([ALL, [[0, 1, 2], [4, 5]]],         ["tower 1", r"missing \[3\]"]),
    ([[[0, 1, 2], [2, 3, 4, 5]], ALL],   ["tower 0", r"repeated or out of range \[2\]"]),
    ([ALL, [[0, 1, 2, 3, 4, 6]]],        ["tower 1", r"missing \[5\]", r"out of range \[6\]"]),
    ([ALL, [[0, 1, 2, 3, 4, -1]]],       ["tower 1", r"missing \[5\]", r"out of range \[-1\]"]),
    ([ALL, [[0, 1, 2], [], [3, 4, 5]]],  ["tower 1", "empty chunks 1"]),
    ([ALL, []],                          ["tower 1", "missing"]),
    ([ALL],                              ["one list of chunks per tower", "2 towers", "1 lists"]),
    ([],                                 ["2 towers", "0 lists"]),
    ([ALL, ALL, ALL],                    ["2 towers", "3 lists"]),
    ([[0, 1, 2], [3, 4, 5]],             ["tower 0", r"got \[0, 1, 2\]"]),
    ([[[0.0, 1.5, 2, 3, 4, 5]], ALL],    ["tower 0", "1.5"]),
    ([["012345"], ALL],                  ["tower 0", "012345"]),
])
def test_a_malformed_plan_is_refused_by_tower_and_index(plan, words):
    refuses(*words, chunk_size=plan)


def test_a_plan_may_hold_tensors_and_tuples():
    wanted, _ = step(chunk_size=[[[0, 1, 2], [3, 4, 5]]] * 2)
    tensors = tuple(torch.arange(6).split(3))
    assert step(chunk_size=(tensors, ((0, 1, 2), range(3, 6))))[0] == wanted


def test_a_huge_malformed_plan_is_refused_quickly():
    n = 200_000                                                     # quadratic would take hours
    plan = [[i, i + 1] for i in range(0, n, 2)]
    plan[0] = [2, 1]
    with pytest.raises(ValueError, match=r"missing \[0\].*\[2\]"):
        grad_cache_step([nn.Identity()], [torch.zeros(n, 1)], torch.sum, [plan])


def test_towers_and_batches_that_do_not_match_are_refused_with_both_numbers():
    refuses("1 encoders", "2 batches", encoders=[Tower()])
    refuses("3 encoders", "2 batches", encoders=[Tower()] * 3)
    refuses("1 encoders", "6 batches", encoders=[Tower()], batches=torch.zeros(6, 6).double())


@pytest.mark.parametrize("batch, words", [
    ([],                                                 ["tower 1", "empty"]),
    (torch.zeros(0, 6),                                  ["tower 1", "empty"]),
    ({"x": torch.zeros(0, 6)},                           ["tower 1", "empty"]),
    ({},                                                 ["tower 1", "no tensor"]),
    ({"text": ["a", "b"]},                               ["tower 1", "no tensor"]),
    ({"a": torch.zeros(6, 2), "b": torch.zeros(4, 2)},   ["tower 1", "'a': 6", "'b': 4"]),
])
def test_a_batch_without_one_length_is_refused_by_tower_and_sizes(batch, words):
    refuses(*words, batches=[two_towers(n=6)[2][0], batch])


@pytest.mark.parametrize("output, words", [
    (lambda y: y[:1],                       ["tower 1", "2 samples", r"\(1, 5\)"]),
    (lambda y: y.sum(),                     ["tower 1", "2 samples", r"\(\)"]),
    (lambda y: {"pooled": y},               ["tower 1", "dict"]),
    (lambda y: (y, y[:1]),                  ["tower 1", r"\(1, 5\)"]),
    (lambda y: None,                        ["tower 1", "NoneType"]),
])
def test_an_output_that_is_not_one_row_per_sample_is_refused_by_its_shape(output, words):
    tower = Tower()
    refuses(*words, encoders=[tower, lambda x: output(tower(x))])


def batchnorm_tower(layer):
    return nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Tanh(), layer)).double()


def test_a_batchnorm_that_looks_at_the_chunk_is_refused_by_its_name():
    for tower in (batchnorm_tower(nn.BatchNorm1d(4)),
                  batchnorm_tower(nn.BatchNorm1d(4, track_running_stats=False)).eval()):
        refuses("'1.1'", "BatchNorm1d", "LayerNorm", encoders=[Tower(), tower])
        refuses("'1.1'", "BatchNorm1d", encoders=[Tower(), tower.forward])
        with torch.no_grad():
            refuses("'1.1'", encoders=[Tower(), tower])
    frozen = batchnorm_tower(nn.BatchNorm1d(4)).requires_grad_(False)
    refuses("'1.1'", encoders=[Tower(), frozen])


def test_a_batchnorm_in_eval_mode_and_a_layernorm_are_welcome():
    batchnorm = nn.BatchNorm1d(4)
    tower = batchnorm_tower(batchnorm).eval()
    step([tower, tower])
    assert batchnorm.num_batches_tracked == 0 and batchnorm.weight.grad is not None
    step([batchnorm_tower(nn.LayerNorm(4))] * 2)


@pytest.mark.parametrize("frozen", ["modules", "functions", "methods"])
def test_a_loss_that_depends_on_nothing_trainable_is_refused(frozen):
    tower = Tower().requires_grad_(frozen != "modules")
    encoder = {"modules": tower, "functions": torch.no_grad()(lambda x: tower(x)),
               "methods": tower.without_gradient}[frozen]
    refuses("nothing trainable", error=RuntimeError, encoders=[encoder, encoder])
    log_scale = torch.ones((), dtype=torch.float64, requires_grad=True)     # enough to train
    step([encoder, encoder], loss_fn=contrastive(log_scale))
    assert log_scale.grad is not None


def test_metrics_pass_through_without_their_graph():
    metrics = {"scores": None, "count": 3}

    def loss_fn(q, d):
        metrics["scores"] = q @ d.T
        return metrics["scores"].square().sum(), metrics

    _, returned = step(loss_fn=loss_fn)
    assert set(returned) == {"scores", "count", "replay_error"} and returned["count"] == 3
    assert not returned["scores"].requires_grad and metrics["scores"].requires_grad
    assert set(metrics) == {"scores", "count"}                      # the caller's dict is his


# --- RandContext ----------------------------------------------------------------------------------

@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_a_rand_context_replays_the_same_numbers_any_number_of_times(device):
    context = RandContext(device)
    wanted = torch.rand(5)
    for _ in range(3):
        torch.rand(7)
        outside = torch.get_rng_state()
        with context:
            assert torch.equal(torch.rand(5), wanted)
        assert torch.equal(torch.get_rng_state(), outside)          # nobody else is rewound


def test_rand_contexts_nest_in_one_another_and_in_themselves():
    first, one = RandContext(), torch.rand(3)
    second, two = RandContext(), torch.rand(3)
    outside = torch.get_rng_state()
    with first:
        assert torch.equal(torch.rand(3), one)
        with second:
            assert torch.equal(torch.rand(3), two)
            with first:
                assert torch.equal(torch.rand(3), one)
        assert torch.equal(torch.rand(3), two)                      # goes on where `first` was
    assert torch.equal(torch.get_rng_state(), outside)


def test_a_rand_context_puts_the_generator_back_after_an_exception():
    context = RandContext()
    torch.rand(3)
    outside = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), context:
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), outside)


def test_an_encoder_that_fails_during_replay_leaves_the_generator_where_it_was():
    tower, calls, states = Tower(), [], []

    def fails(samples):
        calls.append(torch.rand(1))
        if len(calls) == 7:                                         # 3 + 3 chunks, then the replay
            raise KeyError("broken")
        states.append(torch.get_rng_state())
        return tower(samples)

    with pytest.raises(KeyError):
        step([fails, fails], keep=0)
    assert torch.equal(torch.get_rng_state(), states[5])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_rand_context_covers_every_gpu_in_use():
    torch.zeros(1, device="cuda")
    context, wanted = RandContext(), torch.rand(4, device="cuda")
    outside = torch.cuda.get_rng_state()
    with context:
        assert torch.equal(torch.rand(4, device="cuda"), wanted)
    assert torch.equal(torch.cuda.get_rng_state(), outside)


# --- plan_chunks ----------------------------------------------------------------------------------

def padded(chunk, costs):
    return len(chunk) * max(costs[i] for i in chunk)


def test_a_plan_holds_every_sample_once_within_size_and_budget_cheapest_first():
    draw = random.Random(0)
    for _ in range(300):
        n = draw.randint(0, 60)
        costs = [draw.choice([0, 1, 5, 7, draw.randint(0, 200)]) for _ in range(n)]
        size, budget = draw.randint(1, 12), draw.choice([None, 1, 50, 300, 10**6])
        plan = plan_chunks(costs, size, budget)
        assert sorted(i for chunk in plan for i in chunk) == list(range(n))
        assert all(0 < len(chunk) <= size for chunk in plan)
        assert all(budget is None or len(chunk) == 1 or padded(chunk, costs) <= budget
                   for chunk in plan)                               # one above it stays alone
        flat = [(costs[i], i) for chunk in plan for i in chunk]
        assert flat == sorted(flat)                                 # equal costs keep their order
        assert plan == plan_chunks(list(costs), size, budget)


def test_a_plan_worked_by_hand():
    #        index  0  1   2  3  4  5
    assert plan_chunks([7, 2, 40, 3, 3, 9], 3) == [[1, 3, 4], [0, 5, 2]]
    assert plan_chunks([7, 2, 40, 3, 3, 9], 2) == [[1, 3], [4, 0], [5, 2]]
    assert plan_chunks([7, 2, 40, 3, 3, 9], 3, max_cost=20) == [[1], [3, 4], [0], [5], [2]]
    assert plan_chunks([7, 2, 40, 3, 3, 9], 3, 20, call_cost=2) == [[1, 3, 4], [0, 5], [2]]
    assert plan_chunks([1, 1, 1, 1], 3) == [[0], [1, 2, 3]]         # the last one is full
    assert plan_chunks([], 3) == []


def test_a_plan_never_pads_more_than_chunks_in_batch_order():
    draw, saved = random.Random(1), []
    for _ in range(100):
        costs = [draw.randint(4, 128) for _ in range(64)]
        naive = [list(range(i, i + 8)) for i in range(0, 64, 8)]
        planned, unplanned = (sum(padded(c, costs) for c in plan)
                              for plan in (plan_chunks(costs, 8), naive))
        assert sum(costs) <= planned <= unplanned
        saved.append(planned / unplanned)
    assert sum(saved) / len(saved) < 0.7


def test_a_chunk_is_as_long_as_its_limits_allow_and_not_longer():
    draw = random.Random(2)
    for _ in range(200):
        costs = [draw.randint(0, 100) for _ in range(draw.randint(2, 60))]
        size, budget, call = draw.randint(1, 12), draw.randint(50, 600), draw.choice([0, 5, 40])
        plan = plan_chunks(costs, size, budget, call)
        for chunk, below in zip(plan[1:], plan):
            more = below[-1:] + chunk                               # its neighbour's dearest, too
            assert padded(chunk, costs) - sum(costs[i] for i in chunk) <= call
            assert (len(more) > size or padded(more, costs) > budget
                    or padded(more, costs) - sum(costs[i] for i in more) > call)


def test_padding_and_calls_together_cost_little_more_than_the_best_cut():
    """The best one by trying all: least cost of the i cheapest, for i = 1, 2, ..."""
    draw = random.Random(3)
    for n, budget in itertools.product((32, 128, 300), (256, 2048)):
        costs = sorted(min(128, round(draw.lognormvariate(3.5, 1))) for _ in range(n))
        call, best = budget / 64, [0.0]
        for j in range(1, n + 1):
            best.append(min(best[i] + (j - i) * costs[j - 1] + call for i in range(j)
                            if j - i == 1 or (j - i) * costs[j - 1] <= budget))
        plan = plan_chunks(costs, n, budget)
        got = sum(padded(chunk, costs) + call for chunk in plan)
        assert best[n] - 1e-9 <= got <= 1.03 * best[n], (n, budget, got / best[n])


# --- graphs_that_fit ------------------------------------------------------------------------------

def test_a_limit_holds_as_many_graphs_as_fit_beside_what_rests():
    """A simulated device: weights take 40, a graph 10, so 100 hold six of them."""
    keep, largest = 1, 0
    for _ in range(3):
        keep, largest = graphs_that_fit(keep, 40, 40 + 10 * keep, 100, largest)
        assert (keep, largest) == (6, 10)
    # Batches of shorter samples do not raise it, a longer one lowers it, and it stays low.
    assert graphs_that_fit(6, 40, 70, 100, largest) == (6, 10)
    assert graphs_that_fit(6, 40, 40 + 6 * 20, 100, largest) == (3, 20)
    assert graphs_that_fit(3, 40, 55, 100, 20) == (3, 20)
    # More than there are chunks: the share of each looks small, but the largest is remembered.
    assert graphs_that_fit(50, 40, 80, 540, 10) == (50, 10)


def test_the_one_graph_that_costs_nothing_is_always_kept():
    assert graphs_that_fit(1, 40, 90, 60)[0] == 1
    assert graphs_that_fit(1, 40, 40, 30) == (1, 0)


# --- The file alone -------------------------------------------------------------------------------

def test_the_file_alone_trains_a_module_and_imports_nothing_but_torch(tmp_path):
    source = Path(gradcache.__file__)
    nodes = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
    names = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {n.split(".")[0] for n in names} <= set(sys.stdlib_module_names) | {"torch"}

    shutil.copy(source, tmp_path)
    script = """if True:
        import torch
        from gradcache import grad_cache_step
        torch.manual_seed(0)
        tower, x = torch.nn.Linear(8, 4), torch.randn(12, 8)
        optimizer = torch.optim.Adam(tower.parameters(), lr=0.05)
        for _ in range(40):
            loss, _ = grad_cache_step([tower, tower], [x, x + 0.1], lambda q, d:
                torch.nn.functional.cross_entropy(q @ d.T, torch.arange(12)), chunk_size=5)
            optimizer.step(), optimizer.zero_grad()
            print(loss.item())"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=120, text=True,
                          capture_output=True, env={"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.split()]
    assert losses[0] > 2 * losses[-1]
