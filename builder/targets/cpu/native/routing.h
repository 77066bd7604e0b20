// Which tokens each expert computes: the pairs (token, choice) of a step, grouped by expert.
//
//   ids [T, K]          pair p = t·K + k is expert ids[p]
//   hit [hits]          the experts that some token chose, ascending
//   begin [hits + 1]    pairs of hit[h] are order[begin[h]] .. order[begin[h + 1] - 1], ascending
//   place [pairs]       order[place[p]] = p
#pragma once
#include "op.h"

class Routing {
 public:
  int64_t pairs = 0, hits = 0;
  const int64_t *order = nullptr, *place = nullptr, *hit = nullptr, *begin = nullptr;

  // False if an id is not in 0 .. experts - 1.
  bool group(const int32_t* ids, int64_t count, int64_t experts) {
    pairs = count;
    int64_t* lists = lists_.at_least(2 * count + 3 * experts + 1);
    int64_t *ordered = lists, *places = ordered + count, *next = places + count, *found = next + experts;
    int64_t* bounds = found + experts;
    for (int64_t e = 0; e < experts; ++e) next[e] = 0;
    for (int64_t p = 0; p < count; ++p) {
      if (ids[p] < 0 || ids[p] >= experts) return false;
      ++next[ids[p]];
    }
    hits = 0;
    int64_t total = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t of_expert = next[e];
      next[e] = total;
      if (of_expert == 0) continue;
      found[hits] = e;
      bounds[hits++] = total;
      total += of_expert;
    }
    bounds[hits] = total;
    for (int64_t p = 0; p < count; ++p) {
      places[p] = next[ids[p]]++;
      ordered[places[p]] = p;
    }
    order = ordered, place = places, hit = found, begin = bounds;
    return true;
  }

 private:
  ort::Buffer<int64_t> lists_;
};
