/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/base/nearest.h"

#include <string.h>
#include <strings.h>

#include "codelets/base/int64.h"

/* Insertions, deletions and replacements between a and b, case ignored. */
static int distance(const char *a, const char *b)
{
    int row[IZ_KEY_NAME_MAX + 1];
    int nb = (int)strlen(b);
    if (nb > IZ_KEY_NAME_MAX)
        return IZ_KEY_NAME_MAX;
    for (int j = 0; j <= nb; j++)
        row[j] = j;
    for (int i = 0; a[i] != '\0'; i++) {
        int corner = row[0];
        row[0] = i + 1;
        for (int j = 0; j < nb; j++) {
            int same = strncasecmp(&a[i], &b[j], 1) == 0;
            int64_t next = min64(corner + !same, min64(row[j], row[j + 1]) + 1);
            corner = row[j + 1];
            row[j + 1] = (int)next;
        }
    }
    return row[nb];
}

static const char *last_part(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

static bool is_end_of(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return m >= 4 && n >= m &&
           (strcmp(s + n - m, end) == 0 || strncmp(s, end, m) == 0);
}

/* Twice the distance.  A key in the wrong section, or of which one end is
 * missing, is near too. */
static int score(const char *name, const char *known, bool whole)
{
    const char *a = whole ? name : last_part(name);
    const char *b = whole ? known : last_part(known);
    int all = 2 * distance(name, known), part = 2 + 2 * distance(a, b);
    if (is_end_of(b, a) || is_end_of(a, b))
        part = part < 3 ? part : 3;
    return all < part ? all : part;
}

struct iz_nearest iz_nearest_start(const char *name, bool whole)
{
    int length = (int)strlen(whole ? name : last_part(name));
    return (struct iz_nearest){.name = name,
                               .whole = whole,
                               .score =
                                   2 + 2 * (length / 3 > 2 ? length / 3 : 2)};
}

void iz_nearest_try(struct iz_nearest *n, const char *known)
{
    int s = score(n->name, known, n->whole);
    if (s >= n->score)
        return;
    n->score = s;
    snprintf(n->near, sizeof(n->near), "%s", known);
    snprintf(n->hint, sizeof(n->hint), "; did you mean %s?", n->near);
}
