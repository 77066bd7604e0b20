// How a weight [N, K] in blocks is stored, and how one row of it is read back.
//
// Tiles of 8 rows; in a tile one record for every block of `block` columns (16 or 32):
//
//   scale [8 rows]  f16 or f32 (wide)
//   offset [8 rows] likewise, if there is one
//   q               groups of 4 columns: 32 bytes = 8 rows × 4 columns
//
// 8 bits: group g is byte vector g. 4 bits: byte vector i holds group i in the low nibble and group i + groups / 2 in
// the high one. W[n, k] = scale·(q - zero) + offset, q unsigned.
#pragma once
#include <immintrin.h>

#include "op.h"

struct BlockWeight {
  int64_t rows, columns, blocks, block, bits, zero, wide, offset;
  int64_t scale_bytes, record_bytes, tile_bytes;

  // prefix: of the attributes' names, for operators with several weights.
  explicit BlockWeight(const ort::Attributes& attributes, const char* prefix = "")
      : rows(attributes.integer(prefix, "N")),
        columns(attributes.integer(prefix, "K")),
        block(attributes.integer(prefix, "block")),
        bits(attributes.integer(prefix, "bits")),
        zero(attributes.integer(prefix, "zero")),
        wide(attributes.integer(prefix, "wide")),
        offset(attributes.integer(prefix, "offset")) {
    blocks = (columns + block - 1) / block;
    scale_bytes = wide ? 32 : 16;
    record_bytes = scale_bytes * (1 + offset) + block * bits;
    tile_bytes = blocks * record_bytes;
  }

  int64_t tiles() const { return (rows + 7) / 8; }
};

// Eight scales or offsets, f16 or f32.
inline __m256 load_scales(const uint8_t* p, bool wide) {
  if (wide) return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Asks for a record to be brought into the L2 cache. Tiles are short streams, which the processor's own prefetching
// learns too late: without this, time to read and time to compute add up.
inline void prefetch(const BlockWeight& w, const uint8_t* record) {
  for (int64_t line = 0; line < w.record_bytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(record + line), _MM_HINT_T1);
  }
}

// Writes the results of one tile for row m of y [.., rows], those beyond the last row left out.
inline void store_tile(const BlockWeight& w, __m256 values, const float* bias, int64_t tile, int64_t m, float* y) {
  const int64_t n = 8 * tile, valid = w.rows - n < 8 ? w.rows - n : 8;
  float* out = y + m * w.rows + n;
  if (valid == 8) {
    if (bias != nullptr) values = _mm256_add_ps(values, _mm256_loadu_ps(bias + n));
    return _mm256_storeu_ps(out, values);
  }
  alignas(32) float each[8];
  _mm256_store_ps(each, values);
  for (int64_t j = 0; j < valid; ++j) out[j] = each[j] + (bias != nullptr ? bias[n + j] : 0.0f);
}
