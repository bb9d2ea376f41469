/* SPDX-License-Identifier: Apache-2.0 */
/* The vision transformer, for the classification of images.  T = 1 + patches of
 * an image, M = samples * T rows, C = width, K = numbers of a patch. */
#include "models/vit.h"

#include "models/block.h"
#include "models/keys.h"
#include "models/parts.h"

#define CONFIG struct iz_vit_config

/* Larger widths or depths are typing errors; a label is a byte. */
#define WIDEST (1 << 20)
#define LABELS 256

static struct iz_vit_config config;

static const struct iz_key keys[] = {
    {KEY(layers, INT, 1, WIDEST, NULL), "12", "Transformer blocks."},
    {KEY(heads, INT, 1, WIDEST, NULL), "12", "Attention heads of a block."},
    {KEY(width, INT, 1, WIDEST, NULL), "768", "Channels; a multiple of heads."},
    {KEY(hidden, INT, 0, WIDEST, NULL), "0",
     "Hidden channels of the MLP; 0: 4 width."},
    {KEY(image, INT, 1, 8192, NULL), "224",
     "Pixels of a side; a multiple of patch."},
    {KEY(patch, INT, 1, 1024, NULL), "16", "Pixels of a side of a patch."},
    {KEY(channels, INT, 1, 64, NULL), "3", "Colours of a pixel."},
    {KEY(classes, INT, 1, LABELS, NULL), "10", "Different labels."},
    {0},
};

/* What a model holds: what its keys say, and so its blocks. */
struct self {
    struct iz_vit_config config;
    struct iz_block block;
};

/* What a row of the first block is: the token whose output is classified, or a
 * patch.  Each has a learned vector, which for patches is a bias. */
enum { CLASS_TOKEN, PATCH_TOKEN, TOKENS };

/* Parameters of the embedding. */
enum { TOKEN = 0, POSITION = 1, PATCH = 2, EMBED_PARAMS = 3 };

static int patches(const struct iz_vit_config *c)
{
    return c->image / c->patch * (c->image / c->patch);
}

static int rows(const struct iz_vit_config *c)
{
    return 1 + patches(c);
}

static int numbers(const struct iz_vit_config *c)
{
    return c->channels * c->patch * c->patch;
}

/* ---- samples ---- */

/* The input of n samples: int32 [n T], what each row is; then fp32 [n T,K], the
 * patches, with zeros for the class tokens. */
static float *pixels(const void *input, const struct iz_vit_config *c,
                     int64_t samples)
{
    return input ? (float *)((int32_t *)(uintptr_t)input + samples * rows(c))
                 : NULL;
}

static const char *check_record(const void *self, const void *record)
{
    const struct iz_vit_config *c = self;
    return *(const unsigned char *)record < c->classes
               ? NULL
               : "its label is not below model.classes";
}

/* One patch of an image, channel by channel and row by row, in [-1, 1]. */
static void unpack_patch(float *to, const unsigned char *image,
                         const struct iz_vit_config *c, int patch)
{
    int side = c->image / c->patch;
    int64_t row = patch / side * c->patch, col = patch % side * c->patch;
    for (int64_t k = 0; k < c->channels; k++)
        for (int64_t y = row; y < row + c->patch; y++)
            for (int64_t x = col; x < col + c->patch; x++)
                *to++ =
                    (float)image[(k * c->image + y) * c->image + x] / 127.5f -
                    1;
}

/* Only the class token has a target: the label. */
static void unpack(const void *self, const void *record, int64_t i, int64_t n,
                   void *input, void *target)
{
    const struct iz_vit_config *c = self;
    const unsigned char *r = record;
    int64_t t = rows(c), k = numbers(c);
    int32_t *token = (int32_t *)input + i * t, *label = target;
    float *to = pixels(input, c, n) + i * t * k;
    label += i * t;
    token[0] = CLASS_TOKEN;
    label[0] = r[0];
    memset(to, 0, (size_t)k * sizeof(*to));
    for (int p = 0; p < patches(c); p++) {
        token[1 + p] = PATCH_TOKEN;
        label[1 + p] = -1;
        unpack_patch(to + (1 + p) * k, r + 1, c, p);
    }
}

/* ---- layers ---- */

/* The patches in the type of activations, in scratch. */
static struct iz_view patch_rows(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_vit_config *c = a->self;
    return numbers_of(x, pixels(a->input, c, a->samples),
                      (int64_t)a->samples * rows(c), numbers(c));
}

static void vit_embed_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_vit_config *c = a->self;
    struct iz_view y = tokens(a->y, c->width);
    struct iz_table t = {.w = a->w[TOKEN],
                         .row = a->input,
                         .vocabulary = true,
                         .wpe = a->w[POSITION]};
    struct iz_linear l = {.w = a->w[PATCH]};
    int64_t mark = iz_exec_mark(x);
    iz_table_fwd(x, y, IZ_NONE, &t);
    iz_matmul_fwd(x, y, y, patch_rows(x, a), &l);
    iz_exec_release(x, mark);
}

static void vit_embed_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_vit_config *c = a->self;
    struct iz_view dy = tokens(a->dy, c->width);
    struct iz_table t = {.dw = a->dw[TOKEN],
                         .row = a->input,
                         .vocabulary = true,
                         .dwpe = a->dw[POSITION]};
    struct iz_linear l = {.w = a->w[PATCH], .dw = a->dw[PATCH]};
    int64_t mark = iz_exec_mark(x);
    iz_table_bwd(x, dy, &t);
    iz_matmul_dw(x, dy, patch_rows(x, a), &l);
    iz_exec_release(x, mark);
}

/* ---- units ---- */

static const struct iz_block_names names = {.block = "blocks",
                                            .norm_1 = "norm1",
                                            .qkv = "attn.qkv",
                                            .attn_proj = "attn.proj",
                                            .norm_2 = "norm2",
                                            .fc = "mlp.fc1",
                                            .mlp_proj = "mlp.fc2"};

static void vit_open_units(struct iz_model *m)
{
    const struct self *s = m->self;
    const struct iz_vit_config *c = &s->config;
    const struct iz_param embed[] = {
        [TOKEN] = weight("embed.token", TOKENS, c->width, IZ_BLOCK_STD),
        [POSITION] = weight("embed.position", rows(c), c->width, IZ_BLOCK_STD),
        [PATCH] = weight("embed.patch", numbers(c), c->width, IZ_BLOCK_STD),
    };
    const struct iz_param head[] = {
        vector("norm.weight", c->width, IZ_INIT_ONE),
        vector("norm.bias", c->width, IZ_INIT_ZERO),
        weight("head.weight", c->classes, c->width, IZ_BLOCK_STD),
    };
    iz_block_open(m, &s->block, &names,
                  &(struct iz_ends){embed, head, EMBED_PARAMS, 3});
    m->unit[0].self = c;
    m->unit[0].forward = vit_embed_forward;
    m->unit[0].backward = vit_embed_backward;
    m->input_bytes = (int64_t)rows(c) * (4 + 4 * (int64_t)numbers(c));
    m->target_bytes = (int64_t)rows(c) * 4;
    m->item = "image";
    m->record = (struct iz_record){
        .bytes = 1 + (int64_t)c->channels * c->image * c->image,
        .check = check_record,
        .unpack = unpack,
    };
}

int iz_vit_open(struct iz_model **out, const void *target)
{
    struct iz_vit_config c = *(const struct iz_vit_config *)target;
    *out = NULL;
    if (c.hidden == 0 && c.width > 0 && c.width <= WIDEST)
        c.hidden = 4 * c.width;
    if (check_keys("vit", keys, &c))
        return -EINVAL;
    if (c.image % c.patch) {
        fprintf(stderr, "vit: image %d is not divisible by patch = %d\n",
                c.image, c.patch);
        return -EINVAL;
    }
    if (iz_block_check("vit", c.width, c.heads))
        return -EINVAL;
    struct self s = {.config = c,
                     .block = {.layers = c.layers,
                               .heads = c.heads,
                               .kv_heads = c.heads,
                               .head_dim = c.width / c.heads,
                               .width = c.width,
                               .hidden = c.hidden,
                               .seq = rows(&c),
                               .norm_eps = 1e-5f,
                               .full = true,
                               .has = IZ_HAS_GPT2}};
    *out = iz_model_open("vit", c.layers + 2, &s, sizeof(s));
    vit_open_units(*out);
    return 0;
}

/* ---- the program ---- */

#define SHAPE(l, h, w, p)                                                      \
    "{\"layers\": " #l ", \"heads\": " #h ", \"width\": " #w                   \
    ", \"patch\": " #p ", \"image\": 224}"

static const struct iz_preset presets[] = {
    {"tiny",
     "{\"layers\": 2, \"heads\": 2, \"width\": 32, \"image\": 8, "
     "\"patch\": 4, \"channels\": 1}",
     "for tests"},
    {"vit-b16", SHAPE(12, 12, 768, 16), "ViT-Base, patches of 16 pixels"},
    {"vit-l16", SHAPE(24, 16, 1024, 16), "ViT-Large, patches of 16 pixels"},
    {"vit-h14", SHAPE(32, 16, 1280, 14), "ViT-Huge, patches of 14 pixels"},
    {0},
};

const struct iz_program iz_program = {
    .name = "vit",
    .about = "trains vision transformers to classify images",
    .section = {.keys = keys, .target = &config, .presets = presets},
    .open = iz_vit_open,
};
