/* SPDX-License-Identifier: Apache-2.0 */
/* The only header with build switches: what the compiler and the build offer.
 * Everything else is decided at run time by data. */
#pragma once

/* A function with this attribute is compiled once per SIMD level and chosen
 * when the program is loaded.  Sanitizers cannot instrument the resolver, which
 * runs before they are set up, so their builds take the portable version. */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__clang__)
#define IZ_SIMD                                                                \
    __attribute__((                                                            \
        target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define IZ_SIMD
#endif

/* Of a file that is compiled once per SIMD level: fp32 numbers in a vector, and
 * how many rows of two vectors fit into the registers as accumulators. */
#if defined(__AVX512F__)
#define IZ_LANES 16
#define IZ_STRIP 8
#elif defined(__AVX__)
#define IZ_LANES 8
#define IZ_STRIP 4
#elif defined(__aarch64__)
#define IZ_LANES 4
#define IZ_STRIP 8
#else
#define IZ_LANES 4
#define IZ_STRIP 4
#endif

/* Before a loop whose iterations touch different memory: GCC cannot see that,
 * and clang complains where it does something else than it is told. */
#ifdef __clang__
#define IZ_APART
#else
#define IZ_APART _Pragma("omp simd")
#endif

/* A function whose constant arguments make a loop of its own at every call. */
#define IZ_INLINE static inline __attribute__((always_inline))

/* A small function of the host that the kernels of a CUDA source call, too. */
#ifdef __CUDACC__
#define IZ_EITHER static inline __host__ __device__
#else
#define IZ_EITHER static inline
#endif

/* Around the declarations of a header that CUDA sources include. */
#ifdef __cplusplus
#define IZ_C_BEGIN extern "C" {
#define IZ_C_END }
#else
#define IZ_C_BEGIN
#define IZ_C_END
#endif

#define IZ_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define IZ_NORETURN __attribute__((noreturn))

/* Calls f() before the constructors of libraries; of a program alone. */
#define IZ_BEFORE_LIBRARIES(f)                                                 \
    __attribute__((section(".preinit_array"),                                  \
                   used)) static void (*const f##_first)(void) = f;
