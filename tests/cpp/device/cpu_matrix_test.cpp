#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "device/guarded.h"
#include "zc/base/parallel.h"
#include "zc/device/kernels.h"
#include "zc/math/exact_sum.h"
#include "zc/math/norm.h"

namespace zc::device {
namespace {

struct Matrix {
  std::int64_t rows, columns;
  std::vector<float> values;

  float& at(std::int64_t i, std::int64_t j) { return values[static_cast<std::size_t>(i * columns + j)]; }
};

Matrix random_matrix(std::int64_t rows, std::int64_t columns, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Matrix out{rows, columns, std::vector<float>(static_cast<std::size_t>(rows * columns))};
  for (float& value : out.values) value = normal(random);
  return out;
}

Matrix transposed(Matrix in) {
  Matrix out{in.columns, in.rows, std::vector<float>(in.values.size())};
  for (std::int64_t i = 0; i < in.rows; ++i) {
    for (std::int64_t j = 0; j < in.columns; ++j) out.at(j, i) = in.at(i, j);
  }
  return out;
}

// In ascending order of the inner index.
Matrix product(Matrix a, Matrix b) {
  Matrix out{a.rows, b.columns, std::vector<float>(static_cast<std::size_t>(a.rows * b.columns), 0)};
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < b.columns; ++j) {
      for (std::int64_t k = 0; k < a.columns; ++k) out.at(i, j) = out.at(i, j) + a.at(i, k) * b.at(k, j);
    }
  }
  return out;
}

Matrix reference(Matrix x, int iterations) {
  math::ExactSum sum;
  const auto numel = static_cast<std::int64_t>(x.values.size());
  for (std::int64_t i = 0; i < numel; i += math::kBlockNumel) {
    sum.add(math::square_sum_block(x.values.data() + i, std::min(math::kBlockNumel, numel - i)));
  }
  sum.normalize();
  for (float& value : x.values) value *= static_cast<float>(1 / (std::sqrt(sum.to_double()) + 1e-7));
  const bool tall = x.rows > x.columns;
  if (tall) x = transposed(x);
  for (int n = 0; n < iterations; ++n) {
    const Matrix gram = product(x, transposed(x));
    Matrix polynomial = product(gram, gram);
    for (std::size_t i = 0; i < gram.values.size(); ++i) {
      polynomial.values[i] = -4.7750f * gram.values[i] + 2.0315f * polynomial.values[i];
    }
    const Matrix change = product(polynomial, x);
    for (std::size_t i = 0; i < x.values.size(); ++i) x.values[i] = 3.4445f * x.values[i] + change.values[i];
  }
  return tall ? transposed(x) : x;
}

std::vector<float> orthogonalized(const Matrix& matrix, int iterations) {
  Guarded<float> values(matrix.values.size(), 0);
  std::copy(matrix.values.begin(), matrix.values.end(), values.data());
  Guarded<float> workspace(static_cast<std::size_t>(orthogonalize_workspace(matrix.rows, matrix.columns)), 0);
  cpu_kernels().orthogonalize(values.data(), matrix.rows, matrix.columns, iterations, workspace.data(), {});
  EXPECT_TRUE(values.intact());
  EXPECT_TRUE(workspace.intact());
  return values.values();
}

// Around the sizes of strips (6, 16), of tiles (96) and of what is packed at a time (256).
TEST(CpuOrthogonalize, HasTheBitsOfPlainLoops) {
  const std::pair<std::int64_t, std::int64_t> shapes[] = {{1, 1},  {1, 5},   {7, 1},    {5, 17},   {16, 16},
                                                          {6, 96}, {97, 95}, {95, 300}, {193, 20}, {100, 513}};
  for (const auto& [rows, columns] : shapes) {
    for (int iterations : {0, 1, 3}) {
      const Matrix matrix = random_matrix(rows, columns);
      expect_same_bits(orthogonalized(matrix, iterations), reference(matrix, iterations).values, "matrix");
    }
  }
}

TEST(CpuOrthogonalize, SingularValuesComeOutAroundOne) {
  Matrix x = random_matrix(40, 90);
  x.values = orthogonalized(x, 5);
  Matrix gram = product(x, transposed(x));
  double trace = 0;  // the sum of their squares
  for (std::int64_t i = 0; i < 40; ++i) trace += static_cast<double>(gram.at(i, i));
  EXPECT_GT(trace / 40, 0.7 * 0.7);
  EXPECT_LT(trace / 40, 1.2 * 1.2);
}

TEST(CpuOrthogonalize, NothingStaysNothing) {
  const Matrix zero{3, 4, std::vector<float>(12, 0)};
  EXPECT_EQ(orthogonalized(zero, 5), zero.values);
}

TEST(CpuOrthogonalize, ThreadsDoNotMatter) {
  const Matrix matrix = random_matrix(250, 310);
  const std::vector<float> one = orthogonalized(matrix, 5);
  set_num_threads(4);
  const std::vector<float> several = orthogonalized(matrix, 5);
  set_num_threads(1);
  expect_same_bits(several, one, "matrix");
}

}  // namespace
}  // namespace zc::device
