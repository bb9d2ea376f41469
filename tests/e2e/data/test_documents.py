# SPDX-License-Identifier: Apache-2.0
"""Documents of a sample that do not see each other (data.document_end)."""
import struct

import pytest

import rows
import run
from run import STILL, hf

END = 0
SEQ = 16


def document(n, seed):
    """n tokens, of which the last one ends it."""
    return bytes(1 + (seed * 31 + i * 7) % 255 for i in range(n - 1)) + bytes([END])


def weights(place, kind):
    """A folder of random ones, which a window of any length may have; and their
    program."""
    place.use(rows.program_of(kind))
    shapes, config = hf.model_of(kind) if kind != "gpt2" else \
        (hf.gpt2_shapes(run.MODEL), hf.gpt2_config(run.MODEL))
    tensors = hf.scaled(hf.random_tensors(shapes, "F32"), 4)
    return hf.write(place.folder / "in", tensors, config)


def losses(place, folder, text, seq, batch=1, **more):
    """Of text, which is `batch` samples of `seq` tokens and one token."""
    path = place.folder / f"text-{len(text)}-{seq}"
    path.write_bytes(text)
    return place.good(1, {"model": {"import": str(folder), "seq": seq},
                          "train_batch_size": batch, "data.path": str(path),
                          "data.val_fraction": 0, "data.document_end": END, **more})


@pytest.mark.parametrize("kind", ("gpt2", "llama", "qwen3"))
def test_documents_have_the_losses_that_they_have_alone(kind, place):
    """The last one is cut by the end of the sample; one is a single token, which
    has nothing to learn."""
    folder = weights(place, kind)
    sizes = (5, 1, 7, 3)
    texts = [document(n, 3 + n) for n in sizes[:-1]] + [document(9, 1)[:sizes[-1] + 1]]
    r = losses(place, folder, b"".join(texts), SEQ, **STILL)
    total = count = 0
    for text, n in zip(texts, sizes):
        learnt = n if text[-1] != END else n - 1
        if learnt:
            one = losses(place, folder, text + b"\1" * (len(text) == n), n, **STILL,
                         **{"data.document_end": END if END in text else -1})
            total += one.losses[0] * learnt
        count += learnt
    assert r.losses[0] == pytest.approx(total / count, rel=2e-6)
    joined = losses(place, folder, b"".join(texts), SEQ, **STILL,
                    **{"data.document_end": -1})
    assert abs(joined.losses[0] - r.losses[0]) > 1e-3


@pytest.mark.parametrize("kind", ("gpt2", "llama"))
def test_packed_documents_have_the_losses_that_they_have_alone(kind, place):
    """Without a key: the shard says where they begin, and what is only filled up is not
    learnt."""
    folder = weights(place, kind)
    texts = [bytes(1 + (n * 31 + i * 7) % 255 for i in range(n)) for n in (5, 2, 9, 7, 6)]
    (place.folder / "t.txt").write_bytes(b"//".join(texts))
    r = run.call(run.ROOT / "tools/tokenize", "--tokenizer", "bytes", "--end", "none",
                 "--split-on", "//", "--pack", SEQ, "--out", "p", "t.txt", cwd=place.folder)
    assert r.rc == 0 and "2 samples of 16, 90.6 % full" in r.out, str(r)
    c = {"model": {"import": str(folder), "seq": SEQ}, "train_batch_size": 2,
         "data": {"path": str(place.folder / "p_train_*.bin"), "bytes": False,
                  "val_fraction": 0}, **STILL}
    r = place.good(1, c)
    total = sum(losses(place, folder, t, len(t) - 1, **STILL,
                       **{"data.document_end": -1}).losses[0] * (len(t) - 1) for t in texts)
    assert r.losses[0] == pytest.approx(total / sum(len(t) - 1 for t in texts), rel=2e-6)
    run.refused(place.launch(1, {**c, "model.seq": 8}), "a sample here has 8")
    run.refused(place.launch(1, {**c, "data.document_end": 0}), "packed and say where")
    run.refused(place.launch(1, {**c, "run.gpu_attention": "cudnn", "bf16.enabled": True}),
                "samples of data.path are packed")


@pytest.mark.parametrize("kind", ("gpt2", "mistral", "qwen2"))
def test_documents_train_as_samples(kind, place):
    """Four of a sample, as four samples of one: the same gradients."""
    text = b"".join(document(4, i) for i in range(4)) + b"\1"
    more = {"run.steps": 4, "optimizer.params.lr": 1e-2}
    folder = weights(place, kind)
    a = losses(place, folder, text, SEQ, **more)
    b = losses(place, folder, text, 4, 4, **more)
    assert len(a.steps) == 4 and a.losses[3] < a.losses[0]
    for x, y in zip(a.steps, b.steps):
        assert x["loss"] == pytest.approx(y["loss"], rel=2e-5)
        assert x["grad_norm"] == pytest.approx(y["grad_norm"], rel=2e-4)


@pytest.mark.sanitized
def test_a_text_is_one_document(place):
    """Also where it holds the token that ends one."""
    c = {"run.steps": 0, "run.sample_tokens": 40, "run.sample_temperature": 0,
         "run.sample_prompt": "the of and", "optimizer.params.lr": 0.0}
    plain, apart = place.good(1, c), place.good(1, {**c, "data.document_end": 32})
    assert run.sampled(plain) == run.sampled(apart) != ""


@pytest.mark.parametrize("name", ("vit", "dlrm"))
def test_models_without_documents_refuse_packed_ones(name, place):
    rows.use(place, name)
    head = struct.pack("<256i", 20240520, 1, 8, 0, 8, *[0] * 251)
    (place.folder / "p.bin").write_bytes(head + bytes(16))
    r = place.launch(1, {"data.path": str(place.folder / "p.bin"), "data.bytes": False})
    assert r.rc and f"packed, but the layers of {name} know no documents" in r.err, str(r)
