/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/base/environment.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/take.h"

#define MOST_NUMBER (1 << 20) /* more than anything here can be */

extern char **environ;

static char **kept;
static int n_kept;

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
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
    static int room;
    while (n_kept > 0)
        free(kept[--n_kept]);
    for (char **v = environ; *v; v++)
        if (!strncmp(*v, "STARPU_", 7) && !ours(*v)) {
            kept =
                iz_take_more(kept, n_kept, &room, sizeof(*kept), "variables");
            kept[n_kept++] = iz_take_text(*v, (int64_t)strlen(*v));
        }
    if (n_kept) /* NULL is no list */
        qsort(kept, (size_t)n_kept, sizeof(*kept), by_name);
}

void iz_environment_print(FILE *out)
{
    for (int i = 0; i < n_kept; i++)
        fprintf(out, "      environment: %s\n", kept[i]);
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
