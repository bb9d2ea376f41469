/* SPDX-License-Identifier: Apache-2.0 */
/* See coded.h. */
#include "runtime/formats/coded.h"

#include <math.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/flat/half.h"
#include "runtime/base/text.h"

enum { MOST = 1 << 20 }; /* of a block */

/* ---- what there is ---- */

/* The end of the name of such a tensor, and what stands there in that of the
 * one it belongs to. */
static const struct {
    const char *end, *of;
    enum iz_coded_kind kind;
    enum iz_coded_tensor tensor;
} ends[] = {
    {".absmax", "", IZ_CODED_BITS4, IZ_CODED_SCALES},
    {".nested_absmax", "", IZ_CODED_BITS4, IZ_CODED_MOST},
    {".quant_map", "", IZ_CODED_BITS4, IZ_CODED_VALUES},
    {".nested_quant_map", "", IZ_CODED_BITS4, IZ_CODED_DYNAMIC},
    {".quant_state.bitsandbytes__nf4", "", IZ_CODED_BITS4, IZ_CODED_STATE},
    {".quant_state.bitsandbytes__fp4", "", IZ_CODED_BITS4, IZ_CODED_STATE},
    {".SCB", ".weight", IZ_CODED_INT8, IZ_CODED_SCALES},
    {".weight_format", ".weight", IZ_CODED_INT8, IZ_CODED_FORMAT},
    {".input_scale", ".weight", IZ_CODED_FP8, IZ_CODED_UNUSED},
    {".activation_scale", ".weight", IZ_CODED_FP8, IZ_CODED_UNUSED},
    {"_scale_inv", "", IZ_CODED_FP8, IZ_CODED_SCALES},
    {"_scale", "", IZ_CODED_FP8, IZ_CODED_SCALES},
    {"_blocks", "", IZ_CODED_MXFP4, IZ_CODED_CODES},
    {"_scales", "", IZ_CODED_MXFP4, IZ_CODED_SCALES},
};

/* Of two codes a byte the rows follow one another. */
static const struct {
    const char *what;
    const char *codes, *scales; /* types that they lie as */
    int per_byte;
} kinds[] = {
    [IZ_CODED_BITS4] = {"in 4 bits", "U8|BF16|F16|F32", "U8|F32", 2},
    [IZ_CODED_INT8] = {"in 8 bits", "I8", "F32", 1},
    [IZ_CODED_FP8] = {"in FP8", "F8_E4M3", "F32|BF16|F16|F8_E8M0|U8", 1},
    [IZ_CODED_MXFP4] = {"in MXFP4", "U8", "U8|F8_E8M0", 2},
};

bool iz_coded_name(const char *name, struct iz_coded_name *out)
{
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        size_t k = strlen(ends[i].end);
        if (n <= k || n - k + strlen(ends[i].of) >= IZ_HF_NAME ||
            strcmp(name + n - k, ends[i].end) != 0)
            continue;
        *out = (struct iz_coded_name){ends[i].kind, ends[i].tensor, ""};
        snprintf(out->of, sizeof(out->of), "%.*s%s", (int)(n - k), name,
                 ends[i].of);
        return true;
    }
    return false;
}

const char *iz_coded_what(enum iz_coded_kind k)
{
    return kinds[k].what;
}

/* ---- one tensor ---- */

static bool is_array(const struct iz_st_tensor *e, const char *dtype,
                     int64_t bytes)
{
    return e && iz_text_among(e->dtype, dtype) && e->bytes == bytes;
}

static int64_t over(int64_t n, int64_t by)
{
    return (n + by - 1) / by;
}

static const char *check_bits4(struct iz_coded *t)
{
    const struct iz_st_tensor *const *p = t->tensor, *e = p[IZ_CODED_STATE];
    bool codes =
        p[IZ_CODED_SCALES] && strcmp(p[IZ_CODED_SCALES]->dtype, "U8") == 0;
    json_t *state = e ? iz_json_open((const char *)e->data, e->bytes) : NULL;
    t->block[1] = iz_json_number(json_object_get(state, "blocksize"), MOST);
    t->nested =
        codes ? iz_json_number(json_object_get(state, "nested_blocksize"), MOST)
              : 0;
    t->mean = (float)json_number_value(json_object_get(state, "nested_offset"));
    json_decref(state);
    if (!e || !p[IZ_CODED_VALUES] ||
        (codes && (!p[IZ_CODED_MOST] || !p[IZ_CODED_DYNAMIC])))
        return "is in 4 bits, and tensors are missing that belong to it";
    if (t->block[1] < 1 || (codes && t->nested < 1))
        return "is in 4 bits, and its state is not known";
    int64_t blocks = over(t->cols, t->block[1]);
    if (!is_array(p[IZ_CODED_VALUES], "F32", 4 * 16) ||
        (codes &&
         (!is_array(p[IZ_CODED_DYNAMIC], "F32", 4 * IZ_QUANT_SCALES) ||
          !is_array(p[IZ_CODED_MOST], "F32", 4 * over(blocks, t->nested)))))
        return "is in 4 bits, but of another shape or type than the model's";
    memcpy(t->value, p[IZ_CODED_VALUES]->data, sizeof(t->value));
    return NULL;
}

/* Scales are of blocks, of rows, or there is one. */
static const char *check_grid(struct iz_coded *t, const int64_t block[2])
{
    const struct iz_st_tensor *e = t->tensor[IZ_CODED_SCALES];
    int64_t n = e->dims ? e->shape[0] : 1, m = e->dims > 1 ? e->shape[1] : 1;
    memcpy(t->block, block, sizeof(t->block));
    if (n == over(t->rows, block[0]) && m == over(t->cols, block[1]))
        return NULL;
    t->block[0] = n == 1 ? t->rows : 1;
    t->block[1] = t->cols;
    return m == 1 && (n == 1 || n == t->rows)
               ? NULL
               : "is in FP8, and its scales are not those of its blocks, see "
                 "quantization_config.weight_block_size, of its rows, or one";
}

const char *iz_coded_check(struct iz_coded *t, const int64_t block[2])
{
    static const float fp4[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    const struct iz_st_tensor *codes = t->tensor[IZ_CODED_CODES];
    const struct iz_st_tensor *scales = t->tensor[IZ_CODED_SCALES];
    const struct iz_st_tensor *format = t->tensor[IZ_CODED_FORMAT];
    bool mx = t->kind == IZ_CODED_MXFP4, rows = kinds[t->kind].per_byte == 1;
    int64_t n = t->rows * t->cols;
    const char *why = mx && t->cols % 32 ? "has rows of parts of blocks" : NULL;
    if (!rows) {
        t->rows = 1;
        t->cols = n;
    }
    t->block[0] = 1;
    t->block[1] = mx ? 32 : t->cols;
    for (int i = 0; i < 16 && mx; i++)
        t->value[i] = i < 8 ? fp4[i] : -fp4[i - 8];
    if (!codes)
        return "is missing";
    if (!scales)
        return "has codes, and tensors are missing that belong to it";
    if (t->kind == IZ_CODED_BITS4)
        why = check_bits4(t);
    if (t->kind == IZ_CODED_FP8)
        why = check_grid(t, block);
    if (why)
        return why;
    int64_t size = strcmp(scales->dtype, "F32") == 0          ? 4
                   : iz_text_among(scales->dtype, "BF16|F16") ? 2
                                                              : 1;
    int64_t grid =
        over(t->rows, t->block[0]) * over(t->cols, t->block[1]) * size;
    if (!is_array(codes, kinds[t->kind].codes,
                  over(n, kinds[t->kind].per_byte)) ||
        !is_array(scales, kinds[t->kind].scales, grid) ||
        (rows && (codes->dims != 2 || codes->shape[0] != t->rows)))
        return "has codes, but is of another shape or type than the model's";
    return format && format->bytes && format->data[0]
               ? "is in 8 bits, and its codes are not row after row"
               : NULL;
}

/* ---- reading ---- */

static void load_numbers(const struct iz_st_tensor *e, int64_t at, float *out,
                         int64_t n)
{
    enum { RUN = 512 };
    enum iz_dtype type = IZ_F32;
    float aligned[RUN];
    iz_st_dtype_read(e->dtype, &type);
    int64_t size = iz_dtype_bytes(type);
    for (int64_t i = 0; i < n; i += RUN) {
        int64_t k = min64(n - i, RUN);
        memcpy(aligned, e->data + (at + i) * size, (size_t)(k * size));
        iz_cast(out + i, IZ_F32, aligned, type, k);
    }
}

static float number(const struct iz_st_tensor *e, int64_t i)
{
    float out;
    if (iz_text_among(e->dtype, "U8|F8_E8M0")) /* an exponent */
        return e->data[i] == 255 ? NAN : ldexpf(1, e->data[i] - 127);
    load_numbers(e, i, &out, 1);
    return out;
}

static float block_scale(const struct iz_coded *t, int64_t i)
{
    const struct iz_st_tensor *e = t->tensor[IZ_CODED_SCALES];
    if (!t->nested)
        return number(e, i);
    float without = number(t->tensor[IZ_CODED_DYNAMIC], e->data[i]) *
                    number(t->tensor[IZ_CODED_MOST], i / t->nested);
    return without + t->mean;
}

/* An exponent of 4 bits and 3 bits; no infinities. */
static float fp8(uint8_t code)
{
    uint32_t bits = code & 127;
    float x = bits < 8      ? (float)bits / 512
              : bits == 127 ? NAN
                            : iz_float_of_bits((bits << 20) + (120u << 23));
    return code & 128 ? -x : x;
}

static float code_of(const struct iz_coded *t, const uint8_t *data, int64_t i)
{
    switch (t->kind) {
    case IZ_CODED_INT8:
        return (int8_t)data[i];
    case IZ_CODED_FP8:
        return fp8(data[i]);
    default: { /* the first one is in the upper half, or in the lower */
        bool upper = (i % 2 == 0) == (t->kind == IZ_CODED_BITS4);
        return t->value[upper ? data[i / 2] >> 4 : data[i / 2] & 15];
    }
    }
}

void iz_coded_load(const struct iz_coded *t, int64_t at, float *out, int64_t n)
{
    if (t->kind == IZ_CODED_NUMBERS) {
        load_numbers(t->tensor[IZ_CODED_CODES], at, out, n);
        return;
    }
    const uint8_t *data = t->tensor[IZ_CODED_CODES]->data;
    int64_t across = over(t->cols, t->block[1]);
    for (int64_t k; n > 0; at += k, out += k, n -= k) {
        int64_t row = at / t->cols, col = at % t->cols;
        int64_t left = min64(t->block[1] - col % t->block[1], t->cols - col);
        float s =
            block_scale(t, row / t->block[0] * across + col / t->block[1]);
        k = min64(left, n);
        for (int64_t i = 0; i < k; i++)
            out[i] = code_of(t, data, at + i) * s;
        for (int64_t i = 0; i < k && t->kind == IZ_CODED_INT8; i++)
            out[i] *= 7.874015718698502e-3f; /* as theirs, 1 / 127 */
    }
}

/* ---- our groups ---- */

const char *iz_coded_nf4(const struct iz_coded *t)
{
    struct iz_nf4_tables ours;
    iz_nf4_tables(&ours);
    if (t->nested != IZ_QUANT_SCALES || t->block[1] != IZ_QUANT_BLOCK)
        return "is in 4 bits, but not of nf4 in blocks of 64 with scales in "
               "blocks of 256, and would be quantised again: set "
               "model.base_dtype: null";
    return memcmp(t->value, ours.value, sizeof(t->value)) == 0 &&
                   memcmp(t->tensor[IZ_CODED_DYNAMIC]->data, ours.scale,
                          sizeof(ours.scale)) == 0
               ? NULL
               : "is in 4 bits, but its codes mean other values than here";
}

void iz_coded_nf4_group(const struct iz_coded *t, int64_t g,
                        struct iz_nf4_group *out)
{
    const struct iz_st_tensor *const *p = t->tensor;
    int64_t n = min64(t->cols - g * IZ_QUANT_GROUP, IZ_QUANT_GROUP);
    int64_t blocks = iz_quant_blocks(n);
    *out = (struct iz_nf4_group){.mean = t->mean};
    memcpy(out->code, p[IZ_CODED_CODES]->data + g * IZ_QUANT_GROUP / 2,
           (size_t)(n + 1) / 2);
    memcpy(out->scale, p[IZ_CODED_SCALES]->data + g * IZ_QUANT_SCALES,
           (size_t)blocks);
    memcpy(&out->most, p[IZ_CODED_MOST]->data + 4 * g, 4);
}
