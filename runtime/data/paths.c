/* SPDX-License-Identifier: Apache-2.0 */
/* The files behind data.path: a list with commas of names and patterns. */
#include "runtime/base/text.h"
#include "runtime/data/shard.h"

#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int data_paths_add(struct iz_paths *p, const char *path)
{
    for (int i = 0; i < p->count; i++)
        if (strcmp(p->path[i], path) == 0)
            return iz_refuse(stderr, "data: %s is named twice", path);
    char **grown = realloc(p->path, ((size_t)p->count + 1) * sizeof(*grown));
    if (!grown)
        return -ENOMEM;
    p->path = grown;
    p->path[p->count] = strdup(path);
    if (!p->path[p->count])
        return -ENOMEM;
    p->count++;
    return 0;
}

static int add_pattern(struct iz_paths *p, const char *pattern)
{
    glob_t g = {0};
    int rc = glob(pattern, GLOB_ERR, NULL, &g), err = 0;
    if (rc != 0) {
        fprintf(stderr, "izar: data: %s: %s\n", pattern,
                rc == GLOB_NOMATCH ? "no file matches"
                                   : "a folder cannot be read");
        err = -ENOENT;
    }
    for (size_t i = 0; !err && i < g.gl_pathc; i++)
        err = data_paths_add(p, g.gl_pathv[i]);
    globfree(&g);
    return err;
}

static int add_entry(struct iz_paths *p, const char *entry)
{
    if (strpbrk(entry, "*?[") && access(entry, F_OK) != 0)
        return add_pattern(p, entry);
    return data_paths_add(p, entry);
}

static int add_list(struct iz_paths *p, char *list)
{
    int err = 0;
    for (char *entry = list, *end; !err && entry; entry = end) {
        end = strchr(entry, ',');
        if (end)
            *end++ = '\0';
        err = add_entry(p, entry);
    }
    return err;
}

int iz_paths_open(struct iz_paths *p, const char *list)
{
    *p = (struct iz_paths){0};
    if (access(list, F_OK) == 0) /* a file's name may have a comma */
        return data_paths_add(p, list);
    char *copy = strdup(list);
    if (!copy)
        return -ENOMEM;
    int err = add_list(p, copy);
    free(copy);
    return err;
}

void iz_paths_close(struct iz_paths *p)
{
    for (int i = 0; i < p->count; i++)
        free(p->path[i]);
    free(p->path);
    *p = (struct iz_paths){0};
}
