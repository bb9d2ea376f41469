/* SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* madvise: the one of POSIX does nothing here */

#include "runtime/run/identity.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "codelets/base/int64.h"
#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "codelets/flat/simd.h"
#include "codelets/ops/blas.h"
#include "runtime/base/hash.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"
#include "runtime/data/shard.h"

/* Lines that are no keys of the config, by the beginnings of their names. */
static const struct {
    const char *name;
    enum iz_change change;
} facts[] = {
    {"data.train.", IZ_CHANGE_SAME}, {"data.val.", IZ_CHANGE_TOLD},
    {"import.", IZ_CHANGE_SAME},     {"model.", IZ_CHANGE_SAME},
    {"program", IZ_CHANGE_SAME},     {"--", IZ_CHANGE_SAME},
};

/* Variables that choose kernels of libraries, or how these compute. */
static const char *const variables[] = {"CUBLAS_WORKSPACE_CONFIG",
                                        "DNNL_DEFAULT_FPMATH_MODE",
                                        "DNNL_MAX_CPU_ISA",
                                        "IZ_SIMD",
                                        "MKL_CBWR",
                                        "NVIDIA_TF32_OVERRIDE",
                                        "ONEDNN_DEFAULT_FPMATH_MODE",
                                        "ONEDNN_MAX_CPU_ISA",
                                        "OPENBLAS_CORETYPE"};

/* Bytes that are hashed of all files together, and of a large one at a time. */
#define READ_MOST (INT64_C(1) << 30)
#define READ_BLOCK (INT64_C(1) << 18)

enum { TOLD_RANKS = 3 }; /* that differ from the first one */

/* ---- lines ---- */

struct line {
    char name[IZ_KEY_NAME_MAX];
    const char *value; /* borrowed: up to the end of the line */
    int length;        /* of that */
};

/* Takes the line at *text, which moves behind it; false: there is none. */
static bool line_take(struct line *l, const char **text)
{
    size_t n = strcspn(*text, " \n");
    if (!**text)
        return false;
    snprintf(l->name, sizeof(l->name), "%.*s", (int)n, *text);
    l->value = *text + n + ((*text)[n] == ' ');
    l->length = (int)strcspn(l->value, "\n");
    *text = l->value + l->length;
    *text += **text == '\n';
    return true;
}

static bool line_same(const struct line *a, const struct line *b)
{
    return a->length == b->length &&
           !memcmp(a->value, b->value, (size_t)a->length);
}

/* What another value of this line means. */
static enum iz_change change_of(const char *name)
{
    enum iz_change change = IZ_CHANGE_TOLD;
    if (iz_config_change(name, &change))
        return change;
    for (size_t i = 0; i < sizeof(facts) / sizeof(facts[0]); i++)
        if (!strncmp(facts[i].name, name, strlen(facts[i].name)))
            return facts[i].change;
    return change;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Sorts the lines and leaves empty ones out.  `text` is the callee's. */
static char *lines_sorted(char *text)
{
    struct iz_text sorted;
    int64_t n = 0;
    for (const char *p = text; *p; p++)
        n += *p == '\n';
    char **line = iz_take(n + 1, sizeof(*line), "the run's identity");
    FILE *out = iz_text_open(&sorted);
    n = 0;
    for (char *p = text, *next = NULL; *p; p = next) {
        next = p + strcspn(p, "\n");
        if (*next)
            *next++ = 0;
        if (*p)
            line[n++] = p;
    }
    qsort(line, (size_t)n, sizeof(*line), by_text);
    for (int64_t i = 0; i < n; i++)
        fprintf(out, "%s\n", line[i]);
    free(line);
    free(text);
    return iz_text_close(&sorted);
}

static bool decides(const char *name)
{
    return change_of(name) < IZ_CHANGE_FREE;
}

/* Which GPUs may be together is said where they are chosen. */
static bool is_common(const char *name)
{
    return change_of(name) != IZ_CHANGE_OWN && strncmp(name, "gpu.", 4) != 0;
}

static uint64_t lines_hash(const char *text, bool (*counts)(const char *name))
{
    struct line l;
    uint64_t h = 0;
    for (const char *begin = text; line_take(&l, &text); begin = text)
        if (counts(l.name))
            h = iz_mix(h + iz_hash(begin, text - begin));
    return h;
}

uint64_t iz_identity_hash(const char *text)
{
    return lines_hash(text, decides);
}

/* Calls `differs` for each name whose lines are not the same; of NULL: there is
 * no such line. */
static void lines_compare(const char *a, const char *b,
                          void (*differs)(void *arg, const char *name,
                                          const struct line *a,
                                          const struct line *b),
                          void *arg)
{
    struct line l[2];
    bool more[2] = {line_take(&l[0], &a), line_take(&l[1], &b)};
    while (more[0] || more[1]) {
        int order = !more[0] ? 1 : !more[1] ? -1 : strcmp(l[0].name, l[1].name);
        if (order || !line_same(&l[0], &l[1]))
            differs(arg, l[order > 0].name, order > 0 ? NULL : &l[0],
                    order < 0 ? NULL : &l[1]);
        if (order <= 0)
            more[0] = line_take(&l[0], &a);
        if (order >= 0)
            more[1] = line_take(&l[1], &b);
    }
}

/* A value for people, which may be long; of NULL: "nothing". */
#define SHOWN(l)                                                               \
    (l) ? (l)->length < 200 ? (l)->length : 200 : 7,                           \
        (l) ? (l)->value : "nothing"

/* ---- files ---- */

/* Of all its blocks, or of some that lie evenly in what is longer than `most`.
 * at: of a mapping, whose pages do not stay. */
static void print_bytes(FILE *out, const char *name, unsigned char *at,
                        int64_t bytes, int64_t most)
{
    int64_t all = (bytes + READ_BLOCK - 1) / READ_BLOCK;
    int64_t n = min64(all, most / READ_BLOCK);
    uint64_t h = (uint64_t)bytes;
    for (int64_t i = 0, gone = 0; i < n; i++) {
        int64_t from = all * i / n * READ_BLOCK;
        int64_t length = min64(bytes - from, READ_BLOCK);
        h = iz_mix(h + iz_hash(at + from, length));
        madvise(at + gone, (size_t)(from + length - gone), MADV_DONTNEED);
        gone = from; /* what is mapped may begin before it, or end behind it */
    }
    madvise(at, (size_t)bytes, MADV_DONTNEED);
    fprintf(out, "%s %" PRId64 " bytes, hash %016" PRIx64, name, bytes, h);
    if (n < all)
        fprintf(out, " of %" PRId64 " blocks of %" PRId64, n, READ_BLOCK);
    fputc('\n', out);
}

/* So that all of `files` together are read up to READ_MOST. */
static int64_t share_of(int64_t files)
{
    return max64(READ_MOST / max64(files, 1), READ_BLOCK);
}

static void print_data(FILE *out, const struct iz_data *d, enum iz_split split)
{
    const char *name = split == IZ_TRAIN ? "data.train" : "data.val";
    const struct iz_shard *s;
    char line[64];
    int n = 0;
    while (iz_data_shard(d, split, n))
        n++;
    fprintf(out, "%s.windows %" PRId64 "\n", name, iz_data_windows(d, split));
    for (int i = 0; (s = iz_data_shard(d, split, i)); i++) {
        snprintf(line, sizeof(line), "%s.%05d", name, i);
        print_bytes(out, line, s->tokens.at, s->tokens.bytes, share_of(n));
        snprintf(line, sizeof(line), "%s.%05d.mask", name, i);
        if (s->mask.at)
            print_bytes(out, line, s->mask.at, s->mask.bytes, share_of(n));
    }
}

static int print_file(FILE *out, const char *name, const char *path,
                      int64_t most)
{
    struct stat st = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    unsigned char *at = MAP_FAILED;
    if (fd >= 0 && fstat(fd, &st) == 0) /* mmap takes no length of 0 */
        at = mmap(NULL, (size_t)max64(st.st_size, 1), PROT_READ, MAP_SHARED, fd,
                  0);
    int err = at == MAP_FAILED ? -errno : 0;
    if (fd >= 0)
        close(fd);
    if (err) {
        iz_text_refuse(stderr, "%s: %s", path, strerror(-err));
        return err;
    }
    print_bytes(out, name, at, st.st_size, most);
    munmap(at, (size_t)max64(st.st_size, 1));
    return 0;
}

static int is_weights(const struct dirent *e)
{
    const char *end = strrchr(e->d_name, '.');
    return end && strcmp(end, ".safetensors") == 0;
}

/* All weights in a folder, by the files' names; "": there is none. */
static int print_folder(FILE *out, const char *name, const char *folder)
{
    char path[IZ_PATH_MAX + 256], line[64];
    struct dirent **file = NULL;
    int n = *folder ? scandir(folder, &file, is_weights, alphasort) : 0;
    int err =
        n < 0 ? iz_text_refuse(stderr, "%s: %s", folder, strerror(errno)) : 0;
    for (int i = 0; i < n; i++) {
        snprintf(path, sizeof(path), "%s/%s", folder, file[i]->d_name);
        snprintf(line, sizeof(line), "%s.%05d", name, i);
        if (!err)
            err = print_file(out, line, path, share_of(n));
        free(file[i]);
    }
    free(file);
    return err;
}

/* ---- the text ---- */

static void print_variables(FILE *out)
{
    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++) {
        const char *value = getenv(variables[i]);
        if (!value)
            continue;
        fprintf(out, "env.%s ", variables[i]);
        iz_json_print(out, value);
        fputc('\n', out);
    }
}

static void print_machine(FILE *out, const struct run *r)
{
    char blas[128];
    iz_blas_name(blas, sizeof(blas));
    fprintf(out, "izar %s\nranks %d\n", IZ_VERSION, r->coll->size);
    if (r->gpu.device >= 0)
        fprintf(out, "gpu.capability %d.%d\ngpu.name %s\n",
                r->gpu.info.capability / 10, r->gpu.info.capability % 10,
                r->gpu.info.name);
    else
        fprintf(out, "cpu.blas %s\ncpu.simd %s\n", blas, iz_simd_name());
}

/* What the resumed run began with stays; its files may be gone by now. */
static int print_import(FILE *out, const struct run *r)
{
    struct line l;
    const char *text = r->from.identity;
    if (!iz_run_loads(r)) {
        int s = print_folder(out, "import.model", r->c.import);
        return s ? s : print_folder(out, "import.lora", r->c.lora.import);
    }
    while (text && line_take(&l, &text))
        if (!strncmp(l.name, "import.", 7))
            fprintf(out, "%s %.*s\n", l.name, l.length, l.value);
    return 0;
}

char *iz_identity_facts(const struct run *r)
{
    struct iz_text t;
    iz_text_open(&t);
    print_data(t.out, r->data, IZ_TRAIN);
    print_data(t.out, r->data, IZ_VAL);
    print_machine(t.out, r);
    int s = print_import(t.out, r);
    char *text = iz_text_close(&t);
    if (!s)
        return text;
    free(text);
    return NULL;
}

static void print_options(FILE *out, const struct run *r)
{
    static const char *const is[] = {"false", "true"};
    fprintf(out, "--resume %s\n--plan %s\n--parameters %s\n", is[r->o.resume],
            is[r->o.plan], is[r->o.parameters]);
    fprintf(out,
            "--ranks %d\n--machine %s\n--replay %" PRId64 ":%" PRId64
            "\nizar %s\n",
            r->o.ranks, r->o.machine ? r->o.machine : "", r->o.from, r->o.to,
            IZ_VERSION);
}

char *iz_identity_text(const struct run *r)
{
    struct iz_text t;
    iz_text_open(&t);
    iz_config_lines(t.out, &r->c, &r->p->section);
    fprintf(t.out, "program %s\n", r->p->name);
    print_variables(t.out);
    if (r->facts)
        fputs(r->facts, t.out);
    else
        print_options(t.out, r);
    return lines_sorted(iz_text_close(&t));
}

/* ---- between ranks ---- */

static void tell_rank(void *arg, const char *name, const struct line *a,
                      const struct line *b)
{
    const int *rank = arg;
    if (is_common(name))
        fprintf(stderr,
                "izar: %s: %.*s on rank 0, %.*s on rank %d: all ranks of a run "
                "need the same\n",
                name, SHOWN(a), SHOWN(b), *rank);
}

/* What rank q has otherwise than the first one. */
static void compare_rank(const struct run *r, const char *text, int q,
                         int64_t bytes)
{
    char *other = iz_take(bytes + 1, 1, "what another rank has");
    if (q == r->coll->rank)
        memcpy(other, text, (size_t)bytes);
    iz_coll_broadcast(r->coll, other, bytes, q, "what the run is");
    if (iz_run_first(r))
        lines_compare(text, other, tell_rank, &q);
    free(other);
}

int iz_identity_agree(const struct run *r, const char *text)
{
    int64_t mine[2] = {(int64_t)lines_hash(text, is_common),
                       (int64_t)strlen(text)};
    int64_t *all = iz_agree_numbers(r->coll, mine, 2, "what the run is");
    int told = 0;
    for (int64_t q = 1; q < r->coll->size && told < TOLD_RANKS; q++)
        if (all[2 * q] != all[0]) {
            compare_rank(r, text, (int)q, all[2 * q + 1]);
            told++;
        }
    free(all);
    return told ? -EINVAL : 0;
}

/* ---- with the run that it goes on with ---- */

struct comparison {
    const struct run *r;
    FILE *out[2]; /* of changes without other results; of all, as JSON */
    bool another;
};

/* To a replay, another machine or program is what it is for; all else that
 * decides bits is not. */
static bool tell_replay(const struct comparison *c, const char *name,
                        const struct line *was, const struct line *now)
{
    enum iz_change change = change_of(name), key;
    bool machine = change == IZ_CHANGE_TOLD && !iz_config_change(name, &key) &&
                   strcmp(name, "ranks") != 0;
    bool refused =
        change == IZ_CHANGE_SAME || (change == IZ_CHANGE_TOLD && !machine);
    if (refused && iz_run_first(c->r))
        fprintf(stderr,
                "izar: --replay: %s: %.*s in the run, %.*s now: it decides "
                "bits\n",
                name, SHOWN(was), SHOWN(now));
    else if (machine && iz_run_first(c->r))
        printf("replay: %s: %.*s in the run, %.*s now\n", name, SHOWN(was),
               SHOWN(now));
    return refused;
}

static void tell_change(void *arg, const char *name, const struct line *was,
                        const struct line *now)
{
    struct comparison *c = arg;
    enum iz_change change = change_of(name), key;
    bool first = iz_run_first(c->r);
    /* A key without a meaning in the one run, or in the older program. */
    bool none = (!was || !now) && iz_config_change(name, &key);
    bool open = was && !strncmp(was->value, "\"auto\"", 6);
    if (c->r->o.replay) {
        c->another |= !none && !open && tell_replay(c, name, was, now);
        return;
    }
    if (change == IZ_CHANGE_SAME && !none) {
        c->another = true;
        if (first)
            fprintf(stderr,
                    "izar: --resume: %s: %.*s in the checkpoint of step %lld, "
                    "%.*s now: it would be another run\n",
                    name, SHOWN(was), (long long)c->r->from.step, SHOWN(now));
        return;
    }
    if (open)
        return;
    fprintf(c->out[1], "%s\"%s\": [", ftell(c->out[1]) ? ", " : "", name);
    for (int i = 0; i < 2; i++) {
        const struct line *l = i ? now : was;
        char *value = l ? iz_take_text(l->value, l->length) : NULL;
        fputs(i ? ", " : "", c->out[1]);
        if (value)
            iz_json_print(c->out[1], value);
        else
            fputs("null", c->out[1]);
        free(value);
    }
    fputc(']', c->out[1]);
    if (change >= IZ_CHANGE_FREE)
        fprintf(c->out[0], ", %s %.*s -> %.*s", name, SHOWN(was), SHOWN(now));
    else if (first)
        printf("resume: %s: %.*s until step %lld, from now on %.*s\n", name,
               SHOWN(was), (long long)c->r->from.step, SHOWN(now));
}

int iz_identity_compare(const struct run *r, const char *text, char **changes)
{
    struct iz_text told[2];
    struct comparison c = {
        .r = r, .out = {iz_text_open(&told[0]), iz_text_open(&told[1])}};
    lines_compare(r->from.identity, text, tell_change, &c);
    char *rest = iz_text_close(&told[0]);
    *changes = iz_text_close(&told[1]);
    if (*rest && !c.another && !r->o.replay && iz_run_first(r))
        printf("resume: without effect on results: %s\n", rest + 2);
    fflush(stdout);
    free(rest);
    return c.another ? -EINVAL : 0;
}
