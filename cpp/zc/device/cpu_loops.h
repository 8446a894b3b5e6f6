// The CPU kernels' loops over plain arrays: free functions, one clone for each instruction set level.
// Arrays do not overlap unless a comment says so; numel may be 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zc/base/dtype.h"
#include "zc/device/kernels.h"
#include "zc/math/optimizer.h"

namespace zc::device::cpu {

// in and out: fp32, fp16 or bf16; dtypes differ.
void cast(const void* in, DType in_dtype, void* out, DType out_dtype, std::int64_t numel);

// acc[i] = ((acc[i] + in[0][i]) + in[1][i]) + ..., each sum math::add_element; in: num_in arrays of fp32, fp16 or bf16;
// acc: any of these. first: acc counts as +0, whatever it holds.
void fold(const void* const* in, std::size_t num_in, DType dtype, void* acc, DType acc_dtype, std::int64_t numel,
          bool first);

// out[b] = math::square_sum_block of the b-th block of in: fp32, fp16 or bf16.
void square_sum_blocks(const void* in, DType dtype, std::int64_t numel, double* out);

// One piece of an optimizer step: the buffers' pointers are at the piece's first element, grad is fp32.
// Multiplies grad by factor, updates param and the states, writes the model copy.
void adam(const math::AdamScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel);
void sgd(const math::SgdScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel);
void lion(const math::LionScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel);
void adagrad(const math::AdagradScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel);
void muon_momentum(const math::MuonScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel);
void muon(const math::MuonScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel);

// As Kernels::orthogonalize.
void orthogonalize(float* matrix, std::int64_t rows, std::int64_t columns, int iterations, float* workspace);

}  // namespace zc::device::cpu
