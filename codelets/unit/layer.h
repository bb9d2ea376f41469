/* SPDX-License-Identifier: Apache-2.0 */
/* What a model must provide: a list of units (embedding, blocks, head), the
 * parameters of each, and one forward and one backward function per unit.
 * Nothing here knows where a parameter lives or how many processes there are.
 */
#ifndef IZ_CODELETS_UNIT_LAYER_H
#define IZ_CODELETS_UNIT_LAYER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codelets/ops/exec.h"

enum iz_init { IZ_INIT_ZERO, IZ_INIT_ONE, IZ_INIT_NORMAL };

struct iz_param {
    char name[64]; /* logical name, as in checkpoints: "h.3.attn.c_attn.weight"
                    */
    int64_t rows, cols; /* a vector has rows = 1 */
    enum iz_init init;
    float std; /* of IZ_INIT_NORMAL */
    /* Set by the runtime (runtime/config/rules.h), not by a model. */
    double lr_scale, weight_decay;
    bool frozen; /* has no gradient: its view in dw is absent (rows = 0) */
    /* Of it a step moves and updates the rows alone that it touches: views may
     * have only those (struct iz_view). */
    bool sparse;
    int adapts; /* of an adapter: the parameter, and how that one lies */
    bool out_in;
};

/* The arguments of one call of a layer function, on one micro-batch. */
struct iz_layer {
    const void *self; /* the model's own constants */
    int unit;
    int samples; /* in this micro-batch */
    /* Parameters of the unit in the order of its list, then the tied one if
     * any. dw has the same order: backward overwrites every entry whose p is
     * not NULL (entries of parameters that take no gradient are absent). */
    const struct iz_view *w;
    const struct iz_view *dw;
    /* x: [samples, elements of the previous boundary]; y: [samples, out_elems].
     * The first unit reads `input` instead of x, the last writes no y. */
    struct iz_view x, y;
    /* Backward: dy in, dx out.  They may be the same memory: a backward reads
     * all it needs of dy before it writes dx. */
    struct iz_view dy, dx;
    const void *input,
        *target; /* records of the micro-batch, samples * bytes; the first and
                  * the last unit have them, and those that ask for them */
    /* Last unit only.  *loss is written: the mean over the micro-batch, of
     * those targets that count.  The gradients are those of
     * loss * loss_scale. */
    double *loss;
    float loss_scale;
    /* Last unit, generation only: row of sample 0 whose logits are wanted. */
    int64_t row;
    float *logits;
};

/* A unit has fewer parameters than this, adapters and a tied one included. */
#define IZ_UNIT_PARAMS 128

struct iz_unit {
    char name[32]; /* "wte", "h.3", "head" */
    struct iz_param *param;
    int n_params;
    /* At the end of the list, set by the runtime (runtime/config/lora.h): a,
     * then b of each.  The layer finds them in its weights' views. */
    int n_adapters;
    /* A parameter of an earlier unit that this one uses too (one parameter, one
     * gradient), or tied_unit = -1. */
    int tied_unit, tied_param;
    int64_t out_elems; /* boundary tensor after the unit, elements per sample */
    bool reads_input;  /* in the middle of the model too */
    /* Rows that a sample reads at most of the table that is the unit's only
     * parameter: the table may be sparse.  0: the unit is something else. */
    int64_t table_reads;
    /* Same kind = same shapes and functions, so one dry run serves all. */
    int kind;
    /* Training forward; takes with iz_save what backward needs.  NULL in the
     * last unit, whose backward computes loss and gradients in one go. */
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
    /* What is wrong with a record, or NULL. */
    const char *(*check)(const void *self, const void *record);
    /* Writes sample i of n into the input and target records of all n; how
     * these lie there is the model's own affair. */
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
    float adapter_scale;
    /* Without records: tokens of a window, valid ones are 0..vocab-1; input and
     * target are windows of int32. */
    int tokens, vocab;
    struct iz_record record;
    const char *item; /* what is counted per second: "token", "image" */
    /* Rows of embedding tables, and how many of them a sample reads; 0: none
     * that is worth a line in the plan. */
    int64_t table_rows, table_reads;
    /* Writes which rows n samples of the input read, unit << 32 | row, in any
     * order and as often as they are read; returns how many, at most n *
     * table_reads.  For models with units that have table_reads; called on the
     * host from several threads. */
    int64_t (*list_rows)(const void *self, int n, const void *input,
                         uint64_t *out);
    void (*close)(struct iz_model *m);
};

/* ---- published checkpoints: what a model's tensors are called there ---- */

/* How a parameter [rows, cols] lies in its tensor, and in several of them if it
 * is cut. */
enum iz_hf_layout {
    IZ_HF_SAME,       /* [rows, cols], a vector [cols]; cut by columns */
    IZ_HF_TRANSPOSED, /* [cols, rows]; cut by columns of the parameter, too */
    IZ_HF_ROWS,       /* [rows, cols]; cut by rows */
};

/* "h.{}.attn.c_attn.weight": {} is a number, the same in both names. */
struct iz_hf_name {
    const char *tensor; /* "q|k|v": the parameter is cut into these */
    const char *param;  /* NULL: a tensor that may be there and means nothing */
    enum iz_hf_layout layout;
    /* A second name of what another unit uses: need not be there, must be equal
     * if it is, and is not written. */
    bool tied;
    /* Columns (or rows) of tensor i, from the model's self; NULL: all alike. */
    int64_t (*cut)(const void *self, int i);
};

/* A key of config.json.  Several rows of one key of ours are several names of
 * it: what an absent one means is said by the first of them. */
struct iz_hf_key {
    const char *name; /* "a.b": b in the object a; those stand together */
    const char *key;  /* of the section "model"; NULL: always one of `values` */
    /* JSON "a|b".  Without key: what is accepted; the first one is written, and
     * an absent key means it.  With key: what an absent one means; NULL: it
     * must be there, "": it need not. */
    const char *values;
    const char *types; /* "a|b": the types that have this row; NULL: all */
    bool null_is_zero; /* null there is 0 here */
    /* Members "a|b" that give this one its meaning: one must be `with_value`,
     * or the file is refused; NULL: it needs none. */
    const char *with, *with_value;
    /* Whether it is written, from the model's self; NULL: it is. */
    bool (*write)(const void *self);
};

/* One of the kinds of config.json that are this model. */
struct iz_hf_type {
    const char *name;         /* its model_type: "gpt2" */
    const char *architecture; /* "GPT2LMHeadModel" */
    const char *implies;      /* members of the section "model"; may be NULL */
};

/* The model's self is the struct that the section's keys fill, complete. */
struct iz_hf {
    const struct iz_hf_type *types; /* ends with name = NULL; an absent one is
                                       the first */
    /* The name of the type to write; NULL: no type is such a model.  Without
     * the function: the first. */
    const char *(*type)(const void *self);
    const char *prefix;             /* of tensors, which a file may lack */
    const struct iz_hf_name *names; /* ends with tensor = NULL */
    const struct iz_hf_key *keys;   /* ends with name = NULL */
};

/* For models.  Creates a model with n_units empty units and self_bytes of
 * zeroed `self`; its close is set.  Returns 0 or -ENOMEM (*out is then NULL).
 */
int iz_model_open(struct iz_model **out, const char *name, int n_units,
                  size_t self_bytes);
/* Calls the model's close; accepts NULL. */
void iz_model_close(struct iz_model **model);
/* Gives u a copy of n parameters, each name after the prefix; 0 or -ENOMEM. */
int iz_unit_params(struct iz_unit *u, const struct iz_param *list, int n,
                   const char *prefix);

/* The parameters of a unit but for its adapters'. */
static inline int iz_unit_base(const struct iz_unit *u)
{
    return u->n_params - 2 * u->n_adapters;
}

/* Elements of a unit's trained or of its frozen parameters. */
int64_t iz_unit_elems(const struct iz_unit *u, bool frozen);
/* Where each parameter begins in the unit's flat ones: the trained ones end to
 * end from 0 on, the frozen ones from frozen_at on.  offset[n_params]. */
void iz_unit_offsets(const struct iz_unit *u, int64_t frozen_at,
                     int64_t *offset);
/* Whether the unit uses a parameter of another one that is trained. */
bool iz_unit_ties_trained(const struct iz_model *m, int unit);

#endif
