#include "zc/math/norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace zc::math {
namespace {

// The documented order, written out: 16 lane sums, then halves.
double by_definition(const std::vector<float>& in) {
  std::vector<double> sums(16, 0.0);
  for (std::size_t i = 0; i < in.size(); ++i) sums[i % 16] += static_cast<double>(in[i]) * static_cast<double>(in[i]);
  for (std::size_t distance : {8u, 4u, 2u, 1u}) {
    for (std::size_t lane = 0; lane < distance; ++lane) sums[lane] = sums[lane] + sums[lane + distance];
  }
  return sums[0];
}

double block(const std::vector<float>& in) { return square_sum_block(in.data(), static_cast<std::int64_t>(in.size())); }

TEST(Norm, ClosedForm) {
  EXPECT_EQ(block({}), 0);
  EXPECT_EQ(block({3}), 9);
  EXPECT_EQ(block({3, -4}), 25);
  EXPECT_EQ(block(std::vector<float>(1024, 0.5f)), 256);
  std::vector<float> ramp;
  for (int i = 1; i <= 1000; ++i) ramp.push_back(static_cast<float>(i));
  EXPECT_EQ(block(ramp), 1000.0 * 1001 * 2001 / 6);
}

TEST(Norm, EverySizeFollowsTheDocumentedOrder) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::size_t numel = 0; numel <= 1024; ++numel) {
    std::vector<float> in(numel);
    for (float& value : in) value = normal(random);
    ASSERT_EQ(block(in), by_definition(in)) << numel;
  }
}

TEST(Norm, ExtremesDoNotOverflowOrVanish) {
  EXPECT_EQ(block(std::vector<float>(1024, 0x1p127f)), 0x1p264);
  EXPECT_EQ(block(std::vector<float>(1024, std::numeric_limits<float>::denorm_min())), 0x1p-288);
  EXPECT_TRUE(std::isfinite(block(std::vector<float>(1024, std::numeric_limits<float>::max()))));
}

TEST(Norm, NotFiniteWhereverItStands) {
  for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                    std::numeric_limits<float>::quiet_NaN()}) {
    for (std::size_t at : {0u, 15u, 16u, 1007u, 1008u, 1018u}) {
      std::vector<float> in(1019, 1.0f);
      in[at] = bad;
      EXPECT_FALSE(std::isfinite(block(in))) << at;
    }
  }
}

}  // namespace
}  // namespace zc::math
