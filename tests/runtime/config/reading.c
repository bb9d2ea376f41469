/* SPDX-License-Identifier: Apache-2.0 */
/* A toy model, and reading configs from text. */
#include "tests/runtime/config/reading.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[] = "/tmp/izar-config-XXXXXX";
char config_json[64], effective_json[64];

struct toy toy;

static const struct iz_key toy_keys[] = {
    {.name = "layers",
     .type = IZ_KEY_INT,
     .offset = offsetof(struct toy, layers),
     .min = 1,
     .max = 1000,
     .fallback = "2",
     .doc = "Blocks."},
    {.name = "width",
     .type = IZ_KEY_INT,
     .offset = offsetof(struct toy, width),
     .fallback = "64",
     .doc = "Channels."},
    {.name = "dropout",
     .type = IZ_KEY_DOUBLE,
     .offset = offsetof(struct toy, dropout),
     .min = 0,
     .max = 1,
     .fallback = "0.1",
     .doc = "Share of zeros."},
    {.name = "bias",
     .type = IZ_KEY_BOOL,
     .offset = offsetof(struct toy, bias),
     .fallback = "true",
     .doc = "Linear layers have one."},
    {.name = "act",
     .type = IZ_KEY_ENUM,
     .offset = offsetof(struct toy, act),
     .words = "gelu|relu",
     .fallback = "\"gelu\"",
     .doc = "Activation."},
    {.name = "name",
     .type = IZ_KEY_STRING,
     .offset = offsetof(struct toy, name),
     .size = sizeof(toy.name),
     .fallback = "\"\"",
     .doc = "Name."},
    {.name = NULL},
};

static const struct iz_preset toy_presets[] = {
    {"toy-small", "{\"layers\": 3, \"width\": 128}", "Small."},
    {"toy-large", "{\"layers\": 30, \"width\": 1024, \"act\": \"relu\"}",
     "Large."},
    {NULL, NULL, NULL},
};

const struct iz_section toy_section = {
    .keys = toy_keys, .target = &toy, .presets = toy_presets};

const char users_file[] =
    "{\n"
    "  \"train_batch_size\": \"auto\",\n"
    "  \"train_micro_batch_size_per_gpu\": 4,\n"
    "  \"gradient_accumulation_steps\": 2,\n"
    "  \"steps_per_print\": 20,\n"
    "  \"gradient_clipping\": 0.5,\n"
    "  \"wall_clock_breakdown\": false,\n"
    "  \"zero_allow_untested_optimizer\": true,\n"
    "  \"communication_data_type\": \"fp16\",\n"
    "  \"optimizer\": {\"type\": \"Adam\", \"params\": {\"lr\": 3e-5,\n"
    "    \"betas\": [0.8, 0.95], \"eps\": 1e-7, \"weight_decay\": 3e-7,\n"
    "    \"adam_w_mode\": false, \"torch_adam\": true}},\n"
    "  \"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\n"
    "    \"warmup_min_lr\": 1e-6, \"warmup_max_lr\": 3e-5,\n"
    "    \"warmup_num_steps\": 30, \"warmup_type\": \"linear\",\n"
    "    \"total_num_steps\": \"auto\"}},\n"
    "  \"fp16\": {\"enabled\": true, \"loss_scale\": 0,\n"
    "    \"initial_scale_power\": 12, \"loss_scale_window\": 500,\n"
    "    \"hysteresis\": 3, \"consecutive_hysteresis\": true,\n"
    "    \"min_loss_scale\": 2, \"auto_cast\": false},\n"
    "  \"bf16\": {\"enabled\": false},\n"
    "  \"data_types\": {\"grad_accum_dtype\": \"fp16\"},\n"
    "  \"zero_optimization\": {\"stage\": 3,\n"
    "    \"offload_optimizer\": {\"device\": \"cpu\", \"pin_memory\": false,\n"
    "      \"buffer_count\": 6, \"fast_init\": false, \"ratio\": 1},\n"
    "    \"offload_param\": {\"device\": \"nvme\", \"nvme_path\": \"/nvme\",\n"
    "      \"buffer_count\": 7, \"buffer_size\": 1e8, \"max_in_cpu\": 1e9},\n"
    "    \"sub_group_size\": 1e6, \"overlap_comm\": false,\n"
    "    \"contiguous_gradients\": true, \"reduce_bucket_size\": \"auto\",\n"
    "    \"stage3_prefetch_bucket_size\": \"auto\",\n"
    "    \"stage3_param_persistence_threshold\": \"auto\",\n"
    "    \"stage3_max_live_parameters\": 5e8,\n"
    "    \"stage3_max_reuse_distance\": 0,\n"
    "    \"stage3_gather_16bit_weights_on_model_save\": true,\n"
    "    \"zero_quantized_weights\": false, \"mics_shard_size\": -1},\n"
    "  \"activation_checkpointing\": {\"partition_activations\": false,\n"
    "    \"number_checkpoints\": null, \"profile\": false},\n"
    "  \"flops_profiler\": {\"enabled\": false, \"profile_step\": 1},\n"
    "  \"tensorboard\": {\"enabled\": false},\n"
    "  \"run\": {\"steps\": 70, \"seed\": 7, \"schedule\": "
    "\"breadth_first\"},\n"
    "  \"model\": {\"preset\": \"toy-large\", \"layers\": 5}\n"
    "}\n";

int make_folder(void **state)
{
    if (!mkdtemp(folder))
        return -1;
    snprintf(config_json, sizeof(config_json), "%s/config.json", folder);
    snprintf(effective_json, sizeof(effective_json), "%s/effective.json",
             folder);
    return 0;
}

int remove_folder(void **state)
{
    remove(config_json);
    remove(effective_json);
    return rmdir(folder);
}

struct iz_config config;
char said[65536];

void write_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");

    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

int read_set(const char *json, char *const *set, int n_set, int ranks)
{
    FILE *err = fmemopen(said, sizeof(said), "w");
    int rc;

    assert_non_null(err);
    said[0] = '\0';
    if (json)
        write_file(config_json, json);
    rc = iz_config_read(&config, &toy_section, json ? config_json : NULL, set,
                        n_set, ranks, err);
    fclose(err);
    return rc;
}

int read_text(const char *json)
{
    return read_set(json, NULL, 0, 1);
}

int lines_of(const char *s)
{
    int n = 0;

    for (; *s != '\0'; s++)
        n += *s == '\n';
    return n;
}

void assert_said(const char *text)
{
    if (!strstr(said, text))
        fail_msg("expected \"%s\" in:\n%s", text, said);
}

void assert_refused(const char *body, const char *text)
{
    char json[4096];

    snprintf(json, sizeof(json), "{\"train_batch_size\": 8%s%s}",
             body[0] != '\0' ? ", " : "", body);
    if (read_text(json) != -EINVAL)
        fail_msg("accepted: %s", json);
    assert_said(text);
    if (lines_of(said) != 1)
        fail_msg("one line expected for %s:\n%s", json, said);
    assert_non_null(strstr(said, "config.json: "));
}

void assert_accepted(const char *body)
{
    char json[4096];

    snprintf(json, sizeof(json), "{\"train_batch_size\": 8%s%s}",
             body[0] != '\0' ? ", " : "", body);
    if (read_text(json) != 0)
        fail_msg("refused: %s\n%s", json, said);
    assert_string_equal(said, "");
}

int read_override(const char *key, const char *value)
{
    char text[1024];
    char *set[] = {"train_micro_batch_size_per_gpu=1", text};

    snprintf(text, sizeof(text), "%s=%s", key, value);
    if (strcmp(key, "train_micro_batch_size_per_gpu") == 0)
        return read_set(NULL, set + 1, 1, 1);
    return read_set(NULL, set, 2, 1);
}

void read_whole(const char *path, char *text, size_t size)
{
    FILE *f = fopen(path, "r");
    size_t n;

    if (!f)
        fail_msg("%s: %s", path, strerror(errno));
    n = fread(text, 1, size - 1, f);
    text[n] = '\0';
    fclose(f);
}
