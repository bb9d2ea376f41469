/* SPDX-License-Identifier: Apache-2.0 */
/* STARPU_ variables of the user; see environment.h. */
#define _GNU_SOURCE /* dladdr, memmem */
#include "runtime/base/environment.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST 64
#define LONGEST 160
#define MOST_NUMBER (1 << 20) /* more than anything here can be */

extern char **environ;

static char kept[MOST][LONGEST];
static int n_kept;

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* Whether a tool of ours has set it, not the user: IZ_SET names those. */
static bool ours(const char *variable)
{
    size_t n = strcspn(variable, "=");
    const char *s = getenv("IZ_SET");
    for (; s && *s; s += strspn(s, " ")) {
        size_t k = strcspn(s, " ");
        if (k == n && !strncmp(s, variable, n))
            return true;
        s += k;
    }
    return false;
}

void iz_environment_keep(void)
{
    n_kept = 0;
    for (char **v = environ; *v && n_kept < MOST; v++)
        if (!strncmp(*v, "STARPU_", 7) && !ours(*v))
            snprintf(kept[n_kept++], LONGEST, "%s", *v);
    qsort(kept, (size_t)n_kept, LONGEST, by_name);
}

/* ---- what StarPU reads ---- */

struct library {
    char *text;
    size_t bytes;
};

/* The file that StarPU's functions come from; empty if it cannot be read. */
static struct library library_open(void)
{
    struct library l = {NULL, 0};
    struct stat st;
    Dl_info where;
    void *f = dlsym(RTLD_DEFAULT, "starpu_init");
    int fd = f && dladdr(f, &where) ? open(where.dli_fname, O_RDONLY) : -1;
    if (fd < 0)
        return l;
    if (!fstat(fd, &st)) {
        l.bytes = (size_t)st.st_size;
        l.text = mmap(NULL, l.bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    if (l.text == MAP_FAILED)
        l.text = NULL;
    close(fd);
    return l;
}

/* Whether it holds head and tail as one string, as in "LIMIT_CUDA_" "%u_MEM".
 */
static bool library_holds(const struct library *l, const char *name, size_t n,
                          const char *tail)
{
    char text[2 * LONGEST] = "";
    int k = snprintf(text + 1, sizeof(text) - 1, "%.*s%s", (int)n, name, tail);
    return memmem(l->text, l->bytes, text, (size_t)k + 2) != NULL;
}

/* Names with a number or a word in them are made from a format. */
static bool is_known(const struct library *l, const char *name, size_t n)
{
    size_t at = strcspn(name, "0123456789"), word = n;
    char tail[LONGEST];
    if (!l->text || library_holds(l, name, n, ""))
        return true;
    while (word > 0 && name[word - 1] != '_')
        word--;
    if (library_holds(l, name, word, "%s"))
        return true;
    if (at >= n)
        return false;
    size_t end = at + strspn(name + at, "0123456789");
    snprintf(tail, sizeof(tail), "%%u%.*s", (int)(n - end), name + end);
    if (library_holds(l, name, at, tail))
        return true;
    tail[1] = 'd';
    return library_holds(l, name, at, tail);
}

/* Why a variable changes nothing here; docs/tuning.md shows it. */
static const char *no_effect(const char *name, size_t n)
{
    static const char evicts[] = "nothing is ever evicted",
                      measures[] = "izar measures its tasks: run.task_log";
    static const struct {
        const char *name, *why;
        const char *unless; /* this variable is set too */
    } none[] = {
        {"STARPU_LIMIT_CUDA_MEM",
         "memory is planned: use run.device_memory_limit_bytes", ""},
        {"STARPU_LIMIT_CPU_MEM",
         "memory is planned: use run.memory_limit_bytes", ""},
        {"STARPU_LIMIT_CPU_NUMA_MEM", "memory is planned", ""},
        {"STARPU_PREFETCH", "copies are tasks: StarPU moves no data", ""},
        {"STARPU_MINIMUM_AVAILABLE_MEM", evicts, ""},
        {"STARPU_TARGET_AVAILABLE_MEM", evicts, ""},
        {"STARPU_MINIMUM_CLEAN_BUFFERS", evicts, ""},
        {"STARPU_TARGET_CLEAN_BUFFERS", evicts, ""},
        {"STARPU_CALIBRATE", "costs of tasks are computed, not measured", ""},
        {"STARPU_PERF_MODEL_DIR", "costs of tasks are computed, not measured",
         ""},
        {"STARPU_DISK_SWAP", "the disk is izar's own", ""},
        {"STARPU_PROFILING", measures, ""},
        {"STARPU_CODELET_PROFILING", measures, ""},
        {"STARPU_MEMORY_STATS", "StarPU allocates no data", ""},
        {"STARPU_STATS", "without STARPU_ENABLE_STATS", "STARPU_ENABLE_STATS"},
        {"STARPU_TRACE_BUFFER_SIZE", "without STARPU_FXT_TRACE",
         "STARPU_FXT_TRACE"},
        {"STARPU_GENERATE_TRACE", "without STARPU_FXT_TRACE: use tools/trace",
         "STARPU_FXT_TRACE"},
        {"STARPU_LIMIT_MAX_SUBMITTED_TASKS",
         "without STARPU_LIMIT_MIN_SUBMITTED_TASKS",
         "STARPU_LIMIT_MIN_SUBMITTED_TASKS"},
        {"STARPU_LIMIT_MIN_SUBMITTED_TASKS",
         "without STARPU_LIMIT_MAX_SUBMITTED_TASKS",
         "STARPU_LIMIT_MAX_SUBMITTED_TASKS"},
    };
    for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++)
        if (strlen(none[i].name) == n && !strncmp(none[i].name, name, n))
            return getenv(none[i].unless) ? NULL : none[i].why;
    return NULL;
}

void iz_environment_print(FILE *out)
{
    struct library l = library_open();
    for (int i = 0; i < n_kept; i++) {
        size_t n = strcspn(kept[i], "=");
        const char *why = is_known(&l, kept[i], n)
                              ? no_effect(kept[i], n)
                              : "this StarPU reads no such variable";
        fprintf(out, "      environment: %s%s%s%s\n", kept[i],
                why ? " (no effect: " : "", why ? why : "", why ? ")" : "");
    }
    if (l.text)
        munmap(l.text, l.bytes);
}

/* Whole numbers, or lists of them: StarPU ends the process on anything else. */
static bool is_number(const char *s)
{
    static const char *const numbers[] = {
        "STARPU_NCPU",           "STARPU_NCPUS",
        "STARPU_NCUDA",          "STARPU_RESERVE_NCPU",
        "STARPU_MIN_PRIO",       "STARPU_MAX_PRIO",
        "STARPU_WORKERS_NOBIND", "STARPU_WORKERS_CPUID",
        "STARPU_WORKERS_COREID", "STARPU_BACKOFF_MIN",
        "STARPU_BACKOFF_MAX",    "STARPU_WORKER_TREE",
        "STARPU_SILENT",         "STARPU_CALIBRATE",
        "STARPU_PREFETCH",       "STARPU_MAIN_THREAD_BIND"};
    size_t name = strcspn(s, "=");
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        if (strlen(numbers[i]) == name && !strncmp(numbers[i], s, name)) {
            const char *value = s + name + 1;
            const char *more =
                strstr(s, "ID=") ? "0123456789 ,-" : "0123456789";
            return *value >= '0' && *value <= '9' &&
                   !value[strspn(value, more)];
        }
    return true;
}

const char *iz_environment_bad(void)
{
    for (int i = 0; i < n_kept; i++)
        if (!is_number(kept[i])) {
            kept[i][strcspn(kept[i], "=")] = 0;
            return kept[i];
        }
    return NULL;
}

int iz_environment_number(const char *name, int none)
{
    const char *s = getenv(name);
    char *end;
    long v = s ? strtol(s, &end, 10) : 0;
    if (!s || end == s || *end || v < 0)
        return none;
    return v > MOST_NUMBER ? MOST_NUMBER : (int)v;
}
