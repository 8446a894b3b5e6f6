#include "zc/base/error.h"
#include "zc/device/cpu_loops.h"
#include "zc/device/target_clones.h"
#include "zc/math/norm.h"

namespace zc::device::cpu {
namespace {

constexpr std::int64_t kBlock = math::kBlockNumel;

// math::square_sum_block of a full block. Lanes start with their first square, which has the same bits as adding it to
// zero and keeps them in registers from the start.
template <class In>
ZC_ALWAYS_INLINE double full_block(const In* in) {
  double lanes[math::kNormLanes];
  for (int lane = 0; lane < math::kNormLanes; ++lane) {
    const double value = to_float(in[lane]);
    lanes[lane] = value * value;
  }
  for (std::int64_t i = math::kNormLanes; i < kBlock; i += math::kNormLanes) {
    math::add_squares(in + i, math::kNormLanes, lanes);
  }
  return math::add_lanes(lanes);
}

template <class In>
ZC_ALWAYS_INLINE void blocks_loop(const In* in, std::int64_t numel, double* out) {
  for (; numel >= kBlock; numel -= kBlock, in += kBlock, ++out) *out = full_block(in);
  if (numel > 0) *out = math::square_sum_block(in, numel);
}

// clang-format off
ZC_TARGET_CLONES void blocks_of(const float* in, std::int64_t numel, double* out) { blocks_loop(in, numel, out); }
ZC_TARGET_CLONES void blocks_of(const F16* in, std::int64_t numel, double* out) { blocks_loop(in, numel, out); }
ZC_TARGET_CLONES void blocks_of(const BF16* in, std::int64_t numel, double* out) { blocks_loop(in, numel, out); }
// clang-format on

}  // namespace

void square_sum_blocks(const void* in, DType dtype, std::int64_t numel, double* out) {
  switch (dtype) {
    case DType::kF32:
      return blocks_of(static_cast<const float*>(in), numel, out);
    case DType::kF16:
      return blocks_of(static_cast<const F16*>(in), numel, out);
    case DType::kBF16:
      return blocks_of(static_cast<const BF16*>(in), numel, out);
    default:
      fail(ErrorKind::kInternal, "[device] no such norm: got ", name(dtype), ", expected fp32, fp16 or bf16");
  }
}

}  // namespace zc::device::cpu
