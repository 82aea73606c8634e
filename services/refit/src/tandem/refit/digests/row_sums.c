/* Sums of digests on a CPU: see tandem/refit/digests/compiled_sums.py, which compiles this file with the machine's own
   compiler. Plain C that compilers turn into 16-bit dot products (pmaddwd on x86, smlal on ARM). Sums wrap: compile it
   with -fwrapv. */

#include <stddef.h>
#include <stdint.h>

enum { NUM_DIGITS = 6, BLOCK = 512, AHEAD = 1024, CACHE_LINE = 64 };

static const int shifts[NUM_DIGITS] = {0, 8, 16, 24, 32, 48};

/* Write sum_k word(r, k) * multiplier(k) - excess, modulo 2**64, for each row r.

   A multiplier is given as signed digits, which lie at shifts[] in it; digits_DK has all first digits first. Those below
   2**32 are from -127 to 128, so that the sum over a block fits 32 bits: it is least for words of -2**15, with
   512 * -2**15 * 2**7 = -2**31. The sums of the two 16-bit digits above may wrap at 32 bits, since the rest of theirs
   does not fit into 64 bits anyway. */
#define DEFINE_ROW_SUMS(NAME, WORD, FLIPPED)                                                                           \
    void NAME(const char *rows, ptrdiff_t row_bytes, size_t num_rows, size_t num_words, const int16_t *digits_DK,      \
              uint64_t excess, uint64_t *sums_R)                                                                       \
    {                                                                                                                  \
        for (size_t row = 0; row < num_rows; row++) {                                                                  \
            const WORD *words_K = (const WORD *)(rows + (ptrdiff_t)row * row_bytes);                                   \
            uint64_t total = 0;                                                                                        \
            for (size_t first = 0; first < num_words; first += BLOCK) {                                                \
                const size_t num = num_words - first < BLOCK ? num_words - first : BLOCK;                              \
                const WORD *block = words_K + first;                                                                   \
                const int16_t *d0 = digits_DK + first, *d1 = d0 + num_words, *d2 = d1 + num_words;                     \
                const int16_t *d3 = d2 + num_words, *d4 = d3 + num_words, *d5 = d4 + num_words;                        \
                int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0, s4 = 0, s5 = 0;                                                \
                for (size_t at = 0; at < BLOCK * sizeof(WORD); at += CACHE_LINE)                                       \
                    __builtin_prefetch((const char *)block + at + AHEAD);                                              \
                for (size_t k = 0; k < num; k++) {                                                                     \
                    const int16_t word = (int16_t)(block[k] ^ FLIPPED);                                                \
                    s0 += word * d0[k];                                                                                \
                    s1 += word * d1[k];                                                                                \
                    s2 += word * d2[k];                                                                                \
                    s3 += word * d3[k];                                                                                \
                    s4 += word * d4[k];                                                                                \
                    s5 += word * d5[k];                                                                                \
                }                                                                                                      \
                const int32_t sums[NUM_DIGITS] = {s0, s1, s2, s3, s4, s5};                                             \
                for (int digit = 0; digit < NUM_DIGITS; digit++)                                                       \
                    total += (uint64_t)(int64_t)sums[digit] << shifts[digit];                                          \
            }                                                                                                          \
            sums_R[row] = total - excess;                                                                              \
        }                                                                                                              \
    }

DEFINE_ROW_SUMS(sum_rows_of_bytes, int8_t, 0)

/* Words of 2 bytes, or of 4 as two of 2: the top bit of each lower byte is flipped, and what that adds is the
   excess. */
DEFINE_ROW_SUMS(sum_rows_of_halves, int16_t, 0x80)
