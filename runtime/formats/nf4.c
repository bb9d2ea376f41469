/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors in 4 bits: a tensor of codes, with five more behind its name; see
 * tensors.h. */
#include <string.h>

#include "codelets/base/int64.h"
#include "runtime/base/text.h"
#include "runtime/formats/nf4.h"

static const char *const suffix[IZ_HF_NF4_PARTS] = {
    [IZ_HF_NF4_SCALE] = ".absmax",
    [IZ_HF_NF4_MOST] = ".nested_absmax",
    [IZ_HF_NF4_VALUES] = ".quant_map",
    [IZ_HF_NF4_DYNAMIC] = ".nested_quant_map",
    [IZ_HF_NF4_STATE] = ".quant_state.bitsandbytes__nf4"};

bool iz_hf_nf4_name(const char *name, enum iz_hf_nf4_part *part,
                    char of[IZ_HF_NAME])
{
    size_t n = strlen(name);
    for (int i = 0; i < IZ_HF_NF4_PARTS; i++) {
        size_t k = strlen(suffix[i]);
        if (n <= k || n - k >= IZ_HF_NAME ||
            strcmp(name + n - k, suffix[i]) != 0)
            continue;
        memcpy(of, name, n - k);
        of[n - k] = '\0';
        *part = (enum iz_hf_nf4_part)i;
        return true;
    }
    return false;
}

static bool is_array(const struct iz_st_tensor *e, const char *dtype,
                     int64_t bytes)
{
    return iz_text_among(e->dtype, dtype) && e->bytes == bytes;
}

/* What all values of codes are here: of codes in one group, whose scales are 1.
 */
static bool same_values(const struct iz_st_tensor *values,
                        const struct iz_st_tensor *dynamic)
{
    struct iz_nf4_group g = {.most = 1};
    float out[IZ_QUANT_GROUP], all[IZ_QUANT_SCALES], codes[16];
    for (int i = 0; i < IZ_QUANT_SCALES; i++) {
        memset(g.code + i * IZ_QUANT_BLOCK / 2, 0xff, IZ_QUANT_BLOCK / 2);
        g.scale[i] = (uint8_t)i;
    }
    int last = IZ_QUANT_SCALES - 1; /* a scale of 1 */
    for (int i = 0; i < 8; i++)
        g.code[last * IZ_QUANT_BLOCK / 2 + i] =
            (uint8_t)(2 * i << 4 | (2 * i + 1));
    iz_nf4_load(out, IZ_F32, &g, IZ_QUANT_GROUP);
    memcpy(codes, out + last * IZ_QUANT_BLOCK, sizeof(codes));
    for (int i = 0; i < IZ_QUANT_SCALES; i++)
        all[i] = out[i * IZ_QUANT_BLOCK + IZ_QUANT_BLOCK - 1];
    return memcmp(values->data, codes, sizeof(codes)) == 0 &&
           memcmp(dynamic->data, all, sizeof(all)) == 0;
}

/* The numbers of the state, which is JSON. */
static const char *read_state(struct iz_hf_nf4 *t)
{
    const struct iz_st_tensor *e = t->part[IZ_HF_NF4_STATE];
    json_t *state = iz_json_open((const char *)e->data, e->bytes);
    const json_t *mean = json_object_get(state, "nested_offset");
    bool known =
        strcmp(iz_json_text_of(state, "quant_type"), "nf4") == 0 &&
        iz_json_count_of(state, "blocksize") == IZ_QUANT_BLOCK &&
        iz_json_count_of(state, "nested_blocksize") == IZ_QUANT_SCALES &&
        json_is_number(mean);
    t->mean = (float)json_number_value(mean);
    json_decref(state);
    return known
               ? NULL
               : "is in 4 bits, but not of nf4 in blocks of 64 with scales in "
                 "blocks of 256";
}

const char *iz_hf_nf4_check(struct iz_hf_nf4 *t)
{
    int64_t blocks = (t->n + IZ_QUANT_BLOCK - 1) / IZ_QUANT_BLOCK;
    const struct iz_st_tensor *const *p = t->part;
    for (int i = 0; i < IZ_HF_NF4_PARTS; i++)
        if (!p[i])
            return "is in 4 bits, and tensors are missing that belong to it: "
                   "only nf4 with double quantization is read";
    /* bnb_4bit_quant_storage names a type that the same bytes lie as. */
    if (!is_array(t->code, "U8|BF16|F16|F32", (t->n + 1) / 2) ||
        !is_array(p[IZ_HF_NF4_SCALE], "U8", blocks) ||
        !is_array(p[IZ_HF_NF4_MOST], "F32", 4 * iz_quant_groups(t->n)) ||
        !is_array(p[IZ_HF_NF4_VALUES], "F32", 4 * 16) ||
        !is_array(p[IZ_HF_NF4_DYNAMIC], "F32", 4 * IZ_QUANT_SCALES))
        return "is in 4 bits, but of another shape or type than the model's";
    if (!same_values(p[IZ_HF_NF4_VALUES], p[IZ_HF_NF4_DYNAMIC]))
        return "is in 4 bits, but its codes mean other values than here";
    return read_state(t);
}

void iz_hf_nf4_group(const struct iz_hf_nf4 *t, int64_t g,
                     struct iz_nf4_group *out)
{
    int64_t n = min64(t->n - g * IZ_QUANT_GROUP, IZ_QUANT_GROUP);
    int64_t blocks = (n + IZ_QUANT_BLOCK - 1) / IZ_QUANT_BLOCK;
    *out = (struct iz_nf4_group){.mean = t->mean};
    memcpy(out->code, t->code->data + g * IZ_QUANT_GROUP / 2,
           (size_t)(n + 1) / 2);
    memcpy(out->scale, t->part[IZ_HF_NF4_SCALE]->data + g * IZ_QUANT_SCALES,
           (size_t)blocks);
    memcpy(&out->most, t->part[IZ_HF_NF4_MOST]->data + 4 * g, 4);
}
