# SPDX-License-Identifier: Apache-2.0
"""Bad input and dying ranks: one clear message that names the thing, a status
that is not zero, no dump, nothing damaged and never a hang."""
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

import rows
import run

PROMPT_S = 100  # "within seconds", on a busy machine; run.comm_timeout_s is 300


# ---- data and config: the rest is in tests/runtime ----

@pytest.mark.sanitized
def test_of_many_faults_some_are_told(place):
    r = place.launch(1, {f"run.key{i}": 1 for i in range(300)})
    lines = [x for x in r.err.splitlines() if "unknown key" in x]
    assert r.rc == 1 and len(lines) == 100, str(r)
    run.refused(r, "more faults than these 100")


CHUNK = "run.sequence_chunk"
MUON, ADAPTERS, NF4 = rows.UPDATES["muon"], {"lora": {"rank": 2, "targets": "*"}}, \
    rows.TUNED["nf4"]
# Mixtral's has experts in all blocks, whose weights add up to 1.
UNPUBLISHED = {"run.export": "/tmp/none", "model.qk_norm": False,
               "model.mlp_only_layers": []}
NO_SHAPE = "export", "no published type of model has this shape"
GROUPS = "groups of so many do not divide 4 ranks"
HOSTS = {"LD_PRELOAD": f"{run.BUILD}/tests/libhosts.so"}


def rule(match, **more):
    return {"parameters": [{"match": match, **more}]}


# By model: a change of the config, in which "ranks" and what is in capitals is of the
# start, and words.
REFUSED = {
    "gpt2": [
        ({"model": {"preset": "gpt2-125m"}}, "model.preset", "gpt2-124m"),
        ({"model.heads": 5}, "heads", "24", "5"),
        ({"data.path": "a,"}, "data.path", '"a,"', "empty member"),
        ({"data.path": ["a", "~/b"]}, "data.path", '"~/b"', "shell"),
        ({"zero_optimization.offload_param.nvme_path": "/x,"}, "offload_param.nvme_path", '"/x,"', "empty member"),
        ({"run.export": "~/x"}, "run.export", '"~/x"', "shell"),
        ({"run.sample_tokens": 3}, "run.sample_tokens", "run.sample_prompt"),
        ({"run.scheduler": "fastest"}, "run.scheduler", "fastest", "lws"),
        ({"run.slices": 3}, "run.slices", "3", "4"),
        ({"ranks": 3}, "train_batch_size", "4", "3 ranks"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "stage": 1}},
         "offload_optimizer.ratio: 0.5 leaves chunks to a GPU"),
        ({"ranks": 4, "run.sum_group": 3}, f"run.sum_group: 3: {GROUPS}"),
        ({"ranks": 4, "zero_optimization.stage": 3,
          "zero_optimization.zero_hpz_partition_size": 3},
         f"zero_optimization.zero_hpz_partition_size: 3: {GROUPS}"),
        # places: a new folder, an old one, a file
        ({"run.output": "/proc/no"}, "run.output", "/proc/no"),
        *[({"run.output": place}, place) for place in ("/proc/self", "/proc/version")],
        (run.offload(3, "nvme", "nvme", "/none"), "nvme", "/none", "No such file"),
        ({"ranks": 2, "data.path": "nowhere"}, "data: ", "nowhere", "No such file"),
        # memory: Open MPI's first rank of a host alone fails, in a call of all
        ({"ranks": 2, **HOSTS, "HOSTS": "Aa"},
         "MPI_Win_allocate_shared", "is /dev/shm full?"),
        ({"ranks": 4, "run.host_comm": "memory", **HOSTS, "HOSTS": "aaXX"},
         "run.host_comm: memory: it cannot be read on another host: set auto"),
        # variables
        ({"STARPU_SCHED": "quickest"}, "STARPU_SCHED", "quickest", "lws"),
        ({"STARPU_SCHED": "none"}, "STARPU_SCHED", "no scheduler 'none'"),
        ({"STARPU_SCHED": "modular-dmda"}, "STARPU_SCHED", "modular-dmda", "never end"),
        *[({name: value, "ranks": 2}, f"{name}: rank 0:", "unset it")
          for name, value in (("STARPU_USE_NUMA", "1"), ("STARPU_NTHREADS_PER_CORE", "2"),
                              ("STARPU_DISABLE_KERNELS", "1"))],
        *[({"IZ_REFERENCE_GEMM": side}, "IZ_REFERENCE_GEMM: rank 0:", "from 64 to 8192")
          for side in ("9000", "63", "many", "-1")],
        *[({name: value}, f"{name}: rank 0: is not a number") for name, value in (
            ("STARPU_NCPU", "abc"), ("STARPU_NCPU", "-1"), ("STARPU_NCPU", "1-3"),
            ("STARPU_MIN_PRIO", "-3"), ("STARPU_WORKERS_CPUID", "all"),
            ("STARPU_BACKOFF_MAX", "1k"))],
        *[({name: "/proc/no"}, f"{name}: rank 0: ", "another one")
          for name in ("STARPU_HOME", "XDG_CACHE_HOME")],
        ({"HOME": "/proc/no", "STARPU_HOME": None}, "HOME: rank 0: ", "STARPU_HOME"),
        ({"STARPU_HOSTNAME": "a/b"}, "STARPU_HOSTNAME: rank 0: ", "unset it"),
        ({"STARPU_NCPU": "0"}, "STARPU_NCPU", "leaves no worker"),
        ({"run.workers": 0, "STARPU_RESERVE_NCPU": "999"},
         "STARPU_RESERVE_NCPU", "leaves no worker"),
        ({"run.memory_limit_bytes": 10**14, "STARPU_NCPU": str(10**14)},
         "run.workers or STARPU_NCPU: 1048576 compute workers", "are more than"),
        ({"STARPU_NCUDA": "2"}, "STARPU_NCUDA", "one GPU"),
        ({"run.device": "cpu", "STARPU_NCUDA": "1"},
         "STARPU_NCUDA", "contradicts run.device"),
        ({"IZ_TRACE_STEPS": "1:2"}, "IZ_TRACE", "goes with IZ_TRACE"),
        ({"IZ_TRACE": "/dev/null"}, "IZ_TRACE", "is a file"),
        *[({"IZ_TRACE": "/tmp", "IZ_TRACE_STEPS": steps}, "IZ_TRACE", word)
          for steps, word in (("3", "is not a:b"), ("5:5", "is not a:b"),
                              ("7:9", "after run.steps"))],
        # documents
        ({"data.document_end": 256}, "data.document_end: 256 is outside the vocabulary"),
        ({"data.document_end": 255}, "has no token 255: no document ends"),
        ({"data.document_end": -2}, "data.document_end: -2"),
        ({"data.document_end": 32, "run.gpu_attention": "cudnn", "bf16.enabled": True},
         "run.gpu_attention: cudnn, but data.document_end is 32"),
        # what is trained how
        (rule("h.0.ln_1.wieght"),
         "parameters[0].match", "h.0.ln_1.wieght", "the nearest is h.0.ln_1.weight"),
        ({"parameters": [{"match": "*"}, {"match": "nothing"}]},
         "parameters[1].match", "nothing"),
        (rule("*", frozen=True), "parameters", "every tensor", "frozen"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"frozen_device": "cpu"}}},
         "frozen_device: cpu", "no tensor is frozen"),
        ({**NF4, **rule("h.1.mlp.c_fc.weight", frozen=False)},
         "model.base_dtype: nf4", "h.1.mlp.c_fc.weight", "trained"),
        ({"model.base_dtype": "nf4"},
         "model.base_dtype: nf4", "h.0.attn.c_attn.weight", "trained"),
        *[({"lora": {"rank": 2, "targets": t}}, "lora.targets", t, "linear layer")
          for t in ("wte.weight", "*.bias", "ln_f*", "c_atn")],
        ({"lora": {"rank": 2, "targets": "c_attn", "rank_pattern": {"c_fc": 4}}},
         "lora.rank_pattern", "c_fc", "matches no weight with an adapter"),
        ({"lora": {"rank": 2, "targets": "c_atn, nom"}}, "lora.targets", '"nom"'),
        ({"lora": {"rank": 2, "targets": "h.1.attn.c_atn.weight"}},
         "lora.targets", "the nearest is h.1.attn.c_attn.weight"),
        ({**MUON, "run.device": "cpu", "run.muon_products": "gpu"},
         "run.muon_products", "units are computed on the CPU"),
        ({**MUON, **rule("wte.weight", use_muon=True)}, "use_muon", "wte.weight"),
        ({**MUON, **rule("h.*", use_muon=False)}, "optimizer.type", "no matrix"),
        ({**MUON, **ADAPTERS}, "optimizer.type", "no matrix"),
        (rule("h.*", use_muon=False), "use_muon", "AdamW")],
    "llama": [
        ({CHUNK: 8, **rows.TUNED["dropout"]}, CHUNK, "lora.dropout"),
        *(({"lora": {"rank": 2, "targets": "o_proj", "modules_to_save": saved}},
           "lora.modules_to_save", told) for saved, told in (
               ("q_proj", "others not"), ("self_attn", "adapter, too"),
               ("nom", "matches no tensor")))],
    "all of llama": [
        ({"model.tie_embeddings": False, "run.export": "/tmp/none"},
         "run.export", "no published type")],
    "moe": [
        ({"model.experts_per_unit": 8}, "experts_per_unit is above num_experts"),
        *(({**UNPUBLISHED, **more}, *NO_SHAPE) for more in (
            {"model.norm_topk_prob": False}, {"model.decoder_sparse_step": 2},
            {"model.qkv_bias": True}))],
    "units of experts": [({CHUNK: 8}, CHUNK, "model.experts_per_unit")],
    "vit": [
        ({"model.patch": 3}, "image 10 is not divisible by patch = 3"),
        ({"model.classes": 6}, "label is not below model.classes"),
        ({"model.image": 12}, "no multiple of the 433 of a record of vit"),
        ({"run.sample_tokens": 3, "run.sample_prompt": "a"}, "generates nothing"),
        (rule("embed.*", sparse=True), "sparse: true for embed.", "no table of rows"),
        ({CHUNK: 8}, CHUNK, "set off"),
        ({"data.bytes": True}, "data.bytes", "vit reads records"),
        ({"data.document_end": 0}, "data.document_end: 0, but the layers of vit"),
        ({"loss.type": "dpo"}, "loss.type", "vit has no loss of such")],
    "dlrm": [
        ({"model.tables": 8}, "no multiple of the 56 of a record of dlrm"),
        ({"model.rows": 10**9}, "must be below 2^31"),
        ({"model.vocab": 3}, "unknown key"),
        (rule("*", sparse=True), "sparse: true for bottom.0.weight", "no table of rows"),
        (rule("tables.*", sparse=True, frozen=True),
         "parameters[0]", "what is frozen is never updated"),
        ({"parameters": [*rows.SPARSE, {"match": "tables.2.*", "frozen": True}]},
         "sparse: true for tables.2.rows", "it is frozen"),
        (rule("tables.*", sparse=1), "parameters[0].sparse"),
        ({"data.document_end": 0}, "data.document_end: 0, but the layers of dlrm")],
    "sparse": [
        ({"run.state_dtype": "fp8"}, "sparse: true for tables.0.rows", "no multiple of 64"),
        ({"ranks": 4, "zero_optimization.stage": 3,
          "zero_optimization.zero_hpz_partition_size": 2},
         "sparse: true for tables", "zero_hpz_partition_size copies whole")],
    "pairs": [
        ({"model.seq": 8}, "texts of 16 tokens", "a sample here has 8"),
        ({"loss": {}}, "has pairs of texts", "set loss.type to dpo or ipo"),
        ({**ADAPTERS, "lora.import": "somewhere"},
         "lora.import: somewhere", "merge them first")],
}

# Keys of models; the refusal names the last one.
IMPOSSIBLE = {
    "gpt2": ({"layers": 0}, {"heads": 0}, {"width": -6}, {"seq": 0}, {"vocab": 1 << 30}),
    "llama": ({"head_dim": 258}, {"rope_theta": 0}, {"kv_heads": 4}, {"head_dim": 5},
              {"head_dim": 0}, {"ffn": 0}),
    "all of llama": ({"rope_scaling_high_freq_factor": 1},),
    "moe": ({"num_experts": 0}, {"num_experts": 1025}, {"num_experts_per_tok": 8},
            {"num_experts_per_tok": 0}, {"moe_intermediate_size": 0},
            {"experts_per_unit": -1}, {"decoder_sparse_step": 5}, {"n_group": 3},
            {"topk_group": 2}, {"qk_norm": False, "family": "llama"}, *(
                {"mlp_only_layers": blocks} for blocks in ("-1", "4", "1,3", "1,4"))),
    "groups": ({"n_group": 8},),
    "vit": ({"heads": 2}, {"classes": 257}, {"hidden": -1}, {"width": 3 << 17, "hidden": 0}),
    "dlrm": ({"rows": 0}, {"rows": 1 << 24, "unit_rows": 1}, {"unit_rows": 0},
             {"top_layers": 9})}
for name, keys in IMPOSSIBLE.items():
    REFUSED.setdefault(name, []).extend(
        ({f"model.{k}": v for k, v in x.items()}, list(x)[-1]) for x in keys)


@pytest.mark.parametrize("model, change, words", [
    pytest.param(model, change, words, id=f"{model} {change}", marks=(
        () if any(k == "ranks" or k.startswith("STARPU") for k in change)
        else pytest.mark.sanitized))
    for model, some in REFUSED.items() for change, *words in some])
def test_what_cannot_be_is_refused(model, change, words, place):
    """Here is what needs a program and no folder."""
    rows.use(place, model)
    config = {**rows.BESIDE.get(model, (None, {}))[1], **change}
    r = place.launch(config.pop("ranks", 1), config)
    run.refused(r, *words)
    assert not list(r.output.glob("checkpoints"))


@pytest.mark.parametrize("variable", ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
def test_the_launcher_of_another_mpi_is_refused(variable, place):
    """Its ranks do not see each other: each would train alone."""
    r = place.launch(1, {}, env={variable: "2"})
    run.refused(r, f"{variable}: the launcher started 2 ranks", "sees one")
    assert not r.output.exists()
    place.good(1, {"run.steps": 1}, env={variable: "1"})


def test_a_bad_variable_of_one_rank_ends_all(place):
    for variable, words in (("STARPU_NCPU=two", "STARPU_NCPU: rank 1: is not a number"),
                            ("STARPU_USE_NUMA=1", "STARPU_USE_NUMA: rank 1: StarPU would"),
                            ("STARPU_NCPU=999", "STARPU_NCPU: 999 compute workers")):
        run.refused(place.apart([[], ["env", variable]], {"run.memory_limit_bytes": 10**14}),
                    words)


@pytest.mark.sanitized
@pytest.mark.parametrize("options, word", [
    (["--stpes", "3"], "--stpes"), (["--set"], "--set"),
    (["--set", "run.steps"], "run.steps"), (["--steps", "-1"], "-1"),
    (["--steps", "few"], "few"), (["--ranks", "2"], "--ranks"),
    (["--steps", "9999999999"], "from 0 to 1000000000"), (["other.json"], "other.json")])
def test_wrong_usage_exits_2(options, word, place):
    run.refused(place.launch(1, {}, options), word, status=2)


@pytest.mark.sanitized
def test_no_config_is_wrong_usage():
    r = run.call(run.PROGRAM)
    assert r.rc == 2 and "usage:" in r.err
    r = run.call(run.PROGRAM, "--help")
    assert r.rc == 0 and not r.err
    for word in ("--resume", "--plan", "--set", "zero_optimization.stage",
                 "run.in_flight", "model.width", "Exit status"):
        assert word in r.out


# ---- places ----

@contextlib.contextmanager
def small_disk(folder, mib):
    """A file system of its own, with O_DIRECT: a file mounted as ext4."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4")
    image, mount = folder / "image", folder / "mount"
    mount.mkdir()
    with open(image, "wb") as f:
        f.truncate(mib * run.MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, mount],
                      capture_output=True).returncode:
        pytest.skip("mounting is not permitted")
    try:
        yield mount
    finally:
        # the last rank of a run may be about to end
        subprocess.run(["umount", "--lazy", mount], check=True)


def on_disk(path, **more):
    return {**run.offload(3, "nvme", "nvme", path), **more}


# No GPU is seen, whatever the program was built for.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "IZ_STANDIN_DEVICES": "0"}


def built_with_cuda():
    """It needs the library itself; StarPU may need it too."""
    return b"libcudart.so" in pathlib.Path(run.PROGRAM).read_bytes()


@pytest.mark.parametrize("ranks, options", ((1, ("--plan",)), (2, ())))
def test_a_gpu_that_is_not_there_is_refused(ranks, options, place):
    r = place.launch(ranks, {"run.device": "cuda"}, options, env=NO_GPU)
    line = run.refused(r, "run.device: cuda: ")
    assert ("this program was built without CUDA" in line) != built_with_cuda()
    assert not r.output.exists() and not r.out, str(r)


def test_auto_without_a_gpu_goes_on_on_the_cpu(place):
    cpu = place.good(2, {"run.device": "cpu"})
    r = place.good(2, {"run.device": "auto"}, env=NO_GPU)
    assert r.numbers == cpu.numbers
    why = [x for x in r.out.splitlines() if "on the CPU: " in x]
    assert len(why) == 1 and "on the CPU: " not in cpu.out, str(r)
    assert ("this program was built without CUDA" in why[0]) != built_with_cuda()


def test_full_nvme_is_named_with_its_bytes(place):
    with small_disk(place.folder, 8) as path:
        model = {"layers": 4, "heads": 4, "width": 256}
        r = place.launch(1, on_disk(path, model=model))
        run.refused(r, "nvme_path", str(path), "MiB free", "need")
        assert [p.name for p in path.iterdir()] == ["lost+found"]


@pytest.mark.sanitized
def test_nvme_leaves_no_file(place, nvme):
    before = sorted(nvme.iterdir())
    place.good(1, on_disk(nvme))
    place.launch(1, on_disk(nvme, **{"run.scheduler": "none such"}))
    assert sorted(nvme.iterdir()) == before


def test_full_output_keeps_the_checkpoint_before(place):
    """The disk fills between two saves: the second fails, the first stays."""
    with small_disk(place.folder, 24) as path:
        out = path / "out"
        model = {"layers": 2, "heads": 4, "width": 128}
        c = {"model": model, "run.save": True, "run.keep_last": 5}
        place.good(2, {**c, "run.steps": 1}, output=out)
        free = os.statvfs(path)
        with open(path / "filler", "wb") as f:
            f.write(bytes(free.f_bavail * free.f_frsize - run.MIB))
        r = place.launch(2, {**c, "run.steps": 2}, ["--resume"],
                         output=out)
        assert r.rc == 1 and not run.DUMPS.search(r.out + r.err), str(r)
        # A line of metrics may be lost as well, as long as the disk is full.
        said = [x for x in r.err.splitlines()
                if "No space left" in x and "metrics.jsonl" not in x]
        assert 1 <= len(said) <= 2, str(r)  # each of its own file
        assert all("checkpoint" in x and str(out) in x and "free" in x
                   for x in said), str(r)
        assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-00000001"]
        (path / "filler").unlink()
        (out / "metrics.jsonl").unlink()  # a line may have been cut off
        place.good(2, {**c, "run.steps": 2}, ["--resume"], output=out)


# ---- losses ----

@pytest.mark.parametrize("ranks, dtype", ((1, "fp32"), (2, "bf16")))
def test_loss_that_is_not_finite_ends_the_run(ranks, dtype, place):
    c = {"run.save": True, "run.steps": 3, **run.typed(dtype)}
    out = place.folder / "out"
    place.good(ranks, c, output=out)
    before = run.checkpoints(out)
    wild = {**c, "optimizer.params.lr": 1e6, "gradient_clipping": 0,
            "optimizer.params.weight_decay": 0,
            "parameters": [{"match": "*", "lr_scale": 1e6}],
            "run.save_interval": 1, "run.steps": 200}
    r = place.launch(ranks, wild, ["--resume"], output=out)
    run.refused(r, "not finite", "step")
    assert r.summary["reason"] == "failed"
    bad = [x["step"] for x in r.steps
           if isinstance(x["grad_norm"], str) or isinstance(x["loss"], str)]
    assert bad and r.steps[-1]["step"] <= bad[0] + 2  # run.in_flight
    after = r.files
    # What is there can be continued: every one was saved before the fault.
    last = r.saved[-1]
    assert last < r.steps[-1]["step"] and "checkpoint of step" in r.err
    assert after.items() >= {k: v for k, v in before.items()
                             if k in after}.items()
    if last == 3:
        place.good(ranks, {**c, "run.steps": 5}, ["--resume"], output=out)


# ---- ranks that die ----

FOREVER = {"run.steps": 10**6, "run.inject_delay_us": 3000, "run.save": True,
           "run.save_interval": 2, "train_batch_size": 6,
           "zero_optimization.stage": 3}


@pytest.mark.parametrize("ranks, victim", [(2, 0), (3, 1)])
def test_killed_rank_ends_the_others(ranks, victim, place):
    run_ = place.start(ranks, FOREVER)
    run_.until(lambda: run.saved(run_.output), "a checkpoint")
    pids = run_.pids()
    assert len(pids) == ranks
    run_.signal(signal.SIGKILL, victim)
    r = run_.finish(PROMPT_S)
    assert r.rc != 0, str(r)
    # the launcher's word or that of a rank that saw it first
    assert "Killed" in r.out + r.err or f"rank {victim} is gone" in r.err, str(r)
    assert run.all_gone(pids)
    more = {**FOREVER, "run.inject_delay_us": 0,
            "run.steps": 2 * (r.saved[-1] // 2 + 1)}
    place.good(ranks, more, ["--resume"], output=r.output)


def test_stopped_rank_is_noticed(place):
    run_ = place.start(2, {**FOREVER, "run.comm_timeout_s": 3,
                           "run.save_interval": 0})  # a save has other words
    run_.until_step(2)
    pids = run_.pids()
    run_.signal(signal.SIGSTOP, 1)
    try:
        r = run_.finish(PROMPT_S + 3)
    finally:
        run_.kill()
    assert r.rc != 0
    lines = [x for x in r.err.splitlines()
             if "izar: rank 0: waited 3 s for" in x]
    assert len(lines) == 1 and "dead or stopped" in lines[0], str(r)
    assert run.all_gone(pids)


def test_ranks_that_were_stopped_together_go_on(place):
    """As by a batch system, or with the whole machine, for longer than a wait may
    last."""
    run_ = place.start(2, {**FOREVER, "run.comm_timeout_s": 3})
    run_.until_step(2)
    run_.signal(signal.SIGSTOP)
    time.sleep(4)
    run_.signal(signal.SIGCONT)
    run_.until_step(run_.step() + 3)
    run_.signal(signal.SIGTERM)
    r = run_.finish()
    assert r.rc == 0 and r.summary["reason"] == "interrupted", str(r)


@pytest.mark.parametrize("where, more, words", [
    ("elsewhere", [], ("text", "No such file")),
    ("here", ["--set", "run.memory_limit_bytes=100000"], ("needs", "there are 0.1 MiB"))])
def test_one_ranks_fault_ends_the_others(where, more, words, place):
    """Only the second one sees no data, or has too little memory."""
    for folder in ("here", "elsewhere"):
        (place.folder / folder).mkdir()
    shutil.copy(place.data, place.folder / "here/text")
    config = place.config({"train_batch_size": 2, "data.path": "text"})
    r = run.call(*run.apart(*(["env", "-C", place.folder / folder, run.PROGRAM, config, *x]
                              for folder, x in (("here", []), (where, more)))))
    run.refused(r, *words)
    run.refused(r, "the other ranks end with rank 1")
    assert r.seconds < PROMPT_S


def test_a_limit_of_locked_memory_is_seen_before_it_is_met(place):
    """Also by a superuser without the capability, as in a container; told once."""
    config = place.config({"train_batch_size": 2, "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}})
    line = ["prlimit", "--memlock=4096"]
    if os.geteuid() == 0:
        line += ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]
    r = run.call(*line, *place.command(2, config))
    run.refused(r, "pin_memory: true locks", "ulimit -l", "pin_memory to false")


@pytest.mark.parametrize("first", "ab")
def test_an_output_that_ranks_do_not_share_is_refused(first, place):
    """As in a folder of each host: before step 0 and, if one rank alone has a
    checkpoint, of a resumed run too."""
    c = {"train_batch_size": 2, "run.save": True, "run.comm_timeout_s": 20}
    for folder in "ab":
        (place.folder / folder).mkdir()
    place.good(2, c, output=place.folder / "a/o")
    config = place.config(c, "o")

    def of_two(*options, folders):
        return run.call(*run.apart(*(
            ["env", "-C", place.folder / x, run.PROGRAM, config, *options]
            for x in folders)))
    pair = "ab" if first == "a" else "ba"
    r = of_two("--resume", folders=pair)
    run.refused(r, "run.output: rank 1 does not see in o" if first == "a"
                else "--resume: no checkpoint in o: there is no such folder")
    assert not (place.folder / "b/o").exists()
    if first == "b":
        run.refused(of_two(folders=pair), "run.output: rank 1 does not see in o")
        assert {x.name for x in (place.folder / "b/o").iterdir()} == {"metrics.jsonl"}
