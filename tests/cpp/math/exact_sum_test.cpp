#include "zc/math/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "zc/base/error.h"

namespace zc::math {
namespace {

__extension__ using Int128 = __int128;

constexpr double kMax = std::numeric_limits<double>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLeastSubnormal = std::numeric_limits<double>::denorm_min();
constexpr double kLeastNormal = std::numeric_limits<double>::min();

ExactSum sum_of(const std::vector<double>& terms) {
  ExactSum sum;
  for (double term : terms) sum.add(term);
  return sum;
}

double total(const std::vector<double>& terms) { return sum_of(terms).to_double(); }

// Finite doubles with all exponents and signs.
std::vector<double> wild_terms(int count, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<double> terms;
  while (static_cast<int>(terms.size()) < count) {
    const double term = std::bit_cast<double>(random());
    if (std::isfinite(term)) terms.push_back(term);
  }
  return terms;
}

TEST(ExactSum, EmptyIsPositiveZero) {
  EXPECT_EQ(std::bit_cast<std::uint64_t>(ExactSum().to_double()), 0u);
  EXPECT_EQ(std::bit_cast<std::uint64_t>(total({-0.0, 1.5, -1.5})), 0u);
}

TEST(ExactSum, OneTermComesBackUnchanged) {
  std::vector<double> terms = wild_terms(20'000, 1);
  terms.insert(terms.end(), {kMax, -kMax, kLeastSubnormal, -kLeastSubnormal, kLeastNormal, -kLeastNormal,
                             kLeastNormal - kLeastSubnormal, 1.0, -1.0, 0x1p-1022, 0x1p-1021, 0x1p1023});
  for (double term : terms) ASSERT_EQ(total({term}), term) << std::hexfloat << term;
}

TEST(ExactSum, RoundsToNearestEven) {
  EXPECT_EQ(total({1.0, 0x1p-53}), 1.0);                             // a tie, 1 is even
  EXPECT_EQ(total({1.0 + 0x1p-52, 0x1p-53}), 1.0 + 0x1p-51);         // a tie, up to even
  EXPECT_EQ(total({1.0, 0x1p-53, kLeastSubnormal}), 1.0 + 0x1p-52);  // a hair above the tie
  EXPECT_EQ(total({1.0 + 0x1p-52, 0x1p-53, -kLeastSubnormal}), 1.0 + 0x1p-52);
  EXPECT_EQ(total({-1.0, -0x1p-53}), -1.0);
  EXPECT_EQ(total({-1.0, -0x1p-53, -kLeastSubnormal}), -1.0 - 0x1p-52);
  EXPECT_EQ(total({2.0 - 0x1p-52, 0x1p-53}), 2.0);  // the carry moves the exponent
  EXPECT_EQ(total({1.0, -0x1p-54}), 1.0);           // a tie below a power of two
  EXPECT_EQ(total({1.0, -0x1p-54, -kLeastSubnormal}), 1.0 - 0x1p-53);
}

TEST(ExactSum, NothingIsLostToCancellation) {
  EXPECT_EQ(total({1e308, 1.0, -1e308}), 1.0);
  EXPECT_EQ(total({kMax, kLeastSubnormal, -kMax}), kLeastSubnormal);
  EXPECT_EQ(total({-kMax, -kLeastSubnormal, kMax}), -kLeastSubnormal);
  EXPECT_EQ(total({0x1p100, 0x1p40, 1.0, -0x1p100, -0x1p40}), 1.0);
}

TEST(ExactSum, SubnormalsAreExact) {
  EXPECT_EQ(total({kLeastSubnormal, kLeastSubnormal}), 2 * kLeastSubnormal);
  EXPECT_EQ(total({kLeastNormal - kLeastSubnormal, kLeastSubnormal}), kLeastNormal);
  EXPECT_EQ(total({kLeastNormal, -kLeastSubnormal}), kLeastNormal - kLeastSubnormal);
  EXPECT_EQ(total({2 * kLeastNormal, -kLeastSubnormal}), 2 * kLeastNormal - kLeastSubnormal);  // 53 bits
  EXPECT_EQ(total({2 * kLeastNormal, kLeastSubnormal}), 2 * kLeastNormal);                     // a tie with 54
}

TEST(ExactSum, OverflowsLikeOneRoundedAddition) {
  EXPECT_EQ(total({kMax, kMax}), kInfinity);
  EXPECT_EQ(total({-kMax, -kMax}), -kInfinity);
  EXPECT_EQ(total({kMax, kMax, -kMax}), kMax);
  EXPECT_EQ(total({kMax, 0x1p970}), kInfinity);  // half a unit in the last place: a tie, up to even
  EXPECT_EQ(total({kMax, 0x1p970, -kLeastSubnormal}), kMax);
}

// 2^62 times the largest double, by doubling, and all the way back.
TEST(ExactSum, HoldsTheLargestDoubleAnyNumberOfTimes) {
  ExactSum sum = sum_of({kMax, kLeastSubnormal});
  ExactSum negative = sum_of({-kMax});
  for (int i = 0; i < 62; ++i) {
    sum.add(ExactSum(sum));
    negative.add(ExactSum(negative));
  }
  EXPECT_EQ(sum.to_double(), kInfinity);
  EXPECT_EQ(negative.to_double(), -kInfinity);
  sum.add(negative);
  EXPECT_EQ(sum.to_double(), std::ldexp(kLeastSubnormal, 62));
}

TEST(ExactSum, MatchesIntegerArithmetic) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 2'000; ++round) {
    ExactSum sum;
    Int128 expected = 0;
    for (int i = 0; i < 20; ++i) {
      const auto integer = static_cast<std::int64_t>(random()) >> (11 + random() % 50);  // exact in a double
      const int up = static_cast<int>(random() % 60);
      sum.add(std::ldexp(static_cast<double>(integer), up - 40));
      expected += static_cast<Int128>(integer) << up;
    }
    ASSERT_EQ(sum.to_double(), std::ldexp(static_cast<double>(expected), -40));
  }
}

TEST(ExactSum, OrderDoesNotMatter) {
  std::vector<double> terms = wild_terms(3'000, 3);
  ExactSum first = sum_of(terms);
  first.normalize();
  std::mt19937 random(4);
  for (int i = 0; i < 20; ++i) {
    std::shuffle(terms.begin(), terms.end(), random);
    ExactSum sum = sum_of(terms);
    EXPECT_EQ(sum.to_double(), first.to_double());  // before carries are propagated, too
    sum.normalize();
    ASSERT_EQ(sum.limbs(), first.limbs());
  }
}

// As ranks do it: each sums its part, normalizes, and limbs are added as integers.
TEST(ExactSum, SplitsDoNotMatter) {
  const std::vector<double> terms = wild_terms(1'000, 5);
  const double expected = total(terms);
  for (std::size_t ranks : {1u, 2u, 3u, 7u, 1'000u}) {
    std::vector<ExactSum> parts(ranks);
    for (std::size_t i = 0; i < terms.size(); ++i) parts[i * 31 % ranks].add(terms[i]);
    ExactSum by_limbs, by_add;
    for (ExactSum& part : parts) {
      by_add.add(part);
      part.normalize();
      for (int i = 0; i < ExactSum::kNumLimbs; ++i) {
        by_limbs.limbs()[static_cast<std::size_t>(i)] += part.limbs()[static_cast<std::size_t>(i)];
      }
    }
    EXPECT_EQ(by_limbs.to_double(), expected);
    EXPECT_EQ(by_add.to_double(), expected);
    by_limbs.normalize();
    EXPECT_EQ(by_limbs.to_double(), expected);
  }
}

TEST(ExactSum, NormalizedLimbsHold32Bits) {
  ExactSum sum = sum_of(wild_terms(500, 6));
  sum.normalize();
  for (std::size_t i = 0; i + 1 < sum.limbs().size(); ++i) {
    EXPECT_GE(sum.limbs()[i], 0);
    EXPECT_LT(sum.limbs()[i], std::int64_t{1} << 32);
  }
}

TEST(ExactSum, RefusesWhatIsNotFinite) {
  for (double value : {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    ExactSum sum;
    try {
      sum.add(value);
      FAIL() << "no error for " << value;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInternal);
      EXPECT_NE(std::string(error.what()).find("[math] exact sum of a value that is not finite"), std::string::npos);
    }
    EXPECT_EQ(sum.to_double(), 0);
  }
}

}  // namespace
}  // namespace zc::math
