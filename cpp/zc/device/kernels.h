// What a device must be able to do to memory. Inputs, outputs, scalars, stream, in that order.
//
// Every kernel is element-wise over the functors of zc/math, so a result never depends on how a buffer was
// cut, which instruction set ran, or which device. Views are checked by the callers, once, not here.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "zc/base/buffer_view.h"
#include "zc/math/exact_sum.h"
#include "zc/math/optimizer.h"
#include "zc/math/step_outcome.h"
#include "zc/math/step_scalars.h"

namespace zc::device {

// An ordered queue of work. The CPU has one and runs it at once.
struct Stream {
  void* handle = nullptr;
};

// Consecutive elements of one parameter inside a flat buffer. `slot` is the parameter's index in the arrays
// of per-parameter scalars and flags.
struct Piece {
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  std::int32_t slot = 0;
};

// At most kBlockNumel elements of a piece, counted from its start: a norm block, and what a group of an accelerator's
// threads takes at a time.
struct Chunk {
  std::int64_t offset = 0;
  std::int32_t numel = 0;
  std::int32_t slot = 0;
};

// Pieces as kernels take them; see PieceTable. The CPU needs the list only.
struct Pieces {
  Pieces(std::span<const Piece> list) : list(list) {}  // NOLINT: a list of pieces is pieces
  Pieces(const std::vector<Piece>& list) : list(list) {}
  std::span<const Piece> list;
  const Chunk* chunks = nullptr;  // in device memory
  std::int64_t num_chunks = 0;
};

// A part of a flat buffer and what goes there: `numel` elements of dtype at data, or zeros where that is null.
struct Part {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
};

// The flat buffers an optimizer works on, all of the same length, addressed by Piece::offset.
struct OptimizerBuffers {
  const void* grad = nullptr;  // the accumulator, fp32, fp16 or bf16, whose elements are converted to fp32
  DType grad_dtype = DType::kF32;
  float* param = nullptr;  // fp32 parameter or fp32 master
  // Adam, Lion: exp_avg; Adagrad: sum of squares; SGD: momentum buffer (slots without momentum leave it), or null
  float* state1 = nullptr;
  float* state2 = nullptr;     // Adam: exp_avg_sq
  float* direction = nullptr;  // Muon: what goes into orthogonalize() and comes out of it
  void* model = nullptr;       // where the updated parameter goes, rounded to model_dtype; null: param is the model's
  DType model_dtype = DType::kF32;
};

class Kernels {
 public:
  virtual ~Kernels() = default;

  virtual void zero(BufferView out, Stream stream) = 0;

  // Element conversion between fp32, fp16 and bf16, round to nearest even; equal dtypes copy the bits.
  virtual void cast(BufferView in, BufferView out, Stream stream) = 0;

  // Puts each part into `out`, converted as by cast(). Parts do not overlap.
  virtual void pack(std::span<const Part> parts, BufferView out, Stream stream) = 0;

  // Rounds each part to dtype and folds it into its place in `acc`, as fold() and fold_first() of one source do; where
  // data is null +0 is folded.
  virtual void fold_parts(std::span<const Part> parts, DType dtype, BufferView acc, bool first, Stream stream) = 0;

  // The ordered fold: for each i, acc[i] = ((acc[i] + in[0][i]) + in[1][i]) + ..., each sum made in fp32 and rounded to
  // acc's dtype (math::add_element). in: `in.size()` arrays of acc.numel elements of dtype. Both: fp32, fp16 or bf16.
  virtual void fold(std::span<const void* const> in, DType dtype, BufferView acc, Stream stream) = 0;

  // The same, of one source at least, into an accumulator that counts as +0 whatever it holds: nobody has to zero it.
  virtual void fold_first(std::span<const void* const> in, DType dtype, BufferView acc, Stream stream) = 0;

  // inout[i] *= factor, fp32.
  virtual void scale(BufferView inout, float factor, Stream stream) = 0;

  // Adds the squares of in[piece] to *sum, exactly and free of order over blocks: a block is up to 1024 consecutive
  // elements counted from a piece's start (a piece starts at a multiple of 1024 within its parameter). Within a
  // block: 16 fp64 lanes, lane l sums elements l, l+16, ... in order, then lanes are added pairwise by halves
  // (l + l+8, + 4, + 2, + 1). nonfinite[slot] is set to 1 when a square is inf or NaN, and that block is left out.
  // in: fp32, or fp16 or bf16, whose elements are converted to fp32 first. sum, nonfinite: in device memory.
  virtual void square_sum(BufferView in, const Pieces& pieces, math::ExactSum* sum, std::int64_t* nonfinite,
                          Stream stream) = 0;

  // From the sum of all ranks' square sums to the step's scalars: *outcome, in which the loss scale of this step stands
  // when `rule` says so. sum: not normalized. nonfinite: num_slots counts of ranks; all in device memory.
  virtual void finish_norm(const math::ExactSum* sum, const std::int64_t* nonfinite, std::int64_t num_slots,
                           const math::StepRule& rule, math::StepOutcome* outcome, Stream stream) = 0;

  // One pass: unscale and clip (step->factor), update, cast to the model dtype. scalars, used: one a slot; both, and
  // step, in device memory. Slots with used[slot] == 0 are left as they are; with step->skip nothing is done.
  virtual void adam(const Pieces& pieces, const math::AdamScalars* scalars, const std::uint8_t* used,
                    const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) = 0;
  virtual void sgd(const Pieces& pieces, const math::SgdScalars* scalars, const std::uint8_t* used,
                   const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) = 0;
  virtual void lion(const Pieces& pieces, const math::LionScalars* scalars, const std::uint8_t* used,
                    const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) = 0;
  virtual void adagrad(const Pieces& pieces, const math::AdagradScalars* scalars, const std::uint8_t* used,
                       const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) = 0;

  // Muon's two passes over elements: from the gradient to the momentum (state1) and the direction; and, once that is
  // orthogonalised, from there to the parameter and the model's copy.
  virtual void muon_momentum(const Pieces& pieces, const math::MuonScalars* scalars, const std::uint8_t* used,
                             const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) = 0;
  virtual void muon(const Pieces& pieces, const math::MuonScalars* scalars, const std::uint8_t* used,
                    const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) = 0;

  // Newton-Schulz iterations on a whole fp32 matrix, in place (math::kNewtonSchulz). Each element of a product is
  // summed in ascending order of the inner index, so that the bits depend on the matrix alone. workspace:
  // orthogonalize_workspace() elements, aligned to 8 bytes.
  virtual void orthogonalize(float* matrix, std::int64_t rows, std::int64_t columns, int iterations, float* workspace,
                             Stream stream) = 0;
};

inline std::int64_t orthogonalize_workspace(std::int64_t rows, std::int64_t columns) {
  const std::int64_t least = rows < columns ? rows : columns;
  constexpr std::int64_t kSum = 2 * (math::ExactSum::kNumLimbs + 2);  // for devices that sum squares in their memory
  return 2 * (rows * columns + least * least) + kSum;
}

// The fold, into an accumulator that holds something or, `first`, one that counts as +0.
inline void fold(Kernels& kernels, std::span<const void* const> in, DType dtype, BufferView acc, bool first,
                 Stream stream) {
  if (first) {
    kernels.fold_first(in, dtype, acc, stream);
  } else {
    kernels.fold(in, dtype, acc, stream);
  }
}

// The CPU implementation; one instance a process.
Kernels& cpu_kernels();

}  // namespace zc::device
