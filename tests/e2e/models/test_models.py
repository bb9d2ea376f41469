# SPDX-License-Identifier: Apache-2.0
"""Models beside GPT-2: they learn records, and speak of what they read.  Their bits are in
test_matrix.py, the losses of texts in tests/e2e/hf/test_families.py."""
import json
import re

import pytest

import rows
import run
from rows import PLAIN

ROW = {**PLAIN, "ranks": 1, "dtype": "fp32", "batch": 12, "device": "cpu"}
CLICKS = {"dense": 13, "tables": 26, "rows": 500, "dim": 8, "unit_rows": 3000,
          "bottom_layers": 1, "bottom_width": 32, "top_layers": 1, "top_width": 64}


# Ten classes: a guess costs 2.3 nats.  Always the mean rate of clicks: 0.59.
@pytest.mark.parametrize("name, kind, count, shape, batch, steps, first, last", [
    ("vit", "shapes", 3000, {
        "layers": 2, "heads": 2, "width": 32, "hidden": 64, "image": 32, "patch": 8,
        "channels": 3, "classes": 10}, 32, 150, (2.2, 2.6), 1.9),
    ("dlrm", "clicks", 20000, CLICKS, 128, 250, (0.6, 2), 0.56),
    ("sparse", "clicks", 20000, CLICKS, 128, 250, (0.6, 2), 0.56)])
def test_learns_records(name, kind, count, shape, batch, steps, first, last, start,
                        place):
    pytest.importorskip("numpy")
    data = place.folder / "learnt"
    assert run.call(run.ROOT / "tools/records", kind, data, count).rc == 0
    r = start({**ROW, "model": name, "batch": batch, "steps": steps},
              {"model": shape, "data.path": str(data), "run.eval_batches": 8})
    assert first[0] < r.losses[0] < first[1]
    assert r.summary["validation_loss"] < last, str(r)


@pytest.mark.sanitized
@pytest.mark.parametrize("model, item", [("vit", "image"), ("dlrm", "sample")])
def test_output_speaks_of_what_the_model_counts(model, item, start):
    r = start({**ROW, "model": model}, {"run.eval_batches": 1})
    assert f"nats per {item}" in r.out and f"{item}s/s" in r.out
    assert f"{item}s_per_s" in r.summary and "train 95 records" in r.out
    assert "token" not in r.out, str(r)


def test_a_finished_run_is_not_exported_without_names(start, place):
    row, more = {**ROW, "model": "dlrm", "steps": 2}, {"run.save": True}
    out = start(row, more).output
    r = start(row, {**more, "run.output": str(out), "run.export": str(place.folder / "x")},
              good=False, options=["--resume"])
    run.refused(r, "run.export: this model has no names for it")


# 7 tables of 31 rows; a sample reads one of each.
@pytest.mark.sanitized
@pytest.mark.parametrize("model, rules, words", [
    ("dlrm", [], ("0.00M rows of tables: a step reads at most 28",
                  "all are moved and updated")),
    ("sparse", rows.SPARSE, ("at most 28 of them (12.9 %), only these are moved",)),
    ("dlrm", [{"match": "tables.2.*", "sparse": True}],
     ("these and whole dense tables are moved",))])
def test_plan_says_what_tables_cost(model, rules, words, start):
    r = start({**ROW, "model": model, "batch": 4}, {"parameters": rules}, good=False,
              options=["--plan"])
    assert all(w in r.out for w in words), str(r)


# The published ones; ViT-Base and -Large less 990 rows of their classifiers and the biases.
@pytest.mark.sanitized
@pytest.mark.parametrize("name, model, millions", [
    ("gpt2", {"preset": "gpt2-124m"}, "124.44"), ("llama", {"preset": "llama-3-8b"}, "8030.26"),
    ("llama", {"preset": "qwen3-0.6b"}, "596.05"),
    ("vit", {"preset": "vit-b16", "classes": 10}, "85.81"),
    ("vit", {"preset": "vit-l16", "classes": 10}, "303.31")])
def test_preset_is_planned_for_another_machine(name, model, millions, place):
    place.use(run.built(f"models/{name}"), model, name == "vit" and place.data)
    machine = run.ROOT / "configs/machines/h200-141.json"
    r = place.good(1, {"bf16.enabled": True, **run.offload(3, "cpu", "none", None),
                       "train_batch_size": 8},
                   ["--plan", "--ranks", 8, "--machine", machine])
    assert f"{millions}M parameters" in r.out, str(r)


@pytest.mark.parametrize("samples, accum, near, percent", [
    (4, "bf16", True, None), (2, "fp32", False, None), (8, "bf16", False, "16.9")])
def test_14b_at_128k_tokens_repeats_what_the_docs_say(samples, accum, near, percent,
                                                      place):
    """On one H200 with a host of 128 GiB."""
    config = json.loads((run.ROOT / "configs/gpt2-14b.json").read_text())
    change = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": samples,
              "gradient_accumulation_steps": 64 // samples,
              "zero_optimization.offload_optimizer.ratio": 0.5,
              "data_types.grad_accum_dtype": accum, "run.master": "remainder",
              "run.state_dtype": "fp32",
              "run.schedule": "depth_first", "run.ring": 2}
    path = place.folder / "14b.json"
    path.write_text(json.dumps(run.merge(config, change)))
    r = run.call(run.PROGRAM, path, "--plan", "--machine",
                 run.ROOT / "configs/machines/h200-141.json")
    assert r.rc == 0 and ("the GPU adds the micro-batches" in r.out) == near, str(r)
    found = re.search(r"backward recomputes ([\d.]+) %", r.out)
    assert (found and found.group(1)) == percent, str(r)


def test_sparse_tables_refuse_a_gpu(start):
    machine = run.ROOT / "configs/machines/v100-32-dgx2.json"
    row = {k: v for k, v in ROW.items() if k != "device"}
    r = start({**row, "model": "sparse", "batch": 4}, good=False,
              options=["--plan", "--ranks", "4", "--machine", machine])
    run.refused(r, "sparse: true for tables.0.rows", "run.device: cpu")
