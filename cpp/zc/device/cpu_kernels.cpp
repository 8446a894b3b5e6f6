#include <algorithm>
#include <cmath>
#include <cstring>

#include "zc/base/error.h"
#include "zc/device/cpu_loops.h"
#include "zc/device/kernels.h"
#include "zc/math/norm.h"

namespace zc::device {
namespace {

// The flat buffers as seen from a piece's first element.
OptimizerBuffers buffers_at(const OptimizerBuffers& buffers, std::int64_t offset) {
  OptimizerBuffers at = buffers;
  at.grad += offset;
  at.param += offset;
  if (at.state1 != nullptr) at.state1 += offset;
  if (at.state2 != nullptr) at.state2 += offset;
  if (at.model != nullptr) at.model = static_cast<std::byte*>(at.model) + offset * size_bytes(at.model_dtype);
  return at;
}

template <class Scalars, class Update>
void for_each_piece(std::span<const Piece> pieces, const Scalars* scalars, const math::StepScalars& step,
                    const OptimizerBuffers& buffers, const Update& update) {
  for (const Piece& piece : pieces) {
    if (step.skip != 0) {
      std::fill_n(buffers.grad + piece.offset, piece.numel, 0.0f);
    } else {
      update(scalars[piece.slot], step.factor, buffers_at(buffers, piece.offset), piece.numel);
    }
  }
}

class CpuKernels final : public Kernels {
 public:
  void zero(BufferView out, Stream) override {
    if (out.numel > 0) std::memset(out.data, 0, static_cast<std::size_t>(out.bytes()));
  }

  void cast(BufferView in, BufferView out, Stream) override {
    if (in.numel == 0) return;
    if (in.dtype == out.dtype) {
      std::memmove(out.data, in.data, static_cast<std::size_t>(in.bytes()));
    } else {
      cpu::cast(in.data, in.dtype, out.data, out.dtype, in.numel);
    }
  }

  void fold(std::span<const void* const> in, DType dtype, BufferView acc, Stream) override {
    cpu::fold(in.data(), in.size(), dtype, acc.as<float>(), acc.numel);
  }

  void square_sum(const float* in, std::span<const Piece> pieces, math::ExactSum* sum, std::uint8_t* nonfinite,
                  Stream) override {
    constexpr std::int64_t kBlocks = 64;  // at a time
    double blocks[kBlocks];
    for (const Piece& piece : pieces) {
      for (std::int64_t begin = 0; begin < piece.numel; begin += kBlocks * math::kBlockNumel) {
        const std::int64_t count = std::min(kBlocks * math::kBlockNumel, piece.numel - begin);
        cpu::square_sum_blocks(in + piece.offset + begin, count, blocks);
        for (std::int64_t b = 0; b * math::kBlockNumel < count; ++b) {
          if (std::isfinite(blocks[b])) {
            sum->add(blocks[b]);
          } else {
            nonfinite[piece.slot] = 1;
          }
        }
      }
    }
  }

  void adam(std::span<const Piece> pieces, const math::AdamScalars* scalars, const math::StepScalars* step,
            const OptimizerBuffers& buffers, Stream) override {
    for_each_piece(pieces, scalars, *step, buffers, cpu::adam);
  }

  void sgd(std::span<const Piece> pieces, const math::SgdScalars* scalars, const math::StepScalars* step,
           const OptimizerBuffers& buffers, Stream) override {
    for_each_piece(pieces, scalars, *step, buffers, cpu::sgd);
  }
};

}  // namespace

Kernels& cpu_kernels() {
  static CpuKernels kernels;
  return kernels;
}

}  // namespace zc::device
