/* SPDX-License-Identifier: Apache-2.0 */
/* The numbers of 4-bit codes by AVX2's shuffles of bytes, which AVX-512 has,
 * too. */

/* As in half_any.h. */
static inline void look_up(uint16_t *restrict y, const uint8_t *restrict x,
                           const uint8_t *restrict lower,
                           const uint8_t *restrict upper)
{
    enum { in_order = 0xd8 }; /* unpacking keeps the two lanes apart */
    const __m256i low_4 = _mm256_set1_epi8(15);
    __m256i low =
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)lower));
    __m256i high =
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)upper));
    __m256i codes =
        _mm256_permute4x64_epi64(_mm256_loadu_si256((const void *)x), in_order);
    __m256i code[2] = {_mm256_and_si256(_mm256_srli_epi16(codes, 4), low_4),
                       _mm256_and_si256(codes, low_4)};
    __m256i of[2][2]; /* by half of a byte, and by quarters of all */
    for (int j = 0; j < 2; j++) {
        __m256i a = _mm256_shuffle_epi8(low, code[j]);
        __m256i b = _mm256_shuffle_epi8(high, code[j]);
        of[j][0] = _mm256_unpacklo_epi8(a, b);
        of[j][1] = _mm256_unpackhi_epi8(a, b);
    }
    for (int i = 0; i < 2; i++) {
        __m256i a = _mm256_unpacklo_epi16(of[0][i], of[1][i]);
        __m256i b = _mm256_unpackhi_epi16(of[0][i], of[1][i]);
        _mm256_storeu_si256((void *)(y + 32 * i),
                            _mm256_permute2x128_si256(a, b, 0x20));
        _mm256_storeu_si256((void *)(y + 32 * i + 16),
                            _mm256_permute2x128_si256(a, b, 0x31));
    }
}
