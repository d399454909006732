"""Batches: ids from content, an order that is a pure function, negatives, labels, noise."""
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import batches as batches_module
from batches import (
    Batches,
    describe,
    document_id,
    fingerprint,
    index_rows,
    query_id,
    retrieval_pool,
)
from data import as_page, as_pages

ROOT = Path(__file__).parent.parent


def pairs(n, negatives=0):
    return [{"query": f"q{i}", "positive": f"p{i}",
             "negatives": [f"n{i}.{j}" for j in range(negatives)]} for i in range(n)]


def features(sample, side):
    return [side, sample]


def error_of(call, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# -------------------------------------------------------------------- ids, answers, evaluation pool
def test_ids_depend_on_content_only_and_are_the_same_in_every_process():
    samples = ["text", {"image": "/a.png"}, {"text": "text", "image": "/a.png"}, "text ", "Text",
               {"text": "text"}]
    ids = [document_id(sample) for sample in samples]
    assert ids[0] == ids[3] == ids[5] and len(set(ids)) == 4
    assert all(0 <= i < 2 ** 63 for i in ids) and torch.tensor(ids).tolist() == ids
    code = f"import batches; print([batches.document_id(s) for s in {samples!r}])"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True,
                                      env={**os.environ, "PYTHONHASHSEED": "1"}, timeout=120)
    assert printed.strip() == str(ids)


def test_parts_of_a_sample_are_not_confused():
    assert document_id("a.png") != document_id({"image": "a.png"})
    assert document_id({"text": "ab", "image": "c"}) != document_id({"text": "a", "image": "bc"})
    assert document_id({"text": "a b", "image": "c"}) != document_id({"text": "a", "image": " bc"})
    red, green, tall = (Image.new("RGB", size, c) for size, c in
                        (((2, 4), "red"), ((2, 4), "green"), ((4, 2), "red")))
    assert len({document_id({"image": image}) for image in (red, green, tall, red.copy())}) == 3


def test_pool_counts_every_row_once_and_every_document_once():
    rows = [{"query": "q", "positive": "p1", "negatives": ["n", "p3"]},
            {"query": "q", "positive": "p2", "negatives": ["p1", "n"]},
            {"query": "r", "positive": "p3", "negatives": []}, {"query": "q", "positive": "p1"}]
    queries, documents, relevant = retrieval_pool(rows)
    assert queries == ["q", "q", "r", "q"] and sorted(documents) == ["n", "p1", "p2", "p3"]
    named = [[documents[i] for i in indices] for indices in relevant]
    assert named == [["p1", "p2"], ["p2", "p1"], ["p3"], ["p1", "p2"]]     # the row's own one first


def test_fingerprint_sees_every_change_and_nothing_else():
    rows = pairs(3, negatives=2)
    changed = [rows[::-1], rows[:2], [*rows[:2], {**rows[2], "query": "x"}],
               [*rows[:2], {**rows[2], "positive": "x"}],
               [*rows[:2], {**rows[2], "negatives": ["x"]}]]
    assert len({fingerprint(r) for r in [rows, *changed]}) == 6
    assert fingerprint(rows) == fingerprint([{**row, "line": 1} for row in rows])


def test_the_summary_of_what_was_read_has_the_numbers():
    rows = [{"query": "q", "positive": "p", "negatives": ["a", "b", "c"]},
            {"query": "q", "positive": {"image": "/x.png"}, "negatives": []}]
    text = describe(rows)
    for part in ("2 rows", "1 unique queries", "5 unique documents", "1 with an image",
                 "min 0, mean 1.5, max 3"):
        assert part in text


def test_negatives_that_answer_the_query_or_repeat_are_left_out_and_counted():
    rows = [{"query": "q", "positive": "p1", "negatives": ["p2", "n", " p1 ", "n"]},
            {"query": "q", "positive": "p2", "negatives": []}, {"query": "r", "positive": "p"}]
    assert [[*own.values()][1:] for own in index_rows(rows)[1]] == [["n"], [], []]
    assert "3 negatives are known answers or repeats" in describe(rows)


# ----------------------------------------------------------------------------------- order, batches
def joined(lists):
    return [item for part in lists for item in part]


def run(batches, steps):
    """Everything of a run that must be repeatable, as plain values."""
    return [(b["rows"], b["queries"], b["documents"], b["positives"].tolist(),
             b["document_ids"].tolist(), b["answers"]) for b in (batches[s] for s in steps)]


def test_resuming_at_any_step_continues_the_same_run():
    """23 rows, batch 4, three epochs: also exactly on an edge, and with sampled negatives."""
    make = lambda: Batches(pairs(23, 5), features, 4, num_hard_negatives=2, seed=3)
    assert len(make()) == 5
    whole = run(make(), range(15))
    for stop in range(16):
        random.seed(stop), torch.manual_seed(stop)
        assert run(make(), range(stop)) + run(make(), range(stop, 15)) == whole
    backwards = make()
    assert [run(backwards, [s])[0] for s in reversed(range(15))] == whole[::-1]


def test_batches_leave_the_global_generators_alone():
    random.seed(0), torch.manual_seed(0)
    before = random.getstate(), torch.get_rng_state()
    run(Batches(pairs(20, 3), features, 4, num_hard_negatives=1, no_duplicates=True), range(8))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_epochs_differ_in_order_and_in_who_shares_a_batch():
    batches = Batches(pairs(100), features, 10)
    epochs = [[batches[s]["rows"] for s in range(e * 10, e * 10 + 10)] for e in (0, 1)]
    assert all(sorted(joined(epoch)) == list(range(100)) for epoch in epochs)
    assert {frozenset(b) for b in epochs[0]}.isdisjoint({frozenset(b) for b in epochs[1]})
    again, other = Batches(pairs(100), features, 10), Batches(pairs(100), features, 10, seed=1)
    assert [again[s]["rows"] for s in range(10)] == epochs[0]
    assert [other[s]["rows"] for s in range(10)] != epochs[0]
    assert [batches.epoch_of(s) for s in (0, 9, 10, 35)] == [0, 0, 1, 3]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_take_the_slices_of_what_one_process_would_take(world_size):
    rows = pairs(53, 2)
    whole = Batches(rows, features, 12, num_hard_negatives=1)
    shares = [Batches(rows, features, 12 // world_size, rank=r, world_size=world_size,
                      num_hard_negatives=1) for r in range(world_size)]
    for step in range(9):
        for key in ("rows", "queries", "documents", "answers"):
            assert joined(share[step][key] for share in shares) == whole[step][key]
        assert torch.equal(torch.cat([share[step]["document_ids"] for share in shares]),
                           whole[step]["document_ids"])


@pytest.mark.parametrize("rows, size, world_size, steps",
                         [(7, 2, 2, 1), (5, 2, 2, 1), (10, 4, 1, 2)])
def test_the_incomplete_batch_is_dropped_and_no_row_used_twice(rows, size, world_size, steps):
    shares = [Batches(pairs(rows), features, size, rank=r, world_size=world_size)
              for r in range(world_size)]
    assert {len(share) for share in shares} == {steps}
    for epoch in range(5):
        used = [row for step in range(epoch * steps, epoch * steps + steps)
                for share in shares for row in share[step]["rows"]]
        assert len(set(used)) == len(used) == steps * size * world_size


def test_kept_last_batches_count_every_row_exactly_once():
    shares = [Batches(pairs(7), features, 2, rank=r, world_size=2, drop_last=False) for r in (0, 1)]
    assert len(shares[0]) == 2
    used = [[share[step]["rows"] for share in shares] for step in (0, 1)]
    assert sorted(joined(used[0] + used[1])) == list(range(7))
    assert sorted(map(len, used[1])) == [1, 2]


def test_settings_without_a_full_batch_are_refused_with_the_numbers():
    message = error_of(Batches, pairs(5), features, 4, world_size=2)
    assert "5 rows" in message and "8" in message and "--batch-size" in message
    for wrong in ({"batch_size": 0}, {"rank": 2, "world_size": 2}, {"num_hard_negatives": -1}):
        options = {"batch_size": 2, **wrong}
        assert all(f"{k}={v}" in error_of(Batches, pairs(5), features, **options)
                   for k, v in wrong.items())


def texts_of(batch):
    return [text for _, text in batch["queries"] + batch["documents"]]


@pytest.mark.parametrize("seed", range(10))
def test_batches_without_duplicates_have_none_and_an_honest_length(seed):
    rows = [{"query": f"q{i}", "positive": t, "negatives": []} for i, t in enumerate("AAABCD")]
    batches = Batches(rows, features, 2, seed=seed, no_duplicates=True)
    assert len(batches) in (2, 3)                                 # three A: each needs a partner
    begin = 0
    for epoch in range(4):
        steps = range(begin, begin := begin + batches.steps_in(epoch))
        assert [batches.epoch_of(s) for s in steps] == [epoch] * len(steps) != []
        assert batches.epoch_of(begin) == epoch + 1
        for step in steps:
            assert len(set(texts_of(batches[step]))) == 4


def test_no_text_twice_holds_over_processes_negatives_and_sides():
    rng = random.Random(0)
    text = lambda: f"t{rng.randrange(150)}"
    rows = [{"query": text(), "positive": text(), "negatives": [text() for _ in range(4)]}
            for _ in range(300)]
    make = lambda **options: [Batches(rows, features, 4, rank=r, world_size=2, num_hard_negatives=2,
                                      **options) for r in (0, 1)]

    def has_duplicates(shares, step):
        owners = {}
        for batch in (share[step] for share in shares):
            for i, row in enumerate(batch["rows"]):
                end = [*batch["positives"].tolist(), len(batch["documents"])][i + 1]
                own = batch["documents"][batch["positives"][i]:end] + [batch["queries"][i]]
                for _, text in own:
                    owners.setdefault(text, set()).add(row)
        return any(len(rows) > 1 for rows in owners.values())
    clean, plain = make(no_duplicates=True), make()
    assert len(clean[0]) > 20
    assert not any(has_duplicates(clean, step) for step in range(2 * len(clean[0])))
    assert any(has_duplicates(plain, step) for step in range(len(plain[0])))


def test_rows_that_wait_for_another_batch_are_not_lost():
    rows = [{"query": f"q{i}", "positive": f"p{i % 10}"} for i in range(60)]
    batches = Batches(rows, features, 4, no_duplicates=True)
    for epoch in range(10):                                       # 15 is the most there can be
        assert batches.steps_in(epoch) >= 13
    assert min(Batches(rows, features, 1, world_size=2, no_duplicates=True, seed=s).steps_in(0)
               for s in range(10)) >= 28


def test_alike_rows_without_duplicates_end_with_a_message():
    rows = [{"query": "q", "positive": "p", "negatives": ["n"]}] * 6
    message = error_of(Batches, rows, features, 2, num_hard_negatives=1, no_duplicates=True)
    assert "6 rows" in message and "no_duplicates=True" in message


def test_a_candidate_pool_of_one_is_refused():
    some = [*pairs(3, 1), {"query": "q", "positive": "p"}]
    alike = [{"query": f"q{i}", "positive": "p"} for i in range(6)]
    bad = [(pairs(4), 1, 0), (pairs(4, 2), 1, 0), (some, 1, 1), (alike, 2, 0)]
    for rows, size, negatives in bad:
        message = error_of(Batches, rows, features, size, num_hard_negatives=negatives)
        assert "pool of one" in message and "--batch-size" in message
    Batches(pairs(4), features, 1, world_size=2)
    Batches(pairs(4, 2), features, 1, num_hard_negatives=1)


# ----------------------------------------------------------------------------------- hard negatives
def test_rows_give_their_negatives_without_padding():
    """With equal similarities the loss is the logarithm of the number of candidates."""
    ragged = [{**row, "negatives": row["negatives"][:n]} for row, n in zip(pairs(2, 3), (1, 3))]
    batch = Batches(ragged, features, 2, num_hard_negatives=3)[0]
    assert math.log(len(batch["documents"])) == pytest.approx(1.791759, abs=1e-6)      # ln 6
    for negatives, loss in enumerate((1.386294, 2.079442, 2.484907)):                  # ln 4, 8, 12
        batch = Batches(pairs(4, 2), features, 4, num_hard_negatives=negatives)[0]
        assert math.log(len(batch["documents"])) == pytest.approx(loss, abs=1e-6)


def test_a_batch_says_which_document_is_whose_positive_and_who_is_who():
    rows = [{**row, "negatives": row["negatives"][:i % 4]} for i, row in enumerate(pairs(12, 3))]
    rows[5]["positive"] = rows[6]["positive"]
    for batch in (Batches(rows, features, 6, num_hard_negatives=2)[step] for step in range(4)):
        ends = [*batch["positives"].tolist()[1:], len(batch["documents"])]
        for row, query, begin, end in zip(batch["rows"], batch["queries"],
                                          batch["positives"].tolist(), ends):
            assert query == ["query", rows[row]["query"]]
            assert batch["documents"][begin] == ["document", rows[row]["positive"]]
            negatives = [text for _, text in batch["documents"][begin + 1:end]]
            assert len(negatives) == min(2, row % 4) and {*negatives} <= {*rows[row]["negatives"]}
        assert batch["positives"].dtype == batch["document_ids"].dtype == torch.long
        names = [document_id(text) for _, text in batch["documents"]]
        assert batch["document_ids"].tolist() == names


def test_sampled_negatives_change_with_the_epoch_and_all_get_their_turn():
    batches = Batches(pairs(2, 6), features, 2, num_hard_negatives=2)
    drawn = [frozenset(text for _, text in batches[step]["documents"]) for step in range(40)]
    assert len(set(drawn)) > 20 and len(frozenset.union(*drawn)) == 14


def test_a_known_answer_is_listed_and_never_serves_as_a_negative():
    rows = [{"query": "q", "positive": "a1", "negatives": ["a2", "n1", "n2", "a1 "]},
            {"query": "q", "positive": "a2", "negatives": ["n3", "a1"]}, *pairs(2)]
    batches = Batches(rows, features, 4, num_hard_negatives=3)
    assert "2 rows have fewer" not in batches.summary() and "4 rows have fewer" in batches.summary()
    for step in range(20):
        batch = batches[step]
        assert len(batch["documents"]) == 4 + 3 and len(set(batch["document_ids"].tolist())) == 7
        for row, answers in zip(batch["rows"], batch["answers"]):
            known = ["a1", "a2"] if row < 2 else [rows[row]["positive"]]
            assert sorted(answers) == sorted(map(document_id, known))


def test_the_start_says_how_many_negatives_stay_unused_and_how_many_rows_fall_short():
    rows = [{**row, "negatives": row["negatives"][:n]} for row, n in zip(pairs(4, 5), (5, 4, 1, 0))]
    text = Batches(rows, features, 2, num_hard_negatives=2).summary()
    assert "up to 2" in text and "2 rows have fewer" in text and "5 of 10 stay unused" in text
    assert "2 batches of 2 of 4 rows" in text


def test_loader_workers_give_the_same_batches_and_hash_nothing_again(monkeypatch):
    batches = Batches(pairs(20, 4), features, 3, num_hard_negatives=2)
    expected = run(batches, range(2, 12))
    monkeypatch.setattr(batches_module, "document_id", None)      # hashing again would fail
    loader = DataLoader(batches, batch_size=None, sampler=range(2, 12), num_workers=2)
    assert run(list(loader), range(10)) == expected


# --------------------------------------------------------------- scores, labels, noise, a guide
def labelled(counts):
    """Rows without a positive: `counts[label]` of each label."""
    return [{"query": f"{label}.{i}", "label": label} for label, n in enumerate(counts)
            for i in range(n)]


@pytest.mark.parametrize("counts", [(8, 8), (40, 6, 2), (3, 5, 7, 9)])
def test_rows_of_one_label_come_in_twos_and_no_batch_has_one_class_only(counts):
    rows = labelled(counts)
    batches = Batches(rows, features, 4, numbers=("label",), pair_labels=True, drop_last=False)
    for epoch in range(5):
        begin = sum(map(batches.steps_in, range(epoch)))
        steps = [batches[begin + i] for i in range(batches.steps_in(epoch))]
        assert sorted(joined(step["rows"] for step in steps)) == list(range(len(rows)))
        labels = joined(step["label"].tolist() for step in steps)
        assert labels == [rows[i]["label"] for i in joined(step["rows"] for step in steps)]
        twos = sum(n // 2 for n in counts)
        assert all(labels[2 * i] == labels[2 * i + 1] for i in range(twos))
        if len(set(counts)) == 1:
            assert all(len(set(step["label"].tolist())) == 2 for step in steps)
    assert batches[0]["documents"] == [] and len(batches[0]["positives"]) == 4
    assert run(batches, range(3)) == run(Batches(rows, features, 4, numbers=("label",),
                                                 pair_labels=True, drop_last=False), range(3))


def test_labels_that_hold_no_triplet_are_refused():
    for counts in ((8,), (1,) * 8):
        assert "no triplet" in error_of(Batches, labelled(counts), features, 4, pair_labels=True)
    assert "even" in error_of(Batches, labelled((4, 4)), features, 3, pair_labels=True)


def test_a_teachers_scores_stay_with_their_documents_whatever_is_drawn_or_left_out():
    rows = pairs(6, 5)
    rows[0]["query"] = rows[1]["query"]
    rows[0]["negatives"][2] = rows[1]["positive"]                     # an answer: left out
    rows[3]["negatives"][4] = rows[3]["negatives"][0]                 # a repeat: counts once
    score = {}
    for i, row in enumerate(rows):
        row["teacher_scores"] = [i + j / 10 for j in range(6)]
        for text, value in zip([row["positive"], *row["negatives"]], row["teacher_scores"]):
            score.setdefault((i, text), value)
    batches = Batches(rows, features, 3, num_hard_negatives=2, numbers=("teacher_scores",))
    for step in range(12):
        batch = batches[step]
        ends = [*batch["positives"].tolist()[1:], len(batch["documents"])]
        owners = joined([row] * (end - begin) for row, begin, end in
                        zip(batch["rows"], batch["positives"].tolist(), ends))
        expected = [score[row, text] for row, (_, text) in zip(owners, batch["documents"])]
        assert batch["teacher_scores"].tolist() == torch.tensor(expected).tolist()


def test_noise_takes_words_away_and_other_ones_in_each_epoch():
    words = [f"w{i}" for i in range(100)]
    rows = [{"query": " ".join(words)}, {"query": "one"}, {"query": {"image": "x.png"}}]
    batches = Batches(rows, features, 3, noise=0.6)
    seen = []
    for epoch in range(20):
        batch = batches[epoch]
        by_row = dict(zip(batch["rows"], zip(batch["queries"], batch["originals"])))
        assert all(by_row[i][1] == ["query", rows[i]["query"]] for i in range(3))
        assert by_row[1][0][1] == "one" and by_row[2][0][1] == {"image": "x.png"}
        kept = by_row[0][0][1].split()
        assert kept == [word for word in words if word in kept]       # in their order
        seen.append(tuple(kept))
    assert len(set(seen)) == 20 and 38 < sum(map(len, seen)) / 20 < 42
    again = Batches(rows, features, 3, noise=0.6)
    assert all(again[i]["queries"] == batches[i]["queries"] for i in (7, 0, 19))


def test_a_guide_gets_features_of_its_own_of_the_same_samples():
    guide = lambda sample, side: ("guide", side, sample)
    batch = Batches(pairs(6, 2), features, 3, num_hard_negatives=1, guide=guide)[0]
    for name in ("queries", "documents"):
        assert batch[f"guide_{name}"] == [("guide", *sample) for sample in batch[name]]
    twice = [{"query": "a", "positive": "a"}, {"query": "b", "positive": "b"}]
    batch = Batches(twice, features, 2, document_side="query")[0]
    assert batch["documents"] == batch["queries"]


def test_fingerprint_sees_scores_and_labels():
    rows = [{**row, "score": 0.5, "label": 1} for row in pairs(3)]
    assert fingerprint(rows) != fingerprint(pairs(3))
    assert fingerprint(rows) != fingerprint([*rows[:2], {**rows[2], "label": 0}])


# ------------------------------------------------------------------------------------------ prompts
def prompted(text, prompt="say: "):
    return {"text": text, "prompt": prompt}


def test_a_prompt_is_part_of_a_query_and_not_of_a_document():
    """The same words under two instructions have their own answers; a document is what it says."""
    assert document_id(prompted("t")) == document_id("t") == query_id("t")
    assert len({query_id(q) for q in ("t", prompted("t"), prompted("t", "b"), prompted("u"))}) == 4
    assert query_id(prompted("t", "a b")) != query_id(prompted("b t", "a"))
    rows = [{"query": prompted("q", "a"), "positive": prompted("p1", "x"), "negatives": ["p2"]},
            {"query": prompted("q", "b"), "positive": "p2", "negatives": ["p1", prompted("p2")]}]
    queries, documents, answers = index_rows(rows)
    assert len(set(queries)) == 2 and len(answers) == 2
    assert [[*own.values()] for own in documents] == [[prompted("p1", "x"), "p2"], ["p2", "p1"]]
    assert retrieval_pool(rows) == ([rows[0]["query"], rows[1]["query"]],
                                    [prompted("p1", "x"), "p2"], [[0], [1]])
    assert "2 unique queries, 2 unique documents, 0 with an image" in describe(rows)
    for sample, images in ((prompted("p"), 0), ({**prompted("p"), "image": "x.png"}, 1)):
        assert f"{images} with an image" in describe([{"query": "q", "positive": sample}])


def test_fingerprint_sees_prompts_of_queries_and_of_documents():
    row = {"query": "q", "positive": "p", "negatives": ["n"]}
    changed = [{**row, "query": prompted("q")}, {**row, "positive": prompted("p")},
               {**row, "negatives": [prompted("n")]}, {**row, "query": prompted("q", "b")}]
    assert len({fingerprint([r]) for r in [row, *changed]}) == 5


def test_noise_takes_words_from_the_text_and_leaves_the_prompt():
    text, both = " ".join(f"w{i}" for i in range(50)), {"text": "one two", "image": "x.png"}
    rows = [{"query": prompted(text, "all of this stays")}, {"query": both}]
    batch = Batches(rows, features, 2, noise=0.6)[0]
    noised, original = ([*sorted(batch[name], key=lambda pair: "image" in pair[1])]
                        for name in ("queries", "originals"))
    assert noised[0][1]["prompt"] == "all of this stays" and noised[1] == original[1] == [
        "query", both]
    assert 0 < len(noised[0][1]["text"].split()) < 50 and original[0][1] == rows[0]["query"]
    assert rows[0]["query"]["text"] == text                        # the rows stay as they are


def test_pages_keep_the_prompt():
    image, both = {"image": "x.png"}, {**prompted("m"), "image": "y"}
    rows = [{"query": "q", "positive": prompted("p"), "negatives": ["n", image, both]}]
    as_pages(rows)
    page, negatives = {"image": "page:p", "prompt": "say: "}, [{"image": "page:n"}, image, both]
    assert rows == [{"query": "q", "positive": page, "negatives": negatives}]
    assert as_page(sample := prompted("p")) == page and sample == prompted("p")


def test_an_image_in_memory_is_known_by_its_bytes():
    assert len({document_id({"image": image}) for image in (b"a", b"b", "a")}) == 3
