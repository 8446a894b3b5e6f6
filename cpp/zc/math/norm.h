// The block sum of squares: the one part of the gradient norm that has an order, and it is fixed here.
//
// A norm block is at most 1024 consecutive elements of one parameter, counted from its start, so no bucket cut,
// stage or number of ranks changes what it holds. Block sums go into an ExactSum, which has no order.
#pragma once

#include <cstdint>

#include "zc/base/half.h"

namespace zc::math {

inline constexpr std::int64_t kBlockNumel = 1024;
inline constexpr int kNormLanes = 16;

// Adds the square of in[l] to lane l, for numel <= kNormLanes elements of fp32, fp16 or bf16. Squares of these are
// exact in fp64, so a fused multiply-add gives the same bits.
template <class In>
ZC_HOST_DEVICE inline void add_squares(const In* in, int numel, double* lanes) {
  for (int lane = 0; lane < numel; ++lane) {
    const double value = to_float(in[lane]);
    lanes[lane] += value * value;
  }
}

// Adds lanes by halves: l + l+8, then + 4, + 2, + 1. Overwrites them.
ZC_HOST_DEVICE inline double add_lanes(double* lanes) {
  for (int lane = 0; lane < 8; ++lane) lanes[lane] += lanes[lane + 8];
  for (int lane = 0; lane < 4; ++lane) lanes[lane] += lanes[lane + 4];
  for (int lane = 0; lane < 2; ++lane) lanes[lane] += lanes[lane + 2];
  return lanes[0] + lanes[1];
}

// Sum of the squares of in[0, numel), numel <= kBlockNumel, in fp64: lane l adds elements l, l + 16, ... in order, then
// lanes are added by halves. Finite if and only if all elements are.
template <class In>
ZC_HOST_DEVICE inline double square_sum_block(const In* in, std::int64_t numel) {
  double lanes[kNormLanes] = {};
  std::int64_t i = 0;
  for (; i + kNormLanes <= numel; i += kNormLanes) add_squares(in + i, kNormLanes, lanes);
  add_squares(in + i, static_cast<int>(numel - i), lanes);
  return add_lanes(lanes);
}

}  // namespace zc::math
