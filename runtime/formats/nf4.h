/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors in 4 bits, as transformers saves those of bitsandbytes. */
#pragma once

#include "codelets/flat/nf4.h"
#include "runtime/formats/map.h"
#include "runtime/formats/st.h"

/* What belongs to such a tensor beside its codes. */
enum iz_hf_nf4_part {
    IZ_HF_NF4_SCALE,
    IZ_HF_NF4_MOST,
    IZ_HF_NF4_VALUES,  /* of a code of a weight */
    IZ_HF_NF4_DYNAMIC, /* of a code of a scale */
    IZ_HF_NF4_STATE,
    IZ_HF_NF4_PARTS
};

struct iz_hf_nf4 {
    const struct iz_st_tensor *code, *part[IZ_HF_NF4_PARTS];
    int64_t n;  /* weights */
    float mean; /* of the scales */
};

/* Whether a tensor of this name is such a part, and then the name of the tensor
 * that it belongs to. */
bool iz_hf_nf4_name(const char *name, enum iz_hf_nf4_part *part,
                    char of[IZ_HF_NAME]);
/* Sets the mean, given all else.  What keeps it from being read; NULL: it can.
 */
const char *iz_hf_nf4_check(struct iz_hf_nf4 *t);
void iz_hf_nf4_group(const struct iz_hf_nf4 *t, int64_t g,
                     struct iz_nf4_group *out);
