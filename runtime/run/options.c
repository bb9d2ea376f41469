/* SPDX-License-Identifier: Apache-2.0 */
/* The command line; see options.h. */
#include "runtime/run/options.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/take.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"

/* Those that have a value. */
enum option { SET, STEPS, RANKS, MACHINE, REPLAY, FLAG };
static const char *const options[FLAG] = {"--set", "--steps", "--ranks",
                                          "--machine", "--replay"};

static int wrong(const char *what, const char *arg)
{
    return iz_text_refuse(stderr, "%s '%s' (--help lists the options)", what,
                          arg);
}

/* "A:B", the steps of a replay. */
static bool read_steps(struct iz_options *o, const char *value)
{
    o->replay = true;
    o->from = iz_text_decimal(&value);
    value += *value == ':';
    o->to = iz_text_decimal(&value);
    return !*value && o->from >= 0 && o->to >= o->from && o->to > 0;
}

/* Of an option that has one. */
static int read_value(struct iz_options *o, enum option is, const char *name,
                      char *value)
{
    const char *rest = value;
    int64_t n = value ? iz_text_decimal(&rest) : 0;
    bool counts = is == RANKS || is == STEPS;
    if (!value)
        return wrong("missing value after", name);
    if (is == SET && !strchr(value, '='))
        return wrong("--set needs key=value, not", value);
    if (is == REPLAY && !read_steps(o, value))
        return wrong("--replay needs steps A:B, not", value);
    if (counts && (*rest || n < (is == RANKS) || n > 1000000000))
        return wrong(is == RANKS ? "not a number from 1 to 1000000000:"
                                 : "not a number from 0 to 1000000000:",
                     value);
    if (is == SET)
        o->set[o->n_set++] = value;
    else if (is == MACHINE)
        o->machine = value;
    else if (is == RANKS)
        o->ranks = (int)n;
    else if (is == STEPS)
        snprintf(o->steps, sizeof(o->steps), "run.steps=%" PRId64, n);
    return 0;
}

/* What is no option with a value. */
static int read_flag(struct iz_options *o, char *a)
{
    const struct {
        const char *name;
        bool *is;
    } flags[] = {{"--resume", &o->resume},
                 {"--plan", &o->plan},
                 {"--parameters", &o->parameters},
                 {"--help", &o->help},
                 {"-h", &o->help},
                 {"--help-markdown", &o->help_markdown},
                 {"--version", &o->version}};
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++)
        if (!strcmp(a, flags[i].name))
            return !(*flags[i].is = true);
    if (a[0] == '-')
        return wrong("unknown option", a);
    if (o->path)
        return wrong("one config only; what is", a);
    o->path = a;
    return 0;
}

/* A replay has the run's config, and its output, wherever that is now. */
static void take_output(struct iz_options *o)
{
    struct iz_text path, set;
    fprintf(iz_text_open(&path), "%s/config.json", o->path);
    fputs("run.output=", iz_text_open(&set));
    iz_json_print(set.out, o->path);
    o->path = o->own[0] = iz_text_close(&path);
    o->set[o->n_set++] = o->own[1] = iz_text_close(&set);
    o->resume = true;
}

int iz_options_read(struct iz_options *o, int argc, char **argv)
{
    int r = 0;
    *o = (struct iz_options){
        .set = iz_take(argc + 3, sizeof(*o->set), "the command line")};
    for (int i = 1; i < argc && !r; i++) {
        int is = 0;
        while (is < FLAG && strcmp(argv[i], options[is]))
            is++;
        r = is == FLAG ? read_flag(o, argv[i])
                       : read_value(o, (enum option)is, argv[i], argv[i + 1]);
        i += is < FLAG;
    }
    if (o->steps[0])
        o->set[o->n_set++] = o->steps;
    if (!r && !o->path && !o->help && !o->help_markdown && !o->version) {
        fprintf(stderr,
                "usage: %s config.json [--set key=value ...] "
                "[--resume] [--steps N] [--plan]\n",
                argv[0]);
        r = -EINVAL;
    }
    if (!r && o->replay && o->path)
        take_output(o);
    return r;
}

void iz_options_clear(struct iz_options *o)
{
    free(o->own[0]);
    free(o->own[1]);
    free(o->set);
    o->set = NULL;
}

static void print_help(const struct iz_program *p, const char *argv0)
{
    printf("%s: %s\n\n"
           "usage: %s config.json [options]\n"
           "       mpirun -np N %s config.json [options]\n\n"
           "  --set key=value  overrides a key of the config, e.g.\n"
           "                   --set zero_optimization.stage=3; repeatable\n"
           "  --steps N        short for --set run.steps=N\n"
           "  --resume         continues from the newest checkpoint in "
           "run.output\n"
           "  --replay A:B     with a run's output for the config: computes "
           "steps A to B\n                   again and compares them with its "
           "hashes\n"
           "  --plan           prints the memory plan and ends\n"
           "  --parameters     lists every parameter tensor and how it is "
           "updated,\n                   and ends\n"
           "  --ranks N        with --plan: for N ranks on this machine\n"
           "  --machine FILE   with --plan: on that machine "
           "(configs/machines)\n"
           "  --help           this text and every key of the config\n"
           "  --help-markdown  the keys as docs/config.md\n"
           "  --version        version\n\n"
           "Ctrl-C, SIGTERM, SIGHUP, or a batch system's warning (SIGUSR1, "
           "SIGUSR2, SIGXCPU)\nfinishes the step, saves a checkpoint and "
           "prints how to resume; one of the first\nthree once more stops at "
           "once. SIGQUIT writes stuck-rankN.json into run.output,\nand the "
           "run goes on.\n"
           "Exit status: 0 finished or interrupted with a checkpoint, 1 error, "
           "2 usage.\n\nKeys of the config:\n",
           p->name, p->about, argv0, argv0);
    iz_config_doc(&p->section, false, stdout);
}

bool iz_options_told(const struct iz_options *o, const struct iz_program *p,
                     const char *argv0)
{
    if (o->help)
        print_help(p, argv0);
    else if (o->help_markdown)
        iz_config_doc(&p->section, true, stdout);
    else if (o->version)
        printf("izar %s\n", IZ_VERSION);
    return o->help || o->help_markdown || o->version;
}
