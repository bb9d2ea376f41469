/* SPDX-License-Identifier: Apache-2.0 */
/* The backend of programs with the program's own table of kernels, emulated on
 * the CPU (tests/fake/cuda_on_cpu), and a stand-in for cuBLASLt. */
#pragma once

#include "tests/codelets/ops/scene.h"

/* What calls of the library have beside the ops. */
int kernels_library(void);
