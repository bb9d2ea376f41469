/* SPDX-License-Identifier: Apache-2.0 */
/* Which files a folder has, and that each tensor is in one of them; see
 * tensors.h. */
#include "runtime/formats/folder.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/base/take.h"
#include "runtime/base/text.h"

/* Maps one more file; room is for it. */
static int add_file(struct iz_hf_folder *f, const char *name)
{
    struct iz_st *file = &f->file[f->n_files++];
    size_t n = strlen(f->path) + strlen(name) + 2;
    char *path = iz_take((int64_t)n, 1, "a path");
    snprintf(path, n, "%s/%s", f->path, name);
    int err = iz_st_open(file, "", path, f->err);
    free(path);
    return err ? err : iz_st_map(file);
}

/* The file of that name in the folder; -1: not there yet. */
static int find_file(const struct iz_hf_folder *f, const char *name)
{
    size_t skip = strlen(f->path) + 1;
    for (int i = 0; i < f->n_files; i++)
        if (strcmp(f->file[i].path + skip, name) == 0)
            return i;
    return -1;
}

/* Opens the files that the index names; each tensor must be where it says. */
static int map_files(struct iz_hf_folder *f, const char *path,
                     const json_t *map)
{
    const char *name = NULL;
    int why = 0;
    f->file = iz_take(iz_json_count(map), sizeof(*f->file), "files");
    while (!why && (name = iz_json_key(map, name))) {
        const char *file = json_string_value(json_object_get(map, name));
        int i = file ? find_file(f, file) : -1;
        if (!file || !*file || strchr(file, '/'))
            return iz_text_refuse(f->err,
                                  "%s: tensor %s lies in no file of the folder",
                                  path, name);
        if (i < 0) {
            i = f->n_files;
            why = add_file(f, file);
        }
        if (!why && !iz_st_find(&f->file[i], name))
            why = iz_text_refuse(f->err, "%s: tensor %s is not in %s", path,
                                 name, file);
    }
    return why;
}

static int open_index(struct iz_hf_folder *f, const char *path)
{
    json_t *root = iz_json_read(path, f->err);
    const json_t *map = json_object_get(root, "weight_map");
    int why = -EINVAL;
    if (root && !json_is_object(map))
        iz_text_refuse(f->err, "%s: has no weight_map", path);
    else if (root)
        why = map_files(f, path, map);
    json_decref(root);
    return why;
}

static int open_single(struct iz_hf_folder *f, const char *name)
{
    f->file = iz_take(1, sizeof(*f->file), "a file");
    return add_file(f, name);
}

/* No name may be in two files. */
static int check_unique(const struct iz_hf_folder *f)
{
    for (int i = 0; i < f->n_files; i++)
        for (int k = 0; k < f->file[i].n; k++)
            for (int j = 0; j < i; j++)
                if (iz_st_find(&f->file[j], f->file[i].tensor[k].name))
                    return iz_text_refuse(f->err,
                                          "%s: tensor %s is in two files",
                                          f->path, f->file[i].tensor[k].name);
    return 0;
}

static int folder_open(struct iz_hf_folder *f)
{
    char index[4096], single[4096];
    int n = snprintf(index, sizeof(index), "%s/" IZ_HF_INDEX, f->path);
    snprintf(single, sizeof(single), "%s/" IZ_HF_SINGLE, f->path);
    if (n >= (int)sizeof(index)) {
        iz_text_refuse(f->err, "%s: %s", f->path, strerror(ENAMETOOLONG));
        return -ENAMETOOLONG;
    }
    if (access(single, F_OK) == 0)
        return open_single(f, IZ_HF_SINGLE);
    if (access(index, F_OK) == 0)
        return open_index(f, index);
    iz_text_refuse(f->err, "%s: has neither " IZ_HF_SINGLE " nor " IZ_HF_INDEX,
                   f->path);
    return -ENOENT;
}

int iz_hf_folder_open(struct iz_hf_folder *f, const char *path,
                      const char *file, FILE *err)
{
    *f = (struct iz_hf_folder){.path = path, .err = err};
    int why = file ? open_single(f, file) : folder_open(f);
    if (!why)
        why = check_unique(f);
    if (why)
        iz_hf_folder_close(f);
    return why;
}

void iz_hf_folder_close(struct iz_hf_folder *f)
{
    for (int i = 0; i < f->n_files; i++)
        iz_st_close(&f->file[i]);
    free(f->file);
    *f = (struct iz_hf_folder){0};
}
