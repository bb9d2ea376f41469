# SPDX-License-Identifier: Apache-2.0
"""What a run tells of its config.  Keys that are told to have no effect have none: neither on numbers nor on memory
and tasks.  Those that have one are not told."""
import re

import pytest

import run

ZERO, STATES, PARAMS = ("zero_optimization", "zero_optimization.offload_optimizer",
                        "zero_optimization.offload_param")
PLAIN = {
    "communication_data_type": "fp32", "optimizer.params.torch_adam": True,
    "fp16.loss_scale": 8, "fp16.hysteresis": 5, "data_types.grad_accum_dtype": "fp32",
    f"{ZERO}.overlap_comm": False, f"{ZERO}.stage3_prefetch_bucket_size": 3,
    f"{ZERO}.stage3_max_live_parameters": 4, f"{ZERO}.stage3_max_reuse_distance": 0,
    f"{STATES}.nvme_path": "/", f"{STATES}.buffer_count": 2, f"{STATES}.pin_memory": False,
    f"{PARAMS}.nvme_path": "/", f"{PARAMS}.buffer_count": 2, f"{PARAMS}.pin_memory": False,
    "lora.alpha": 3,
    "data.val_fraction": 0.3, "run.keep_last": 4, "run.save_mode": "async",
    "run.save_buffers": 3, "run.eval_interval": 0, "run.sample_prompt": "a",
    "run.sample_temperature": 0.1, "run.ring": 3, "run.comm": "mpi",
    "run.host_comm": "messages", "run.gpu_attention": "own", "run.gpu_logits_bytes": 7,
    "run.tf32": True, "run.muon_products": "host", "run.device_memory_limit_bytes": 9,
    "run.schedule": "breadth_first", "run.parallel_micro_batches": 2,
    "run.sum_order": "local_first", "run.sum_group": 1, "run.nvme_checksum": True,
    "run.inject_seed": 4, "run.export_dtype": "fp16", "run.export_shard_bytes": 5,
    "run.empty_steps": "skip", "optimizer.params.adam_w_mode": True}
FP16 = {"fp16.enabled": True, "gradient_accumulation_steps": 2}
WARM = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}}}
CASES = [
    (1, {"optimizer.params.weight_decay": 0}, PLAIN, {}),
    (2, {**FP16, **WARM, "fp16.loss_scale": 64, "run.save_interval": 2, "run.save_mode": "sync",
         f"{ZERO}.stage": 3, "run.ring": 2, "data_types.grad_accum_dtype": "fp16"},
     {"fp16.hysteresis": 5, "fp16.loss_scale_window": 1, "fp16.initial_scale_power": 3,
      "fp16.min_loss_scale": 2, "fp16.consecutive_hysteresis": True,
      "optimizer.params.lr": 3, f"{ZERO}.stage3_prefetch_bucket_size": 3,
      f"{ZERO}.stage3_max_live_parameters": 4,
      "run.save_buffers": 3},
     {f"{ZERO}.overlap_comm": True, "optimizer.params.adam_w_mode": True,
      "run.keep_last": 1}),
    (1, {**FP16, "run.schedule": "breadth_first", "fp16.hysteresis": 1,
         "optimizer": {"type": "Muon", "params": {"momentum": 0}}},
     {"optimizer.params.nesterov": False, "optimizer.params.lr": 7,
      "run.parallel_micro_batches": 1, "fp16.consecutive_hysteresis": True},
     {"optimizer.params.muon_lr": 0.01, "optimizer.params.adam_lr": 0.01,
      "fp16.loss_scale_window": 500}),
    (1, {"run.sequence_chunk": 5}, {}, {"run.sequence_chunk": 7, "run.recompute": "none"}),
    (1, {}, {"run.sequence_chunk": 99}, {"run.recompute": "full"})]


WARMUP = {"type": "WarmupLR"}
DECAY = {"type": "WarmupDecayLR"}


@pytest.mark.parametrize("scheduler, params, said", [
    (WARMUP, {"warmup_num_steps": 4}, ["warmup_num_steps is 4 and run.steps 3: the rate "
                                       "is still rising at the end"]),
    (WARMUP, {"warmup_num_steps": 3}, []),
    (DECAY, {"warmup_num_steps": 1, "total_num_steps": 2}, [
        "total_num_steps is 2 and run.steps 3: the rate is 0 from there on"]),
    (DECAY, {"warmup_num_steps": 1, "total_num_steps": 2, "warmup_min_lr": 1e-4}, [
        "total_num_steps is 2 and run.steps 3: the schedule is over before the run"]),
    ({"type": "WarmupCosineLR"}, {"warmup_num_steps": 2, "total_num_steps": 2}, [
        "warmup_num_steps is 2 and total_num_steps 2: the rate rises to the end",
        "total_num_steps is 2 and run.steps 3: the schedule is over before the run"]),
    ({"type": "linear"}, {"total_num_steps": 2}, [
        "total_num_steps is 2 and run.steps 3: the rate is 0 from there on"]),
    ({"type": "cosine"}, {"total_num_steps": "auto"}, []),
    (DECAY, {"warmup_num_steps": 2, "total_num_steps": "auto"}, [])], ids=str)
def test_a_schedule_that_ends_elsewhere_is_told(scheduler, params, said, place):
    r = place.launch(1, {"scheduler": {**scheduler, "params": params}}, ["--plan"])
    lines = re.findall(r"^config: scheduler.params.(.*)$", r.out, re.M)
    assert r.rc == 0 and len(lines) == len(said), str(r)
    assert all(words in line for words, line in zip(said, lines)), str(r)


def test_the_rates_are_those_of_the_keys(place):
    """tests/runtime/engine/test_schedule.c has the formulas."""
    r = place.good(1, {"run.steps": 5, "optimizer.params.lr": 0.02, "scheduler": {
        "type": "warmup_stable_decay", "params": {
            "warmup_num_steps": 1, "num_decay_steps": 2, "min_lr_ratio": 0.5,
            "total_num_steps": "auto"}}})
    assert [s["lr"] for s in r.steps] == pytest.approx([0.01, 0.02, 0.02, 0.02, 0.015])


def test_a_step_that_learns_nothing_new_is_told(place):
    r = place.good(1, {"optimizer.params.lr": 0.0, "data.val_fraction": 0.9,
                       "train_batch_size": 2000, "run.steps": 1})
    assert "config: optimizer.params.lr is 0: no step moves a weight\n" in r.out
    assert re.search(r"train_batch_size is 2000 and there are \d+ samples: a step has "
                     "some", r.out)


@pytest.mark.parametrize("ranks, base, idle, used", CASES, ids=("plain", "fp16", "muon", "chunks", "no chunks"))
def test_what_has_no_effect_is_told(ranks, base, idle, used, place):
    base = {**base, "data.val_path": str(place.data)}
    plain = place.good(ranks, {**base, **used})
    r = place.good(ranks, {**base, **used, **idle})
    said, = re.findall(r"^config: without effect here: (.*)$", r.out, re.M)
    said = set(re.findall(r"[\w.]+\.\w+|communication_data_type", said))
    assert set(idle) - said - {"run.eval_interval"} == set() == said & set(used)
    assert r.numbers == plain.numbers and r.memory == plain.memory
    assert r.summary["tasks"] == plain.summary["tasks"]
    if ranks == 1:  # its own config gives all keys
        again = place.as_it_is({**r.config, "run": {**r.config["run"], "output": str(
            place.folder / "again")}})
        assert again.hash == r.hash and "without effect" not in again.out


@pytest.mark.parametrize("name, base, idle, used", [
    ("llama", {}, {"rope_scaling_low_freq_factor": 2, "rope_scaling_truncate": False,
                   "rope_scaling_original_seq": 99, "rope_scaling_type": "yarn", "window": 16},
     {"kv_heads": 2}),
    ("llama", {"family": "smollm3", "no_rope_layers": "1,0"},
     {"no_rope_layer_interval": 2, "layer_types": "full_attention,sliding_attention"},
     {"rope_theta": 500}),
    ("moe", {"rope_scaling_factor": 4, "rope_scaling_type": "linear"},
     {"ffn": 99, "rope_scaling_original_seq": 7, "rope_scaling_high_freq_factor": 9}, {})],
    ids=("llama", "layers", "moe"))
def test_of_a_model_too(name, base, idle, used, place):
    """The keys of model that are told change no bit, and the others are not told."""
    place.use(run.built(f"models/{name}"), {"preset": "tiny", **base, **used})
    plain = place.good(1, {})
    r = place.good(1, {f"model.{k}": v for k, v in idle.items()})
    said, = re.findall(r"^config: without effect here: (.*)$", r.out, re.M)
    assert set(re.findall(r"model\.(\w+)", said)) == set(idle)
    assert not re.search("^config: without effect.* model\\.", plain.out, re.M)
    assert r.hash == plain.hash
