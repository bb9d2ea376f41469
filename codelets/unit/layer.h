/* SPDX-License-Identifier: Apache-2.0 */
/* What a model must provide: a list of units (embedding, blocks, head), the
 * parameters of each, and one forward and one backward function per unit.
 * Nothing here depends on where a parameter lives or on the number of ranks.
 */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codelets/flat/quant.h"
#include "codelets/ops/exec.h"

struct iz_aux; /* codelets/ops/ops.h */
struct iz_preference;

enum iz_init { IZ_INIT_ZERO, IZ_INIT_ONE, IZ_INIT_NORMAL };

enum { IZ_STACKED = 3 }; /* matrices of one parameter, at most */

struct iz_param {
    char name[96]; /* logical name, as in checkpoints: "h.3.attn.c_attn.weight"
                    */
    int64_t rows, cols; /* a vector has rows = 1 */
    enum iz_init init;
    float std; /* of IZ_INIT_NORMAL */
    /* Of a weight of a block: outputs of each matrix that it stacks, such as
     * those of queries, keys and values; outputs are rows of it or columns.  An
     * optimizer of matrices updates each as such.  All 0: of no matrix. */
    int64_t outputs[IZ_STACKED];
    bool out_rows;
    /* Of experts, whose matrices lie one below the other: these outputs come so
     * many times, as rows.  0: once. */
    int64_t times;
    bool always_frozen; /* whatever a config says */
    /* Set by the runtime (runtime/model/rules.h), not by a model. */
    double lr_scale, weight_decay;
    bool by_matrix; /* its matrices are updated as such */
    bool saved;     /* trained in full beside adapters (runtime/model/lora.h) */
    bool frozen;    /* has no gradient: its view in dw is absent (rows = 0) */
    enum iz_quant quant; /* frozen, and kept in fewer bits */
    /* A step moves and updates only the rows it touches; views may contain just
     * those rows (struct iz_view). */
    bool sparse;
    /* Of an adapter or a copy: the index of the parameter that it adapts or
     * copies; of an adapter, whether that is stored as [out, in]. */
    int adapts;
    bool out_in;
    /* Of its b: the output that its first row adds to, and alpha. */
    int64_t first;
    double alpha;
};

/* The arguments of one call of a layer function, on one micro-batch. */
struct iz_layer {
    const void *self; /* the unit's */
    int unit, kind;   /* its number and kind */
    int index;        /* the unit's */
    int samples;      /* in this micro-batch */
    /* Parameters of the unit in the order of its list, then the tied one if
     * any. dw has the same order: backward overwrites every entry whose p is
     * not NULL (entries of parameters that take no gradient are absent). */
    const struct iz_view *w;
    const struct iz_view *dw;
    /* x: [samples, elements of the previous boundary]; y: [samples, out_elems].
     * The first unit reads `input` instead of x, the last writes no y. */
    struct iz_view x, y;
    /* Backward: dy in, dx out, in the same memory: a backward reads all it
     * needs of dy before it writes dx there.  What the first unit leaves there
     * nobody reads. */
    struct iz_view dy, dx;
    const void *input,
        *target; /* records of the micro-batch, samples * bytes; set for the
                  * first and the last unit, and for units with reads_input */
    /* Where the model's documents are apart: int32 [samples, tokens], as ops.h
     * has it; absent otherwise. */
    struct iz_view begins;
    /* Forward, recomputed for a backward: y is thrown away, so what only y
     * needs may be left out. */
    bool again;
    /* Last unit only.  It writes *loss: the mean over the targets of the
     * micro-batch that count.  The gradients are those of loss * loss_scale;
     * that is there for units with own_loss, too. */
    double *loss;
    float loss_scale;
    /* Units with own_loss, forward, and the last one of pairs: auxiliary
     * metrics; NULL: nobody asks. */
    struct iz_aux *aux;
    /* Last unit only, where samples are pairs: their loss, what w and x are for
     * the reference, and the weight of struct iz_pairs.  NULL: samples are
     * alone. */
    const struct iz_preference *preference;
    const struct iz_view *reference_w;
    struct iz_view reference_x;
    double weight;
    /* Last unit, generation only: the row of sample 0 to compute logits for. */
    int64_t row;
    float *logits;
};

/* A unit has fewer parameters than this, adapters and a tied one included. */
#define IZ_UNIT_PARAMS 128

/* What a unit's backward recomputes of its forward, which keeps the rest:
 * nothing, what makes the widened activations (iz_exec_save_widened), or all.
 * AUTO, in a config alone: the plan chooses for each unit. */
enum iz_recompute {
    IZ_RECOMPUTE_NONE,
    IZ_RECOMPUTE_WIDENED,
    IZ_RECOMPUTE_FULL,
    IZ_RECOMPUTES,
    IZ_RECOMPUTE_AUTO = IZ_RECOMPUTES
};

struct iz_unit {
    char name[32]; /* "wte", "h.3", "head" */
    struct iz_param *param;
    int n_params;
    /* Parameters of adapters at the end of `param`: a, b and where the model
     * has them magnitudes of each.  The runtime adds them
     * (runtime/model/lora.h); the layer finds them in its views. */
    int n_adapters;
    /* Behind them, for the reference of pairs: frozen copies of what is
     * trained.  The runtime adds them, too (runtime/model/rules.c). */
    int n_references;
    /* A parameter of an earlier unit that this unit uses too (one parameter,
     * one gradient); tied_unit is -1 if there is none. */
    int tied_unit, tied_param;
    int64_t out_elems; /* boundary tensor after the unit, elements per sample */
    bool reads_input;  /* gets `input` although it is not the first unit */
    /* It adds a loss to the last unit's: the mean of it over the calls of a
     * step, whatever their targets are. */
    bool own_loss;
    /* For a unit whose only parameter is a table, which may then be sparse: the
     * largest number of rows that a sample reads.  0 for other units. */
    int64_t table_reads;
    /* Same kind = same shapes and functions, so one dry run serves all. */
    int kind;
    int index;        /* a number for its layer: which of several alike it is */
    const void *self; /* constants of its layer; set to the model's by open */
    /* Training forward; it takes memory for whatever backward needs with
     * iz_exec_save or iz_exec_save_widened.  NULL in the last unit, whose
     * backward computes loss and gradients in one go. */
    void (*forward)(struct iz_exec *x, const struct iz_layer *a);
    void (*backward)(struct iz_exec *x, const struct iz_layer *a);
    /* Last unit only: loss without gradients, and logits of one row (NULL if
     * the model generates nothing). */
    void (*evaluate)(struct iz_exec *x, const struct iz_layer *a);
    void (*generate)(struct iz_exec *x, const struct iz_layer *a);
};

/* How samples come from files of fixed-size records.  Both functions are called
 * on the host from several threads; a record may lie at any address. */
struct iz_record {
    int64_t bytes; /* of a record; 0: samples are windows of tokens */
    /* Returns what is wrong with a record, or NULL. */
    const char *(*check)(const void *self, const void *record);
    /* Writes sample i of n into the input and target records of all n samples,
     * in a layout of the model's choice. */
    void (*unpack)(const void *self, const void *record, int64_t i, int64_t n,
                   void *input, void *target);
};

struct iz_model {
    const char *name;
    void *self; /* owned, freed by close */
    int n_units;
    struct iz_unit *unit;
    /* Bytes per sample of the two records that a data set hands over. */
    int64_t input_bytes, target_bytes;
    bool adapter_dora;      /* adapters have magnitudes */
    bool adapter_root;      /* adapters are multiplied by alpha / sqrt(rank) */
    double adapter_dropout; /* of what adapters read, in training; 0: none */
    uint64_t dropout_key;
    /* Without records: the tokens per window and the number of valid tokens,
     * which are 0..vocab-1.  Input and target are windows of int32. */
    int tokens, vocab;
    /* Set by a model whose layers heed `begins`. */
    bool knows_documents;
    /* Set by a model whose layers handle chunks of rows (struct iz_numerics).
     */
    bool knows_chunks;
    /* Set by the runtime: documents do not see each other, every layer gets
     * `begins`. */
    bool documents_apart;
    /* Set by a model whose last unit forms the loss of pairs. */
    bool knows_pairs;
    /* Set by the runtime; NULL: samples are no pairs. */
    const struct iz_preference *preference;
    struct iz_record record;
    bool experts;     /* it has some */
    const char *item; /* what is counted per second: "token", "image" */
    /* Rows of embedding tables, and how many of them a sample reads.  0: the
     * plan prints no line about tables. */
    int64_t table_rows, table_reads;
    /* Writes the rows that n samples of the input read, each as unit << 32 |
     * row, in any order and with repetitions.  Returns their number, at most n
     * * table_reads.  Needed if units have table_reads; called on the host from
     * several threads. */
    int64_t (*list_rows)(const void *self, int n, const void *input,
                         uint64_t *out);
    void (*close)(struct iz_model *m);
};

/* ---- published checkpoints: the names of a model's tensors there ---- */

/* The layout of a parameter [rows, cols] in its tensor, or in several tensors
 * if the parameter is cut. */
enum iz_hf_layout {
    IZ_HF_SAME,       /* [rows, cols], a vector [cols]; cut by columns */
    IZ_HF_TRANSPOSED, /* [cols, rows]; cut by columns of the parameter, too */
    IZ_HF_ROWS,       /* [rows, cols]; cut by rows */
    IZ_HF_FIRST_ROWS, /* those of a tensor that may have more; see `shorter` */
    IZ_HF_BY_HEAD, /* [rows, cols], or [cols]: of each head its rows of queries,
                    * of keys and of values, `each` of them */
    /* All experts in one tensor: [times, rows / times, cols], or with each
     * transposed; of biases [times, cols / times]. */
    IZ_HF_EXPERTS,
    IZ_HF_EXPERTS_TRANSPOSED,
};

/* "h.{}.attn.c_attn.weight": {} is a number, the same in both names. */
struct iz_hf_name {
    /* "q|k|v": the parameter is cut into these.  With `each`, [] stands for 0,
     * 1, ...: into those of 0, then of 1, all alike.  They begin with the
     * number that the parameter's name has in a second {}, if it has one. */
    const char *tensor;
    const char *param; /* NULL: the tensor is ignored if it is present */
    const char *types; /* as in struct iz_hf_key */
    enum iz_hf_layout layout;
    /* A second name of a parameter that another unit owns: it may be missing,
     * must be equal if it is present, and is not written. */
    bool tied;
    /* Columns (or rows) of tensor i, from the model's self; NULL: all alike. */
    int64_t (*cut)(const void *self, int i);
    int64_t (*each)(const void *self); /* columns (or rows) for a number */
    /* Of an ignored one: only numbers from this one on. */
    int64_t (*beyond)(const void *self);
    bool grows; /* rows are tokens: a folder may have fewer */
};

/* What these types have in the names of tensors in place of `is`, one after the
 * other. */
struct iz_hf_word {
    const char *types; /* as in struct iz_hf_key */
    const char *is, *theirs;
};

/* A key of config.json.  Several rows with the same `key` are alternative names
 * of it; `values` of the first row applies if all are absent. */
struct iz_hf_key {
    /* "a.b": b in the object a; those stand together, and what no row names in
     * such an object is refused. */
    const char *name;
    const char *key; /* of the section "model"; NULL: always one of `values` */
    /* JSON "a|b".  Without `key`: the accepted values, or what all items of an
     * array must be; the first one is written, and is the value if the name is
     * absent; NULL: it means nothing.  With `key`: the value
     * if the name is absent; NULL: the name must be present, "": it may be
     * absent. */
    const char *values;
    const char *types; /* "a|b": the types that have this row, "!a|b": all
                        * others; NULL: all */
    /* null in config.json means 0 here, or an empty list; there 0 means
     * nothing and is refused. */
    bool null_is_zero;
    /* Of several names of a key this one may say another value, and wins. */
    bool wins;
    /* Another member, which must say the same if both are there. */
    const char *same;
    /* Another value than the first one is told, with this sentence. */
    const char *told;
    /* A setting may be less: the number of rows of IZ_HF_FIRST_ROWS. */
    bool shorter;
    /* A setting may be more: the number of rows of what grows. */
    bool grows;
    /* A setting may be any other: it says how to train. */
    bool free;
    /* Members "a|b" that give this one its meaning: one of them must be
     * `with_value`, or the file is refused.  NULL: it needs none. */
    const char *with, *with_value;
    /* Whether to write the key, given the model's self; NULL: always. */
    bool (*write)(const void *self);
};

/* A model_type of config.json that this model reads and writes. */
struct iz_hf_type {
    const char *name;         /* its model_type: "gpt2" */
    const char *architecture; /* "GPT2LMHeadModel" */
    const char *implies;      /* members of the section "model"; may be NULL */
    const void *own;          /* what the model knows of the type; or NULL */
};

/* What types "a|b" of published models have that no program has. */
struct iz_hf_lack {
    const char *what, *types;
};

/* The model's self is the struct that the section's keys fill, complete. */
struct iz_hf {
    const struct iz_hf_type *types; /* ends with name = NULL; an absent one is
                                       the first */
    /* Returns the name of the type to write, or NULL if no type is such a
     * model. Without the function, the first type is written. */
    const char *(*type)(const void *self);
    const char *prefix;             /* of tensor names; a file may omit it */
    const struct iz_hf_name *names; /* ends with tensor = NULL */
    const struct iz_hf_word *words; /* ends with types = NULL; may be NULL */
    const struct iz_hf_key *keys;   /* ends with name = NULL */
    const struct iz_hf_lack *lacks; /* ends with what = NULL; may be NULL */
};

/* For models.  Creates a model with n_units empty units and a copy of `self`;
 * its close is set. */
struct iz_model *iz_model_open(const char *name, int n_units, const void *self,
                               size_t self_bytes);
/* Calls the model's close; accepts NULL. */
void iz_model_close(struct iz_model **model);
/* Gives u a copy of n parameters, each name after the prefix. */
void iz_unit_params(struct iz_unit *u, const struct iz_param *list, int n,
                    const char *prefix);

/* Bytes per sample of what a data set hands over: input and target records,
 * and where documents begin if they are apart. */
static inline int64_t iz_model_sample_bytes(const struct iz_model *m)
{
    int64_t begins = m->documents_apart ? 4 * (int64_t)m->tokens : 0;
    return m->input_bytes + m->target_bytes + begins;
}

/* Whether units have auxiliary metrics. */
static inline bool iz_model_has_aux(const struct iz_model *m)
{
    return m->experts || m->preference;
}

/* The number of a unit's parameters without its copies. */
static inline int iz_unit_own(const struct iz_unit *u)
{
    return u->n_params - u->n_references;
}

/* The same without its adapters, too. */
static inline int iz_unit_base(const struct iz_unit *u)
{
    return iz_unit_own(u) - u->n_adapters;
}

/* Parameters of an adapter. */
static inline int iz_model_adapter(const struct iz_model *m)
{
    return m->adapter_dora ? 3 : 2;
}

/* What an adapter is multiplied by, given its b. */
static inline float iz_param_scale(const struct iz_model *m,
                                   const struct iz_param *b)
{
    double rank = (double)b->cols;
    return (float)(b->alpha / (m->adapter_root ? sqrt(rank) : rank));
}

/* Which parameter the reference of pairs has for this one: a copy, or itself.
 */
static inline int iz_unit_reference(const struct iz_unit *u, int param)
{
    for (int i = iz_unit_own(u); i < u->n_params; i++)
        if (u->param[i].adapts == param)
            return i;
    return param;
}

/* A unit's flat array has its trained parameters, then the frozen ones, then
 * those that are quantised. */
enum iz_unit_part { IZ_PART_TRAINED, IZ_PART_FROZEN, IZ_PART_QUANT, IZ_PARTS };

/* Matrices that it stacks, of all experts. */
static inline int64_t iz_param_matrices(const struct iz_param *p)
{
    int n = 0;
    while (n < IZ_STACKED && p->outputs[n])
        n++;
    return p->times ? n * p->times : n;
}

static inline enum iz_unit_part iz_param_part(const struct iz_param *p)
{
    return p->quant    ? IZ_PART_QUANT
           : p->frozen ? IZ_PART_FROZEN
                       : IZ_PART_TRAINED;
}

/* Elements of a part. */
int64_t iz_unit_elems(const struct iz_unit *u, enum iz_unit_part part);
/* Writes offset[n_params], where each parameter starts in the unit's flat
 * array: those of a part follow one another from from[part] on. */
void iz_unit_offsets(const struct iz_unit *u, const int64_t from[IZ_PARTS],
                     int64_t *offset);

/* The format of its quantised part: all of it has one. */
enum iz_quant iz_unit_quant(const struct iz_unit *u);

/* A matrix of the quantised part, which has groups of its own: one of those
 * that a parameter stacks, if they follow one another, or all of it. */
struct iz_quant_matrix {
    int param, stacked;    /* which of the parameter's */
    int64_t first, n;      /* elements of the part, end to end */
    int64_t group, groups; /* of all of the part */
};
/* Goes on to the next one, from {0} to the first; false: there are no more.
 * Then first and group are what all have together. */
bool iz_unit_next_quant(const struct iz_unit *u, struct iz_quant_matrix *m);
/* Elements of group g, and the first of them in the part, end to end; 0 behind
 * the last group. */
int64_t iz_unit_quant_group(const struct iz_unit *u, int64_t g, int64_t *first);
/* Whether the unit uses a trained parameter of another unit. */
bool iz_unit_ties_trained(const struct iz_model *m, int unit);
