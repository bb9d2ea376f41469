/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/plan/bytes.h"

#include "codelets/base/units.h"

const char *const iz_class_names[IZ_MEM_CLASSES] = {
    [IZ_MEM_PARAM] = "parameters",    [IZ_MEM_SECONDARY] = "parameter copies",
    [IZ_MEM_GRAD] = "gradients",      [IZ_MEM_STATE] = "optimizer",
    [IZ_MEM_RING] = "gathered units", [IZ_MEM_GRAD_RING] = "unit gradients",
    [IZ_MEM_BOUNDARY] = "boundaries", [IZ_MEM_SAVED] = "activations",
    [IZ_MEM_SCRATCH] = "scratch",     [IZ_MEM_STAGING] = "staging",
    [IZ_MEM_BATCH] = "batches",       [IZ_MEM_MATRIX] = "matrices",
    [IZ_MEM_COMM] = "collectives",
};

const char *const iz_tier_names[IZ_TIERS] = {"device", "cpu", "nvme"};

int64_t iz_bytes_tier(const struct iz_bytes *t, enum iz_tier tier)
{
    int64_t sum = 0;
    for (int c = 0; c < IZ_MEM_CLASSES; c++)
        sum += t->b[tier][c];
    return sum;
}

void iz_bytes_print(const struct iz_bytes *t, FILE *out)
{
    fprintf(out, "  %-16s %12s %12s %12s\n", "MiB per rank", "device", "cpu",
            "nvme");
    for (int c = 0; c < IZ_MEM_CLASSES; c++) {
        if (!(t->b[0][c] | t->b[1][c] | t->b[2][c]))
            continue;
        fprintf(out, "  %-16s %12.2f %12.2f %12.2f\n", iz_class_names[c],
                iz_units_mib(t->b[0][c]), iz_units_mib(t->b[1][c]),
                iz_units_mib(t->b[2][c]));
    }
    fprintf(out, "  %-16s %12.2f %12.2f %12.2f\n", "total",
            iz_units_mib(iz_bytes_tier(t, IZ_TIER_DEVICE)),
            iz_units_mib(iz_bytes_tier(t, IZ_TIER_CPU)),
            iz_units_mib(iz_bytes_tier(t, IZ_TIER_NVME)));
}
