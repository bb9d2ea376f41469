/* SPDX-License-Identifier: Apache-2.0 */
/* The clocks of the program. */
#pragma once

#include <stdint.h>

/* CLOCK_MONOTONIC in ns. */
int64_t iz_clock_ns(void);
/* CPU time of this thread: a loaded machine does not count. */
int64_t iz_clock_cpu_ns(void);
