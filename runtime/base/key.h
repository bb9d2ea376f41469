/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of keys: the fields of a struct, and the JSON that they are read from
 * and written as.  Models have such tables too. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

struct iz_hf; /* codelets/unit/layer.h */
struct json_t;

#define IZ_PATH_MAX 1024
#define IZ_KEY_NAME_MAX 256 /* bytes of a dotted key */

enum iz_key_type {
    IZ_KEY_BOOL,   /* bool */
    IZ_KEY_INT,    /* int */
    IZ_KEY_INT64,  /* int64_t */
    IZ_KEY_UINT64, /* uint64_t */
    IZ_KEY_DOUBLE, /* double */
    IZ_KEY_STRING, /* char[size] */
    IZ_KEY_PATH,   /* the same, of a file or folder */
    IZ_KEY_LIST,   /* paths or names with commas: in JSON also an array */
    IZ_KEY_INTS,   /* char[size], integers with commas: in JSON an array */
    IZ_KEY_MAP,    /* char[size], JSON: an object of numbers */
    IZ_KEY_PAIR,   /* double[2] */
    IZ_KEY_COUNT,  /* int64_t, or one of `words`: its position, times -1 */
    /* int-sized enum, one of `words` ("a|b|c", value = position); the word null
     * stands for JSON's null */
    IZ_KEY_ENUM,
};

/* What it means that another rank, or the run that is resumed, has another
 * value.  Ranks may differ in IZ_CHANGE_OWN alone. */
enum iz_change {
    IZ_CHANGE_SAME, /* another run: refused */
    IZ_CHANGE_TOLD, /* a resumed run goes on with other results, and says so */
    IZ_CHANGE_FREE, /* the same results */
    IZ_CHANGE_OWN,  /* the same results, and of each rank its own */
    IZ_CHANGES
};

/* Which resumed runs keep what was chosen where a config left a key open
 * ("auto", or 0), as another choice would have other bits. */
enum iz_kept {
    IZ_KEPT_NOT, /* none, or there is no such choice */
    IZ_KEPT_ALL,
    IZ_KEPT_OF_16_BITS,
    IZ_KEPT_SAME_MICRO_BATCH,
    IZ_KEPT_SAME_RANKS,
    IZ_KEPT_SAME_BATCH, /* and as many ranks */
};

struct iz_key {
    const char *name; /* dotted: "zero_optimization.offload_param.device" */
    enum iz_key_type type;
    size_t offset, size; /* of the field in its struct; size for strings */
    double min, max; /* of numbers, inclusive; both 0 or min > max: unchecked */
    const char *words; /* of IZ_KEY_ENUM */
    enum iz_change change;
    const char *fallback; /* default, as JSON text */
    const char *doc;      /* one sentence */
    /* Of a config's own keys; models have none of these. */
    const char *automatic; /* what "auto" stands for, as JSON; "": the default;
                              NULL: it is refused */
    const char *types;     /* of schedules that have it, "a|b"; NULL: all */
    enum iz_kept kept;
};

static inline bool iz_key_is_text(const struct iz_key *k)
{
    return k->type >= IZ_KEY_STRING && k->type <= IZ_KEY_MAP;
}

/* "gpt2-124m": model.preset = name applies `json` before the other keys. */
struct iz_preset {
    const char *name, *json, *doc;
};

/* A model's own section "model": its keys and the struct they fill. */
struct iz_section {
    const struct iz_key *keys; /* ends with name = NULL; without "model." */
    void *target;
    const struct iz_preset *presets; /* ends with name = NULL; may be NULL */
    const struct iz_hf *hf; /* published checkpoints; NULL: there are none */
    /* Why a key can have no effect beside the other values of the struct at
     * `base`; NULL: it has one.  May be NULL. */
    const char *(*idle)(const void *base, const char *key);
};

/* The row of a table that has this name, or NULL. */
const struct iz_key *iz_key_find(const struct iz_key *table, const char *name);

/* Whether a key's numbers have a range. */
static inline bool iz_key_ranged(const struct iz_key *k)
{
    return k->min <= k->max && (k->min != 0 || k->max != 0);
}

#define IZ_WHY_MAX 512

/* `5e8 (a number)`, `"x" (a string)`, `an object`. */
void iz_key_describe(char *out, size_t size, const struct json_t *v);
/* Whether v is one of the JSON values of "a|b". */
bool iz_key_among(const struct json_t *v, const char *values);
/* Whether `word` is one of "a|b", or with "!a|b" none of them; NULL: it is. */
bool iz_key_applies(const char *word, const char *words);
/* Stores v at the offset of k in the struct at `base`.  Returns false with the
 * reason in `why` (IZ_WHY_MAX bytes) if k does not accept v. */
bool iz_key_store(char *why, void *base, const struct iz_key *k,
                  const struct json_t *v);
void iz_key_store_default(void *base, const struct iz_key *k);
void iz_key_store_defaults(void *base, const struct iz_key *k);

/* One value of the struct at `base` as JSON that reads back the same. */
void iz_key_print(FILE *out, const struct iz_key *k, const void *base);
