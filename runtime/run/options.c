/* SPDX-License-Identifier: Apache-2.0 */
/* The command line; see options.h. */
#include "runtime/run/options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "runtime/base/text.h"

static int wrong(const char *what, const char *arg)
{
    return iz_text_refuse(stderr, "%s '%s' (--help lists the options)", what,
                          arg);
}

/* A positive whole number, or 0. */
static long long positive(const char *s)
{
    char *end;
    errno = 0;
    long long v = strtoll(s, &end, 10);
    return errno || *end || end == s || v < 1 ? 0 : v;
}

static int read_value(struct iz_options *o, const char *name, char *value)
{
    if (!value)
        return wrong("missing value after", name);
    if (!strcmp(name, "--set")) {
        if (!strchr(value, '='))
            return wrong("--set needs key=value, not", value);
        o->set[o->n_set++] = value;
        return 0;
    }
    if (!strcmp(name, "--machine")) {
        o->machine = value;
        return 0;
    }
    if (!strcmp(name, "--replay")) {
        const char *at = value;
        o->replay = true;
        o->from = iz_text_decimal(&at);
        at += *at == ':';
        o->to = iz_text_decimal(&at);
        if (*at || o->from < 0 || o->to < o->from || o->to == 0)
            return wrong("--replay needs steps A:B, not", value);
        return 0;
    }
    long long n = positive(value);
    if (!n || n > 1000000000)
        return wrong("not a positive number:", value);
    if (!strcmp(name, "--ranks"))
        o->ranks = (int)n;
    else
        snprintf(o->steps, sizeof(o->steps), "run.steps=%lld", n);
    return 0;
}

static bool takes_value(const char *a)
{
    return !strcmp(a, "--set") || !strcmp(a, "--steps") ||
           !strcmp(a, "--ranks") || !strcmp(a, "--machine") ||
           !strcmp(a, "--replay");
}

static int read_flag(struct iz_options *o, char *a)
{
    if (!strcmp(a, "--resume"))
        o->resume = true;
    else if (!strcmp(a, "--plan"))
        o->plan = true;
    else if (!strcmp(a, "--parameters"))
        o->parameters = true;
    else if (!strcmp(a, "--help") || !strcmp(a, "-h"))
        o->help = true;
    else if (!strcmp(a, "--help-markdown"))
        o->help_markdown = true;
    else if (!strcmp(a, "--version"))
        o->version = true;
    else if (a[0] == '-')
        return wrong("unknown option", a);
    else if (o->path)
        return wrong("one config only; what is", a);
    else
        o->path = a;
    return 0;
}

/* A replay has the run's config, and its output, wherever that is now. */
static int take_output(struct iz_options *o)
{
    struct iz_text path, set;
    FILE *f = iz_text_open(&path), *g = iz_text_open(&set);
    if (f)
        fprintf(f, "%s/config.json", o->path);
    if (g) {
        fputs("run.output=", g);
        iz_json_print(g, o->path);
    }
    o->path = o->own[0] = iz_text_close(&path);
    o->set[o->n_set++] = o->own[1] = iz_text_close(&set);
    o->resume = true;
    return o->own[0] && o->own[1] ? 0 : -ENOMEM;
}

int iz_options_read(struct iz_options *o, int argc, char **argv)
{
    int r = 0;
    *o = (struct iz_options){.set = calloc((size_t)argc + 3, sizeof(*o->set))};
    if (!o->set)
        return -ENOMEM;
    for (int i = 1; i < argc && !r; i++) {
        if (takes_value(argv[i])) {
            r = read_value(o, argv[i], argv[i + 1]);
            i++;
        } else {
            r = read_flag(o, argv[i]);
        }
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
        r = take_output(o);
    return r;
}

void iz_options_clear(struct iz_options *o)
{
    free(o->own[0]);
    free(o->own[1]);
    free(o->set);
    o->set = NULL;
}

void iz_options_help(const struct iz_program *p, const char *argv0)
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
