/* SPDX-License-Identifier: Apache-2.0 */
/* For C there is nothing more than the API. */
#pragma once

#include <cuda_runtime_api.h>
