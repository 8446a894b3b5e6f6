// An exact, order-free sum of doubles: a fixed-point integer wide enough for any finite double.
//
// Integer addition is associative, so the sum has the same bits whatever the order, the number of ranks, or how
// the terms were split; ranks combine sums by adding limbs as int64 (any integer all-reduce does it).
#pragma once

#include <array>
#include <cstdint>

namespace zc::math {

class ExactSum {
 public:
  // Limbs hold 32 bits of payload each, so that carries can wait: 2^31 terms or ranks fit before normalize(). The
  // largest double takes 66 limbs; the others leave room for 2^100 such terms and the sign.
  static constexpr int kNumLimbs = 70;

  // value must be finite, else kInternal. Normalizes by itself when 2^31 terms have come in.
  void add(double value);
  void add(const ExactSum& other);

  // Propagates carries. Do it before limbs travel to other ranks, and after writing limbs that came from them.
  void normalize();

  // The sum rounded once, to nearest even.
  double to_double() const;

  std::array<std::int64_t, kNumLimbs>& limbs() { return limbs_; }
  const std::array<std::int64_t, kNumLimbs>& limbs() const { return limbs_; }

 private:
  std::array<std::int64_t, kNumLimbs> limbs_{};  // limb i weighs 2^(32 i - 1074)
  std::int64_t pending_ = 0;                     // terms added since the last normalize()
};

}  // namespace zc::math
