/* SPDX-License-Identifier: Apache-2.0 */
/* What people read in place of bytes and shares. */
#ifndef IZ_CODELETS_BASE_UNITS_H
#define IZ_CODELETS_BASE_UNITS_H

static inline double iz_mib(double bytes)
{
    return bytes / 1048576;
}

/* 0 where there is no whole. */
static inline double iz_percent(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}

#endif
