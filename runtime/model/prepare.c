/* SPDX-License-Identifier: Apache-2.0 */
/* The order of what a config does to a model; see prepare.h. */
#include "runtime/model/prepare.h"

#include <errno.h>

#include "runtime/base/text.h"
#include "runtime/formats/tokens.h"
#include "runtime/model/lora.h"
#include "runtime/model/rules.h"

static int tell_data(struct iz_model *m, const struct iz_config *whole,
                     FILE *err)
{
    const struct iz_data_config *c = &whole->data;
    if (c->group > 1 && !m->knows_pairs) {
        iz_text_refuse(
            err,
            "loss.type: samples would be pairs of texts, and %s has no "
            "loss of such",
            m->name);
        return -ENOTSUP;
    }
    if (whole->run.sequence_chunk != IZ_CHUNK_OFF && !m->knows_chunks)
        return iz_text_refuse(
            err,
            "run.sequence_chunk: %s has no layers that handle some rows "
            "of a sample at a time%s: set off",
            m->name, m->experts ? " with model.experts_per_unit" : "");
    if (whole->run.sequence_chunk != IZ_CHUNK_OFF && whole->lora.dropout > 0)
        return iz_text_refuse(
            err, "run.sequence_chunk: adapters with lora.dropout need all rows "
                 "of a sample: set off, or no dropout");
    m->documents_apart = c->apart;
    if (c->packed && (whole->run.gpu_attention == IZ_ATTENTION_CUDNN ||
                      whole->run.gpu_attention_backward == IZ_ATTENTION_CUDNN))
        return iz_text_refuse(
            err, "run.gpu_attention or its backward: cudnn, but samples of "
                 "data.path are packed, and cuDNN's attention does not keep "
                 "documents apart: use own");
    if (!m->documents_apart || m->knows_documents)
        return 0;
    if (c->packed)
        iz_text_refuse(err,
                       "data.path: its samples are packed, but the layers of "
                       "%s know no documents",
                       m->name);
    else
        iz_text_refuse(
            err,
            "data.document_end: %d, but the layers of %s know no documents",
            c->document_end, m->name);
    return -ENOTSUP;
}

int iz_model_prepare(struct iz_model *m, const struct iz_config *c,
                     const struct iz_hf *hf, FILE *err)
{
    int s = tell_data(m, c, err);
    if (!s && m->vocab && c->import[0])
        s = iz_tokens_check(c->import, m->vocab, err);
    if (!s)
        s = iz_lora_apply(m, c, hf, err);
    return s ? s : iz_rules_apply(m, c, err);
}
