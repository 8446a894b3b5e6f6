#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <vector>

#include "zc/base/parallel.h"
#include "zc/device/cpu_loops.h"
#include "zc/device/target_clones.h"
#include "zc/math/exact_sum.h"
#include "zc/math/norm.h"

// Products of matrices whose bits depend on nothing but their factors: each element of a product is the sum over k,
// in ascending order from +0, of products rounded to fp32. Vectors run over columns, threads over tiles.

namespace zc::device::cpu {
namespace {

constexpr std::int64_t kTile = 96;    // rows and columns of a tile of the product: its sums stay in the second cache
constexpr std::int64_t kDepth = 256;  // of the inner dimension that are packed at a time
constexpr std::int64_t kRows = 6;     // of sums kept in registers: with kColumns, 12 of AVX2's 16
constexpr std::int64_t kColumns = 16;

// A matrix or its transpose, as strides.
struct View {
  const float* data;
  std::int64_t row_stride;
  std::int64_t column_stride;
};

// out = other_factor * other + sum_factor * (left right). other: as out, or null. symmetric: of a square out, so that
// tiles above the diagonal are copied from below.
struct Product {
  View left;
  View right;
  std::int64_t rows, columns, depth;
  float sum_factor = 1;
  const float* other = nullptr;
  float other_factor = 0;
  bool symmetric = false;
  float* out;
};

typedef float Vector __attribute__((vector_size(kColumns * sizeof(float))));

// Strips of kRows rows, each depth * kRows elements with the rows of one column together; rows that are not there are
// 0.
ZC_ALWAYS_INLINE void pack_rows(const View& from, std::int64_t row, std::int64_t rows, std::int64_t k,
                                std::int64_t depth, float* __restrict__ to) {
  for (std::int64_t strip = 0; strip < rows; strip += kRows) {
    for (std::int64_t d = 0; d < depth; ++d) {
      for (std::int64_t r = 0; r < kRows; ++r) {
        const float* at = from.data + (row + strip + r) * from.row_stride + (k + d) * from.column_stride;
        *to++ = strip + r < rows ? *at : 0.0f;
      }
    }
  }
}

// The same of kColumns columns of the right factor.
ZC_ALWAYS_INLINE void pack_columns(const View& from, std::int64_t column, std::int64_t columns, std::int64_t k,
                                   std::int64_t depth, float* __restrict__ to) {
  for (std::int64_t strip = 0; strip < columns; strip += kColumns) {
    for (std::int64_t d = 0; d < depth; ++d) {
      const float* at = from.data + (k + d) * from.row_stride + (column + strip) * from.column_stride;
      for (std::int64_t c = 0; c < kColumns; ++c) *to++ = strip + c < columns ? at[c * from.column_stride] : 0.0f;
    }
  }
}

// Adds depth products to kRows x kColumns sums, which lie kTile apart.
ZC_ALWAYS_INLINE void add_products(const float* __restrict__ left, const float* __restrict__ right, std::int64_t depth,
                                   float* __restrict__ sums) {
  Vector acc[kRows];
  for (int r = 0; r < kRows; ++r) __builtin_memcpy(&acc[r], sums + r * kTile, sizeof(Vector));
  for (std::int64_t d = 0; d < depth; ++d) {
    Vector row;
    __builtin_memcpy(&row, right + d * kColumns, sizeof(Vector));
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) acc[r] = acc[r] + left[d * kRows + r] * row;
  }
  for (int r = 0; r < kRows; ++r) __builtin_memcpy(sums + r * kTile, &acc[r], sizeof(Vector));
}

// What a thread works in.
struct Scratch {
  alignas(64) std::array<float, kTile * kDepth> left;
  alignas(64) std::array<float, kTile * kDepth> right;
  alignas(64) std::array<float, kTile * kTile> sums;
};

ZC_TARGET_CLONES void product_tile(const Product& p, std::int64_t row, std::int64_t column, Scratch& s) {
  const std::int64_t rows = std::min(kTile, p.rows - row), columns = std::min(kTile, p.columns - column);
  s.sums.fill(0);
  for (std::int64_t k = 0; k < p.depth; k += kDepth) {
    const std::int64_t depth = std::min(kDepth, p.depth - k);
    pack_rows(p.left, row, rows, k, depth, s.left.data());
    pack_columns(p.right, column, columns, k, depth, s.right.data());
    for (std::int64_t j = 0; j < columns; j += kColumns) {
      for (std::int64_t i = 0; i < rows; i += kRows) {
        add_products(s.left.data() + i * depth, s.right.data() + j * depth, depth, s.sums.data() + i * kTile + j);
      }
    }
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t at = (row + i) * p.columns + column;
    for (std::int64_t j = 0; j < columns; ++j) {
      const float scaled = p.sum_factor * s.sums[static_cast<std::size_t>(i * kTile + j)];
      p.out[at + j] = p.other == nullptr ? scaled : p.other_factor * p.other[at + j] + scaled;
    }
  }
}

void multiply(const Product& p) {
  const std::int64_t tile_rows = (p.rows + kTile - 1) / kTile, tile_columns = (p.columns + kTile - 1) / kTile;
  parallel_for(tile_rows * tile_columns, 1, [&](std::int64_t begin, std::int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<Scratch>();
    for (std::int64_t tile = begin; tile < end; ++tile) {
      const std::int64_t row = tile / tile_columns * kTile, column = tile % tile_columns * kTile;
      if (p.symmetric && column > row) continue;
      product_tile(p, row, column, *scratch);
      if (!p.symmetric || column == row) continue;
      for (std::int64_t i = row; i < std::min(row + kTile, p.rows); ++i) {
        for (std::int64_t j = column; j < column + kTile; ++j) p.out[j * p.columns + i] = p.out[i * p.columns + j];
      }
    }
  });
}

// out = in^T. in: rows x columns.
void transpose(const float* in, std::int64_t rows, std::int64_t columns, float* out) {
  constexpr std::int64_t kBlock = 32;
  parallel_for((rows + kBlock - 1) / kBlock, 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin * kBlock; i < std::min(end * kBlock, rows); i += kBlock) {
      for (std::int64_t j = 0; j < columns; j += kBlock) {
        for (std::int64_t c = j; c < std::min(j + kBlock, columns); ++c) {
          for (std::int64_t r = i; r < std::min(i + kBlock, rows); ++r) out[c * rows + r] = in[r * columns + c];
        }
      }
    }
  });
}

}  // namespace

void orthogonalize(float* matrix, std::int64_t rows, std::int64_t columns, int iterations, float* workspace) {
  const std::int64_t numel = rows * columns;
  std::vector<double> blocks(static_cast<std::size_t>((numel + math::kBlockNumel - 1) / math::kBlockNumel));
  square_sum_blocks(matrix, DType::kF32, numel, blocks.data());
  math::ExactSum square_sum;
  for (double block : blocks) square_sum.add(block);
  square_sum.normalize();
  const auto scale = static_cast<float>(1 / (std::sqrt(square_sum.to_double()) + math::kNormEps));

  const bool tall = rows > columns;
  const std::int64_t r = std::min(rows, columns), c = std::max(rows, columns);
  float* x = workspace;
  float* next = x + numel;
  float* gram = next + numel;
  float* polynomial = gram + r * r;
  if (tall) {
    transpose(matrix, rows, columns, x);
  } else {
    std::copy(matrix, matrix + numel, x);
  }
  for (std::int64_t i = 0; i < numel; ++i) x[i] *= scale;
  for (int iteration = 0; iteration < iterations; ++iteration) {
    multiply(
        {.left = {x, c, 1}, .right = {x, 1, c}, .rows = r, .columns = r, .depth = c, .symmetric = true, .out = gram});
    multiply({.left = {gram, r, 1},
              .right = {gram, 1, r},
              .rows = r,
              .columns = r,
              .depth = r,
              .sum_factor = math::kNewtonSchulz[2],
              .other = gram,
              .other_factor = math::kNewtonSchulz[1],
              .symmetric = true,
              .out = polynomial});
    multiply({.left = {polynomial, r, 1},
              .right = {x, c, 1},
              .rows = r,
              .columns = c,
              .depth = r,
              .other = x,
              .other_factor = math::kNewtonSchulz[0],
              .out = next});
    std::swap(x, next);
  }
  if (tall) {
    transpose(x, columns, rows, matrix);
  } else {
    std::copy(x, x + numel, matrix);
  }
}

}  // namespace zc::device::cpu
