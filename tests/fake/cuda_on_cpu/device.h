/* SPDX-License-Identifier: Apache-2.0 */
/* The GPU that the emulation pretends to be. */
#pragma once

#include "codelets/base/build.h"

IZ_C_BEGIN

/* Kernels launched from now on have the shared memory and the instructions of
 * this compute capability, 90 for 9.0, which it is at first. */
void emu_device(int capability);

IZ_C_END
