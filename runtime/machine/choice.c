/* SPDX-License-Identifier: Apache-2.0 */
/* Choices that a run keeps; see choice.h. */
#include "runtime/machine/choice.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "runtime/ckpt/shares.h"

enum { UNREADABLE = -1 };

static int64_t word_of(const char *path, const char *key, const char *a,
                       const char *b)
{
    struct iz_json *j = iz_json_read(path);
    const struct iz_json *run = iz_json_member(j, "run");
    const char *text = iz_json_text(iz_json_member(run, key));
    int64_t w = !run                            ? UNREADABLE
                : !text || strcmp(text, a) == 0 ? 1
                : strcmp(text, b) == 0          ? 2
                                                : 0;
    if (j)
        iz_json_close(&j);
    return w;
}

int iz_choice_begun(const struct iz_config *c, struct iz_coll *coll,
                    const char *key, const char *a, const char *b)
{
    char path[IZ_PATH_MAX + 32];
    snprintf(path, sizeof(path), "%s/config.json", c->run.output);
    int64_t mine = coll->rank ? 0 : word_of(path, key, a, b);
    int64_t *all = iz_ckpt_gather(coll, &mine, 1);
    int64_t first = all[0];
    free(all);
    if (first != UNREADABLE)
        return (int)first;
    if (coll->rank == 0)
        fprintf(stderr,
                "izar: run.%s: auto: %s does not tell what the run began with: "
                "set %s or %s\n",
                key, path, a, b);
    return -EINVAL;
}
