#include "zc/device/cpu_loops.h"
#include "zc/device/target_clones.h"
#include "zc/math/norm.h"

namespace zc::device::cpu {
namespace {

constexpr std::int64_t kBlock = math::kBlockNumel;

// math::square_sum_block of a full block. Lanes start with their first square, which has the same bits as adding it to
// zero and keeps them in registers from the start.
ZC_ALWAYS_INLINE double full_block(const float* in) {
  double lanes[math::kNormLanes];
  for (int lane = 0; lane < math::kNormLanes; ++lane) {
    const double value = in[lane];
    lanes[lane] = value * value;
  }
  for (std::int64_t i = math::kNormLanes; i < kBlock; i += math::kNormLanes) {
    math::add_squares(in + i, math::kNormLanes, lanes);
  }
  return math::add_lanes(lanes);
}

}  // namespace

ZC_TARGET_CLONES void square_sum_blocks(const float* in, std::int64_t numel, double* out) {
  for (; numel >= kBlock; numel -= kBlock, in += kBlock, ++out) *out = full_block(in);
  if (numel > 0) *out = math::square_sum_block(in, numel);
}

}  // namespace zc::device::cpu
