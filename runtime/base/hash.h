/* SPDX-License-Identifier: Apache-2.0 */
/* A fast 64-bit hash against accidents (flipped bits, torn writes, wrong
 * blocks), not against an adversary; the same value on every machine of our
 * byte order. */
#pragma once

#include <stdint.h>

/* Any alignment.  Two inputs that differ in one 8-byte word alone never have
 * the same hash. */
uint64_t iz_hash(const void *p, int64_t bytes);
