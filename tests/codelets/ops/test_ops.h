/* SPDX-License-Identifier: Apache-2.0 */
/* What the program on the CPU has beside the cases of all backends. */
#pragma once

int ops_cpu(void);
int ops_bench(void);
