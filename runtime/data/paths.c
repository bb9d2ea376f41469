/* SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* strsep */

#include "runtime/data/paths.h"

#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/base/take.h"
#include "runtime/base/text.h"
#include "runtime/config/config.h"

static int paths_add(struct iz_paths *p, const char *path)
{
    for (int i = 0; i < p->count; i++)
        if (strcmp(p->path[i], path) == 0)
            return iz_text_refuse(p->err, "data: %s is named twice", path);
    p->path =
        iz_take_more(p->path, p->count, &p->room, sizeof(*p->path), "files");
    p->path[p->count++] = iz_take_text(path, (int64_t)strlen(path));
    return 0;
}

static int paths_add_pattern(struct iz_paths *p, const char *pattern)
{
    glob_t g = {0};
    int rc = glob(pattern, GLOB_ERR, NULL, &g), err = 0;
    if (rc != 0) {
        iz_text_refuse(p->err, "data: %s: %s", pattern,
                       rc == GLOB_NOMATCH ? "no file matches"
                                          : "a folder cannot be read");
        err = -ENOENT;
    }
    for (size_t i = 0; !err && i < g.gl_pathc; i++)
        err = paths_add(p, g.gl_pathv[i]);
    globfree(&g);
    return err;
}

int iz_paths_open(struct iz_paths *p, const char *list, FILE *err)
{
    *p = (struct iz_paths){.err = err};
    if (access(list, F_OK) == 0) /* a file's name may have a comma */
        return paths_add(p, list);
    char *copy = iz_take_text(list, (int64_t)strlen(list)), *rest = copy;
    char *entry;
    int why = 0;
    while (!why && (entry = strsep(&rest, ",")))
        why = strpbrk(entry, "*?[") && access(entry, F_OK) != 0
                  ? paths_add_pattern(p, entry)
                  : paths_add(p, entry);
    free(copy);
    return why;
}

void iz_paths_close(struct iz_paths *p)
{
    for (int i = 0; i < p->count; i++)
        free(p->path[i]);
    free(p->path);
    *p = (struct iz_paths){0};
}

bool iz_paths_first(char *out, size_t size, const char *list)
{
    char entry[IZ_PATH_MAX];
    glob_t g = {0};
    bool whole = access(list, F_OK) == 0;
    snprintf(entry, sizeof(entry), "%.*s",
             (int)(whole ? strlen(list) : strcspn(list, ",")), list);
    if (access(entry, F_OK) == 0)
        snprintf(out, size, "%s", entry);
    else if (glob(entry, 0, NULL, &g) == 0)
        snprintf(out, size, "%s", g.gl_pathv[0]);
    else
        entry[0] = '\0';
    globfree(&g);
    return entry[0] != '\0';
}
