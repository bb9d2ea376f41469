/* SPDX-License-Identifier: Apache-2.0 */
/* Conversion of bytes and shares into units for people. */
#pragma once

static inline double iz_units_mib(double bytes)
{
    return bytes / 1048576;
}

/* Returns 0 if `whole` is 0. */
static inline double iz_units_percent(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}
