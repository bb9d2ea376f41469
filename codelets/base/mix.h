/* SPDX-License-Identifier: Apache-2.0 */
/* The mixing step of the hashes and of the counter-based random numbers. */
#pragma once

#include <stdint.h>

#include "codelets/base/build.h"

/* 2^64 / golden ratio: odd, so that multiples of it are all different. */
#define IZ_GOLDEN 0x9e3779b97f4a7c15u

/* A bijection of 64 bits in which every input bit reaches every output bit. */
IZ_EITHER uint64_t iz_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* h with the characters of a text mixed in. */
static inline uint64_t iz_mix_text(uint64_t h, const char *s)
{
    for (; *s; s++)
        h = iz_mix(h + (unsigned char)*s);
    return h;
}
