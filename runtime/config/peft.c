/* SPDX-License-Identifier: Apache-2.0 */
/* Which adapters of PEFT are ours too; see peft.h. */
#include "runtime/config/peft.h"

#include <string.h>

#include "runtime/base/json.h"
#include "runtime/base/text.h"

#define ADAPTER_RANKS 4096

/* Members that change nothing of what an adapter computes, or that the names of
 * its tensors tell as well; dropout is ignored as in a model. */
static const char neutral[] =
    "r|lora_alpha|auto_mapping|base_model_name_or_path|exclude_modules|"
    "fan_in_fan_out|inference_mode|layers_pattern|layers_to_transform|"
    "loftq_config|lora_dropout|megatron_core|peft_version|qalora_group_size|"
    "revision|runtime_config|target_modules|target_parameters|task_type";

/* Members with the values that they may have. */
static const struct {
    const char *name, *values;
} accepted[] = {
    {"peft_type", "\"LORA\""},
    {"bias", "\"none\""},
    {"init_lora_weights",
     "true|false|null|\"gaussian\"|\"eva\"|\"orthogonal\""},
};

enum { ACCEPTED = sizeof(accepted) / sizeof(accepted[0]) };

/* What PEFT takes for "without": any other member may only be so. */
static bool is_without(const json_t *v)
{
    return json_is_null(v) || json_is_false(v) ||
           (json_is_object(v) && json_object_size(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0);
}

/* Weights that are no module's: of experts that are one tensor. */
static void read_parameters(struct iz_lora_config *l, struct iz_faults *f,
                            const char *path, const json_t *list)
{
    size_t i;
    json_t *v;
    if (!json_is_array(list) && !is_without(list))
        iz_fault(f, "lora.import", "%s: target_parameters is no list", path);
    json_array_foreach(list, i, v)
    {
        const char *text = json_is_string(v) ? json_string_value(v) : "";
        const char *dot = strrchr(text, '.'), *name = dot ? dot + 1 : text;
        l->gate_up |= strcmp(name, "gate_up_proj") == 0;
        l->down |= strcmp(name, "down_proj") == 0;
        if (!iz_text_among(name, "gate_up_proj|down_proj"))
            iz_fault(f, "lora.import",
                     "%s: target_parameters has \"%s\"; only gate_up_proj and "
                     "down_proj of experts are read",
                     path, text);
    }
}

static void check_member(struct iz_faults *f, const char *path,
                         const char *name, const json_t *v)
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
    iz_fault(f, "lora.import", "%s: %s is %s; adapters here have %s", path,
             name, found, i < ACCEPTED ? accepted[i].values : "none of it");
}

/* A number of the file beside that of the config; 0: the config has none. */
static void compare_number(struct iz_faults *f, const char *path,
                           const char *key, double ours, const char *name,
                           double theirs)
{
    if (ours != 0 && ours != theirs)
        iz_fault(f, key, "%g, but in %s %s is %g", ours, path, name, theirs);
}

void iz_peft_read(struct iz_config_file *file, struct iz_faults *f)
{
    struct iz_lora_config *l = &file->c.lora;
    char path[IZ_PATH_MAX + 32];
    const char *name;
    json_t *v;
    if (l->import[0] == '\0')
        return;
    snprintf(path, sizeof(path), "%s/" IZ_PEFT_CONFIG, l->import);
    json_t *root = iz_json_read(path, f->err);
    if (!root) {
        iz_fault(f, "lora.import", "%s cannot be imported", l->import);
        return;
    }
    json_object_foreach(root, name, v) check_member(f, path, name, v);
    if ((v = json_object_get(root, "target_parameters")))
        read_parameters(l, f, path, v);
    const json_t *rank = json_object_get(root, "r");
    double r = json_number_value(rank);
    double alpha = json_number_value(json_object_get(root, "lora_alpha"));
    if (!json_is_integer(rank) || r < 1 || r > ADAPTER_RANKS)
        iz_fault(f, "lora.import", "%s: r is no rank of 1 to %d", path,
                 ADAPTER_RANKS);
    else if (!(alpha > 0))
        iz_fault(f, "lora.import", "%s: lora_alpha is no number above 0", path);
    compare_number(f, path, "lora.rank", l->rank, "r", r);
    compare_number(f, path, "lora.alpha", l->alpha, "lora_alpha", alpha);
    l->rank = (int)r;
    l->alpha = alpha;
    json_decref(root);
}
