// BlockLinear: y[M, N] = x[M, K]·Wᵀ + bias, W in blocks (block_weight.h), x quantized by blocks (activations.h).
//
// A tile of 8 output rows is computed for 4 input rows at a time, then for what is left of them one by one. Each 32-bit
// lane of a byte vector belongs to one output row, so products are summed inside their lane and no horizontal sum is
// ever needed. For that, 4 bytes of x are wanted in all 8 lanes. Among 4 rows that share the unpacked weights they are
// broadcast when needed; for a single row each task first spreads x into a buffer in its L1 cache, which makes them
// plain memory operands. The order of the float additions is the same in both: a token gives the same result alone and
// in a batch.
#pragma once
#include "activations.h"
#include "block_weight.h"

class BlockLinear {
 public:
  static constexpr const char* kName = "BlockLinear";
  static constexpr ort::Input kInputs[] = {{ort::kFloat}, {ort::kUInt8}, {ort::kFloat, true}};

  explicit BlockLinear(const ort::Attributes& attributes, const char* prefix = "") : w_(attributes, prefix) {
    x_.columns = w_.columns;
    x_.block = w_.block;
    x_.blocks = w_.blocks;
    x_.shift = w_.bits == 4 ? 8 : 7;
  }

  void compute(ort::Context& c) {
    const auto x = c.input<const float>(0);
    const auto weight = c.input<const uint8_t>(1);
    const auto bias = c.input<const float>(2);
    float* y = c.output(x, w_.rows);
    if (c.error() != nullptr) return;
    const int64_t rows = x.rows();
    x_.allocate(rows);
    const int64_t rows_a_task = 16;
    c.parallel((rows + rows_a_task - 1) / rows_a_task, [&](int64_t task) {
      for (int64_t m = task * rows_a_task; m < rows && m < (task + 1) * rows_a_task; ++m) {
        x_.quantize(m, x.data + m * w_.columns);
      }
    });
    if (w_.bits == 4 && w_.block == 32) run<4, 8>(c, weight.data, bias.data, y, rows);
    else if (w_.bits == 4) run<4, 4>(c, weight.data, bias.data, y, rows);
    else if (w_.block == 32) run<8, 8>(c, weight.data, bias.data, y, rows);
    else run<8, 4>(c, weight.data, bias.data, y, rows);
  }

 protected:
  static constexpr int64_t kBytesATask = 48 << 10;   // of weights: enough to pay for handing out a task
  static constexpr int64_t kSpreadBytes = 256 << 10;  // on the stack of a worker: a row of K up to 16,384

  // Tiles begin .. end - 1 for the input rows first .. last - 1, which are quantized already.
  void part(const uint8_t* weight, const float* bias, int64_t begin, int64_t end, int64_t first, int64_t last, float* y) const {
    if (w_.bits == 4 && w_.block == 32) part<4, 8>(weight, bias, begin, end, first, last, y);
    else if (w_.bits == 4) part<4, 4>(weight, bias, begin, end, first, last, y);
    else if (w_.block == 32) part<8, 8>(weight, bias, begin, end, first, last, y);
    else part<8, 4>(weight, bias, begin, end, first, last, y);
  }

  template <int kBits, int kGroups>
  void part(const uint8_t* weight, const float* bias, int64_t begin, int64_t end, int64_t first, int64_t last, float* y) const {
    int64_t m = first;
    for (; m + 4 <= last; m += 4) {
      for (int64_t t = begin; t < end; ++t) {
        tile<kBits, kGroups, 4, false>(weight + t * w_.tile_bytes, bias, t, m, x_.parts + m * x_.row_bytes(), y);
      }
    }
    for (; m < last; ++m) single_row<kBits, kGroups>(weight, bias, begin, end, m, y);
  }

  template <int kBits, int kGroups>
  void run(ort::Context& c, const uint8_t* weight, const float* bias, float* y, int64_t rows) const {
    const int64_t tiles = w_.tiles();
    const int64_t share = w_.tile_bytes < kBytesATask ? kBytesATask / w_.tile_bytes : 1;
    const int64_t tasks = (tiles + share - 1) / share;
    c.parallel(tasks, [&](int64_t task) {
      part<kBits, kGroups>(weight, bias, tiles * task / tasks, tiles * (task + 1) / tasks, 0, rows, y);
    });
  }

  template <int kBits, int kGroups>
  void single_row(const uint8_t* weight, const float* bias, int64_t begin, int64_t end, int64_t m, float* y) const {
    const int8_t* parts = x_.parts + m * x_.row_bytes();
    if (8 * x_.row_bytes() > kSpreadBytes) {
      for (int64_t t = begin; t < end; ++t) {
        tile<kBits, kGroups, 1, false>(weight + t * w_.tile_bytes, bias, t, m, parts, y);
      }
      return;
    }
    alignas(32) int8_t spread[kSpreadBytes];
    for (int64_t i = 0; i < x_.row_bytes(); i += 4) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(spread + 8 * i), repeat(parts + i));
    }
    for (int64_t t = begin; t < end; ++t) {
      tile<kBits, kGroups, 1, true>(weight + t * w_.tile_bytes, bias, t, m, spread, y);
    }
  }

  // Four bytes, repeated in all eight lanes.
  static __m256i repeat(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
  }

  // Output rows 8t .. 8t + 7 for the input rows m .. m + kRows - 1, whose parts (spread or not) begin at x.
  template <int kBits, int kGroups, int kRows, bool kSpread>
  void tile(const uint8_t* record, const float* bias, int64_t t, int64_t m, const int8_t* x, float* y) const {
    __m256 total[kRows];
    for (int i = 0; i < kRows; ++i) total[i] = _mm256_setzero_ps();
    const __m256 zero = _mm256_set1_ps(float(w_.zero));
    constexpr int kBlockBytes = 8 * kGroups * (kSpread ? 8 : 1);
    for (int64_t b = 0; b < w_.blocks; ++b, record += w_.record_bytes, x += kBlockBytes) {
      const __m256 scale = load_scales(record, w_.wide);
      const auto* bytes = reinterpret_cast<const __m256i*>(record + w_.scale_bytes * (1 + w_.offset));
      __m256i dots[kRows];
      dot<kBits, kGroups, kRows, kSpread>(bytes, x, x_.row_bytes(), dots);
      for (int i = 0; i < kRows; ++i) {
        const int64_t at = (m + i) * w_.blocks + b;
        __m256 dot = _mm256_cvtepi32_ps(dots[i]);
        if (w_.zero != 0) dot = _mm256_fnmadd_ps(zero, _mm256_broadcast_ss(x_.sum + at), dot);
        total[i] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scale, _mm256_broadcast_ss(x_.step + at)), total[i]);
      }
      if (w_.offset) {
        const __m256 offset = load_scales(record + w_.scale_bytes, w_.wide);
        for (int i = 0; i < kRows; ++i) {
          total[i] = _mm256_fmadd_ps(offset, _mm256_broadcast_ss(x_.mass + (m + i) * w_.blocks + b), total[i]);
        }
      }
    }
    const int64_t n = 8 * t, valid = w_.rows - n < 8 ? w_.rows - n : 8;
    for (int i = 0; i < kRows; ++i) {
      float* out = y + (m + i) * w_.rows + n;
      alignas(32) float values[8];
      _mm256_store_ps(values, total[i]);
      for (int64_t j = 0; j < valid; ++j) out[j] = values[j] + (bias != nullptr ? bias[n + j] : 0.0f);
    }
  }

  // dots[i] = for each of 8 output rows, 2^shift·Σ q·high + Σ q·low over one block, for input row i.
  template <int kBits, int kGroups, int kRows, bool kSpread>
  static void dot(const __m256i* bytes, const int8_t* x, int64_t row_bytes, __m256i* dots) {
    const __m256i ones = _mm256_set1_epi16(1), high_weight = _mm256_set1_epi16(kBits == 4 ? 256 : 128);
    auto part = [&](int i, int g) {  // 4 bytes of input row i, in all lanes: groups 0 .. kGroups - 1 are the high parts
      if constexpr (kSpread) return _mm256_load_si256(reinterpret_cast<const __m256i*>(x) + g);
      else return repeat(x + i * row_bytes + 4 * g);
    };
    if constexpr (kBits == 4) {
      const __m256i nibble = _mm256_set1_epi8(15);
      __m256i q[kGroups];
      for (int g = 0; g < kGroups / 2; ++g) {
        const __m256i both = _mm256_loadu_si256(bytes + g);
        q[g] = _mm256_and_si256(both, nibble);
        q[g + kGroups / 2] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
      }
      for (int i = 0; i < kRows; ++i) {
        // Sums of 8 pairs, of at most 2 · 15 · 128 each, fit 16 bits.
        __m256i high = _mm256_maddubs_epi16(q[0], part(i, 0)), low = _mm256_maddubs_epi16(q[0], part(i, kGroups));
        for (int g = 1; g < kGroups; ++g) {
          high = _mm256_add_epi16(high, _mm256_maddubs_epi16(q[g], part(i, g)));
          low = _mm256_add_epi16(low, _mm256_maddubs_epi16(q[g], part(i, kGroups + g)));
        }
        dots[i] = _mm256_add_epi32(_mm256_madd_epi16(high, high_weight), _mm256_madd_epi16(low, ones));
      }
    } else {
      for (int i = 0; i < kRows; ++i) dots[i] = _mm256_setzero_si256();
      for (int g = 0; g < kGroups; ++g) {
        const __m256i q = _mm256_loadu_si256(bytes + g);
        for (int i = 0; i < kRows; ++i) {
          // A pair is at most 2 · 255 · 64 = 32,640, which fits 16 bits; two would not.
          const __m256i high = _mm256_maddubs_epi16(q, part(i, g)), low = _mm256_maddubs_epi16(q, part(i, kGroups + g));
          dots[i] = _mm256_add_epi32(dots[i], _mm256_madd_epi16(high, high_weight));
          dots[i] = _mm256_add_epi32(dots[i], _mm256_madd_epi16(low, ones));
        }
      }
    }
  }

  BlockWeight w_;
  Activations x_;
};
