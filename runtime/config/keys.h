/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the config reader share: the file as it is written, before
 * the rules between keys turn it into a struct iz_config, and the tables of its
 * keys. Nothing outside runtime/config includes this. */
#pragma once

#include "codelets/base/build.h"
#include "runtime/base/json.h"
#include "runtime/base/nearest.h"
#include "runtime/base/text.h"
#include "runtime/config/config.h"

enum iz_given { IZ_GIVEN_NOT, IZ_GIVEN_AUTO, IZ_GIVEN_BAD, IZ_GIVEN_VALUE };

/* Fields of the file that are not one to one a field of struct iz_config. */
struct iz_config_file {
    struct iz_config c;
    int64_t micro_batch, grad_accum; /* 0: not given */
    bool bf16, fp16;
    int grad_accum_dtype, communication_dtype; /* 0: null, else 1 + iz_dtype */
    bool adam_w_mode, torch_adam;
    double muon_lr;
    int warmup_type; /* 0: log, 1: linear */
    double min_lr_ratio;
    int64_t steps_per_print;
    /* Whether the file or an override gives iz_config_keys[i]. */
    enum iz_given given[IZ_CONFIG_KEYS_MAX];
};

/* Keys that set something; offsets are in struct iz_config_file.  Ends with
 * name = NULL. */
extern const struct iz_key iz_config_keys[];

/* Keys of one member of the array "parameters"; offsets are in struct iz_rule.
 * Ends with name = NULL. */
extern const struct iz_key iz_rule_keys[];

/* DeepSpeed's keys that set nothing here.  `accept` lists the accepted values:
 * bool, number, string: any value of that type; any: any value; off: an object
 * whose "enabled" is not true; otherwise JSON values separated by |.  Ends with
 * name = NULL. */
struct iz_foreign_key {
    const char *name, *accept;
    const char *doc; /* what happens, or what to do instead */
};

extern const struct iz_foreign_key iz_foreign_keys[];

/* The sentence about a choice that a resumed run keeps, with a space before it;
 * "" of other keys. */
const char *iz_config_keeps(const struct iz_key *key);

/* Counts and prints faults, each with the place it comes from. */
struct iz_faults {
    FILE *err; /* may be NULL */
    const char *path;
    char *const *set;
    int n_set, count;
};

/* Default of loss.beta, TRL's. */
#define IZ_LOSS_BETA 0.1

/* Of one config at most so many faults are told. */
enum { IZ_FAULTS_TOLD = 100 };

/* One line "place: key: text"; key may be NULL. */
void iz_fault(struct iz_faults *f, const char *key, const char *fmt, ...)
    IZ_PRINTF(3, 4);

/* Whether a key is one of this section: "run.steps" of "run". */
bool iz_config_in(const char *key, const char *section);

/* The file with the overrides put in; path NULL: these alone.  New reference;
 * NULL after a fault of the file, *rc is then a negative errno. */
json_t *iz_config_object(const struct iz_section *model, struct iz_faults *f,
                         const char *path, int *rc);
/* Whether an override gives this key a value that begins with one of these
 * characters; NULL: any. */
bool iz_config_overridden(const struct iz_faults *f, const char *key,
                          const char *begin);

/* Whether the file gives this key; as "auto"; and with a value of its own. */
enum iz_given *iz_config_given(struct iz_config_file *file, const char *name);
bool iz_config_auto(struct iz_config_file *file, const char *name);
bool iz_config_gives(struct iz_config_file *file, const char *name);
/* Whether one of these keys, "a|b", has a fault of its own. */
bool iz_config_bad(struct iz_config_file *file, const char *names);

/* Where `is`, `text` is told of `key`, with the values of the keys in it:
 * "{run.steps}"; "{}" is that of `key`, "{dtype}" the type of parameters.  It
 * is not told where one of all these has a fault of its own: a rule must not
 * blame a key for another. */
struct iz_conflict {
    bool is;
    const char *key, *text;
};

/* Tells of those of n that are. */
void iz_conflicts_tell(struct iz_config_file *file, struct iz_faults *f,
                       const struct iz_conflict *conflicts, size_t n);

/* The nearest of all keys of a config. */
struct iz_nearest iz_nearest_key(const char *name,
                                 const struct iz_section *model);

/* Turns the file's fields into those of file->c and reports every rule between
 * keys that is broken. */
void iz_config_resolve(struct iz_config_file *file, struct iz_faults *f,
                       int ranks);

/* Whether the config's optimizer or scheduler has the parameter `key`; any
 * other key is had by all. */
bool iz_config_has_param(const struct iz_config *c, const char *key);
/* Of optimizer and scheduler, after types and batch. */
void iz_config_resolve_updates(struct iz_config_file *file,
                               struct iz_faults *f);

/* The inverse: the file's fields that give *c.  given[i] is IZ_GIVEN_VALUE for
 * the keys that have a meaning in this config. */
void iz_config_unresolve(struct iz_config_file *file,
                         const struct iz_config *c);
