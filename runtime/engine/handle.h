/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the engine as StarPU knows it. */
#pragma once

#include "runtime/engine/trace.h"

/* What StarPU knows an address by: that of memory on a GPU has a stand-in. */
uintptr_t iz_handle_address(const struct iz_engine *e, const void *p);
/* Registers bytes at p, which the engine's memory owns; d and x say to traces
 * what they are. */
starpu_data_handle_t iz_handle_open(struct iz_engine *e, void *p, int64_t bytes,
                                    enum iz_datum d, int x);
/* Sets NULL, and accepts it. */
void iz_handle_close(starpu_data_handle_t *h);
/* Where that lies which host and device both touch: on the host. */
enum iz_tier iz_handle_tier(const struct iz_engine *e);
