/* SPDX-License-Identifier: Apache-2.0 */
/* Turns text into token shards that data.path reads, and shards back into text:
 * arguments and progress.  The work is runtime/tokenizer_run.c's. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/data/shard.h"
#include "runtime/tokenizer_run.h"

#define MIB 1048576.0
#define THREADS_MAX 1024

static const char usage[] =
    "usage: tokenize --tokenizer T --out DIR/NAME [options] INPUT ...\n"
    "       tokenize --tokenizer T --decode SHARD.bin\n"
    "\n"
    "Writes DIR/NAME_train_000000.bin ... from text files and NAME.jsonl "
    "files\n"
    "(a record per line: \"text\", or \"prompt\" and \"completion\", or\n"
    "\"messages\"; of the last two, loss masks are written beside the "
    "shards).\n"
    "\n"
    "  --tokenizer T      tokenizer.json of Hugging Face (byte-level BPE),\n"
    "                     NAME.model of SentencePiece, or the word bytes\n"
    "  --shard-tokens N   tokens of a shard at most (default 100000000)\n"
    "  --val-fraction F   part of the documents for DIR/NAME_val_*.bin, at\n"
    "                     most 0.5 (default 0)\n"
    "  --threads N        default: the processors of this machine\n"
    "  --split-on TEXT    separates documents of text files; \\n and \\t are\n"
    "                     understood (default: a file is one document)\n"
    "  --begin TOKEN      in front of each document (default none)\n"
    "  --end TOKEN        behind each document (default: the tokenizer's end\n"
    "                     of text; none: no token)\n"
    "  --chat STYLE       plain, chatml or llama3 (default: by the "
    "tokenizer's\n"
    "                     special tokens)\n"
    "  --special          special tokens written in the text become them\n"
    "  --skip-bad         leave out records that are no JSON or lack a key\n"
    "  --decode SHARD     print the text of a shard and end\n"
    "  --help\n"
    "\n"
    "Exit status: 0 done, 1 an error, 2 a wrong command line.\n";

struct arguments {
    struct iz_tokenize_job job;
    const char *tokenizer, *decode, *begin, *end;
};

static int wrong(const char *what, const char *value)
{
    fprintf(stderr, "tokenize: %s%s%s (see --help)\n", what, value ? " " : "",
            value ? value : "");
    return 2;
}

/* ---- arguments ---- */

static bool read_count(const char *text, int64_t max, int64_t *out)
{
    char *end;
    double x = strtod(text, &end);

    if (*end || end == text || !(x >= 1 && x <= (double)max) ||
        x != (double)(int64_t)x)
        return false;
    *out = (int64_t)x;
    return true;
}

static bool read_fraction(const char *text, double *out)
{
    char *end;

    *out = strtod(text, &end);
    return *end == '\0' && end != text && *out >= 0 && *out <= 0.5;
}

/* \n, \t and \\ in place. */
static const char *unescape(char *text)
{
    char *to = text;

    for (const char *from = text; *from; from++)
        if (*from == '\\' && from[1] && strchr("nt\\", from[1])) {
            from++;
            *to++ = *from == 'n' ? '\n' : *from == 't' ? '\t' : '\\';
        } else {
            *to++ = *from;
        }
    *to = '\0';
    return text;
}

static bool read_chat(const char *text, enum iz_chat *out)
{
    static const char *const names[] = {
        [IZ_CHAT_AUTO] = "auto",
        [IZ_CHAT_PLAIN] = "plain",
        [IZ_CHAT_CHATML] = "chatml",
        [IZ_CHAT_LLAMA3] = "llama3",
    };

    for (int i = 0; i < 4; i++)
        if (strcmp(text, names[i]) == 0) {
            *out = (enum iz_chat)i;
            return true;
        }
    return false;
}

/* False: the value of this option is wrong. */
static bool read_option(struct arguments *a, int option, char *value)
{
    struct iz_tokenize_job *j = &a->job;
    int64_t n = 1;
    bool good = true;

    switch (option) {
    case 't':
        a->tokenizer = value;
        return true;
    case 'o':
        j->out = value;
        return *value != '\0';
    case 'n':
        return read_count(value, INT32_MAX, &j->shard_tokens);
    case 'v':
        return read_fraction(value, &j->val_fraction);
    case 'j':
        good = read_count(value, THREADS_MAX, &n);
        j->threads = (int)n;
        return good;
    case 's':
        j->split_on = unescape(value);
        return *value != '\0';
    case 'b':
        a->begin = value;
        return true;
    case 'e':
        a->end = value;
        return true;
    case 'c':
        return read_chat(value, &j->recipe.chat);
    case 'd':
        a->decode = value;
        return true;
    case 'x':
        return j->recipe.special = true;
    default:
        return j->skip_bad = true;
    }
}

static const struct option options[] = {
    {"tokenizer", 1, NULL, 't'},    {"out", 1, NULL, 'o'},
    {"shard-tokens", 1, NULL, 'n'}, {"val-fraction", 1, NULL, 'v'},
    {"threads", 1, NULL, 'j'},      {"split-on", 1, NULL, 's'},
    {"begin", 1, NULL, 'b'},        {"end", 1, NULL, 'e'},
    {"chat", 1, NULL, 'c'},         {"decode", 1, NULL, 'd'},
    {"special", 0, NULL, 'x'},      {"skip-bad", 0, NULL, 'k'},
    {"help", 0, NULL, 'h'},         {NULL, 0, NULL, 0},
};

/* 0, or the exit status; -1: --help was printed. */
static int read_arguments(struct arguments *a, int argc, char **argv)
{
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == '?')
            return wrong("wrong command line", NULL);
        if (c == 'h') {
            fputs(usage, stdout);
            return -1;
        }
        if (!read_option(a, c, optarg))
            return wrong("not a value of this option:", optarg);
    }
    a->job.input = (const char *const *)argv + optind;
    a->job.inputs = argc - optind;
    if (!a->tokenizer)
        return wrong("--tokenizer is missing", NULL);
    if (a->decode)
        return a->job.inputs
                   ? wrong("--decode takes no input:", a->job.input[0])
                   : 0;
    if (!a->job.out)
        return wrong("--out is missing", NULL);
    return a->job.inputs > 0 ? 0 : wrong("no input", NULL);
}

/* ---- progress ---- */

struct progress {
    double begin_s;
    bool live; /* on a terminal */
};

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void show(void *arg, const struct iz_tokenize_counts *c)
{
    const struct progress *p = arg;
    double s = now_s() - p->begin_s, done = (double)c->bytes;
    double left = done > 0 ? s * ((double)c->bytes_total - done) / done : 0;
    int64_t tokens = c->tokens[0] + c->tokens[1];

    if (!p->live)
        return;
    fprintf(stderr,
            "\r\033[K%.1f of %.1f MiB  %.1f MiB/s  %lld tokens  %.2f bytes "
            "per token  %.0f s left",
            done / MIB, (double)c->bytes_total / MIB, done / MIB / s,
            (long long)tokens, tokens ? done / (double)tokens : 0, left);
    fflush(stderr);
}

static void report(const struct arguments *a, const struct progress *p,
                   const struct iz_tokenize_counts *c)
{
    static const char *const splits[] = {"train", "val"};
    double s = now_s() - p->begin_s;

    for (int i = 0; i < 2; i++)
        if (c->shards[i] > 0)
            printf("%s_%s_*.bin: %lld tokens in %lld shard%s\n", a->job.out,
                   splits[i], (long long)c->tokens[i], (long long)c->shards[i],
                   c->shards[i] == 1 ? "" : "s");
    printf("%lld documents, %.1f MiB in %.1f s (%.1f MiB/s)",
           (long long)c->documents, (double)c->bytes / MIB, s,
           (double)c->bytes / MIB / s);
    if (c->skipped > 0)
        printf(", %lld faulty records left out", (long long)c->skipped);
    if (c->masked)
        printf(", %lld tokens to be learnt", (long long)c->learnt);
    printf("; model.vocab must be at least %d\n",
           (int)iz_tokenizer_vocab(a->job.recipe.tokenizer));
}

/* ---- work ---- */

/* The id of a token by name; -1 for none.  False: there is no such token. */
static bool token_id(const struct iz_tokenizer *t, const char *name,
                     int32_t otherwise, const char *option, int32_t *out)
{
    *out = otherwise;
    if (name)
        *out = strcmp(name, "none") == 0 ? -1 : iz_tokenizer_find(t, name);
    if (*out >= 0 || (name && strcmp(name, "none") == 0) || !option)
        return true;
    fprintf(stderr, "tokenize: %s: %s%s\n", option,
            name ? "the tokenizer has no token "
                 : "the tokenizer has no end of text: name a token, or none",
            name ? name : "");
    return false;
}

static int encode(struct arguments *a)
{
    struct iz_recipe *r = &a->job.recipe;
    struct progress p = {now_s(), isatty(STDERR_FILENO) && !getenv("IZ_PLAIN")};
    struct iz_tokenize_counts c;
    int err;

    if (!token_id(r->tokenizer, a->begin, -1, a->begin ? "--begin" : NULL,
                  &r->begin) ||
        !token_id(r->tokenizer, a->end, iz_tokenizer_end(r->tokenizer), "--end",
                  &r->end))
        return -EINVAL;
    err = iz_tokenize(&a->job, &c, show, &p);
    if (p.live)
        fputs("\r\033[K", stderr);
    if (!err)
        report(a, &p, &c);
    return err;
}

static int print_text(const struct iz_tokenizer *t, const struct iz_shard *s)
{
    int32_t *id = malloc((size_t)s->count * sizeof *id);
    int64_t bytes = 0;
    char *text = NULL;
    int err = -ENOMEM;

    if (id) {
        iz_shard_tokens(s, 0, id, s->count);
        text = iz_decode(t, id, s->count, &bytes);
    }
    if (text)
        err = fwrite(text, 1, (size_t)bytes, stdout) == (size_t)bytes &&
                      fflush(stdout) == 0
                  ? 0
                  : -errno;
    if (err)
        fprintf(stderr, "tokenize: %s\n", strerror(-err));
    free(id);
    free(text);
    return err;
}

static int decode(const struct arguments *a)
{
    struct iz_shard s;
    int err = iz_shard_open(&s, a->decode, false,
                            iz_tokenizer_vocab(a->job.recipe.tokenizer));

    if (!err)
        err = print_text(a->job.recipe.tokenizer, &s);
    iz_shard_close(&s);
    return err;
}

int main(int argc, char **argv)
{
    struct arguments a = {.job = {.shard_tokens = 100000000, .threads = 1}};
    struct iz_tokenizer *t = NULL;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int err;

    if (processors > 1)
        a.job.threads =
            processors > THREADS_MAX ? THREADS_MAX : (int)processors;
    err = read_arguments(&a, argc, argv);
    if (err)
        return err < 0 ? 0 : err;
    err = iz_tokenizer_open(&t, a.tokenizer);
    a.job.recipe.tokenizer = t;
    if (!err)
        err = a.decode ? decode(&a) : encode(&a);
    iz_tokenizer_close(&t);
    return err ? 1 : 0;
}
