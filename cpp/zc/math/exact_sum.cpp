#include "zc/math/exact_sum.h"

#include <cmath>

#include "zc/base/error.h"

namespace zc::math {
namespace {

constexpr std::int64_t kMaxPending = (std::int64_t{1} << 31) - 1;

}  // namespace

void ExactSum::add(double value) {
  ZC_CHECK(std::isfinite(value), kInternal, "[math] exact sum of a value that is not finite: got ", value,
           ", expected the caller to leave it out");
  const Term term = ExactSum::term(value);
  if (pending_ == kMaxPending) normalize();
  for (int i = 0; i < 3; ++i) limbs_[static_cast<std::size_t>(term.first + i)] += term.parts[i];
  ++pending_;
}

void ExactSum::add(const ExactSum& other) {
  ExactSum term = other;
  term.normalize();
  if (pending_ == kMaxPending) normalize();
  for (int i = 0; i < kNumLimbs; ++i) limbs_[i] += term.limbs_[i];
  ++pending_;
}

void ExactSum::normalize() {
  propagate(limbs_.data());
  pending_ = 0;
}

double ExactSum::to_double() const {
  std::array<std::int64_t, kNumLimbs> limbs = limbs_;
  return round(limbs.data());
}

}  // namespace zc::math
