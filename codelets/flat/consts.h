/* SPDX-License-Identifier: Apache-2.0 */
/* What the formula of each optimizer needs of a step's numbers. */
#pragma once

#include "codelets/flat/adam.h"
#include "codelets/flat/lion.h"
#include "codelets/flat/muon.h"

/* Rounded to fp32 once. */
union iz_consts {
    struct iz_adam_consts adam;
    struct iz_lion_consts lion;
    struct iz_muon_consts muon;
    struct iz_along_consts along;
};
