#include "zc/engine/reductions.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "zc/math/exact_sum.h"

namespace zc::engine {

double exact_mean(comm::Communicator& comm, double value, bool counts) {
  constexpr std::size_t kLimbs = math::ExactSum::kNumLimbs;
  math::ExactSum sum;
  if (counts && std::isfinite(value)) sum.add(value);
  sum.normalize();
  std::array<std::int64_t, kLimbs + 2> message{};
  std::copy(sum.limbs().begin(), sum.limbs().end(), message.begin());
  message[kLimbs] = counts;
  message[kLimbs + 1] = counts && !std::isfinite(value);
  comm.all_reduce(message, comm::ReduceOp::kSum, "mean over ranks").wait();
  if (message[kLimbs] == 0 || message[kLimbs + 1] != 0) return std::numeric_limits<double>::quiet_NaN();
  std::copy_n(message.begin(), kLimbs, sum.limbs().begin());
  sum.normalize();
  return sum.to_double() / static_cast<double>(message[kLimbs]);
}

}  // namespace zc::engine
