# SPDX-License-Identifier: Apache-2.0
"""The chain of hashes, and steps that are computed again at another place."""
import json
import re
import shutil

import pytest

import rows
import run

CHAIN = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3,
         "gradient_accumulation_steps": 2, "run.steps": 6, "run.hash_interval": 1,
         "run.save": True, "run.save_interval": 2, "run.keep_last": 2, "run.hash": False}
ONE = {**CHAIN, "gradient_accumulation_steps": 4}  # of one rank
MUON = {**rows.UPDATES["muon"], "run.state_dtype": "bf16", **run.typed("bf16")}
# What the run computes; what else it has; where its steps are computed again.
ROWS = [(2, {}, "0:6", {"zero_optimization.stage": 3, "run.schedule": "depth_first"}),
        (2, {}, "4:6", {**run.offload(3, "nvme", "nvme", "NVME"), "run.workers": 1}),
        (1, {"gradient_accumulation_steps": 4}, "2:5",
         {**run.offload(2, "cpu", "none", ""), "run.inject_delay_us": 500}),
        (2, rows.TUNED["nf4"], "2:4", run.offload(3, "nvme", "nvme/nvme", "NVME")),
        (2, MUON, "4:6", run.offload(3, "nvme", "cpu", "NVME"))]


def replay(place, output, ranks, steps, settings=None, **more):
    words = [x for key, value in (settings or {}).items()
             for x in ("--set", f"{key}={json.dumps(value)}")]
    return run.call(*place.command(ranks, output, ["--replay", steps, *words]),
                    output=output, **more)


def links(output):
    return [x["hash"] for x in run.read_lines(output / "metrics.jsonl") if "hash" in x]


@pytest.mark.parametrize("ranks, what, steps, at", ROWS)
def test_a_replay_is_equal_anywhere_and_writes_nothing(ranks, what, steps, at, place,
                                                       nvme):
    out = place.good(ranks, {**CHAIN, **what}).output
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    at = json.loads(json.dumps(at).replace("NVME", str(nvme)))
    r = replay(place, out, ranks, steps, at)
    first, last = (int(x) for x in steps.split(":"))
    assert r.rc == 0 and r.out.splitlines()[-1].startswith(
        f"equal: steps {max(first, 1)} to {last} ("), str(r)
    assert f"from step {first // 2 * 2 if first > 3 else 0} on" in r.out
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_a_chain_goes_on_after_a_resume_at_another_place(place):
    whole = links(place.good(1, ONE).output)
    rest = place.halves(1, {**ONE, "run.steps": 3, "zero_optimization.stage": 3},
                        {**ONE, **run.offload(2, "cpu", "none", "")})
    assert links(rest.output) == whole and len({x["chain"] for x in whole}) == 6
    assert [x["after"] for x in whole] == [0, 1, 2, 3, 4, 5]


def test_steps_are_computed_with_what_the_run_had_there(place):
    """Of a run whose schedule became longer when it was resumed."""
    c = {**ONE, "run.keep_last": 9, "scheduler": {"type": "WarmupCosineLR", "params": {
        "warmup_num_steps": 1, "total_num_steps": "auto"}}}
    out = place.halves(1, {**c, "run.steps": 4}, {**c, "run.steps": 8}).output
    r = replay(place, out, 1, "5:8")
    assert r.rc == 0 and r.out == \
        "equal: steps 5 to 8 (4 hashes, computed from step 4 on)\n", str(r)
    run.refused(replay(place, out, 1, "3:4"), "total_num_steps: 4 in the run, 8 now")
    for step in (2, 4):  # as run.keep_last removes them
        shutil.rmtree(out / f"checkpoints/step-{step:08}")
    for steps, told in (("1:8", "between steps 4 and 5 the run was resumed with other settings"),
                        ("1:4", "no checkpoint tells what step 4 was computed with")):
        r = replay(place, out, 1, steps)
        assert r.rc == 1 and r.out.startswith(f"replay: {told}"), str(r)
        assert "\ndiffers: step 4: " in r.out, str(r)


def test_what_a_run_has_left_is_not_in_its_chain(place):
    """It ended behind its last checkpoint and was resumed with another rate."""
    out = place.halves(1, {**ONE, "run.steps": 5, "run.save": False}, {
        **ONE, "run.hash_interval": 3, "optimizer.params.lr": 1e-3}).output
    assert [(x["step"], x["after"]) for x in links(out)[-2:]] == [(5, 4), (6, 4)]
    r = replay(place, out, 1, "5:6")
    assert r.rc == 0 and r.out == \
        "equal: steps 6 to 6 (1 hashes, computed from step 4 on)\n", str(r)


def test_the_commands_of_the_page_prove_a_run(place):
    out = place.good(1, ONE).output
    page = (run.ROOT / "docs/checkpoints.md").read_text().partition("## Prove")[2]
    commands = [x.replace("izar replay", "build/models/gpt2").replace("--steps", "--replay")
                for x in re.search(r"```sh\n(.*?)```", page, re.S)[1].splitlines()]
    for words in (x.replace("100:300", "2:6").split() for x in commands):
        assert words[:2] == ["build/models/gpt2", "runs/a"]
        r = run.call(place.program, out, *words[2:], output=out)
        assert r.rc == 0 and r.out == \
            "equal: steps 2 to 6 (5 hashes, computed from step 0 on)\n", str(r)


def test_a_difference_is_named(place):
    """Another library, in the place of a machine that errs; a line that was edited; and
    what there is no answer to."""
    out = place.good(1, ONE).output
    r = replay(place, out, 1, "4:6", env={"OPENBLAS_CORETYPE": "Nehalem"})
    assert "replay: env.OPENBLAS_CORETYPE: nothing in the run, \"Nehalem\" now" in r.out
    assert r.rc == 1 and re.search(
        r"^differs: step 5: wte.weight \(master\) and \d+ more of 192; equal up to step 4$",
        r.out, re.M), str(r)
    run.refused(replay(place, out, 1, "7:9"), "no hash of steps 7 to 9")
    for steps in ("1:2", "4:6"):
        run.refused(replay(place, out, 1, steps, {"optimizer.params.lr": 1e-3}),
                    "--replay: optimizer.params.lr: 0.003 in the run, 0.001 now")
    run.refused(replay(place, out, 2, "4:6"), "train_batch_size", "2 ranks")
    run.refused(replay(place, out, 1, "4"), "--replay needs steps A:B", status=2)
    path = out / "metrics.jsonl"
    for word in ('"h.1/m": "........', '"state": "'):  # of a link
        text, n = re.subn(rf'^({{"hash": {{"step": 5,.*?{word})....', r"\1dead",
                          path.read_text(), flags=re.M)
        assert n == 1
        path.write_text(text)
    r = replay(place, out, 1, "4:6")
    assert r.rc == 1 and "the chain breaks at step 5" in r.out, str(r)
    assert "differs: step 5: h.1.ln_1.bias (m); equal up to step 4\n" in r.out
