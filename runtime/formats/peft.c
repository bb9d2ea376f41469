/* SPDX-License-Identifier: Apache-2.0 */
/* Which adapters of PEFT are ours too; see peft.h. */
#include "runtime/formats/peft.h"

#include <math.h>
#include <regex.h>
#include <stdarg.h>
#include <string.h>

#include "codelets/base/build.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"

#define ADAPTER_RANKS 4096

/* Members that change nothing of what an adapter computes, or that the names of
 * its tensors tell as well; dropout is ignored as in a model. */
static const char neutral[] =
    "r|lora_alpha|rank_pattern|alpha_pattern|auto_mapping|"
    "base_model_name_or_path|ensure_weight_tying|exclude_modules|"
    "modules_to_save|"
    "fan_in_fan_out|inference_mode|layers_pattern|layers_to_transform|"
    "loftq_config|lora_dropout|megatron_core|peft_version|qalora_group_size|"
    "revision|runtime_config|target_modules|target_parameters|task_type";

/* Members with the values that they may have. */
static const struct {
    const char *name, *values;
} accepted[] = {
    {"peft_type", "\"LORA\""},
    {"bias", "\"none\""},
    {"use_rslora", "true|false|null"},
    {"use_dora", "true|false|null"},
    {"init_lora_weights",
     "true|false|null|\"gaussian\"|\"eva\"|\"orthogonal\""},
};

enum { ACCEPTED = sizeof(accepted) / sizeof(accepted[0]) };

/* What PEFT takes for "without": any other member may only be so. */
static bool is_without(const json_t *v)
{
    return !v || json_is_null(v) || json_is_false(v) ||
           (json_is_object(v) && json_object_size(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0);
}

struct reader {
    const char *path;
    iz_peft_fault *fault;
    void *arg;
};

IZ_PRINTF(2, 3)
static void peft_tell(const struct reader *r, const char *fmt, ...)
{
    char what[1024];
    int n = snprintf(what, sizeof(what), "%s: ", r->path);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what + n, sizeof(what) - (size_t)n, fmt, ap);
    va_end(ap);
    r->fault(r->arg, what);
}

/* Weights that are no module's: of experts that are one tensor. */
static void read_parameters(struct iz_peft *p, const struct reader *r,
                            const json_t *list)
{
    size_t i;
    json_t *v;
    if (!json_is_array(list) && !is_without(list))
        peft_tell(r, "target_parameters is no list");
    json_array_foreach(list, i, v)
    {
        const char *text = json_is_string(v) ? json_string_value(v) : "";
        const char *dot = strrchr(text, '.'), *name = dot ? dot + 1 : text;
        p->gate_up |= strcmp(name, "gate_up_proj") == 0;
        p->down |= strcmp(name, "down_proj") == 0;
        if (!iz_text_among(name, "gate_up_proj|down_proj"))
            peft_tell(r,
                      "target_parameters has \"%s\"; only gate_up_proj and "
                      "down_proj of experts are read",
                      text);
    }
}

/* As POSIX has it; false: it is one that only Python has. */
static bool compile(regex_t *r, const char *key)
{
    const char *set = NULL; /* the bracket that is open */
    char text[1024];
    size_t n = (size_t)snprintf(text, sizeof(text), "^(.*\\.)?(");
    for (; *key && n + 8 < sizeof(text); key++) {
        bool digit = key[0] == '\\' && key[1] == 'd';
        if ((key[0] == '\\' && !digit && key[1] != '.') ||
            (key[0] == '(' && key[1] == '?'))
            return false;
        if (!set && *key == '[')
            set = key;
        else if (set && *key == ']' && key > set + 1 + (set[1] == '^'))
            set = NULL;
        if (digit)
            n += (size_t)snprintf(text + n, 8, set ? "0-9" : "[0-9]"), key++;
        else
            text[n++] = *key;
    }
    snprintf(text + n, sizeof(text) - n, ")$");
    return !*key && regcomp(r, text, REG_EXTENDED | REG_NOSUB) == 0;
}

/* Of keys without operators but for dots: a folder may have one for each
 * module. */
static bool is_end(const char *key, const char *name)
{
    size_t n = strlen(name), k = strlen(key), i = 0;
    if (n < k || (n > k && name[n - k - 1] != '.'))
        return false;
    while (i < k && (key[i] == '.' || key[i] == name[n - k + i]))
        i++;
    return i == k;
}

bool iz_peft_matches(const char *key, const char *weight)
{
    char name[256];
    regex_t r;
    int n = (int)strlen(weight), tail = (int)strlen(".weight");
    if (n > tail && strcmp(weight + n - tail, ".weight") == 0)
        n -= tail;
    snprintf(name, sizeof(name), "%.*s", n, weight);
    if (!strpbrk(key, "\\^$*+?()[]{}|"))
        return is_end(key, name);
    if (!compile(&r, key))
        return false;
    bool found = regexec(&r, name, 0, NULL, 0) == 0;
    regfree(&r);
    return found;
}

/* Other ranks or other alphas. */
static void check_patterns(const struct reader *r, const json_t *root,
                           const char *name, double most)
{
    json_t *map = json_object_get(root, name), *v;
    const char *key;
    regex_t of;
    if (!is_without(map) && !json_is_object(map))
        peft_tell(r, "%s is no object", name);
    if (json_object_size(map) &&
        !is_without(json_object_get(root, "target_parameters")))
        peft_tell(r, "%s and target_parameters are not read together", name);
    json_object_foreach(map, key, v)
    {
        double n = json_number_value(v);
        if (!(n > 0 && n <= most) || (most == ADAPTER_RANKS && n != floor(n)))
            peft_tell(r, "%s has no such number for \"%s\"", name, key);
        if (compile(&of, key))
            regfree(&of);
        else
            peft_tell(r, "%s has \"%s\", an expression that only Python reads",
                      name, key);
    }
}

static void check_member(const struct reader *r, const char *name,
                         const json_t *v)
{
    char found[IZ_WHY_MAX / 2];
    int i = 0;
    if (iz_text_among(name, neutral))
        return;
    while (i < ACCEPTED && strcmp(accepted[i].name, name) != 0)
        i++;
    if (i < ACCEPTED ? iz_key_among(v, accepted[i].values) : is_without(v))
        return;
    iz_key_describe(found, sizeof(found), v);
    peft_tell(r, "%s is %s; adapters here have %s", name, found,
              i < ACCEPTED ? accepted[i].values : "none of it");
}

bool iz_peft_read(struct iz_peft *p, const char *path, iz_peft_fault *fault,
                  void *arg, FILE *err)
{
    const struct reader r = {path, fault, arg};
    const char *name;
    json_t *v, *root = iz_json_read(path, err);
    *p = (struct iz_peft){0};
    if (!root)
        return false;
    json_object_foreach(root, name, v) check_member(&r, name, v);
    if ((v = json_object_get(root, "target_parameters")))
        read_parameters(p, &r, v);
    check_patterns(&r, root, "rank_pattern", ADAPTER_RANKS);
    check_patterns(&r, root, "alpha_pattern", 1e6);
    p->ties = json_is_true(json_object_get(root, "ensure_weight_tying"));
    p->use_dora = json_is_true(json_object_get(root, "use_dora"));
    p->use_rslora = json_is_true(json_object_get(root, "use_rslora"));
    const json_t *rank = json_object_get(root, "r");
    double n = json_number_value(rank);
    p->alpha = json_number_value(json_object_get(root, "lora_alpha"));
    if (!json_is_integer(rank) || n < 1 || n > ADAPTER_RANKS)
        peft_tell(&r, "r is no rank of 1 to %d", ADAPTER_RANKS);
    else if (!(p->alpha > 0))
        peft_tell(&r, "lora_alpha is no number above 0");
    p->rank = (int)n;
    json_decref(root);
    return true;
}
