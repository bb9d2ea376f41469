/* SPDX-License-Identifier: Apache-2.0 */
/* A build without CUDA has no GPU, so nobody calls an op of one; but they must
 * link.  The build gives every declaration of gpu_ops.h a body that ends the
 * job (meson.build). */
#include "codelets/base/die.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"
#include "codelets/cuda_none.h"
