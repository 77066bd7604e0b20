// MoeExperts, BlockMoeExperts: y[t] = Σ_k scores[t, k] · down(inner(up(x[t]))) by expert ids[t, k].
//
// Pairs (token, choice) are grouped by expert (routing.h), and only experts that are hit are read. Each linear is one
// parallel loop over (expert, slice of its rows); all of an expert's tokens meet a slice of its weights while that is in
// cache. A token's results do not depend on which others are in the step, and are summed in the order of its choices.
#pragma once
#include "activation.h"
#include "block_linear.h"
#include "dense_rows.h"
#include "op.h"
#include "routing.h"

// What lies between the two linears: activation(min(gate, limit)) · (clip(up, -limit, limit) + shift), or the activation.
class ExpertInner {
 public:
  explicit ExpertInner(const ort::Attributes& attributes)
      : kind_(attributes.integer("activation")),
        gated_(attributes.integer("gated")),
        slope_(attributes.real("slope")),
        limit_(attributes.real("limit")),
        shift_(attributes.real("shift")) {}

  int64_t width(int64_t rows) const { return gated_ ? rows / 2 : rows; }

  void row(const float* hidden, float* out, int64_t width) const {
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) store8(out + i, value(load8(hidden + i), gated_ ? load8(hidden + width + i) : v8{}));
    for (; i < width; ++i) out[i] = value(splat8(hidden[i]), splat8(gated_ ? hidden[width + i] : 0.0f))[0];
  }

 private:
  v8 value(v8 gate, v8 up) const {
    if (!gated_) return activate8(kind_, gate, slope_);
    if (limit_ > 0) {
      gate = min8(gate, splat8(limit_));
      up = min8(max8(up, splat8(-limit_)), splat8(limit_));
    }
    return activate8(kind_, gate, slope_) * (up + splat8(shift_));
  }

  int64_t kind_, gated_;
  float slope_, limit_, shift_;
};

// The steps that both operators share; Linears computes the two products.
class ExpertSteps {
 public:
  explicit ExpertSteps(const ort::Attributes& attributes) : inner_(attributes) {}

  template <typename Linears>
  void compute(ort::Context& c, Linears&& linears, int64_t experts, int64_t hidden_rows) {
    const auto x = c.input<const float>(0);
    const auto ids = c.input<const int32_t>(1);
    const auto scores = c.input<const float>(2);
    float* y = c.output(x, x.width());
    if (c.error() != nullptr) return;
    const int64_t tokens = ids.rows(), choices = ids.width(), width = x.width(), inner = inner_.width(hidden_rows);
    if (!routing_.group(ids.data, tokens * choices, experts)) return c.fail("an expert id is out of range");
    const int64_t pairs = routing_.pairs;
    const float** rows = rows_.at_least(pairs);
    for (int64_t p = 0; p < pairs; ++p) rows[p] = x.data + routing_.order[p] / choices * width;
    float* hidden = hidden_.at_least(pairs * hidden_rows);
    linears.up(c, routing_, rows, hidden);
    float* active = active_.at_least(pairs * inner);
    c.parallel(pairs, [&](int64_t p) { inner_.row(hidden + p * hidden_rows, active + p * inner, inner); });
    for (int64_t p = 0; p < pairs; ++p) rows[p] = active + p * inner;
    float* result = result_.at_least(pairs * width);
    linears.down(c, routing_, rows, result);
    c.parallel(tokens, [&](int64_t t) {
      for (int64_t i = 0; i < width; ++i) {
        float sum = 0;
        for (int64_t k = t * choices; k < (t + 1) * choices; ++k) {
          sum += scores.data[k] * result[routing_.place[k] * width + i];
        }
        y[t * width + i] = sum;
      }
    });
  }

 private:
  ExpertInner inner_;
  Routing routing_;
  ort::Buffer<const float*> rows_;
  ort::Buffer<float> hidden_, active_, result_;
};

// Calls function(h, begin, end) in parallel for every hit expert h and slices of `total` units that make up its weight.
template <typename Function>
void each_slice(ort::Context& c, const Routing& routing, int64_t total, int64_t unit_bytes, Function&& function) {
  const int64_t bytes_a_task = 48 << 10;  // enough work to pay for handing out a task
  const int64_t share = unit_bytes < bytes_a_task ? bytes_a_task / unit_bytes : 1;
  const int64_t slices = (total + share - 1) / share;
  c.parallel(routing.hits * slices, [&](int64_t task) {
    const int64_t slice = task % slices;
    function(task / slices, total * slice / slices, total * (slice + 1) / slices);
  });
}

class MoeExperts {
 public:
  static constexpr const char* kName = "MoeExperts";
  static constexpr ort::Input kInputs[] = {{ort::kFloat}, {ort::kInt32}, {ort::kFloat},      {ort::kFloat},
                                           {ort::kFloat}, {ort::kFloat, true}, {ort::kFloat, true}};

  explicit MoeExperts(const ort::Attributes& attributes) : steps_(attributes) {}

  void compute(ort::Context& c) {
    const auto up = c.input<const float>(3), down = c.input<const float>(4);
    const auto up_bias = c.input<const float>(5), down_bias = c.input<const float>(6);
    if (c.error() != nullptr) return;
    const Linears linears{up, down, up_bias.data, down_bias.data};
    steps_.compute(c, linears, up.dims[0], up.dims[1]);
  }

 private:
  struct Linears {
    ort::Tensor<const float> up_, down_;
    const float *up_bias, *down_bias;

    void up(ort::Context& c, const Routing& r, const float* const* x, float* y) const { product(c, r, up_, up_bias, x, y); }
    void down(ort::Context& c, const Routing& r, const float* const* x, float* y) const {
      product(c, r, down_, down_bias, x, y);
    }

    static void product(ort::Context& c, const Routing& r, const ort::Tensor<const float>& w, const float* bias,
                        const float* const* x, float* y) {
      const int64_t rows = w.dims[1], width = w.dims[2], quads = (rows + 3) / 4;
      each_slice(c, r, quads, 4 * width * int64_t(sizeof(float)), [&](int64_t h, int64_t begin, int64_t end) {
        const int64_t expert = r.hit[h], first = r.begin[h], last = 4 * end < rows ? 4 * end : rows;
        dense_rows(w.data + expert * rows * width, 4 * begin, last, width, bias != nullptr ? bias + expert * rows : nullptr,
                   x + first, r.begin[h + 1] - first, y + first * rows, rows);
      });
    }
  };

  ExpertSteps steps_;
};

// One linear of the experts over blocks: their tiles lie below each other, so rows must come in eights.
class BlockExpertLinear : BlockLinear {
 public:
  BlockExpertLinear(const ort::Attributes& attributes, const char* prefix) : BlockLinear(attributes, prefix) {}
  int64_t rows() const { return w_.rows; }

  void product(ort::Context& c, const Routing& r, const float* const* x, const uint8_t* weight, const float* bias, float* y) {
    x_.allocate(r.pairs);
    c.parallel(r.pairs, [&](int64_t p) { x_.set(p, x[p]); });
    each_slice(c, r, w_.tiles(), w_.tile_bytes, [&](int64_t h, int64_t begin, int64_t end) {
      const int64_t expert = r.hit[h];
      const uint8_t* tiles = weight + expert * w_.tiles() * w_.tile_bytes;
      const float* of_expert = bias != nullptr ? bias + expert * w_.rows : nullptr;
      part(tiles, of_expert, begin, end, r.begin[h], r.begin[h + 1], y);
    });
  }
};

class BlockMoeExperts {
 public:
  static constexpr const char* kName = "BlockMoeExperts";
  static constexpr ort::Input kInputs[] = {{ort::kFloat}, {ort::kInt32}, {ort::kFloat},      {ort::kUInt8},
                                           {ort::kUInt8}, {ort::kFloat, true}, {ort::kFloat, true}};

  explicit BlockMoeExperts(const ort::Attributes& attributes)
      : experts_(attributes.integer("experts")),
        steps_(attributes),
        up_(attributes, "up_"),
        down_(attributes, "down_") {}

  void compute(ort::Context& c) {
    const auto up = c.input<const uint8_t>(3), down = c.input<const uint8_t>(4);
    const auto up_bias = c.input<const float>(5), down_bias = c.input<const float>(6);
    if (c.error() != nullptr) return;
    Linears linears{up_, down_, up.data, down.data, up_bias.data, down_bias.data};
    steps_.compute(c, linears, experts_, up_.rows());
  }

 private:
  struct Linears {
    BlockExpertLinear &up_, &down_;
    const uint8_t *up_weight, *down_weight;
    const float *up_bias, *down_bias;

    void up(ort::Context& c, const Routing& r, const float* const* x, float* y) {
      up_.product(c, r, x, up_weight, up_bias, y);
    }
    void down(ort::Context& c, const Routing& r, const float* const* x, float* y) {
      down_.product(c, r, x, down_weight, down_bias, y);
    }
  };

  int64_t experts_;
  ExpertSteps steps_;
  BlockExpertLinear up_, down_;
};
