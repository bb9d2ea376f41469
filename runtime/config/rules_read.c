/* SPDX-License-Identifier: Apache-2.0 */
/* The array "parameters": rules for tensors by name.  Whether a pattern matches
 * any is seen later, when there is a model. */
#include "runtime/config/keys.h"

#include <jansson.h>
#include <string.h>

#define KEY(name_, type_, field, doc_)                                         \
    .name = (name_), .type = IZ_KEY_##type_,                                   \
    .offset = offsetof(struct iz_rule, field), .fallback = "null",             \
    .doc = (doc_)

const struct iz_key iz_rule_keys[] = {
    [IZ_RULE_MATCH] = {KEY("match", STRING, match,
                           "Names of tensors as in checkpoints, with * ? [...] "
                           "as in a shell. A pattern that matches no tensor is "
                           "refused."),
                       .size = IZ_MATCH_MAX},
    [IZ_RULE_FROZEN] = {KEY("frozen", BOOL, frozen,
                            "Never update these: no gradient, no optimizer "
                            "state, and no backward below the lowest trained "
                            "unit.")},
    [IZ_RULE_SPARSE] = {KEY("sparse", BOOL, sparse,
                            "For an embedding table: a step moves and updates "
                            "only the rows that its samples read; other rows "
                            "keep their weights, m and v.")},
    [IZ_RULE_DECAY] = {KEY("weight_decay", DOUBLE, weight_decay,
                           "Replaces optimizer.params.weight_decay; 0: "
                           "none."),
                       .min = 0, .max = 1e6},
    [IZ_RULE_LR] = {KEY("lr_scale", DOUBLE, lr_scale,
                        "Multiplies the learning rate of the step."),
                    .min = 0, .max = 1e6},
    [IZ_RULE_KEYS] = {.name = NULL},
};

struct rule_reader {
    struct iz_rule *rule;
    struct iz_faults *faults;
    int index;
};

static void read_member(const struct rule_reader *r, const char *name,
                        const json_t *v)
{
    char key[IZ_CONFIG_NAME_MAX], why[IZ_WHY_MAX];
    const struct iz_key *k = iz_key_find(iz_rule_keys, name);
    struct iz_nearest near = iz_nearest_start(name, false);
    snprintf(key, sizeof(key), "parameters[%d].%.100s", r->index, name);
    for (int i = 0; i < IZ_RULE_KEYS; i++)
        iz_nearest_try(&near, iz_rule_keys[i].name);
    if (!k)
        iz_fault(r->faults, key, "unknown key%s", near.hint);
    else if (!iz_key_store(why, r->rule, k, v))
        iz_fault(r->faults, key, "%s", why);
    else
        r->rule->given[k - iz_rule_keys] = !json_is_null(v);
}

static void read_rule(const struct rule_reader *r, json_t *v)
{
    char key[64], found[IZ_WHY_MAX / 2];
    const char *name;
    json_t *member;

    snprintf(key, sizeof(key), "parameters[%d]", r->index);
    iz_json_describe(found, sizeof(found), v);
    if (!json_is_object(v)) {
        iz_fault(r->faults, key, "expected an object, found %s", found);
        return;
    }
    json_object_foreach(v, name, member) read_member(r, name, member);
    member = json_object_get(v, "match");
    if (!member || json_is_null(member) ||
        (json_is_string(member) && json_string_length(member) == 0))
        iz_fault(r->faults, key, "has no \"match\": the names it is for");
    if (r->rule->frozen &&
        (r->rule->given[IZ_RULE_DECAY] || r->rule->given[IZ_RULE_LR]))
        iz_fault(r->faults, key,
                 "frozen: true, but what is frozen has neither weight_decay "
                 "nor lr_scale");
    if (r->rule->frozen && r->rule->sparse)
        iz_fault(r->faults, key,
                 "frozen: true and sparse: true: what is frozen is never "
                 "updated");
}

void iz_config_rules(struct iz_config_file *file, struct iz_faults *f,
                     const json_t *v)
{
    char found[IZ_WHY_MAX / 2];
    size_t n = json_array_size(v);

    iz_json_describe(found, sizeof(found), v);
    if (json_is_null(v))
        return;
    if (!json_is_array(v)) {
        iz_fault(f, "parameters", "expected an array of rules, found %s",
                 found);
        return;
    }
    if (n > IZ_RULES_MAX) {
        iz_fault(f, "parameters", "%zu rules, at most %d", n, IZ_RULES_MAX);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        struct rule_reader r = {&file->c.rule[i], f, (int)i};
        read_rule(&r, json_array_get(v, i));
    }
    file->c.n_rules = (int)n;
}
