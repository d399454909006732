"""extras/plot.py: what is drawn is what the files say, legible, and told apart by everyone."""
import itertools
import json

import pytest
import torch
from PIL import Image

from extras import plot
from model import BiEncoder
from tests.conftest import TEXTS


def write_run(folder, batch=8, recall=(0.1, 0.3), processes=1, steps=50, **args):
    """An output folder with the files that the pictures read."""
    args = {"batch_size": batch, "processes": processes, "chunk_tokens": None,
            "grad_cache_chunk": 2, "lr": 1e-3} | args
    rows = [{"step": 0, "eval_recall@10": recall[0]}]
    rows += [{"step": n, "loss": 3 / n, "accuracy": n / steps, "grad_norm": 10.0 / n,
              "peak_memory_mb": 800.0 + n} for n in range(1, steps + 1)]
    rows[7] |= {"loss": None, "grad_norm": None}                 # a step that was skipped
    rows += [{"step": steps, "eval_recall@10": recall[-1]}]
    for step in (5, steps):                                # the older checkpoint must not be read
        state = folder / f"checkpoint-{step}" / "state.json"
        state.parent.mkdir(parents=True)
        state.write_text(json.dumps({"args": args if step == steps else {**args, "lr": 99}}))
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def labels(axes):
    return [text for text in axes.texts if text.get_text()]


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"query": text.split()[-1] + str(n), "positive": text})
                              for n, text in enumerate(TEXTS)))
    return path


# --- Runs -----------------------------------------------------------------------------------------

def test_recall_is_drawn_over_the_global_batch_with_one_point_per_run(tmp_path, capsys):
    runs = [write_run(tmp_path / "a", 64, (0.1, 0.5)), write_run(tmp_path / "b", 8, (0.1, 0.2)),
            write_run(tmp_path / "c", 8, (0.1, 0.4), seed=1),
            write_run(tmp_path / "d", 8, (0.1, 0.45), processes=2)]
    (axes,) = plot.recall_vs_batch(runs).axes
    line, points = axes.lines[:2]
    assert [*zip(*line.get_data())] == [(8, pytest.approx(0.3)), (16, 0.45), (64, 0.5)]
    assert sorted(zip(*points.get_data())) == [(8, 0.2), (8, 0.4), (16, 0.45), (64, 0.5)]
    assert [text.get_text() for text in labels(axes)] == ["0.30", "0.45", "0.50",
                                                          "before training 0.10"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [f"{b}\n850 MB"
                                                                    for b in (8, 16, 64)]
    assert axes.get_ylim()[0] == 0 and "after 50 steps" in axes.get_title(loc="left")
    assert "note" not in capsys.readouterr().out           # batch, processes and seed may differ


def test_runs_that_differ_in_more_than_the_batch_are_told_or_refused(tmp_path, capsys):
    one = write_run(tmp_path / "one")
    plot.recall_vs_batch([one, write_run(tmp_path / "lr", 16, lr=0.5)])
    assert "note: the runs also differ in lr: 0.001, 0.5" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"the same in all runs, found \[2, 4\]"):
        plot.recall_vs_batch([one, write_run(tmp_path / "chunk", 16, grad_cache_chunk=4)])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text('{"step": 0, "eval_recall@10": 0.1}')
    with pytest.raises(ValueError, match="is no finished run"):
        plot.recall_vs_batch([one, str(tmp_path / "empty")])


def test_curves_show_every_finite_value_and_the_mean_of_the_last_ones(tmp_path):
    runs = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", steps=100)]
    panels = plot.curves(runs).axes
    raw, mean = panels[0].lines[:2]
    steps = [n for n in range(1, 51) if n != 7]
    assert [*raw.get_xdata()] == [*mean.get_xdata()] == steps
    losses = [3 / n for n in steps]
    assert raw.get_ydata() == pytest.approx(losses)
    window = 100 // 25
    assert mean.get_ydata() == pytest.approx([
        sum(losses[max(0, i - window + 1):i + 1]) / len(losses[max(0, i - window + 1):i + 1])
        for i in range(len(losses))])
    assert "mean of the last 4 steps" in panels[0].get_title(loc="left")
    assert [[*line.get_ydata()] for line in panels[2].lines] == [[0.1, 0.3]] * 2
    for axes in panels:                                    # the names say which run is which
        assert sorted(text.get_text() for text in labels(axes)) == ["a/run", "b/run"]
        assert labels(axes)[0].get_color() != labels(axes)[1].get_color()
        assert axes.get_ylim()[0] == 0 or axes.get_yscale() == "log"


def test_names_of_lines_that_end_together_do_not_overlap(tmp_path):
    figure = plot.curves([write_run(tmp_path / f"run{i}") for i in range(6)])
    figure.canvas.draw()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in labels(axes)]
        assert len(boxes) == 6
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_a_run_without_held_out_rows_says_so(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "grad_norm": 1.0}\n')
    panels = plot.curves([str(tmp_path)]).axes
    assert [text.get_text() for text in labels(panels[2])] == ["not in these runs"]


# --- Models ---------------------------------------------------------------------------------------

def test_heat_maps_show_the_models_similarities_on_one_scale(models, jsonl):
    rows = plot.read_pairs(jsonl)
    figure = plot.heat_maps(models, rows)
    images = [axes.images[0] for axes in figure.axes[:2]]
    assert images[0].get_clim() == images[1].get_clim()
    for path, image, axes in zip(models, images, figure.axes):
        model = BiEncoder.from_pretrained(path)
        scores = (model.encode([r["query"] for r in rows], "query")
                  @ model.encode([r["positive"] for r in rows]).T)
        torch.testing.assert_close(torch.tensor(image.get_array()), scores, atol=1e-6, rtol=0)
        hits = sum(row[i] > max([*row[:i], *row[i + 1:]]) for i, row in enumerate(scores.tolist()))
        assert f"in {hits} of 18 rows" in axes.get_title()


def test_histograms_separate_answers_from_all_other_documents(models, jsonl):
    rows = plot.read_pairs(jsonl)
    figure = plot.histograms(models, rows)
    for path, axes in zip(models, figure.axes):
        scores, answers = plot.similarities(path, rows)
        assert answers.sum() == 18 and answers.diagonal().all()
        wins = [float(a > b) for a in scores[answers] for b in scores[~answers]]
        assert f"in {100 * sum(wins) / len(wins):.1f} % of pairs" in axes.get_title(loc="left")
        assert [text.get_text() for text in labels(axes)] == ["other documents", "answers"]


def test_equal_scores_count_half_in_the_share_of_pairs():
    a, b = torch.tensor([1.0, 2.0, 2.0, 5.0]), torch.tensor([2.0, 0.0, 2.0])
    wins = [1.0 if x > y else 0.5 if x == y else 0.0 for x in a for y in b]
    assert plot.share_above(a, b) == pytest.approx(sum(wins) / 12)


# --- Files and eyes -------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["curves", "recall-vs-batch", "heatmap", "histogram"])
def test_the_program_writes_a_png_with_nothing_cut_off(models, jsonl, tmp_path, kind):
    runs = [write_run(tmp_path / f"a-run-with-quite-a-long-name-{b}", b) for b in (8, 1024)]
    given = models if kind in ("heatmap", "histogram") else runs
    plot.main([f"--{kind}", *given, "--eval-jsonl", str(jsonl), "--rows", "6",
               "--output", str(tmp_path / "picture")])
    with Image.open(tmp_path / "picture") as image:
        assert image.format == "PNG" and min(image.size) >= 600
        picture = image.convert("RGB")
    width, height = picture.size
    edges = [(0, 0, width, 1), (0, height - 1, width, height), (0, 0, 1, height),
             (width - 1, 0, width, height)]
    assert {picture.crop(edge).getextrema() for edge in edges} == {((255, 255),) * 3}
    assert len(picture.getcolors(10 ** 7)) > 20


def test_rows_come_from_any_file_with_any_names(models, tmp_path):
    lines = ["ask\tfind", *(f"{text.split()[-1]}{n}\t{text}" for n, text in enumerate(TEXTS))]
    (tmp_path / "rows.tsv").write_text("\n".join(lines))
    plot.main(["--heatmap", models[0], "--eval-jsonl", str(tmp_path / "rows.tsv"), "--columns",
               "query=ask", "positive=find", "--output", str(tmp_path / "picture.png")])
    with Image.open(tmp_path / "picture.png") as image:
        assert image.format == "PNG"


def seen(colour, matrix):
    """sRGB colour as a colour-blind eye sees it (Machado et al. 2009, on linear light)."""
    rgb = torch.tensor([int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = (torch.tensor(matrix) @ linear).clamp(0, 1)
    return torch.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


EYES = {"usual": [[1.0, 0, 0], [0, 1, 0], [0, 0, 1]],
        "no red cones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                         [-0.003882, -0.048116, 1.051998]],
        "no green cones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                           [-0.011820, 0.042940, 0.968881]]}


@pytest.mark.parametrize("matrix", EYES.values(), ids=EYES)
def test_colours_differ_for_colour_blind_eyes(matrix):
    def closest(colours):
        return min((seen(a, matrix) - seen(b, matrix)).norm().item()
                   for a, b in itertools.combinations(colours, 2))
    assert closest(plot.COLOURS) > 0.15
    if matrix != EYES["usual"]:                            # the test can tell: red and green fail
        assert closest(["#d62728", "#2ca02c", "#8c564b"]) < 0.15


@pytest.mark.parametrize("flags, message", [
    (["--curves", "missing"], "missing"), (["--heatmap", "no/such"], "no/such: no such folder"),
    (["--curves", "DAMAGED"], "is the run still writing"), ([], "required"),
    (["--histogram", "x", "--rows", "1"], "at least 2")])
def test_what_cannot_be_drawn_ends_with_one_line(tmp_path, jsonl, capsys, flags, message):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step"')
    flags = [str(tmp_path) if flag == "DAMAGED" else flag for flag in flags]
    with pytest.raises(SystemExit) as error:
        plot.main([*flags, "--eval-jsonl", str(jsonl), "--output", str(tmp_path / "x.png")])
    assert message in str(error.value) + capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
