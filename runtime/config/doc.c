/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the keys for people: --help, and docs/config.md.  Everything but the
 * headings comes from the tables the parser uses. */
#include "runtime/config/keys.h"

#include <string.h>

/* Keys whose name starts with `prefix`; "" are those without a dot. */
static const struct {
    const char *prefix, *title, *text;
} sections[] = {
    {"", "Top level", "DeepSpeed's."},
    {"optimizer.", "optimizer",
     "DeepSpeed's. A parameter the chosen type does not have is refused."},
    {"scheduler.", "scheduler",
     "DeepSpeed's. A parameter the chosen type does not have is refused."},
    {"bf16.", "bf16", "DeepSpeed's. Without bf16 and fp16 everything is fp32."},
    {"fp16.", "fp16",
     "DeepSpeed's. A step whose gradients overflow is skipped on all ranks."},
    {"data_types.", "data_types", "DeepSpeed's."},
    {"zero_optimization.", "zero_optimization",
     "DeepSpeed's. Stage, homes and sizes never change a result: for a given "
     "number of ranks, run.sum_order, run.sum_group and, on a GPU, "
     "run.gpu_logits_bytes the losses are the same bit for bit."},
    {"activation_checkpointing.", "activation_checkpointing", "DeepSpeed's."},
    {"lora.", "lora", "izar's. Low-rank adapters, arXiv 2106.09685."},
    {"loss.", "loss", "izar's."},
    {"data.", "data", "izar's."},
    {"run.", "run", "izar's."},
};

static void print_range(FILE *out, const struct iz_key *k)
{
    if (!iz_key_ranged(k))
        return;
    if (k->max > 1e5)
        fprintf(out, " >= %.15g", k->min);
    else
        fprintf(out, ", %.15g..%.15g", k->min, k->max);
}

static void print_type(FILE *out, const struct iz_key *k)
{
    static const char *const types[] = {
        [IZ_KEY_BOOL] = "true, false",        [IZ_KEY_INT] = "integer",
        [IZ_KEY_INT64] = "integer",           [IZ_KEY_UINT64] = "integer",
        [IZ_KEY_DOUBLE] = "number",           [IZ_KEY_PAIR] = "two numbers",
        [IZ_KEY_STRING] = "string",           [IZ_KEY_PATH] = "path",
        [IZ_KEY_LIST] = "string, or several", [IZ_KEY_INTS] = "integers",
        [IZ_KEY_MAP] = "names with numbers",  [IZ_KEY_ENUM] = "",
        [IZ_KEY_COUNT] = "integer",
    };
    char word[IZ_KEY_NAME_MAX];
    fputs(types[k->type], out);
    print_range(out, k);
    for (int i = 0; iz_text_word(word, sizeof(word), k->words, i); i++)
        fprintf(out, "%s%s", i > 0 || *types[k->type] ? ", " : "", word);
}

/* What another value means for a resumed run, in a word. */
static const char *const changes[IZ_CHANGES] = {[IZ_CHANGE_SAME] = "same",
                                                [IZ_CHANGE_TOLD] = "told",
                                                [IZ_CHANGE_FREE] = "free",
                                                [IZ_CHANGE_OWN] = "own"};

static void print_key(FILE *out, const struct iz_key *k, const char *prefix,
                      bool markdown)
{
    if (markdown)
        fprintf(out, "| `%s%s` | ", prefix, k->name);
    else
        fprintf(out, "  %s%s  (", prefix, k->name);
    print_type(out, k);
    fputs(k->automatic ? ", \"auto\"" : "", out);
    fprintf(out,
            markdown ? " | `%s` | %s | %s%s |\n"
                     : "; default %s; %s)\n      %s%s\n",
            k->fallback ? k->fallback : "null", changes[k->change], k->doc,
            iz_config_keeps(k));
}

static void print_head(FILE *out, const char *title, const char *text,
                       bool markdown)
{
    if (markdown)
        fprintf(out,
                "\n## %s\n\n%s\n\n| Key | Values | Default | Change | "
                "Meaning |\n|---|---|---|---|---|\n",
                title, text);
    else
        fprintf(out, "\n%s: %s\n", title, text);
}

static bool is_of(const char *name, const char *prefix)
{
    return prefix[0] == '\0' ? strchr(name, '.') == NULL
                             : strncmp(name, prefix, strlen(prefix)) == 0;
}

/* What each optimizer has of optimizer.params, with its own defaults. */
static void print_optimizers(FILE *out, bool markdown)
{
    if (markdown)
        fputs("\n| `optimizer.type` | Its `optimizer.params` | States of a "
              "parameter |\n|---|---|---|\n",
              out);
    for (int t = 0; t < IZ_OPTIMIZERS; t++) {
        const struct iz_optimizer *o = iz_optimizer((enum iz_optimizer_type)t);
        fprintf(out, markdown ? "| `%s` | " : "  %s has ", o->type);
        for (const struct iz_optimizer_param *p = o->param; p->key; p++)
            fprintf(out, "%s%s%s%s", p == o->param ? "" : ", ", p->key,
                    p->fallback ? " = " : "", p->fallback ? p->fallback : "");
        fputs(markdown ? " | " : "; states: ", out);
        for (int i = 0; i < o->states; i++)
            fprintf(out, "%s%s", i ? ", " : "", o->state[i].name);
        fputs(markdown ? " |\n" : "\n", out);
    }
}

static void print_sections(FILE *out, bool markdown)
{
    for (size_t i = 0; i < sizeof(sections) / sizeof(sections[0]); i++) {
        print_head(out, sections[i].title, sections[i].text, markdown);
        for (const struct iz_key *k = iz_config_keys; k->name; k++)
            if (is_of(k->name, sections[i].prefix))
                print_key(out, k, "", markdown);
        if (strcmp(sections[i].prefix, "optimizer.") == 0)
            print_optimizers(out, markdown);
    }
}

static void print_rules(FILE *out, bool markdown)
{
    print_head(out, "parameters",
               "izar's. An array of rules for tensors by name, such as "
               "[{\"match\": \"*.bias\", \"weight_decay\": 0}]. If several "
               "rules match a tensor, a later rule overrides the settings that "
               "it gives. `--parameters` lists the names and the settings of "
               "each tensor.",
               markdown);
    for (const struct iz_key *k = iz_rule_keys; k->name; k++)
        print_key(out, k, "parameters[].", markdown);
}

static void print_model(FILE *out, const struct iz_section *model,
                        bool markdown)
{
    const struct iz_preset *p = model->presets;
    print_head(out, "model",
               "izar's. `preset` is applied first, then the other keys. "
               "`import` also sets the shape; other keys may then only repeat "
               "it, but gpt2's `seq` may be smaller.",
               markdown);
    if (markdown)
        fputs("\nThese are the keys of gpt2; `build/models/NAME --help` lists "
              "those of another model.\n",
              out);
    for (const struct iz_key *k = model->keys; k->name; k++)
        print_key(out, k, "model.", markdown);
    for (const struct iz_key *k = iz_config_keys; k->name; k++)
        if (is_of(k->name, "model."))
            print_key(out, k, "", markdown);
    if (p)
        fputs(markdown ? "\n| `model.preset` | Sets |\n|---|---|\n"
                       : "  model.preset, one of\n",
              out);
    for (; p && p->name; p++)
        fprintf(out, markdown ? "| `%s` | %s |\n" : "      %s: %s\n", p->name,
                p->doc);
}

static bool is_ignored(const struct iz_foreign_key *k)
{
    return iz_text_among(k->accept, "bool|number|string|any");
}

static void print_accept(FILE *out, const char *accept, bool ignored)
{
    char word[IZ_KEY_NAME_MAX];
    if (ignored)
        fputs(accept, out);
    else if (strcmp(accept, "off") == 0)
        fputs("`\"enabled\": false`", out);
    else if (accept[0] == '\0')
        fputs("none", out);
    else
        for (int i = 0; iz_text_word(word, sizeof(word), accept, i); i++)
            fprintf(out, "%s`%s`", i > 0 ? ", " : "", word);
}

static void print_foreign(FILE *out)
{
    static const char *const heads[] = {
        "\n## DeepSpeed's keys that are refused\n\n"
        "They are accepted only with a value that asks for nothing.\n\n"
        "| Key | Accepted value | What to do |\n|---|---|---|\n",
        "\n## DeepSpeed's keys that are accepted and set nothing\n\n"
        "izar always does what these keys ask for, or they have no meaning "
        "here. A value of the wrong type is refused.\n\n"
        "| Key | Values | What happens |\n|---|---|---|\n"};
    for (int ignored = 1; ignored >= 0; ignored--) {
        fputs(heads[ignored], out);
        for (const struct iz_foreign_key *k = iz_foreign_keys; k->name; k++) {
            if (is_ignored(k) != ignored)
                continue;
            fprintf(out, "| `%s` | ", k->name);
            print_accept(out, k->accept, ignored);
            fprintf(out, " | %s |\n", k->doc);
        }
    }
}

static const char intro[] =
    "# The config file\n\n"
    "The program prints this page from the table that its parser uses; do not "
    "edit it.\n\n"
    "A run is one JSON file with DeepSpeed's keys, and five sections of our "
    "own: `parameters`, `lora`, `model`, `data` and `run`. Only a batch size "
    "is required. A key written `a.b` below is `\"b\"` in the object `\"a\"`. "
    "`--set a.b=value` overrides the file; a value that is not JSON is a "
    "string.\n\n"
    "All errors are reported at once, and nothing is silently ignored: an "
    "unknown key is refused, and the message has the nearest known one. A key "
    "of DeepSpeed that asks for something izar cannot do is refused too. "
    "`\"auto\"` is what follows from other keys, or the default of the Trainer "
    "of transformers; a run prints what it stands for, and which keys have no "
    "effect here. It is refused where there is no such value. `null` means "
    "absent if the default is `null` or \"auto\" is accepted, and for a whole "
    "section. Keys of stage 3 may be written without `stage3_`. Integers may "
    "be written as `5e8`, words in upper or lower case.\n\n"
    "The values in effect are written to the output of the run, as a file "
    "that repeats the run.\n\n"
    "The column Change says what another value means beside that of the "
    "checkpoint that `--resume` takes: *same*, the run is refused; *told*, it "
    "goes on with other results and says so; *free*, the results are the same. "
    "All ranks of a run must have the same values, but for *own*: of each rank "
    "its own, and free. See [checkpoints.md](checkpoints.md#one-run).\n";

void iz_config_doc(const struct iz_section *model, bool markdown, FILE *out)
{
    if (markdown)
        fputs(intro, out);
    print_sections(out, markdown);
    print_rules(out, markdown);
    if (model)
        print_model(out, model, markdown);
    if (markdown)
        print_foreign(out);
}
