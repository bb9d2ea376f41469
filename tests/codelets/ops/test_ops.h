/* SPDX-License-Identifier: Apache-2.0 */
/* What the program on the CPU has beside the cases of all backends. */
#ifndef IZ_TESTS_CODELETS_OPS_TEST_OPS_H
#define IZ_TESTS_CODELETS_OPS_TEST_OPS_H

int ops_cpu(void);
int ops_bench(void);

#endif
