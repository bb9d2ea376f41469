/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/base/cgroup.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "codelets/base/int64.h"

/* A kind of limit: what stands in front of a process's own folder in
 * /proc/self/cgroup, and where these folders are. */
struct controller {
    const char *mark, *root;
};

static const struct memory_files {
    struct controller in;
    const char *max, *used, *cached;
} memory[] = {
    {{"0::", "/sys/fs/cgroup"},
     "memory.max",
     "memory.current",
     "inactive_file "},
    {{":memory:", "/sys/fs/cgroup/memory"},
     "memory.limit_in_bytes",
     "memory.usage_in_bytes",
     "total_inactive_file "},
};

/* Microseconds of processor time, and of each period in which they count. */
static const struct cpu_files {
    struct controller in;
    const char *quota, *period;
} cpu[] = {
    {{"0::", "/sys/fs/cgroup"}, "cpu.max", NULL}, /* both in one line */
    {{":cpu:", "/sys/fs/cgroup/cpu"}, "cpu.cfs_quota_us", "cpu.cfs_period_us"},
    {{":cpu,cpuacct:", "/sys/fs/cgroup/cpu,cpuacct"},
     "cpu.cfs_quota_us",
     "cpu.cfs_period_us"},
};

int64_t iz_cgroup_number(const char *path, const char *head)
{
    FILE *f = fopen(path, "r");
    char line[256];
    long long v = -1;
    while (f && v < 0 && fgets(line, sizeof(line), f))
        if (!strncmp(line, head, strlen(head)))
            sscanf(line + strlen(head), "%lld", &v);
    if (f)
        fclose(f);
    return v;
}

/* The process's own folder, e.g. "/user.slice/job"; "" if there is none. */
static void find_own(char *out, size_t size, const char *mark)
{
    char line[512];
    FILE *f = fopen("/proc/self/cgroup", "r");
    out[0] = 0;
    while (f && fgets(line, sizeof(line), f)) {
        const char *at = strstr(line, mark);
        line[strcspn(line, "\n")] = 0;
        if (at)
            snprintf(out, size, "%s", at + strlen(mark));
    }
    if (f)
        fclose(f);
}

/* Calls fn for the process's own folder and all above it. */
static void climb(const struct controller *c, const void *files,
                  void (*fn)(const void *files, const char *folder, void *out),
                  void *out)
{
    char own[512], folder[600];
    find_own(own, sizeof(own), c->mark);
    for (;;) {
        snprintf(folder, sizeof(folder), "%s%s", c->root, own);
        fn(files, folder, out);
        char *above = strrchr(own, '/');
        if (!above)
            return;
        *above = 0;
    }
}

static int64_t number_in(const char *folder, const char *file, const char *head)
{
    char path[700];
    snprintf(path, sizeof(path), "%s/%s", folder, file);
    return iz_cgroup_number(path, head);
}

static void memory_left(const void *files, const char *folder, void *out)
{
    const struct memory_files *f = files;
    int64_t *left = out, max = number_in(folder, f->max, "");
    int64_t used = number_in(folder, f->used, "");
    int64_t cached = number_in(folder, "memory.stat", f->cached);
    if (max >= 0 && used >= 0) /* else not known, or "max" */
        *left = min64(*left, max - max64(used - max64(cached, 0), 0));
}

int64_t iz_cgroup_memory(void)
{
    int64_t left = INT64_MAX;
    for (size_t i = 0; i < sizeof(memory) / sizeof(*memory); i++)
        climb(&memory[i].in, &memory[i], memory_left, &left);
    return left;
}

static void cores_left(const void *files, const char *folder, void *out)
{
    const struct cpu_files *f = files;
    double *cores = out;
    char path[700];
    long long quota = -1, period = -1;
    if (f->period) {
        quota = number_in(folder, f->quota, "");
        period = number_in(folder, f->period, "");
    } else {
        snprintf(path, sizeof(path), "%s/%s", folder, f->quota);
        FILE *in = fopen(path, "r");
        if (in && fscanf(in, "%lld %lld", &quota, &period) != 2)
            quota = -1; /* "max" */
        if (in)
            fclose(in);
    }
    if (quota > 0 && period > 0)
        *cores = fmin(*cores, (double)quota / (double)period);
}

double iz_cgroup_cores(void)
{
    double cores = INFINITY;
    for (size_t i = 0; i < sizeof(cpu) / sizeof(*cpu); i++)
        climb(&cpu[i].in, &cpu[i], cores_left, &cores);
    return cores;
}
