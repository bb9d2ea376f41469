/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of small files, complete or not there; see imported.h. */
#include "runtime/formats/imported.h"

#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/base/durable.h"
#include "runtime/base/key.h"
#include "runtime/formats/published.h"

#define WHO "run.output"
#define KEPT "imported"
#define PATH (IZ_PATH_MAX + 64)

static const char *const files[] = {IZ_IMPORTED_FILES, NULL};
static const char *const ours[] = {IZ_IMPORTED_ALL, NULL};

/* A link that leads nowhere, too: it is refused when it is read. */
static bool has(const char *folder, const char *name)
{
    char path[PATH + 64];
    struct stat st;
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return lstat(path, &st) == 0;
}

/* The files of a folder, if there is one, whose names are such. */
static int copy_such(const char *who, const char *to, const char *from,
                     const char *name)
{
    char a[PATH + 320], b[PATH + 320];
    DIR *d = opendir(from);
    int err = d ? iz_durable_make_directories(who, to) : 0;
    for (struct dirent *e; d && !err && (e = readdir(d));) {
        snprintf(a, sizeof(a), "%s/%s", from, e->d_name);
        snprintf(b, sizeof(b), "%s/%s", to, e->d_name);
        if (!fnmatch(name, e->d_name, FNM_PERIOD))
            err = iz_durable_copy(who, b, a);
    }
    if (d && !err)
        err = iz_durable_sync_directory(who, to);
    if (d)
        closedir(d);
    return err;
}

static int copy(const char *who, const char *to, const char *from,
                const char *const *name)
{
    char a[PATH + 64], b[PATH + 64];
    int err = 0;
    for (; *name && !err; name++) {
        snprintf(a, sizeof(a), "%s/%s", from, *name);
        snprintf(b, sizeof(b), "%s/%s", to, *name);
        if (strcmp(*name, IZ_PUBLISHED_CONFIG) == 0 || has(from, *name))
            err = iz_durable_copy(who, b, a);
    }
    if (!err)
        err = copy_such(who, to, from, IZ_IMPORTED_CODE);
    snprintf(a, sizeof(a), "%s/" IZ_IMPORTED_TEMPLATES, from);
    snprintf(b, sizeof(b), "%s/" IZ_IMPORTED_TEMPLATES, to);
    return err ? err : copy_such(who, b, a, IZ_IMPORTED_TEMPLATE);
}

int iz_imported_copy(const char *who, const char *to, const char *from)
{
    return from && *from ? copy(who, to, from, files + 1) : 0;
}

/* Makes the directory `kept` of copies. */
static int replace(const char *kept, const char *from)
{
    char tmp[PATH + 8];
    snprintf(tmp, sizeof(tmp), "%s.tmp", kept);
    int err = iz_durable_remove_directory(WHO, tmp, ours);
    if (err)
        return err;
    if (mkdir(tmp, 0777) != 0)
        return iz_durable_refuse(WHO, tmp, "cannot make", errno);
    err = copy(WHO, tmp, from, files);
    if (!err)
        err = iz_durable_sync_directory(WHO, tmp);
    if (!err)
        err = iz_durable_rename(WHO, tmp, kept);
    if (err)
        iz_durable_remove_directory(WHO, tmp, ours);
    return err;
}

int iz_imported_keep(const char *output, const char *folder, bool goes_on)
{
    char kept[PATH];
    snprintf(kept, sizeof(kept), "%s/" KEPT, output);
    if (goes_on && has(kept, IZ_PUBLISHED_CONFIG))
        return 0;
    int err = iz_durable_remove_directory(WHO, kept, ours);
    return err || !*folder ? err : replace(kept, folder);
}

int iz_imported_find(char *path, size_t size, const char *output,
                     const char *folder)
{
    snprintf(path, size, "%s/" KEPT, output);
    if (has(path, IZ_PUBLISHED_CONFIG))
        return 0;
    snprintf(path, size, "%s", folder ? folder : "");
    if (!*path || has(path, IZ_PUBLISHED_CONFIG))
        return 0;
    fprintf(stderr,
            "izar: %s/" IZ_PUBLISHED_CONFIG
            ": %s: keys and a tokenizer that an export keeps of it are lost; "
            "put the folder back, or a " IZ_PUBLISHED_CONFIG
            " of {} into %s/" KEPT " to go without them\n",
            path, strerror(ENOENT), output);
    return -ENOENT;
}

void iz_imported_tell(const char *folder)
{
    static const char *const tokenizers[] = {
        "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", NULL};
    const char *const *name = tokenizers;
    while (*name && !has(folder, *name))
        name++;
    if (!*name)
        printf("%s has no tokenizer, because none was imported: put its files "
               "there before transformers reads it\n",
               folder);
}
