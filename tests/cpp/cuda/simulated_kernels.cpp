#include "cuda/simulated_kernels.h"

#include <algorithm>
#include <vector>

#include "zc/base/float_environment.h"

namespace zc::cuda {
namespace {

using device::Kernels;
using device::OptimizerBuffers;
using device::Part;
using device::Pieces;
using device::Stream;

Kernels& cpu() { return device::cpu_kernels(); }

class SimulatedKernels final : public Kernels {
 public:
  explicit SimulatedKernels(Simulation& simulation) : simulation_(simulation) {}

  void zero(BufferView out, Stream stream) override {
    launch("zero kernel", stream, [this, out] {
      touch(out);
      cpu().zero(out, {});
    });
  }
  void cast(BufferView in, BufferView out, Stream stream) override {
    launch("cast", stream, [this, in, out] {
      touch(in), touch(out);
      cpu().cast(in, out, {});
    });
  }
  void pack(std::span<const Part> parts, BufferView out, Stream stream) override {
    launch("pack", stream, [this, list = copy(parts), out] {
      touch(list), touch(out);
      cpu().pack(list, out, {});
    });
  }
  void fold_parts(std::span<const Part> parts, DType dtype, BufferView acc, bool first, Stream stream) override {
    launch("fold_parts", stream, [this, list = copy(parts), dtype, acc, first] {
      touch(list), touch(acc);
      cpu().fold_parts(list, dtype, acc, first, {});
    });
  }
  void fold(std::span<const void* const> in, DType dtype, BufferView acc, Stream stream) override {
    launch("fold", stream, [this, list = copy(in), dtype, acc] {
      touch(list, dtype, acc);
      cpu().fold(list, dtype, acc, {});
    });
  }
  void fold_first(std::span<const void* const> in, DType dtype, BufferView acc, Stream stream) override {
    launch("fold_first", stream, [this, list = copy(in), dtype, acc] {
      touch(list, dtype, acc);
      cpu().fold_first(list, dtype, acc, {});
    });
  }
  void scale(BufferView inout, float factor, Stream stream) override {
    launch("scale", stream, [this, inout, factor] {
      touch(inout);
      cpu().scale(inout, factor, {});
    });
  }
  void square_sum(BufferView in, const Pieces& pieces, math::ExactSum* sum, std::int64_t* nonfinite,
                  Stream stream) override {
    launch("square_sum", stream, [this, in, where = chunks_of(pieces), sum, nonfinite] {
      const auto list = pieces_at(where);
      touch(in), touch(sum, 1), touch(nonfinite, slots(list));
      cpu().square_sum(in, list, sum, nonfinite, {});
    });
  }
  void finish_norm(const math::ExactSum* sum, const std::int64_t* nonfinite, std::int64_t num_slots,
                   const math::StepRule& rule, math::StepOutcome* outcome, Stream stream) override {
    launch("finish_norm", stream, [this, sum, nonfinite, num_slots, rule, outcome] {
      touch(sum, 1), touch(nonfinite, num_slots), touch(outcome, 1);
      cpu().finish_norm(sum, nonfinite, num_slots, rule, outcome, {});
    });
  }
  void adam(const Pieces& pieces, const math::AdamScalars* scalars, const std::uint8_t* used,
            const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) override {
    update(&Kernels::adam, pieces, scalars, used, step, buffers, stream);
  }
  void sgd(const Pieces& pieces, const math::SgdScalars* scalars, const std::uint8_t* used,
           const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) override {
    update(&Kernels::sgd, pieces, scalars, used, step, buffers, stream);
  }
  void lion(const Pieces& pieces, const math::LionScalars* scalars, const std::uint8_t* used,
            const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) override {
    update(&Kernels::lion, pieces, scalars, used, step, buffers, stream);
  }
  void adagrad(const Pieces& pieces, const math::AdagradScalars* scalars, const std::uint8_t* used,
               const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) override {
    update(&Kernels::adagrad, pieces, scalars, used, step, buffers, stream);
  }
  void muon_momentum(const Pieces& pieces, const math::MuonScalars* scalars, const std::uint8_t* used,
                     const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) override {
    update(&Kernels::muon_momentum, pieces, scalars, used, step, buffers, stream);
  }
  void muon(const Pieces& pieces, const math::MuonScalars* scalars, const std::uint8_t* used,
            const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) override {
    update(&Kernels::muon, pieces, scalars, used, step, buffers, stream);
  }
  void orthogonalize(float* matrix, std::int64_t rows, std::int64_t columns, int iterations, float* workspace,
                     Stream stream) override {
    launch("orthogonalize", stream, [this, matrix, rows, columns, iterations, workspace] {
      touch(matrix, rows * columns), touch(workspace, device::orthogonalize_workspace(rows, columns));
      cpu().orthogonalize(matrix, rows, columns, iterations, workspace, {});
    });
  }

 private:
  struct Chunks {
    const device::Chunk* data;
    std::int64_t count;
  };

  template <class Work>
  void launch(const char* name, Stream stream, Work work) {
    simulation_.enqueue(
        stream.handle,
        [work = std::move(work)] {
          const DefaultFloatEnvironment environment;
          work();
        },
        name);
  }

  template <class Method, class Scalars>
  void update(Method method, const Pieces& pieces, const Scalars* scalars, const std::uint8_t* used,
              const math::StepScalars* step, const OptimizerBuffers& buffers, Stream stream) {
    launch("update", stream, [this, method, where = chunks_of(pieces), scalars, used, step, buffers] {
      const auto list = pieces_at(where);
      std::int64_t numel = 0;
      for (const device::Piece& piece : list) numel = std::max(numel, piece.offset + piece.numel);
      touch(scalars, slots(list)), touch(used, slots(list)), touch(step, 1);
      touch(static_cast<const std::byte*>(buffers.grad), numel * size_bytes(buffers.grad_dtype));
      touch(buffers.param, numel), touch(buffers.state1, numel), touch(buffers.state2, numel);
      touch(buffers.direction, numel);
      touch(static_cast<const std::byte*>(buffers.model), numel * size_bytes(buffers.model_dtype));
      (cpu().*method)(list, scalars, used, step, buffers, {});
    });
  }

  template <class T>
  static std::vector<T> copy(std::span<const T> values) {
    return {values.begin(), values.end()};
  }

  static Chunks chunks_of(const Pieces& pieces) {
    if (!pieces.list.empty() && pieces.chunks == nullptr) {
      fail(ErrorKind::kInternal, "[simulation] pieces that are not in device memory");
    }
    return {pieces.chunks, pieces.num_chunks};
  }

  std::vector<device::Piece> pieces_at(const Chunks& chunks) {
    touch(chunks.data, chunks.count);
    std::vector<device::Piece> pieces;
    for (std::int64_t i = 0; i < chunks.count; ++i) {
      const device::Chunk& chunk = chunks.data[i];
      pieces.push_back({chunk.offset, chunk.numel, chunk.slot});
    }
    return pieces;
  }

  static std::int64_t slots(const std::vector<device::Piece>& pieces) {
    std::int64_t count = 0;
    for (const device::Piece& piece : pieces) count = std::max<std::int64_t>(count, piece.slot + 1);
    return count;
  }

  template <class T>
  void touch(const T* data, std::int64_t count) {
    if (data != nullptr) simulation_.touches(data, count * static_cast<std::int64_t>(sizeof(T)), "kernel");
  }
  void touch(const BufferView& view) { touch(view.as<const std::byte>(), view.bytes()); }
  void touch(const std::vector<Part>& parts) {
    for (const Part& part : parts) {
      touch(static_cast<const std::byte*>(part.data), part.numel * size_bytes(part.dtype));
    }
  }
  void touch(const std::vector<const void*>& in, DType dtype, const BufferView& acc) {
    for (const void* source : in) touch(static_cast<const std::byte*>(source), acc.numel * size_bytes(dtype));
    touch(acc);
  }

  Simulation& simulation_;
};

}  // namespace

std::unique_ptr<device::Kernels> make_simulated_kernels(Simulation& simulation) {
  return std::make_unique<SimulatedKernels>(simulation);
}

}  // namespace zc::cuda
