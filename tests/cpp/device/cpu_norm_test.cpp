#include <gtest/gtest.h>

#include <limits>

#include "device/guarded.h"
#include "zc/base/parallel.h"
#include "zc/math/cast.h"
#include "zc/math/norm.h"

namespace zc::device {
namespace {

template <class T>
BufferView view(std::vector<T>& values) {
  return {values.data(), static_cast<std::int64_t>(values.size()), kDType<T>, {}};
}

math::ExactSum square_sum(BufferView in, const std::vector<Piece>& pieces, std::vector<std::int64_t>& nonfinite) {
  math::ExactSum sum;
  cpu_kernels().square_sum(in, pieces, &sum, nonfinite.data(), {});
  sum.normalize();
  return sum;
}

TEST(CpuSquareSum, AddsBlocksFromEachPiecesStart) {
  for (std::size_t numel : sizes()) {
    Guarded<float> in(numel + 3);
    std::fill_n(in.data(), 3, 1e30f);  // outside the piece
    fill_random(in.data() + 3, numel, static_cast<unsigned>(numel));
    math::ExactSum expected;
    for (std::size_t begin = 0; begin < numel; begin += 1024) {
      const auto count = static_cast<std::int64_t>(std::min<std::size_t>(1024, numel - begin));
      expected.add(math::square_sum_block(in.data() + 3 + begin, count));
    }
    expected.normalize();
    std::vector<std::int64_t> nonfinite(1, 0);
    const math::ExactSum sum = square_sum(in.view(DType::kF32), {{3, static_cast<std::int64_t>(numel), 0}}, nonfinite);
    EXPECT_EQ(sum.limbs(), expected.limbs()) << numel;
    EXPECT_EQ(nonfinite[0], 0);
    EXPECT_TRUE(in.intact());
  }
}

TEST(CpuSquareSum, CutsAtBlocksAndTheirOrderDoNotMatter) {
  std::vector<float> in(10'007);
  fill_random(in.data(), in.size(), 1);
  std::vector<std::int64_t> nonfinite(2, 0);
  const math::ExactSum whole = square_sum(view(in), {{0, 10'007, 1}}, nonfinite);
  const math::ExactSum cut = square_sum(view(in), {{5120, 4887, 1}, {1024, 4096, 1}, {0, 1024, 1}}, nonfinite);
  EXPECT_EQ(cut.limbs(), whole.limbs());
}

// The limbs of the same values in fp32.
template <class T>
void check_converted() {
  for (std::size_t numel : sizes()) {
    std::vector<float> values(numel + 3);
    fill_random(values.data(), values.size(), static_cast<unsigned>(numel));
    Guarded<T> in(numel + 3, numel % 2);
    for (std::size_t i = 0; i < values.size(); ++i) {
      in[i] = math::from_float<T>(values[i]);
      values[i] = to_float(in[i]);
    }
    const std::vector<Piece> pieces{{3, static_cast<std::int64_t>(numel), 0}};
    std::vector<std::int64_t> nonfinite(1, 0);
    EXPECT_EQ(square_sum(in.view(kDType<T>), pieces, nonfinite).limbs(),
              square_sum(view(values), pieces, nonfinite).limbs())
        << numel;
    EXPECT_EQ(nonfinite[0], 0);
    EXPECT_TRUE(in.intact());
  }
  // More blocks than are summed at a time, and one that is not finite.
  std::vector<T> in(200'000, math::from_float<T>(2));
  std::vector<std::int64_t> nonfinite{0, 0};
  EXPECT_EQ(square_sum(view(in), {{0, 200'000, 1}}, nonfinite).to_double(), 800'000);
  in[150'000] = math::from_float<T>(std::numeric_limits<float>::infinity());
  EXPECT_EQ(square_sum(view(in), {{0, 200'000, 1}}, nonfinite).to_double(), 800'000 - 4 * 1024);
  EXPECT_EQ(nonfinite, (std::vector<std::int64_t>{0, 1}));
}

TEST(CpuSquareSum, F16IsTakenAsFp32) { check_converted<F16>(); }
TEST(CpuSquareSum, BF16IsTakenAsFp32) { check_converted<BF16>(); }

TEST(CpuSquareSum, ThreadsDoNotMatter) {
  std::vector<float> in(300'000);
  fill_random(in.data(), in.size(), 1);
  in[150'000] = std::numeric_limits<float>::infinity();
  const std::vector<Piece> pieces{{0, 64, 0}, {64, 1, 1}, {1024, 200'001, 2}, {202'752, 97'000, 3}};
  std::vector<std::int64_t> alone(4, 0), several(4, 0);
  const math::ExactSum expected = square_sum(view(in), pieces, alone);
  set_num_threads(2);
  const math::ExactSum sum = square_sum(view(in), pieces, several);
  set_num_threads(1);
  EXPECT_EQ(sum.limbs(), expected.limbs());
  EXPECT_EQ(several, (std::vector<std::int64_t>{0, 0, 1, 0}));
  EXPECT_EQ(alone, several);
}

TEST(CpuSquareSum, AddsToTheSum) {
  std::vector<float> in(16, 2.0f);
  std::vector<std::int64_t> nonfinite(1, 0);
  math::ExactSum sum;
  sum.add(0.5);
  cpu_kernels().square_sum(view(in), std::vector<Piece>{{0, 16, 0}}, &sum, nonfinite.data(), {});
  EXPECT_EQ(sum.to_double(), 64.5);
}

TEST(CpuSquareSum, FlagsTheSlotAndLeavesTheBlockOut) {
  for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                    std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> in(4096, 1.0f);
    in[1500] = bad;
    std::vector<std::int64_t> nonfinite{0, 0, 1};
    const math::ExactSum sum = square_sum(view(in), {{0, 1024, 0}, {1024, 3072, 1}}, nonfinite);
    EXPECT_EQ(sum.to_double(), 3072);                            // without the block [1024, 2048)
    EXPECT_EQ(nonfinite, (std::vector<std::int64_t>{0, 1, 1}));  // flags are never cleared
  }
}

}  // namespace
}  // namespace zc::device
