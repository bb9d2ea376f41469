/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the program `ckpt` share: a checkpoint as its own index
 * describes it, and what the command line says. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "codelets/unit/layer.h"
#include "runtime/ckpt/ckpt.h"
#include "runtime/comm/coll.h"

struct ckpt_options {
    const struct command *command;
    const char *dir, *out;
    int64_t step; /* -1: the newest */
    int dtype;    /* -1: that of the run */
    int64_t file_bytes;
    bool adapter;     /* alone */
    const char *data; /* of a check: what it shall have the loss of, or NULL */
    const char *set[8]; /* with that: settings of the program */
    int n_set;
};

struct checkpoint {
    int64_t step;
    char path[IZ_CKPT_PATH];
    struct iz_ckpt_index *index;
    struct iz_ckpt k;
    char *model_text;
};

/* The step that was asked for, or the newest.  Negative errno with the reason
 * printed, here and below. */
int64_t checkpoint_step(const struct ckpt_options *o);

int checkpoint_open(struct checkpoint *c, const char *dir, int64_t step);
void checkpoint_close(struct checkpoint *c);

struct iz_program;

/* The programs of models, i = 0, 1, ...; NULL after the last. */
const struct iz_program *ckpt_program(int i);

enum { CKPT_SETTINGS = 32 };

/* All frozen but one tensor, as a setting: such a run needs the least memory.
 */
void ckpt_freeze(char *out, size_t size, const struct iz_model *m);

/* The validation loss that the metrics in a run's output have of a step; NAN:
 * none. */
double ckpt_validation(const char *output, int64_t step);
/* That of a run of no steps, of this config (NULL: none) and settings (the last
 * is NULL, CKPT_SETTINGS at most); NAN with the reason printed. */
double ckpt_loss(struct iz_coll *coll, const struct iz_program *p,
                 const char *config, const char *const *more);

/* What a foreign folder is, on stdout; what contradicts, on stderr. */
int ckpt_check(const struct ckpt_options *o, struct iz_coll *coll);
/* The weights of the checkpoint as a folder in the layout of Hugging Face. */
int ckpt_export(const struct ckpt_options *o, struct iz_coll *coll);
