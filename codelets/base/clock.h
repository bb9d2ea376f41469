/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IZ_CODELETS_BASE_CLOCK_H
#define IZ_CODELETS_BASE_CLOCK_H

#include <stdint.h>

/* CLOCK_MONOTONIC in ns. */
int64_t iz_now_ns(void);

#endif
